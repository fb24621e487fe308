"""Futures of sums, and the end of their callbacks.

A sum ends on a thread of the process group. That thread calls back, and drops the callback and the tensors a moment after
torch has gone on. If the interpreter ended in that moment, the thread could not take its lock, and would abort the process.
So the exit waits for it.
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
"""A sum that a lost rank keeps from ending holds its callback for ever."""

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
    # The tensors go after the callback, on the same thread.
    time.sleep(0.02)


def joined(futures: list[Future[Any]]) -> Future[Any]:
    """A future whose callbacks run once all of these are done."""
    return futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)


def wait_for(futures: list[Future[Any]]) -> None:
    """Raises what any of them raised. On a GPU, lets the current stream come after all of them.

    A callback runs on a stream of its own, which waits for the future that called it. Of futures that are collected, that
    is only the last one.
    """
    for future in futures:
        future.wait()
