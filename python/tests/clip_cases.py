"""Every rank runs these cases: groups that are clipped together, alone or not at all. The reference has an ordinary
optimizer for each clip.

Our model and the reference must have the same bits after every step, so a norm with one gradient too many or too few is
detected.
"""

import math
from collections.abc import Sequence
from typing import Any, Optional

import torch
from fsdp_cases import shard, shard_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from instep.torch import FusedOptimizer, offload, register_ddp, register_fsdp
from instep.torch._offload_simulated import Simulated

LIMITS: list[dict[str, Optional[float]]] = [{}, {"max_norm": 0.02}, {"max_norm": None}, {}, {"max_norm": 0.005}]
"""By layer, what its group says."""
FACTORS = (1.0, 2.0, 3.0, 0.5, 0.25)


class Apart(nn.Module):
    """Parallel layers. The input has a factor for each layer, which affects only the gradients of that layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in LIMITS)

    def forward(self, batch: Tensor, factors: Sequence[float]) -> Tensor:
        return torch.stack([layer(batch).square().sum() * factor for layer, factor in zip(self.layers, factors)]).sum()


def model_of(world: int) -> Apart:
    """Returns a layer for each group, with lengths that cannot be divided evenly among the ranks."""
    torch.manual_seed(world)
    return Apart()


def groups_of(model: nn.Module, limits: Any = LIMITS) -> list[dict[str, Any]]:
    """Returns the param groups, each with one layer."""
    return [
        {"params": list(layer.parameters()), **limit} for layer, limit in zip(getattr(model, "module", model).layers, limits)
    ]


class OneEach:
    """The reference has an ordinary optimizer for all groups that are clipped together, and a separate one for every
    other group.
    """

    def __init__(self, model: nn.Module, key: str, max_norm: Optional[float], **options: Any) -> None:
        together = [group for group in groups_of(model) if "max_norm" not in group]
        alone = [group for group in groups_of(model) if "max_norm" in group]
        self.every = [FusedOptimizer(together, key, max_norm=max_norm, **options)]
        self.every += [FusedOptimizer(group["params"], key, max_norm=group["max_norm"], **options) for group in alone]

    def step(self) -> None:
        for one in self.every:
            one.step()
            one.zero_grad()


def registered(kind: str, model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    """Returns the model in its wrapper, and its optimizer."""
    if kind == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model)
        return wrapped, register_ddp(wrapped, "adamw", params=groups_of(wrapped), **options)
    if kind == "offload":
        return model, offload(model, "adamw", params=groups_of(model), device=Simulated(), **options)
    wrapped = shard(model, offload=kind == "fsdp offload")
    make = offload if kind == "fsdp offload" else register_fsdp
    return wrapped, make(wrapped, "adamw", params=groups_of(wrapped), **options)


def trained(rank: int, world: int, kind: str, max_norm: Optional[float]) -> None:
    """The optimizer gives the same bits as one ordinary optimizer per clip, before and after a hyperparameter changes."""
    ours, stepped = registered(kind, model_of(world), max_norm=max_norm, lr=0.1)
    theirs = model_of(world)
    theirs = DistributedDataParallel(theirs) if kind == "ddp" else theirs if kind == "offload" else shard(theirs)
    wanted = OneEach(theirs, "adamw", max_norm, lr=0.1)
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        batch = torch.randn(5, 7)
        if step == 2:
            stepped.param_groups[1]["max_norm"] = wanted.every[1]._max_norm = 0.01
        for side in (ours, theirs):
            side(batch, FACTORS).backward()
        wanted.step()
        stepped.step()
        stepped.zero_grad()
        if hasattr(stepped, "wait"):
            stepped.wait()
        for (name, own), other in zip(ours.named_parameters(), theirs.parameters()):
            assert torch.equal(shard_of(own), shard_of(other)), f"{kind}, step {step}: {name}"
        if max_norm is not None:
            assert stepped.last_norm() == wanted.every[0].last_norm()


def skipped(rank: int, world: int, kind: str) -> None:
    """If gradients of any group are not finite on one rank, the steps of all groups are skipped."""
    model, stepped = registered(kind, model_of(world), skip_nonfinite=True, lr=0.1)
    before = [shard_of(param).clone() for param in model.parameters()]
    for spoiled in range(len(LIMITS) + 1):
        factors = [math.inf if layer == spoiled and rank == world - 1 else factor for layer, factor in enumerate(FACTORS)]
        model(torch.ones(2, 7), factors).backward()
        stepped.step()
        stepped.zero_grad()
        if hasattr(stepped, "wait"):
            stepped.wait()
        is_same = [torch.equal(shard_of(param), old) for param, old in zip(model.parameters(), before)]
        assert all(is_same) if spoiled < len(LIMITS) else not any(is_same), (kind, spoiled, is_same)


def fixed(rank: int, world: int, kind: str) -> None:
    """The clip of a group is fixed at registration."""
    model, stepped = registered(kind, model_of(world), max_norm=1.0, lr=0.1)
    model(torch.ones(2, 7), FACTORS).backward()
    stepped.step()
    stepped.zero_grad()
    before = [shard_of(param).clone() for param in model.parameters()]
    del stepped.param_groups[1]["max_norm"]
    try:
        model(torch.ones(2, 7), FACTORS).backward()
        stepped.step()
        raise AssertionError("not refused")
    except RuntimeError as error:
        assert "max_norm of a param group" in str(error) or "max_norm of a param group" in str(error.__cause__), error
    assert all(torch.equal(shard_of(param), old) for param, old in zip(model.parameters(), before))
