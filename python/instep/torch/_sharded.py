"""Shards: this rank's part of a sharded tensor, and the ranks that have the other parts.

A ``DTensor`` records which part this rank has, and which ranks have the other parts. The shards of FSDP1 are plain
tensors without such a record. ``torch.distributed.tensor`` is imported only at the first ``DTensor``, because the
import is slow.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import OPTIMIZERS
from ._formats import QUANTUM, Formats, padded

Holders = tuple[tuple[dist.ProcessGroup, str], ...]
"""For each mesh dimension over which a tensor is sharded: the ranks that have its shards, and their type of device."""


PLAIN = (torch.nn.Parameter, Tensor)
"""Types of tensors that have their own memory, all of it on this rank."""


def is_distributed(tensor: Tensor) -> bool:
    """Whether the tensor is a ``DTensor``."""
    return type(tensor) not in PLAIN and hasattr(tensor, "to_local")


def shard_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor. If the tensor is not a ``DTensor``, the shard is the tensor itself."""
    if not is_distributed(tensor):
        return tensor
    with torch.no_grad():
        shard: Tensor = tensor.to_local()  # type: ignore[attr-defined]  # of DTensor
        return shard


def elements_of(param: Tensor) -> int:
    """The number of elements of a parameter on all ranks, or 0 while the parameter's shape is not known."""
    return 0 if is_lazy(param) else param.numel()


class Rows(NamedTuple):
    """This rank's part of a parameter: some full rows of the parameter's first dimension."""

    row: int
    """Elements of a row."""
    first: int
    """The index of this rank's first element among those of the parameter."""


def row_of(param: Tensor) -> int:
    """The number of elements in one row of a parameter's first dimension."""
    return param.numel() // (param.shape[0] or 1) or 1 if param.dim() else 1


def rows_of(param: Tensor) -> Optional[Rows]:
    """The rows that this rank has, or None if it has only parts of rows. A tensor that is not a ``DTensor`` counts as
    one row.
    """
    if not is_distributed(param):
        return Rows(param.numel() or 1, 0)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]  # of DTensor
    shape, offset = compute_local_shape_and_global_offset(param.shape, mesh, placements)
    if tuple(shape[1:]) != tuple(param.shape[1:]):
        return None
    row = row_of(param)
    return Rows(row, offset[0] * row if offset else 0)


def has_neighbours(param: Tensor) -> bool:
    """Whether the rows that a rank has are consecutive rows of the parameter. Rows are consecutive if FSDP has sharded
    the parameter, even in combination with tensor parallelism.
    """
    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]  # of DTensor
    shards = 1  # The product of the mesh's later dimensions that shard the rows.
    for dim in reversed(range(mesh.ndim)):
        if getattr(placements[dim], "dim", None) == 0:
            if getattr(placements[dim], "split_factor", 1) not in (1, shards):
                return False
            shards *= mesh.size(dim)
    return True


def formats_of(formats: Formats, param: Tensor) -> Formats:
    """The formats of a parameter. The formats do not depend on the number of ranks."""
    return formats.of_size(param.numel(), row_of(param) if is_distributed(param) else None)


def scales_shape(param: Tensor) -> tuple[int, ...]:
    """The shape of the full tensor of 8-bit scales. In a sharded parameter, each block lies within one row."""
    if is_distributed(param):
        return param.shape[0], padded(row_of(param)) // QUANTUM
    return (padded(param.numel()) // QUANTUM,)


def spread_as(shard: Tensor, param: Tensor) -> Tensor:
    """Returns a ``DTensor`` that has this shard on this rank. The tensor has the parameter's mesh and placements.
    If the parameter is not a ``DTensor``, returns the shard itself.
    """
    if not is_distributed(param):
        return shard
    from torch.distributed.tensor import DTensor

    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]  # of DTensor
    shape, strides = param.shape, param.stride()
    if shard.shape[1:] != shard_of(param).shape[1:]:
        shape = torch.Size(scales_shape(param))
        strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=strides)


def sharded_as(value: Tensor, param: Tensor) -> Tensor:
    """This rank's shard of a tensor that belongs to a parameter, such as a state. The tensor may be full, or sharded in
    another way.
    """
    if not is_distributed(param):
        return full(value)
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]  # of DTensor
    if not is_distributed(value):
        value = value.to(mesh.device_type)
        return shard_of(distribute_tensor(value, mesh, placements, src_data_rank=None))
    with torch.no_grad():
        return shard_of(value.redistribute(mesh, placements))  # type: ignore[attr-defined]  # of DTensor


def full(value: Tensor) -> Tensor:
    """Returns the full tensor. Every rank must call this at the same time."""
    if not is_distributed(value):
        return value
    with torch.no_grad():
        gathered: Tensor = value.full_tensor()  # type: ignore[attr-defined]  # of DTensor
        return gathered


def holders_of(param: Tensor) -> Holders:
    """For each mesh dimension over which a parameter is sharded, the ranks that have its shards. Mesh dimensions with
    replicas are left out.
    """
    # With DDP over tensor parallelism, parameters are plain tensors, and `_st_info` has the original ones.
    spec: Any = param if is_distributed(param) else getattr(param, "_st_info", None)
    if spec is None:
        return ()
    mesh: Any = spec.device_mesh
    holders = []
    for dim, placement in enumerate(spec.placements):
        if placement.is_partial():
            raise NotImplementedError("parameter with a Partial placement: its value is a sum over ranks; redistribute it")
        if not placement.is_replicate():  # `is_shard` recognises only the plain kind of shards.
            holders.append((mesh.get_group(dim), mesh.device_type))
    return tuple(holders)


def refuse_unsteppable(key: str, formats: Formats, param: Tensor, holders: Holders) -> None:
    """Refuses a parameter if a rank cannot step its elements without those of other ranks, or with the same bits at any
    number of ranks. Also refuses elements of a tensor subclass that no kernel supports.
    """
    if not holders and type(param) in PLAIN:
        return
    shard = shard_of(param)
    if is_traceable_wrapper_subclass(shard):
        word = type(shard).__name__
        raise NotImplementedError(f"parameter of {word}: kernels know no such elements; step it by another optimizer")
    if not holders:
        return
    formats = formats_of(formats, param)
    has_rows = is_distributed(param) and rows_of(param) is not None and shard.is_contiguous()
    if formats.states == "8bit" and not has_rows:
        raise NotImplementedError(
            "states='8bit': this rank holds parts of rows, and a block of 8-bit states lies within one; shard the "
            "parameter along its first dimension, or use 'float32' or 'bfloat16'"
        )
    seed = formats.seed_of(shard.dtype, formats.states_of(shard.dtype))
    if seed is not None and is_distributed(param) and not has_neighbours(param):
        raise NotImplementedError(
            "seed=: this rank holds rows that are not neighbours, and random bits are counted along them; shard the "
            "parameter by Shard(0), or leave seed out"
        )
    if OPTIMIZERS[key].scales_by_norms:
        raise NotImplementedError(
            f"{OPTIMIZERS[key].name}: scales a change by norms of the full parameter, of which this rank holds a shard; "
            "use another optimizer, or parameters that are not sharded"
        )
