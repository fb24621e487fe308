"""Futures of sums, and the end of their callbacks.

An all-reduce ends on a thread of the process group. That thread runs the callback. It drops the callback and the tensors
shortly after the trainer has continued. If the interpreter ended before that, the thread could not take the GIL and would
abort the process. The interpreter's exit therefore waits for the thread.
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
    """A callback for which the interpreter's exit waits."""
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
    """A future that is done once all of these are done."""
    return futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)


def wait_for(futures: list[Future[Any]]) -> None:
    """Raises the error of any of the futures. On a GPU, makes the current stream wait for all of them.

    A callback runs on a separate stream, which waits only for the future that called it. For collected futures, this is the
    last future.
    """
    for future in futures:
        future.wait()
