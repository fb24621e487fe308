"""Compares the settings of the ranks. Each rank reads the result one pass later.

If a rank raised immediately, the other ranks would wait for it in an all-reduce forever. Ranks therefore send their
settings in every pass, and read the result one pass later. On a GPU this read waits only for work of the previous pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor

_streams: dict[torch.device, torch.cuda.Stream] = {}


class Later:
    """Numbers to be read later, when the device has computed them."""

    def __init__(self, numbers: Tensor, work: Optional[dist.Work] = None) -> None:
        self._numbers, self._work, self._event = numbers, work, None
        if numbers.device.type != "cuda":
            return
        stream = _streams.setdefault(numbers.device, torch.cuda.Stream(numbers.device))
        stream.wait_stream(torch.cuda.current_stream(numbers.device))
        with torch.cuda.stream(stream):
            if work is not None:
                work.wait()  # The stream waits, not the host.
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            numbers.record_stream(stream)
            self._event = stream.record_event()

    def read(self) -> list[float]:
        """Waits for the numbers and returns them."""
        if self._event is not None:
            self._event.synchronize()
        elif self._work is not None:
            self._work.wait()
        return self._numbers.tolist()


Member = tuple[dist.ProcessGroup, torch.device]
"""A group of ranks, and the device of the numbers that the group compares."""


class Agreement:
    """Checks, for each of these process groups, whether all its ranks step with the same settings."""

    def __init__(self, groups: Iterable[Member]) -> None:
        # A single rank has nothing to compare.
        self._groups = [(group, device) for group, device in dict.fromkeys(groups) if dist.get_world_size(group) > 1]
        self._asked: list[Later] = []

    def ask(self, settings: Callable[[], object]) -> None:
        """Starts to compare the settings of this pass, and does not wait. Every rank must call this method in every
        pass.
        """
        if not self._groups:
            return
        try:
            text = repr(settings())
        except Exception:
            text = ""  # The step raises the error later, after the sums for which other ranks wait.
        value = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        for group, device in self._groups:
            most_and_least = torch.tensor([value, -value], device=device)
            work = dist.all_reduce(most_and_least, dist.ReduceOp.MAX, group=group, async_op=True)
            self._asked.append(Later(most_and_least, work))

    def read(self) -> None:
        """Raises, on all ranks, if the ranks' settings differed in the last pass."""
        answers, self._asked = [later.read() for later in self._asked], []
        if any(most != -least for most, least in answers):
            raise RuntimeError(
                "hyperparameters: ranks stepped with different ones in the last pass, so their parameters differ now; "
                "set the same on every rank, and load a checkpoint"
            )
