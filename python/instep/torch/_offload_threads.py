"""Threads that run tasks in order, and end before the interpreter does.

If the interpreter ended a thread in native code, the process would abort. At exit every thread therefore finishes its
tasks. Threads finish in the reverse order of their start. A simulated device starts its threads at their first copy, so
these threads finish before the thread that runs steps. This order is safe, because a step may wait for copies, but no
copy waits for a step.
"""

from __future__ import annotations

import atexit
import functools
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Optional

import torch

Task = Callable[[], None]
MOST_SECONDS = 10.0
"""The longest wait in seconds, because a task that waits for a lost rank never ends."""

_living: list[weakref.ref[Lane]] = []


class Lane:
    """A thread and its tasks. When the last reference to a lane is dropped, its thread ends."""

    def __init__(self, name: str, begin: Optional[Task] = None) -> None:
        self._tasks: queue.SimpleQueue[Optional[Task]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._tasks, begin), name=name, daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._tasks.put, None)
        self._finalizer.atexit = False
        _living[:] = [one for one in _living if one() is not None]
        _living.append(weakref.ref(self))
        _end_at_exit()

    def put(self, task: Task) -> None:
        """Adds a task, which the thread runs after all earlier tasks. The task must not raise."""
        self._tasks.put(task)

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is this lane's thread."""
        return threading.current_thread() is self._thread

    def close(self, timeout: Optional[float] = None) -> None:
        """Ends the thread after the last task."""
        self._finalizer()
        self._thread.join(timeout)


def _run(tasks: queue.SimpleQueue[Optional[Task]], begin: Optional[Task]) -> None:
    if begin is not None:
        begin()
        del begin
    with torch.no_grad():
        while (task := tasks.get()) is not None:
            task()
            del task


@functools.cache
def _end_at_exit() -> None:
    atexit.register(_end_all)


def _end_all() -> None:
    for one in reversed(_living):
        lane = one()
        if lane is not None:
            lane.close(MOST_SECONDS)
