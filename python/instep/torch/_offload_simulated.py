"""A simulated device: two memories of the host, and threads instead of streams.

Work and copies end late, in a random order that a seed determines. A gradient is NaN until its work has ended, and the
target of a copy is NaN until the copy has ended. If the source of a copy to the host was freed before the copy, the
target stays NaN. A step or a forward pass that runs too early therefore gives other bits.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ._offload_device import Event, Pair
from ._offload_limit import Limit
from ._offload_threads import Lane


class Done:
    """An event that a thread sets."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def wait(self) -> None:
        self._event.wait()

    def is_done(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        """Marks the work as ended."""
        self._event.set()


class Simulated:
    """A device that is simulated by two memories of the host.

    Arguments:
        seed: the seed of the delays, and of the order in which parts of a copy are made.
        late: the longest delay, in seconds, of a copy and of the work that writes a gradient. 0 delays nothing.
        bytes_per_second: speed of copies in each direction; None is the speed of memory.
        memory_bytes: the device's memory. Tensors that are made in a ``with`` block of the device lie in this memory.
        record: a list, to which ``(what, label)`` is appended for each event. Most labels are a pair of numbers: pass
            and bucket.

    """

    def __init__(
        self,
        seed: int = 0,
        late: float = 0.0,
        bytes_per_second: Optional[float] = None,
        memory_bytes: Optional[int] = None,
        record: Optional[list[tuple[str, object]]] = None,
    ) -> None:
        self.late, self.bytes_per_second, self.record = late, bytes_per_second, record
        self.memory = None if memory_bytes is None else Limit(memory_bytes)
        self.page_locked_bytes = 0
        self.allocations = 0
        self._random, self._guard = random.Random(seed), threading.Lock()
        self._streams: dict[str, Lane] = {}

    def __enter__(self) -> Simulated:
        if self.memory is not None:
            self.memory.__enter__()
        return self

    def __exit__(self, *given: Any) -> None:
        if self.memory is not None:
            self.memory.__exit__(*given)

    def page_locked(self, size: int) -> Tensor:
        self.page_locked_bytes += size
        self.allocations += 1
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def unlock(self, memory: Tensor) -> None:
        self.page_locked_bytes -= memory.numel()

    def mark(self, written: Sequence[Tensor]) -> Event:
        done = Done()
        if self.late == 0.0:
            done.set()
            return done
        values = [tensor.clone() for tensor in written]
        for tensor in written:
            spoil(tensor)
        delay = self._delay()

        def appear() -> None:
            time.sleep(delay)
            for tensor, value in zip(written, values):
                tensor.copy_(value)
            done.set()

        self._stream("work").put(appear)
        return done

    def down(self, pairs: Sequence[Pair], after: Iterable[Event], label: object) -> Event:
        return self._copy("down", pairs, after, label)

    def up(self, pairs: Sequence[Pair], after: Iterable[Event], label: object) -> Event:
        return self._copy("up", pairs, after, label)

    def _copy(self, name: str, pairs: Sequence[Pair], after: Iterable[Event], label: object) -> Event:
        done, events = Done(), list(after)
        # On a GPU, a source that was freed may have other values by the time of its copy.
        held = [(to, source.detach(), weakref.ref(source) if name == "down" else None) for to, source in pairs]
        delay = self._delay()
        if self.late:
            self._random.shuffle(held)
        if self.bytes_per_second is not None:
            delay += sum(to.numel() * to.itemsize for to, _ in pairs) / self.bytes_per_second

        def copy() -> None:
            for event in events:
                event.wait()
            self.note(f"{name} begins", label)
            if self.late:
                for to, _, _ in held:
                    spoil(to)
            if delay:
                time.sleep(delay)
            for to, source, holder in held:
                spoil(to) if holder is not None and holder() is None else to.copy_(source)
            self.note(f"{name} ends", label)
            done.set()

        self._stream(name).put(copy)
        return done

    def _stream(self, name: str) -> Lane:
        with self._guard:
            if name not in self._streams:
                self._streams[name] = Lane(f"instep {name}")
            return self._streams[name]

    def _delay(self) -> float:
        """Returns a delay, which is often zero and sometimes long."""
        return self._random.choice((0.0, 0.0, 0.3, 1.0)) * self._random.random() * self.late

    def wait(self, event: Event) -> None:
        event.wait()

    def note(self, what: str, label: object) -> None:
        if self.record is not None:
            self.record.append((what, label))

    def bind(self) -> None:
        pass

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


def spoil(tensor: Tensor) -> None:
    """Fills a tensor with NaN. If a result contains NaN, something was read too early."""
    with torch.no_grad():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(-1)
