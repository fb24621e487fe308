"""Futures of all-reduces, and a wait for their callbacks when the interpreter exits.

An all-reduce ends on a thread of the process group. That thread runs the callback. The thread may drop the callback and
its tensors after the trainer has continued. If the interpreter exited before this drop, the thread could not acquire
the GIL and would abort the process. The interpreter's exit therefore waits for the thread.
"""

from __future__ import annotations

import atexit
import functools
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.futures import Future

MOST_SECONDS = 1.0
"""The longest wait in seconds. If a rank is lost, an all-reduce never ends, and its callback is never dropped."""

T = TypeVar("T", bound=Callable[..., Any])
_held: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def awaited(callback: T) -> T:
    """Returns the callback. The interpreter's exit waits until the callback is dropped, at most `MOST_SECONDS`."""
    _wait_at_exit()
    _held.add(callback)
    return callback


@functools.cache
def _wait_at_exit() -> None:
    atexit.register(_outlive)


def _outlive() -> None:
    end = time.monotonic() + MOST_SECONDS
    while _held and time.monotonic() < end:
        time.sleep(0.001)
    # The same thread drops the tensors after the callback.
    time.sleep(0.02)


def joined(futures: list[Future[Any]]) -> Future[Any]:
    """Returns a future that is done once all of these futures are done."""
    return futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)


def wait_for(futures: list[Future[Any]]) -> None:
    """Raises the error of any of the futures. On a GPU, makes the current stream wait for all futures.

    A future runs its callback on a separate stream, which waits only for that future. If `joined` combined several
    futures, that stream waits only for the last of them.
    """
    for future in futures:
        future.wait()
