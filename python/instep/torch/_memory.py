"""The memory of optimizer states: its offset within a page, the size of its pages, and the tensors over it.

This module depends only on torch. Memory is initialised with zeros, and is freed when the last tensor over it is freed.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

PAGE = 4096
HUGE_PAGE = 2 << 20


def zeros_apart(length: int, dtype: torch.dtype, device: torch.device, number: int) -> Tensor:
    """Returns a tensor of zeros. On the CPU, four consecutive values of ``number`` give four different offsets within a
    page, and none of these is the offset of a large parameter.

    A CPU may confuse two arrays if their addresses agree in the low 12 bits. torch starts large tensors 64 bytes after
    the start of a page. In the tensor, each parameter's part starts at a multiple of 256 elements.
    """
    if device.type != "cpu":
        return torch.zeros(length, dtype=dtype, device=device)
    size = dtype.itemsize
    whole = _zero_bytes(length * size + 2 * PAGE).view(dtype)
    start = (64 + 512 + 1024 * number - whole.data_ptr()) % PAGE
    return whole[start // size : start // size + length]


def alone(view: Tensor) -> Tensor:
    """A tensor over the memory of a view. Its storage has only the bytes of the view, so saving the tensor writes
    nothing else.
    """
    if view.numel() == 0:
        return torch.empty_like(view, memory_format=torch.preserve_format)
    reach = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride()))
    start = view.storage_offset() * view.itemsize
    storage = view.untyped_storage()[start : start + reach * view.itemsize]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.shape, view.stride())


def _zero_bytes(count: int) -> Tensor:
    """Returns zeros, in huge pages if they fill at least one huge page. With small pages, a step over an arena would
    miss the TLB at every page.
    """
    if count < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(count, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, count + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # The system may refuse huge pages. Small pages work too.
    # The tensor keeps the mapping alive.
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + count]
