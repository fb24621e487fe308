"""Futures of sums, and the end of their callbacks.

A sum ends on a thread of the process group. That thread runs the callback, and drops the callback and the tensors a moment
after the trainer has gone on. If the interpreter ended in that moment, the thread could not take the interpreter's lock, and
would abort the process. So the exit waits for that thread.
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
"""The longest wait in seconds. If a rank is lost, a sum never ends, and never drops its callback."""

T = TypeVar("T", bound=Callable[..., Any])
_held: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def awaited(callback: T) -> T:
    """A callback that the end of the interpreter waits for."""
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
    """A future whose callbacks run once all of these are done."""
    return futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)


def wait_for(futures: list[Future[Any]]) -> None:
    """Raises the error of any of them. On a GPU, makes the current stream wait for all of them.

    A callback runs on a separate stream, which waits for the future that called it. For collected futures, that is only the
    last one.
    """
    for future in futures:
        future.wait()
