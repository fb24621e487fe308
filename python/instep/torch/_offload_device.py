"""The interface between the engine and a device: copies on two queues, events, and page-locked memory.

`_offload_engine.py` uses a device only through this interface. A copy begins after the given events. The call returns
an event that is reached after the copy's last byte.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ._memory import PAGE

ALIGNMENT = 64
"""Tensors in page-locked memory start at multiples of this number of bytes."""

Pair = tuple[Tensor, Tensor]
"""A tensor to copy to, and the one to copy from."""


class Event(Protocol):
    """A point in the work of a queue or a stream."""

    def wait(self) -> None:
        """Blocks the calling thread until the event is reached. Other Python threads continue to run."""

    def is_done(self) -> bool:
        """Whether the event is reached."""


class Device(Protocol):
    """The device's interface for the engine. Any thread may call any method."""

    def page_locked(self, size: int) -> Tensor:
        """Returns host memory that the device can copy to and from as long as the device object lives."""

    def unlock(self, memory: Tensor) -> None:
        """Unlocks page-locked memory. No copy may be running."""

    def mark(self, written: Sequence[Tensor]) -> Event:
        """Returns an event that is reached after all work so far on the calling thread's current stream. ``written``
        lists the tensors that this work writes.
        """

    def down(self, pairs: Sequence[Pair], after: Iterable[Event], label: object) -> Event:
        """Copies to the host, on the queue of downloads."""

    def up(self, pairs: Sequence[Pair], after: Iterable[Event], label: object) -> Event:
        """Copies to the device, on the queue of uploads."""

    def wait(self, event: Event) -> None:
        """Makes the calling thread's current stream wait for an event before it runs work that is submitted later."""

    def note(self, what: str, label: object) -> None:
        """Receives the engine's reports of its actions, for tests."""

    def bind(self) -> None:
        """Prepares the calling thread to run steps."""

    def close(self) -> None:
        """Ends the device's threads."""


def aligned(size: int) -> int:
    """The bytes that a tensor of this size takes up in page-locked memory."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def place_of_scale(device: Device) -> Tensor:
    """Page-locked memory for one number."""
    return device.page_locked(ALIGNMENT)[:4].view(torch.float32)[0]


class CudaEvent:
    """An event that a thread waits for without spinning."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(blocking=True)

    def wait(self) -> None:
        self.event.synchronize()

    def is_done(self) -> bool:
        return bool(self.event.query())


class Cuda:
    """A CUDA device through PyTorch's streams and events."""

    def __init__(self, device: torch.device, numa: bool = True) -> None:
        self.device, self.numa = device, numa
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._registered: dict[int, Tensor] = {}
        weakref.finalize(self, _unlock, self._registered, (self._down, self._up)).atexit = False

    def page_locked(self, size: int) -> Tensor:
        # PyTorch's own allocator of page-locked memory rounds up to a power of two, and keeps freed memory. Each
        # allocation here is whole pages, because two allocations in one page cannot both be registered.
        pages = -(-max(size, 1) // PAGE) * PAGE
        memory = torch.empty(pages + PAGE, dtype=torch.uint8, device="cpu")
        start = -memory.data_ptr() % PAGE
        run = memory[start : start + pages]
        with torch.cuda.device(self.device):
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(run.data_ptr(), pages, 0))
        self._registered[run.data_ptr()] = run
        return run[:size].data

    def unlock(self, memory: Tensor) -> None:
        _unlock({memory.data_ptr(): self._registered.pop(memory.data_ptr())}, ())

    def mark(self, written: Sequence[Tensor]) -> Event:
        event = CudaEvent()
        event.event.record(torch.cuda.current_stream(self.device))
        return event

    def down(self, pairs: Sequence[Pair], after: Iterable[Event], label: object) -> Event:
        return self._copy(self._down, pairs, after)

    def up(self, pairs: Sequence[Pair], after: Iterable[Event], label: object) -> Event:
        for to, _ in pairs:
            to.record_stream(self._up)  # A model may be dropped while its parameters are copied up.
        return self._copy(self._up, pairs, after)

    def _copy(self, stream: torch.cuda.Stream, pairs: Sequence[Pair], after: Iterable[Event]) -> Event:
        done = CudaEvent()
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            for event in after:
                stream.wait_event(event.event)  # type: ignore[attr-defined]  # of this class
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            done.event.record(stream)
        return done

    def wait(self, event: Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event.event)  # type: ignore[attr-defined]  # of this class

    def note(self, what: str, label: object) -> None:
        pass

    def bind(self) -> None:
        torch.cuda.set_device(self.device)
        if self.numa:
            stay_near(self.device)

    def close(self) -> None:
        pass


def _unlock(registered: dict[int, Tensor], streams: Iterable[torch.cuda.Stream]) -> None:
    for stream in streams:
        stream.synchronize()
    for address in registered:
        torch.cuda.cudart().cudaHostUnregister(address)


def stay_near(device: torch.device) -> None:
    """Binds the calling thread, and threads that it starts, to the cores near a GPU, if the system reports these cores."""
    import os
    from pathlib import Path

    properties: Any = torch.cuda.get_device_properties(device)
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        cores = listed(Path(f"/sys/bus/pci/devices/{address}/local_cpulist").read_text())
        near = cores & os.sched_getaffinity(0)
        if near:
            os.sched_setaffinity(0, near)
    except (OSError, ValueError, AttributeError):
        return  # The system does not report these cores: threads may run on any core.


def listed(text: str) -> set[int]:
    """The numbers in a text such as ``0-3,8``."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores.update(range(int(first), int(last or first) + 1))
    return cores
