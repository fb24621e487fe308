"""Shards: what this rank holds of a tensor that is spread over ranks, and the ranks that hold the rest.

A ``DTensor`` names both; the shards of FSDP1 are plain tensors. ``torch.distributed.tensor`` is imported where the first
``DTensor`` is met, since that takes long.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import OPTIMIZERS
from ._formats import Formats

Holders = tuple[tuple[dist.ProcessGroup, str], ...]
"""For each dimension that a tensor is cut along, the ranks that hold its shards, and the type of their device."""


def is_distributed(tensor: Tensor) -> bool:
    """Whether it is a ``DTensor``."""
    return hasattr(tensor, "to_local")


def shard_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: itself, if it is no ``DTensor``."""
    if not is_distributed(tensor):
        return tensor
    with torch.no_grad():
        shard: Tensor = tensor.to_local()  # type: ignore[attr-defined]  # of DTensor
        return shard


def spread_as(shard: Tensor, param: Tensor) -> Tensor:
    """The tensor of which every rank holds such a shard, cut as a parameter is."""
    if not is_distributed(param):
        return shard
    from torch.distributed.tensor import DTensor

    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]  # of DTensor
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def cut_as(value: Tensor, param: Tensor) -> Tensor:
    """This rank's shard of a value that is a parameter's, whole or cut in another way."""
    if not is_distributed(param):
        return whole(value)
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]  # of DTensor
    if not is_distributed(value):
        value = value.to(mesh.device_type)
        return shard_of(distribute_tensor(value, mesh, placements, src_data_rank=None))
    with torch.no_grad():
        return shard_of(value.redistribute(mesh, placements))  # type: ignore[attr-defined]  # of DTensor


def whole(value: Tensor) -> Tensor:
    """All of a tensor, which every rank asks for at the same time."""
    if not is_distributed(value):
        return value
    with torch.no_grad():
        full: Tensor = value.full_tensor()  # type: ignore[attr-defined]  # of DTensor
        return full


def holders_of(param: Tensor) -> Holders:
    """The ranks whose shards make up a parameter. Ranks that have copies are not among them."""
    # DDP over tensor parallelism has plain parameters, and notes here what they were.
    spec: Any = param if is_distributed(param) else getattr(param, "_st_info", None)
    if spec is None:
        return ()
    mesh: Any = spec.device_mesh
    holders = []
    for dim, placement in enumerate(spec.placements):
        if placement.is_partial():
            raise NotImplementedError("parameter with a Partial placement: its value is a sum over ranks; redistribute it")
        if not placement.is_replicate():  # `is_shard` knows the plain kind of shards alone.
            holders.append((mesh.get_group(dim), mesh.device_type))
    return tuple(holders)


def refuse_unsteppable(key: str, formats: Formats, param: Tensor, holders: Holders) -> None:
    """Refuses what a rank cannot step by the elements that it holds."""
    shard = shard_of(param)
    if is_traceable_wrapper_subclass(shard):
        word = type(shard).__name__
        raise NotImplementedError(f"parameter of {word}: kernels know no such elements; step it by another optimizer")
    if not holders:
        return
    if formats.states == "8bit":
        raise NotImplementedError(
            "states='8bit': a shard's blocks are not those of the whole parameter; use 'float32' or 'bfloat16'"
        )
    if OPTIMIZERS[key].scales_by_norms:
        raise NotImplementedError(
            f"{OPTIMIZERS[key].name}: scales a change by norms of the whole parameter, of which this rank holds a shard; "
            "use another optimizer, or parameters that are not cut"
        )
