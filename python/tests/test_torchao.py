"""Tests our optimizers inside torchao's ``CPUOffloadOptimizer``, which makes one optimizer of a given class for each
parameter. Every step is judged against torch's AdamW within a derived bound.

torchao 0.18 accepts only cuda and xpu. If torchao is installed, its own code runs here, with the host as a device of
type cuda. ``OnePerParameter`` needs no torchao, and uses the given class in the same way.
"""

import contextlib
import copy
import types

import pytest
import torch
from judged import assert_close_runs, judged
from torch import Tensor, nn

import instep.torch

HYPER = {"lr": 1e-3, "weight_decay": 0.1}


class OnePerParameter(torch.optim.Optimizer):
    """Keeps a copy of each large parameter on the host. A separate optimizer steps each copy.

    Each group that an optimizer gets has a single tensor, not a list, as ``params``. The tensor is no ``nn.Parameter``,
    has ``requires_grad=False``, and its ``grad`` is set once and then overwritten in place. Small parameters are not
    copied, and one more optimizer steps them. ``param_groups`` joins the groups of all optimizers, and a schedule
    writes learning rates into these groups.
    """

    def __init__(self, params, optimizer_class=torch.optim.AdamW, *, minimal_size: int = 4096, **kwargs) -> None:
        groups = list(params)
        self.hosts: dict[Tensor, Tensor] = {}
        self.optimizers: dict[Tensor, torch.optim.Optimizer] = {}
        self.arrived: dict[Tensor, None] = {}
        self.groups_of_small: list[dict] = []
        for group in groups if isinstance(groups[0], dict) else [{"params": groups}]:
            members = [param for param in group.pop("params") if param.requires_grad]
            for param in members:
                if param.numel() >= minimal_size:
                    host = torch.empty_like(param).copy_(param.detach())
                    host.grad = torch.empty_like(host)
                    param.register_post_accumulate_grad_hook(self._arrive)
                    self.hosts[param] = host
                    self.optimizers[param] = optimizer_class([{"params": host, **group}], **kwargs)
            small = [param for param in members if param.numel() < minimal_size]
            if small:
                self.groups_of_small.append({"params": small, **group})
        self.of_small = optimizer_class(self.groups_of_small, **kwargs)

    def _arrive(self, param: Tensor) -> None:
        self.hosts[param].grad.copy_(param.grad)
        self.arrived.pop(param, None)
        self.arrived[param] = None

    @torch.no_grad()
    def step(self, closure=None) -> None:
        self.of_small.step()
        for param in self.arrived:
            self.optimizers[param].step()
            param.copy_(self.hosts[param])
        self.arrived.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.hosts:
            param.grad = None
        self.of_small.zero_grad(set_to_none)

    @property
    def param_groups(self):
        return sum((optimizer.param_groups for optimizer in self.optimizers.values()), start=self.groups_of_small)

    def state_dict(self):
        return {
            "offloaded": [optimizer.state_dict() for optimizer in self.optimizers.values()],
            "on-device": self.of_small.state_dict(),
        }

    def load_state_dict(self, state_dict):
        for optimizer, saved in zip(self.optimizers.values(), state_dict["offloaded"]):
            optimizer.load_state_dict(saved)
        self.of_small.load_state_dict(state_dict["on-device"])


class Stream:
    """A stream and an event of a device that completes all work before a call returns."""

    def wait_stream(self, other) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> "Stream":
        return self


class HostAsDevice:
    """The module ``torch`` with the host as its device of type cuda, and without page-locked memory."""

    cuda = types.SimpleNamespace(Stream=Stream, current_stream=Stream, stream=lambda stream: contextlib.nullcontext())

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def empty_like(self, tensor: Tensor, pin_memory: bool = False, **options) -> Tensor:
        return torch.empty_like(tensor, **options)


@pytest.fixture(params=["stand-in", "torchao"])
def offload(request, monkeypatch):
    """The class that makes an optimizer for each parameter."""
    if request.param == "stand-in":
        return OnePerParameter
    module = pytest.importorskip("torchao.optim.cpu_offload")
    monkeypatch.setattr(module, "torch", HostAsDevice())
    monkeypatch.setattr(module, "get_available_devices", lambda: ["cpu", "cuda"])
    return module.CPUOffloadOptimizer


def one_for_all(groups, optimizer_class, **kwargs) -> torch.optim.Optimizer:
    """Makes a single optimizer over all parameters."""
    return optimizer_class(groups, **kwargs)


def build(make, adamw, saved=None):
    """Makes a model with one frozen parameter, an optimizer and a schedule, and loads their state dicts.

    torchao's optimizer copies parameters to the host when it is made, so the model's state dict is loaded first.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 1))
    net[0].bias.requires_grad = False
    if saved:
        net.load_state_dict(saved[0])
    layers = net[::2]
    weights = {"params": [layer.weight for layer in layers]}
    biases = {"params": [layer.bias for layer in layers], "weight_decay": 0.0, "lr": 2e-3}
    optimizer = make([weights, biases], adamw, **HYPER)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for one, state in zip((optimizer, schedule), saved[1:] if saved else ()):
        one.load_state_dict(state)
    return net, optimizer, schedule


def train(make, adamw, resume_at=None) -> dict[str, Tensor]:
    """Makes six steps of two backward passes each. Before step ``resume_at``, everything is saved, made again and
    loaded.
    """
    made = build(make, adamw)
    for step in range(6):
        if step == resume_at:
            made = build(make, adamw, [copy.deepcopy(one.state_dict()) for one in made])
        net, optimizer, schedule = made
        torch.manual_seed(step)
        for _ in range(2):
            net(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return net.state_dict()


def test_an_optimizer_for_each_parameter_has_the_bits_of_one_for_all(offload):
    before = train(offload, torch.optim.AdamW)
    with judged() as verdict:
        after = train(offload, instep.torch.AdamW)
    # Two of the weights are large. All other parameters are under one optimizer.
    assert verdict.steps == 6 * 3
    whole = train(one_for_all, instep.torch.AdamW)
    assert all(torch.equal(after[name], value) for name, value in whole.items())
    assert_close_runs(before, after)


def test_each_optimizer_resumes_with_the_bits_of_an_uninterrupted_run(offload):
    whole, resumed = (train(offload, instep.torch.AdamW, resume_at) for resume_at in (None, 4))
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
