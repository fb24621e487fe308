"""Buckets of parameters, and the data of a backward pass.

A bucket's gradients are copied to the host together. Its parameters are then stepped together and copied back together.
On the host, the gradients and the mirrors (copies of the parameters) are tensors over page-locked memory. This module
neither waits nor copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Optional

import torch
from torch import Tensor

from ._engine import Batch, Prepared
from ._norm import GlobalNorm
from ._offload_device import Event, aligned
from ._offload_ring import Slot
from ._sharded import Holders

MOST_PLACES = 16
"""The number of ring offsets for which a bucket caches its tensors."""


class Bucket:
    """Parameters that are stepped together, and then copied to the device together. Their gradients are copied to the
    host together.
    """

    def __init__(self, index: int, params: Sequence[Tensor], mirrors: Optional[list[Tensor]] = None) -> None:
        self.index, self.params, self.mirrors = index, list(params), mirrors
        self.grad_dtypes: list[torch.dtype] = [getattr(param, "grad_dtype", None) or param.dtype for param in params]
        sizes = (aligned(param.numel() * dtype.itemsize) for param, dtype in zip(self.params, self.grad_dtypes))
        self.gradient_bytes = sum(sizes)
        """Bytes of the ring that its gradients take up."""
        # The sums of accumulated gradients, in host memory.
        self.sums: list[Tensor] = []
        self.summed: set[int] = set()
        self.arrived: dict[int, Optional[Tensor]] = {}
        self.measured: list[tuple[Batch, Prepared]] = []
        self.slot: Optional[Slot] = None
        self.uploaded: Optional[Event] = None
        self._views: dict[tuple[int, int], list[Tensor]] = {}
        self.ready = threading.Event()
        """Set while no step is under way."""
        self.ready.set()
        self.is_settled = True
        """Whether the trainer's work already waits for the last upload."""

    def views(self, memory: Tensor, start: int) -> list[Tensor]:
        """Tensors for the bucket's gradients in a part of the ring. Each tensor has the strides of its parameter's
        mirror.
        """
        assert self.mirrors is not None, "parameters of the host's have no place in the ring"
        key = (memory.data_ptr(), start)
        if key not in self._views:
            if len(self._views) >= MOST_PLACES:
                self._views.clear()
            self._views[key] = list(laid_out(memory, start, self.mirrors, self.grad_dtypes))
        return self._views[key]

    def forget_views(self) -> None:
        """Drops the bucket's references to the ring's memory. No copy may be running."""
        self._views.clear()


def laid_out(memory: Tensor, start: int, like: Iterable[Tensor], dtypes: Iterable[torch.dtype]) -> Iterator[Tensor]:
    """Tensors over consecutive bytes, with the shapes and strides of the tensors in ``like``."""
    for one, dtype in zip(like, dtypes):
        size = one.numel() * dtype.itemsize
        run = memory[start : start + size].view(dtype)
        yield run.as_strided(one.shape, one.stride(), run.storage_offset())
        start += aligned(size)


@dataclass
class Arrival:
    """Gradients of a bucket that are being copied."""

    bucket: Bucket
    grads: list[Optional[Tensor]]
    """The gradients in host memory. They are complete after `copied`."""
    copied: Sequence[Event]
    keeps: list[Tensor]
    """The device's tensors, which are freed once they are copied."""
    slot: Optional[Slot] = None
    is_last: bool = True


@dataclass
class Decider:
    """The limit, the norm and the groups of ranks for a decision over all gradients of a pass."""

    max_norm: Optional[float]
    skip_nonfinite: bool
    norm: Callable[[], GlobalNorm]
    spread: Sequence[Holders] = ()


@dataclass
class Pass:
    """A backward pass, or all backward passes that accumulate gradients for one step."""

    number: int = 0
    factors: tuple[int, float] = (1, 1.0)
    scale: Optional[Tensor] = None
    scaled: Sequence[Event] = ()
    keeps: list[Tensor] = field(default_factory=list)
    """The device's copy of the scale, until it is copied to the host."""
    stepped: list[Bucket] = field(default_factory=list)
    measured: list[Bucket] = field(default_factory=list)
    decided: threading.Event = field(default_factory=threading.Event)
    outcome: Optional[tuple[float, float, bool]] = None
    """Norm, clip coefficient, whether steps were skipped."""


def as_laid(grad: Tensor, place: Tensor) -> Tensor:
    """Returns a gradient with the strides of ``place``, the memory for it on the host."""
    if grad.layout is not torch.strided:
        raise NotImplementedError(f"gradient of layout {grad.layout}: no kernel has it; use a dense one (sparse=False)")
    if grad.dtype != place.dtype:
        raise TypeError(f"gradient of {grad.dtype}: {place.dtype} was planned; set grad_dtype before offload()")
    grad = grad.detach()
    if grad.stride() == place.stride() and not grad.is_neg():
        return grad
    return torch.empty_strided(place.shape, place.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)
