"""Watches the gradients that a step inside backward has used. A later change of a gradient would have no effect, so
`step` raises.

torch's version counter shows that a tensor was written. The version of a ``DTensor`` does not count writes by torch's
functions over lists, so some values of a ``DTensor`` are compared too. Writes through ``.data`` and numpy are not
detected.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Optional

import torch
from torch import Tensor

from ._later import Later
from ._sharded import is_distributed

MOST_SAMPLED = 8
"""The number of gradients with values that are compared. This is enough, because a clip scales all gradients."""
FIRST = 64
"""Elements of each gradient that are compared. One element is too few, because an embedding's first rows may have no
gradient."""
PASSES_WATCHED = 8
"""The number of passes in which uncleared gradients are detected. A loop that never clears them is detected at once."""


class SteppedGradients:
    """The gradients of some parameters, as the last backward left them.

    Gradients that are views of one bucket share one version counter. If ``is_alone`` is True, no gradient of
    a parameter outside ``params`` shares the counter.
    """

    def __init__(self, params: Iterable[Tensor], is_alone: bool = True) -> None:
        self.params, self.is_alone = list(params), is_alone
        self._then: Optional[list[Optional[tuple[int, int, int]]]] = None
        self._sample: Optional[Tensor] = None
        self._is_unread = False
        self._late: Optional[Later] = None
        self._passes = 0
        self._has_told = False

    def note(self) -> None:
        """Records the versions and some values of the gradients, after backward."""
        self._then, self._sample = self._now(), self._sampled()
        self._is_unread = True
        self._passes += 1

    def refuse_changes(self) -> None:
        """Raises if the gradients have changed since `note`, because the step did not use the changed values."""
        if not self._is_unread or self._then is None:
            return
        self._is_unread = False
        if self._now() != self._then:
            raise RuntimeError(_CHANGED)
        sample = self._sampled()
        if self._sample is not None and sample is not None:
            self._late = Later(sample != self._sample)
            if sample.device.type == "cpu":
                self.read()

    def read(self) -> None:
        """Raises if the GPU has found a change in the meantime."""
        late, self._late = self._late, None
        if late is not None and any(late.read()):
            raise RuntimeError(_CHANGED)

    def warn_if_kept(self) -> None:
        """Warns if backward is about to add to gradients that a step has already used. If values are compared, there is
        no warning if they have changed, or if all of them are zero.
        """
        if self._then is None or self._passes > PASSES_WATCHED:
            return
        kept = [look for look, then in zip(self._now(), self._then) if look is not None and look == then]
        if not kept:
            return
        sample = self._sampled()
        if sample is not None and self._sample is not None and not (torch.equal(sample, self._sample) and sample.any()):
            return
        self._passes = PASSES_WATCHED + 1
        warnings.warn(_KEPT, stacklevel=2)

    def warn_if_changed(self) -> None:
        """Warns if gradients that are about to be cleared have changed since `note`. A gradient that is now None or
        zero does not count as changed.

        Some loops never call ``step``, so only this call can detect the change. The call does not raise, because
        another backward pass may have written the gradients, for example a pass that computes the gradient of an input.
        """
        if not self._is_unread or self._then is None or self._has_told or self._passes > PASSES_WATCHED:
            return
        changed = [param.grad for param, now, then in zip(self.params, self._now(), self._then) if now != then]
        differs = any(grad is not None and bool(_local(grad).any()) for grad in changed)
        sample = self._sampled()
        if self._sample is not None and sample is not None and sample.shape == self._sample.shape:
            differs = differs or bool(((sample != self._sample) & (sample != 0)).any())
        if differs:
            self._has_told = True
            warnings.warn(_CHANGED, stacklevel=3)

    def _now(self) -> list[Optional[tuple[int, int, int]]]:
        return [None if param.grad is None else self._look(param.grad) for param in self.params]

    def _look(self, grad: Tensor) -> tuple[int, int, int]:
        local = _local(grad)
        return (grad._version, local._version, local.data_ptr()) if self.is_alone else (0, 0, local.data_ptr())

    def _sampled(self) -> Optional[Tensor]:
        """Sums of the first values of some gradients. The bits of the sums are compared as integers, so that a NaN equals
        itself.
        """
        grads = [param.grad for param in self.params if param.grad is not None]
        uncounted = [grad for grad in grads if is_distributed(grad) or not self.is_alone]
        shards = [_local(grad) for grad in uncounted[:: len(uncounted) // MOST_SAMPLED + 1] if _local(grad).numel() > 0]
        if not shards:
            return None
        with torch.no_grad():
            return torch.stack([shard.flatten()[:FIRST].float().abs().sum() for shard in shards]).view(torch.int32)


def refuse_scaler(optimizer: torch.optim.Optimizer, own: Optional[torch.amp.GradScaler]) -> None:
    """Refuses a scaler's ``step`` if the step in backward did not divide gradients by the scale, or if ``unscale_`` has
    divided them again.
    """
    if not hasattr(optimizer, "found_inf"):
        return
    is_unscaled = getattr(optimizer, "grad_scale", None) is None
    if own is not None and not is_unscaled:
        return
    # The scaler removes these attributes only after a step that returns.
    vars(optimizer).pop("grad_scale", None)
    vars(optimizer).pop("found_inf", None)
    if own is None:
        raise RuntimeError("GradScaler: backward has stepped with its scale in the gradients; register with grad_scaler=")
    raise RuntimeError(
        "GradScaler: unscale_ has divided gradients that have no scale in them any more; leave it out, and clip by max_norm="
    )


def _local(grad: Tensor) -> Tensor:
    return getattr(grad, "_local_tensor", grad)


_CHANGED = (
    "gradients: changed after backward has stepped with them, so the parameters do not follow; clip by max_norm= "
    "(torch.nn.utils.get_total_norm reads a norm and changes nothing), and leave parameters out by params="
)
_KEPT = (
    "gradients: backward adds to some that it has stepped with already, and steps with the sum; clear them after every step, "
    "and accumulate under no_sync() or after set_requires_gradient_sync(False)"
)
