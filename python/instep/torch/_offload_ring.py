"""A ring buffer of page-locked memory, into which gradients are copied down.

The ring never grows. If too little memory is free, the caller waits until enough is returned. Memory may be returned
in any order. A slot is free once it and all earlier slots are returned.
"""

from __future__ import annotations

import threading
from collections import deque

from torch import Tensor


class Slot:
    """Consecutive bytes of the ring, which are in use until they are returned."""

    def __init__(self, ring: Ring, start: int, end: int) -> None:
        self.ring, self.start, self.end, self.is_free = ring, start, end, False

    def give_back(self) -> None:
        """Returns the bytes to the ring. Nothing may read them afterwards."""
        self.ring._give_back(self)


class Ring:
    """A ring buffer over given page-locked memory."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.size = memory, memory.numel()
        self._taken: deque[Slot] = deque()
        self._changed = threading.Condition()

    def take(self, size: int) -> Slot:
        """Waits until this number of consecutive bytes is free, and returns them as a slot."""
        if size > self.size:
            raise ValueError(f"ring of {self.size} bytes: a bucket has {size}; give a larger ring=")
        with self._changed:
            while (start := self._place(size)) is None:
                self._changed.wait()
            slot = Slot(self, start, start + size)
            self._taken.append(slot)
            return slot

    def _place(self, size: int) -> int | None:
        """The start of the next slot, or None if the next slot would overlap a slot that is still in use."""
        if not self._taken:
            return 0
        first, last = self._taken[0].start, self._taken[-1].end
        if self._taken[-1].start >= first:  # The bytes after the last slot and before the first slot are free.
            return last if last + size <= self.size else 0 if size <= first else None
        return last if last + size <= first else None

    def _give_back(self, slot: Slot) -> None:
        with self._changed:
            slot.is_free = True
            while self._taken and self._taken[0].is_free:
                self._taken.popleft()
            self._changed.notify_all()
