"""Takes one sample of each candidate in every round, and summarises the samples.

The memory bus of a shared machine gets faster and slower from minute to minute, so each ratio divides two times that were
measured in the same round. This module needs only the standard library.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

PAUSE_S = 0.01


@dataclass(frozen=True)
class Spread:
    """A median with the range of its samples."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """The spread of these samples."""
        return cls(statistics.median(samples), min(samples), max(samples))

    def show(self, digits: int) -> str:
        """Formats the spread as ``median (low-high)``."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"

    def row(self, digits: int) -> str:
        """Formats the spread as ``median,low,high``."""
        return f"{self.median:.{digits}f},{self.low:.{digits}f},{self.high:.{digits}f}"


def in_turn(sides: Mapping[str, Callable[[], float]], rounds: Iterable[object]) -> dict[str, list[float]]:
    """Takes one sample of every candidate in each round, after a pause.

    Idle threads of GNU's OpenMP first spin for some milliseconds. Libraries with separate OpenMP runtimes have separate
    threads. Without the pause, a sample would share the cores with the spinning threads of the previous candidate's
    library. Intel's OpenMP spins for longer than this pause, unless KMP_BLOCKTIME is set.
    """
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for _ in rounds:
        for name, sample in sides.items():
            time.sleep(PAUSE_S)
            samples[name].append(sample())
    return samples


def milliseconds(work: Callable[[], object]) -> float:
    """The time that a call takes, in milliseconds."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def ratios(times: Sequence[float], to: Sequence[float]) -> Spread:
    """The spread of the ratios of these times to another candidate's times in the same rounds."""
    return Spread.of([one / other for one, other in zip(times, to)])
