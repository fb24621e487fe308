"""Norms over gradients of several arenas, and the decisions that follow from the norms. Groups are clipped together or
alone.

Each rank computes the sums of squares of its own shards. The sums are exact integers, so ranks may add them up in any order,
and all get the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _native
from ._engine import Batch, Decided, Engine, Prepared, stream_on
from ._groups import TOGETHER
from ._sharded import Holders

INFINITY_BITS = 0x7F800000
"""The bits of infinity in float32. The bits of NaN are larger."""


class GlobalNorm:
    """The norms of a pass, and their decisions over all ranks."""

    def __init__(self, device: torch.device, instead: Optional[Mapping[dist.ProcessGroup, dist.ProcessGroup]] = None) -> None:
        """``instead`` maps groups of ranks to CPU groups of the same ranks. All-reduces of the sums then use the CPU
        groups.
        """
        self.device, self.instead = device, instead or {}
        self.of_groups: Callable[[], Mapping[int, Optional[float]]] = dict
        """The limits of groups that are clipped alone, as in `GroupSnapshot.limits`."""
        self._parts: dict[tuple[int, Holders], _native.Norm] = {}
        self._factors: _native.Factors = (1, 1.0, 0, 0)
        self._begun: set[tuple[int, Holders]] = set()
        self._added: set[tuple[int, Holders]] = set()

    def begin(self, factors: _native.Factors) -> None:
        """Begins new norms, with the factors that all gradients contain."""
        self._factors = factors
        self._begun.clear()
        self._added.clear()
        self._part(TOGETHER, ())

    def _part(self, clip: int, holders: Holders) -> _native.Norm:
        """The norm of tensors that are clipped together and spread over the same ranks."""
        part = clip, holders
        if part not in self._parts:
            self._parts[part] = _native.Norm(self.device.index if self.device.type == "cuda" else None)
        if part not in self._begun:
            self._parts[part].begin(self._factors, stream_on(self.device))
            self._begun.add(part)
        return self._parts[part]

    def add(self, engine: Engine, batch: Batch) -> Prepared:
        """Adds the gradients of a batch, except those that are None, to the norm by which they are clipped."""
        part = batch.arena.kind.clip, batch.arena.holders
        self._added.add(part)
        return engine.add_norm(batch, self._part(*part))

    def decide(self, max_norm: Optional[float], skip_nonfinite: bool, spread: Iterable[Holders]) -> Decided:
        """Decides, over the shards of all ranks, whether steps are clipped or skipped. Every rank must call this
        method, with the groups of ``spread`` in the same order.
        """
        stream = stream_on(self.device)
        limits = {TOGETHER: max_norm, **self.of_groups()}
        totals = {clip: self._part(clip, ()) for clip in limits}
        for clip, total in totals.items():
            if (clip, ()) not in self._added:
                total.sum(stream)  # A norm to which nothing was added needs a sum too.
        for holders in filter(None, spread):
            sums = [self._sum_of(self._part(clip, holders)) for clip in totals]
            for group, device_type in holders:
                own = self.instead.get(group)
                _sum_over(sums, own or group, "cpu" if own else device_type)
            for total, (limbs, largest) in zip(totals.values(), sums):
                all_limbs, all_largest = self._sum_of(total)
                all_limbs += limbs
                torch.maximum(all_largest, largest, out=all_largest)
        if skip_nonfinite and len(totals) > 1:
            self._share_nonfinite([self._sum_of(total)[1] for total in totals.values()])
        for clip, total in totals.items():
            total.decide(limits[clip], skip_nonfinite, stream)
        return Decided(totals)

    def _share_nonfinite(self, largest: list[Tensor]) -> None:
        """If any gradient is infinite or NaN, skips the steps of all groups. Otherwise the magnitudes do not change."""
        worst = torch.stack(largest).amax(0)
        for own in largest:
            own.copy_(torch.where(worst >= INFINITY_BITS, worst, own))

    def last(self) -> float:
        """The norm of the last decision. On a GPU this waits for the decision."""
        return self._parts[TOGETHER, ()].decision()[0]

    def _sum_of(self, part: _native.Norm) -> tuple[Tensor, Tensor]:
        """A norm's sum of squares and its largest magnitude, as tensors over the norm's memory."""
        limbs, largest = part.sum(stream_on(self.device))
        return _at(limbs, _native.NORM_LIMBS, torch.int64, self.device), _at(largest, 1, torch.int32, self.device)


def _sum_over(sums: list[tuple[Tensor, Tensor]], group: dist.ProcessGroup, device_type: str) -> None:
    """Adds up the sums of a group's ranks, and takes the largest of their magnitudes. The all-reduce can only add, so
    each rank writes its magnitude to a separate entry.
    """
    rank, count = dist.get_rank(group), _native.NORM_LIMBS
    rows = torch.zeros(len(sums), count + dist.get_world_size(group), dtype=torch.int64, device=device_type)
    for row, (limbs, largest) in zip(rows, sums):
        row[:count] = limbs
        row[count + rank] = largest[0]
    dist.all_reduce(rows, group=group)
    for row, (limbs, largest) in zip(rows, sums):
        limbs.copy_(row[:count])
        largest.copy_(row[count:].max())


def _at(address: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor over memory of the native module."""
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
