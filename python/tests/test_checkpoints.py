"""``torch.distributed.checkpoint`` saves and loads models and full optimizers, by parameter names."""

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from instep.torch import FusedOptimizer, apply_optimizer_in_backward, get_in_backward_optimizers, register_ddp

OPTIONS = {"lr": 0.1}


@pytest.fixture(scope="module", autouse=True)
def group():
    """Starts a group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def two_layers() -> nn.Module:
    """Returns two linear layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def stepped_after_backward() -> tuple[nn.Module, Any]:
    """Returns an ordinary optimizer."""
    model = two_layers()
    return model, FusedOptimizer(model.parameters(), "adamw", **OPTIONS)


def stepped_by_ddp() -> tuple[nn.Module, Any]:
    """Returns a model, and an optimizer that runs in DDP's hook."""
    model = DistributedDataParallel(two_layers())
    return model, register_ddp(model, "adamw", **OPTIONS)


def stepped_in_backward() -> tuple[nn.Module, Any]:
    """Returns an optimizer per parameter."""
    model = two_layers()
    apply_optimizer_in_backward("adamw", model.parameters(), OPTIONS)
    return model, get_in_backward_optimizers(model)


def stepped_in_backward_by_ddp() -> tuple[nn.Module, Any]:
    """Returns an optimizer per parameter, under DDP."""
    model, _ = stepped_in_backward()
    ddp = DistributedDataParallel(model)
    return ddp, get_in_backward_optimizers(ddp)


def train(model: nn.Module, optimizers: Any) -> None:
    """Makes one step."""
    model(torch.ones(2, 4)).sum().backward()
    if isinstance(optimizers, FusedOptimizer):
        optimizers.step()
    model.zero_grad()


MAKERS = [stepped_after_backward, stepped_by_ddp, stepped_in_backward, stepped_in_backward_by_ddp]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_training_is_saved_whole_and_goes_on_in_a_new_model(make):
    ours = make()
    for _ in range(3):
        train(*ours)
    saved = io.BytesIO()
    torch.save(get_state_dict(*ours), saved)
    saved.seek(0)
    model_state, optimizer_state = torch.load(saved)
    assert sorted(optimizer_state["state"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert all(state["step"] == 3 for state in optimizer_state["state"].values())
    twin = make()
    set_state_dict(*twin, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for _ in range(2):
        train(*ours)
        train(*twin)
    assert all(torch.equal(p, q) for p, q in zip(ours[0].parameters(), twin[0].parameters()))


SGD = [({}, 0), ({}, 1), ({"states": "8bit"}, 0), ({"states": "8bit"}, 1), ({"states": "bfloat16", "seed": 1}, 0)]


@pytest.mark.parametrize("options, steps", SGD, ids=str)
def test_the_buffer_of_an_sgd_without_an_update_is_known_in_every_type_of_states(options, steps):
    def made() -> tuple[nn.Module, Any]:
        model = DistributedDataParallel(two_layers())
        return model, register_ddp(model, "sgd", lr=0.1, momentum=0.9, dampening=0.5, **options)

    ours, again = made(), made()
    for _ in range(steps):
        train(*ours)
    saved = io.BytesIO()
    torch.save(get_state_dict(*ours), saved)
    saved.seek(0)
    model_state, optimizer_state = torch.load(saved)
    assert sorted(optimizer_state["state"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    set_state_dict(*again, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for _ in range(2):
        train(*ours)
        train(*again)
    assert all(torch.equal(p, q) for p, q in zip(ours[0].parameters(), again[0].parameters()))
