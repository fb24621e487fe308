"""The norm over gradients of several arenas, and the decision that follows from it.

Each rank measures its own shards. Their sums of squares are exact integers, so ranks add them up in any order and decide
alike, to the bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _native
from ._engine import Batch, Engine, Prepared, stream_on
from ._sharded import Holders


class GlobalNorm:
    """See the module."""

    def __init__(self, device: torch.device, instead: Optional[Mapping[dist.ProcessGroup, dist.ProcessGroup]] = None) -> None:
        """``instead`` names groups on the CPU that sum in the place of others."""
        self.device, self.instead = device, instead or {}
        self._parts: dict[Holders, _native.Norm] = {}
        self._factors: _native.Factors = (1, 1.0, 0, 0)
        self._begun: set[Holders] = set()
        self._is_empty = True

    def begin(self, factors: _native.Factors) -> None:
        """Begins anew, with the factors that all these gradients have."""
        self._factors = factors
        self._begun.clear()
        self._is_empty = True
        self._part(())

    def _part(self, holders: Holders) -> _native.Norm:
        """The norm of tensors that are spread over the same ranks."""
        if holders not in self._parts:
            self._parts[holders] = _native.Norm(self.device.index if self.device.type == "cuda" else None)
        part = self._parts[holders]
        if holders not in self._begun:
            part.begin(self._factors, stream_on(self.device))
            self._begun.add(holders)
        return part

    def add(self, engine: Engine, batch: Batch) -> Prepared:
        """Adds the gradients of a batch, but for parameters to pass over."""
        self._is_empty = self._is_empty and bool(batch.arena.holders)
        return engine.add_norm(batch, self._part(batch.arena.holders))

    def decide(self, max_norm: Optional[float], skip_nonfinite: bool, spread: Iterable[Holders]) -> _native.Norm:
        """Decides over all ranks' shards. Every rank must call it, and name every group of holders in the same order."""
        stream = stream_on(self.device)
        total = self._part(())
        if self._is_empty:
            total.sum(stream)  # So it may be decided without a bucket: all are spread, or no parameter has a gradient.
        for holders in spread:
            if holders:
                limbs, largest = self._sum_of(self._part(holders))
                for group, device_type in holders:
                    own = self.instead.get(group)
                    _sum_over(limbs, largest, own or group, "cpu" if own else device_type)
                all_limbs, all_largest = self._sum_of(total)
                all_limbs += limbs
                torch.maximum(all_largest, largest, out=all_largest)
        total.decide(max_norm, skip_nonfinite, stream)
        return total

    def last(self) -> float:
        """The norm of the last decision. On a GPU it waits."""
        return self._parts[()].decision()[0]

    def _sum_of(self, part: _native.Norm) -> tuple[Tensor, Tensor]:
        """A norm's sum of squares and largest magnitude, in place."""
        limbs, largest = part.sum(stream_on(self.device))
        return _at(limbs, _native.NORM_LIMBS, torch.int64, self.device), _at(largest, 1, torch.int32, self.device)


def _sum_over(limbs: Tensor, largest: Tensor, group: dist.ProcessGroup, device_type: str) -> None:
    """Adds up a group's sums, and takes the largest of its magnitudes: each rank has a place for its own."""
    rank, count = dist.get_rank(group), len(limbs)
    row = torch.zeros(count + dist.get_world_size(group), dtype=torch.int64, device=device_type)
    row[:count] = limbs
    row[count + rank] = largest[0]
    dist.all_reduce(row, group=group)
    limbs.copy_(row[:count])
    largest.copy_(row[count:].max())


def _at(address: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the native half as a tensor."""
    if device.type == "cpu":
        numbers = ctypes.c_byte * (length * dtype.itemsize)
        return torch.frombuffer(numbers.from_address(address), dtype=dtype)

    class Array:
        __cuda_array_interface__: dict[str, Any] = {
            "shape": (length,),
            "typestr": f"<i{dtype.itemsize}",
            "data": (address, False),
            "version": 3,
        }

    return torch.as_tensor(Array(), device=device)
