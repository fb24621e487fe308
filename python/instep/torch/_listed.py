"""Checks a list of parameters: each is listed once, and no two share memory.

One launch steps all parameters of a list concurrently, so memory that two parameters share would be stepped twice. This
module stores no reference to a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def refuse_repeated(params: Sequence[Tensor]) -> None:
    """Refuses a list that has a parameter twice."""
    if len(set(map(id, params))) < len(params):
        raise ValueError("params: a parameter is listed twice, so torch would step it twice; list each once")


def refuse_shared(params: Iterable[Tensor]) -> None:
    """Refuses parameters that have elements in common. The elements of two parameters may be interleaved."""
    # FSDP1 frees the memory of some parameters until they are used.
    held = [param for param in params if param.numel() > 0 and param.untyped_storage().nbytes() > 0]
    spans = [(param.data_ptr(), param.data_ptr() + _reach(param), param) for param in held]
    if len(spans) < 2:
        return
    near: list[tuple[int, int, Tensor]] = []
    end = 0
    for span in sorted(spans, key=lambda span: span[:2]):
        if span[0] >= end:
            _refuse_overlap(near)
            near.clear()
        near.append(span)
        end = max(end, span[1])
    _refuse_overlap(near)


def _reach(param: Tensor) -> int:
    """The bytes from the start of a tensor's first element to the end of its last element."""
    return (1 + sum((size - 1) * stride for size, stride in zip(param.shape, param.stride()))) * param.itemsize


def _refuse_overlap(near: Sequence[tuple[int, int, Tensor]]) -> None:
    """Refuses parameters that have elements in common. ``near`` has parameters with overlapping address ranges."""
    if len(near) < 2:
        return
    first = near[0][0]
    taken = torch.zeros(max(end for _, end, _ in near) - first, dtype=torch.bool, device="cpu")
    for start, _, param in near:
        size = param.itemsize
        strides = [size * stride for stride in param.stride()]
        own = taken.as_strided((*param.shape, size), (*strides, 1), start - first)
        if own.any():
            raise NotImplementedError("parameter: shares memory with another one of the optimizer; give one of the two")
        own.fill_(True)
