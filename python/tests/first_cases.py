"""Every rank runs these cases, in which parameters have had no update when a training is saved: `test_first_steps`
calls them.

Each case is compared with torch's optimizer, which has no state for such a parameter.
"""

import copy
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from state_cases import TORCH, full
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from instep.torch import (
    FusedOptimizer,
    apply_optimizer_in_backward,
    get_in_backward_optimizers,
    register_ddp,
    register_fsdp,
)


class Two(nn.Module):
    """Has two parameters. The input has a factor for the gradient of each parameter, and a parameter with a factor of
    zero is not used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(6, 2))

    def forward(self, scales: Tensor) -> Tensor:
        used = [(param, scale) for param, scale in zip((self.first, self.second), scales) if scale != 0]
        return sum((param * torch.linspace(-1, 2, param.numel()).view(param.shape)).sum() * scale for param, scale in used)


def entered(entry: str, net: nn.Module, key: str, options: dict[str, Any]) -> tuple[nn.Module, list[Any]]:
    """Returns a model, and the optimizers that one of the entry points makes for it."""
    if entry == "after":
        return net, [FusedOptimizer(net.parameters(), key, **options)]
    if entry == "ddp":
        ddp = DistributedDataParallel(net, find_unused_parameters=True)
        return ddp, [register_ddp(ddp, key, **options)]
    if entry == "fsdp":
        return fully_shard(net), [register_fsdp(net, key, **options)]
    if entry == "fsdp1":
        wrapped = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
        return wrapped, [register_fsdp(wrapped, key, **options)]
    apply_optimizer_in_backward(key, net.parameters(), options)
    if entry == "in_backward":
        return net, get_in_backward_optimizers(net)
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    return ddp, get_in_backward_optimizers(net)


class Side:
    """A model with our optimizer or with torch's optimizer.

    FSDP1 gives zero gradients to a parameter that was not used, with any optimizer.
    """

    def __init__(self, entry: str, key: str, options: dict[str, Any], gives_zeros: bool = False) -> None:
        self.net, self.entry, self.gives_zeros = Two(), entry, gives_zeros
        if entry == "torch":
            self.model, self.optimizers = self.net, [TORCH[key](self.net.parameters(), foreach=False, **options)]
        else:
            self.model, self.optimizers = entered(entry, self.net, key, options)

    def step(self, first: float, second: float) -> None:
        self.model(torch.tensor([first, second])).backward()
        for param in self.net.parameters() if self.gives_zeros else ():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        for one in self.optimizers if self.entry in ("after", "torch") else ():
            one.step()
        self.model.zero_grad()

    def values(self) -> list[Tensor]:
        if self.entry == "fsdp1":
            with FullyShardedDataParallel.summon_full_params(self.model):
                return [param.detach().clone() for param in self.net.parameters()]
        return [full(param) for param in self.net.parameters()]

    def go_on_from(self, other: "Side") -> None:
        """Copies the values of another `Side`, and its states through the optimizers' own state dicts."""
        for param, source in zip(self.net.parameters(), other.net.parameters()):
            param.data.copy_(source.data)
        for one, saved in zip(self.optimizers, [copy.deepcopy(source.state_dict()) for source in other.optimizers]):
            one.load_state_dict(saved)


def sides(entry: str, key: str, options: dict[str, Any]) -> tuple[Side, Side]:
    """Returns our side, which uses this entry point, and torch's side."""
    return Side(entry, key, options), Side("torch", key, options, entry == "fsdp1")


def assert_alike(ours: Side, theirs: Side) -> None:
    for param, other in zip(ours.values(), theirs.values()):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=2e-6)


def saved_before(rank: int, world: int, entry: str, key: str, options: dict[str, Any]) -> None:
    """The second parameter has had no update when the training is saved. Its first update uses another learning rate."""
    ours, theirs = sides(entry, key, options)
    for number in range(2):
        for side in (ours, theirs):
            side.step(0.5 - number, 0.0)
    states = {id(param): held for one in ours.optimizers for param, held in one.state.items()}
    for param, other in zip(ours.net.parameters(), theirs.net.parameters()):
        found, wanted = states.get(id(param), {}), theirs.optimizers[0].state.get(other, {})
        assert entry == "fsdp1" or found.keys() == wanted.keys(), (found, wanted)
    others = sides(entry, key, options)
    for side, source in zip(others, (ours, theirs)):
        side.go_on_from(source)
        for one in side.optimizers:
            one.param_groups[0]["lr"] = 0.03
    for number in range(3):
        for side in others:
            side.step(0.25, 0.75 - number)
    assert_alike(*others)


def saved_at_once(rank: int, world: int, entry: str, key: str, options: dict[str, Any]) -> None:
    """No parameter has had an update when the training is saved."""
    ours, theirs = sides(entry, key, options)
    others = sides(entry, key, options)
    for side, source in zip(others, (ours, theirs)):
        side.go_on_from(source)
        for number in range(2):
            side.step(0.5, 0.75 - number)
    assert_alike(*others)


def checkpointed(rank: int, world: int, entry: str, key: str, options: dict[str, Any], steps: int, at: str) -> None:
    """torch.distributed.checkpoint saves the training after some steps, and loads it into a new model."""
    ours, theirs = sides(entry, key, options)
    for number in range(steps):
        for side in (ours, theirs):
            side.step(0.5 - number, 0.75)
    model, optimizer = get_state_dict(ours.model, ours.optimizers)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=at)
    again = Side(entry, key, options)
    model, optimizer = get_state_dict(again.model, again.optimizers)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=at)
    set_state_dict(again.model, again.optimizers, model_state_dict=model, optim_state_dict=optimizer)
    for number in range(2):
        for side in (ours, again, theirs):
            side.step(0.25, 0.75 - number)
    # It goes on as the one that was not saved, in every bit.
    assert all(torch.equal(one, two) for one, two in zip(ours.values(), again.values()))
    assert_alike(ours, theirs)
