"""The base class of the optimizers of `register_ddp`, `register_fsdp` and `offload`. Backward makes or starts the
optimizer's steps, so the method ``step`` makes no step.

Every rank steps with the same settings. ``step`` raises if gradients have changed after backward has stepped with them.
If there are no states yet, ``torch.distributed.checkpoint`` calls ``step`` to create them. In this case, ``step`` only
allocates the states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from ._stepped import SteppedGradients, refuse_scaler
from .optimizer import FusedOptimizer


class BackwardOptimizer(FusedOptimizer):
    """An optimizer with steps that run in backward."""

    _runs_in_backward = True
    _own: set[Tensor]
    """The parameters that this optimizer steps."""
    _stepped: SteppedGradients

    def _decide_by(
        self, max_norm: Optional[float], grad_scaler: Optional[torch.amp.GradScaler], skip_nonfinite: bool
    ) -> None:
        """Stores the options that make each pass decide over all its gradients before its first step."""
        self._scaler = grad_scaler
        self._skip_nonfinite = skip_nonfinite or grad_scaler is not None
        self._has_limit = max_norm is not None

    @property
    def _decides(self) -> bool:
        """Whether the steps of a pass depend on a decision over all its gradients. This never changes (see
        `_refuse_other_clip`).
        """
        clips = self._has_limit or self._skip_nonfinite
        return clips or any(group.get("max_norm") is not None for group in self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds further parameters of the wrapped model."""
        if param_group.get("max_norm") is not None and hasattr(self, "_stepped") and not self._decides:
            raise ValueError("max_norm of a late group: passes decide nothing; give max_norm to a group at registration")
        super().add_param_group(param_group)

    def _refuse_other_clip(self) -> None:
        raise RuntimeError(
            "max_norm of a param group: begins or ends to clip the group alone, and ranks decide as at registration; "
            "change a number alone, or register anew"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__}: belongs to the hooks of its model, so it has no copy; save its state_dict()")

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Calls ``closure``, but makes no step, because backward has already stepped. Raises if gradients have changed
        since backward.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        # This must not read `state`, which would wait for running steps.
        if not vars(self)["state"] and all(float(group["lr"]) == 0 for group in self.param_groups):
            # torch.distributed.checkpoint steps with lr = 0, so that there are states to load into. Nothing changes.
            self._show_all()
            return result
        refuse_scaler(self, self._scaler)
        self._stepped.refuse_changes()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients. Warns if gradients have changed since backward stepped with them. `step` raises after such
        a change, but a loop may never call `step`.
        """
        self._stepped.warn_if_changed()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def _show_all(self) -> None:
        """Puts states of all parameters into ``state``. For parameters that were not stepped yet, the next step is
        still the first.
        """
        self._follow_states()
        self._adopt(self._listed())
        for arena in self._engine.arenas:
            arena.show_hidden()

    def _in_common(self) -> object:
        """The settings that must be equal on all ranks."""
        hypers = [
            (len(group["params"]), self._settings.of(group), group.get("max_norm", "together")) for group in self.param_groups
        ]
        return self._key, self._formats, self._max_norm, self._skip_nonfinite, hypers
