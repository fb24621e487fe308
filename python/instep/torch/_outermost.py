"""Finds the end of the backward pass to which a step belongs. With reentrant checkpoints, a step belongs to the
outermost pass.

A checkpoint with ``use_reentrant=True`` runs a second backward pass inside a node of the first one. Parameters then get
gradients in several passes, and all these passes belong to one step. If a pass ends with an error, autograd drops the
callbacks of the pass without calling them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch.autograd import Variable


class Outermost:
    """Calls a function once, at the end of the outermost backward pass in which `open` was called."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end
        self._callback: Optional[weakref.ref[End]] = None

    @property
    def is_open(self) -> bool:
        """Whether a pass has begun and has not ended yet."""
        return self._callback is not None and self._callback() is not None

    def open(self, *_: Any) -> None:
        """Opens this object in the current backward pass. If the object is already open, this call does nothing,
        because the current pass, or an outer pass in which it runs, has opened the object.
        """
        if not self.is_open:
            callback = End(self)
            self._callback = weakref.ref(callback)
            Variable._execution_engine.queue_callback(callback)

    def forget(self) -> None:
        """Forgets a pass that ended with an error. Every forward pass begins with this call. Inside backward the call
        does nothing.
        """
        if torch._C._current_graph_task_id() == -1:
            self._callback = None

    def close(self) -> None:
        """Ends the pass, and calls the function."""
        self._callback = None
        self.end()


class End:
    """The callback that autograd calls at the end of the pass, after the wrapper's own callbacks."""

    def __init__(self, of: Outermost) -> None:
        self.of, self.is_last = of, False

    def __call__(self) -> None:
        if self.of._callback is None or self.of._callback() is not self:
            return
        if self.is_last:
            self.of.close()
            return
        # FSDP reduces the remaining gradients in such a callback, which may run after this one.
        self.is_last = True
        Variable._execution_engine.queue_callback(self)
