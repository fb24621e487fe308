"""The base class of optimizers with steps that overlap with the trainer's work.

A read of states through the optimizer waits for running steps, so the states are complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Optional

import torch

from ._offload_engine import Offload
from .optimizer import FusedOptimizer

LEFT_CORES = 2
"""The number of cores that a step leaves to the trainer's thread and autograd's thread."""


class Waiting(FusedOptimizer):
    """An optimizer that may have an `Offload` engine. Without the engine, nothing waits."""

    _offload: Optional[Offload] = None
    _scaler: Optional[torch.amp.GradScaler]
    _skip_nonfinite: bool

    @property
    def state(self) -> Any:
        """The states, after all steps."""
        if self._offload is not None and not self._offload.is_open:
            self._offload.wait()
        return self.__dict__["state"]

    @state.setter
    def state(self, state: Any) -> None:
        self.__dict__["state"] = state

    def wait(self) -> None:
        """Waits for all steps, and makes later work of the device wait for uploads. Call this before other code reads
        parameters.
        """
        if self._offload is not None:
            self._offload.wait()

    def close(self) -> None:
        """Ends the threads after all steps, if steps overlap with other work. A later backward pass then raises."""
        if self._offload is not None:
            self._offload.close()

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Calls ``closure``, and reports to a scaler whether the step is skipped. This method makes no step, because
        backward has already started the step.
        """
        result = super().step(closure)
        self._tell_scaler()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients and their sums on the host. With ``set_to_none=False``, zeros are written only after the
        steps that read the gradients.
        """
        if self._offload is not None and self._offload.goes_on:
            self._offload.abandon()
        if not set_to_none:
            self.wait()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state in ``torch.optim``'s format, after all steps. The tensors are not copies."""
        self.wait()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class, or of ``torch.optim``'s optimizer of this name, on any device and in any
        dtype.
        """
        if self._offload is not None:
            self._offload.settle()
            # If the model's parameters were loaded already, this copies them to the mirrors before states are loaded.
            self._offload.follow()
        super().load_state_dict(state_dict)

    def last_norm(self) -> Optional[float]:
        """The norm of the mean gradients of the last step, if a clip or a scaler needed it. Waits only for the norm."""
        if self._offload is None:
            return super().last_norm()
        decision = self._offload.decision()
        return None if decision is None else decision[0]

    def _tell_scaler(self) -> None:
        """If a scaler calls ``step``, reports to it whether a gradient was infinite or NaN. The scaler cannot check the
        gradients itself, because they are already freed.
        """
        if self._offload is None or self._scaler is None or not hasattr(self, "found_inf"):
            return
        decision = self._offload.decision()
        scale = self._scaler._get_scale_async()
        assert scale is not None, "a scaler that steps has a scale"
        found = torch.full((), float(decision is not None and decision[2]), device=scale.device)
        self._scaler._per_optimizer_states[id(self)]["found_inf_per_device"] = {scale.device: found}


def budget() -> int:
    """The number of threads of a step: this process's share of the cores, minus `LEFT_CORES`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, cores // max(1, ranks) - LEFT_CORES)
