"""The gradients that backward has stepped with: what is done to them afterwards comes too late, and is said.

A write is seen by the version that torch counts. Functions over lists do not count it for ``DTensor``s, so for these some
values are compared too. Writes through ``.data`` and numpy stay unseen.
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
"""Gradients whose values are compared. A clip scales all of them."""
FIRST = 64
"""Elements of each: an embedding's first rows may have no gradient."""
PASSES_WATCHED = 8
"""Who forgets to clear gradients forgets it at once."""


class SteppedGradients:
    """The gradients of some parameters, as the last backward left them.

    Gradients that are views of one bucket have one version. ``is_alone`` says that it is of these parameters' alone.
    """

    def __init__(self, params: Iterable[Tensor], is_alone: bool = True) -> None:
        self.params, self.is_alone = list(params), is_alone
        self._then: Optional[list[Optional[tuple[int, int, int]]]] = None
        self._sample: Optional[Tensor] = None
        self._is_unread = False
        self._late: Optional[Later] = None
        self._passes = 0

    def note(self) -> None:
        """Takes the gradients as they are now: backward is over."""
        self._then, self._sample = self._now(), self._sampled()
        self._is_unread = True
        self._passes += 1

    def refuse_changes(self) -> None:
        """Raises if somebody has changed them since: the parameters do not follow."""
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
        """Raises what a GPU has found since."""
        late, self._late = self._late, None
        if late is not None and any(late.read()):
            raise RuntimeError(_CHANGED)

    def warn_if_kept(self) -> None:
        """Warns if backward is about to add to gradients that were stepped with. Those that are zeros may stay."""
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

    def _now(self) -> list[Optional[tuple[int, int, int]]]:
        return [None if param.grad is None else self._look(param.grad) for param in self.params]

    def _look(self, grad: Tensor) -> tuple[int, int, int]:
        local = _local(grad)
        return (grad._version, local._version, local.data_ptr()) if self.is_alone else (0, 0, local.data_ptr())

    def _sampled(self) -> Optional[Tensor]:
        """Bits that tell values apart, and NaN from no other NaN."""
        grads = [param.grad for param in self.params if param.grad is not None]
        uncounted = [grad for grad in grads if is_distributed(grad) or not self.is_alone]
        shards = [_local(grad) for grad in uncounted[:: len(uncounted) // MOST_SAMPLED + 1] if _local(grad).numel() > 0]
        if not shards:
            return None
        with torch.no_grad():
            return torch.stack([shard.flatten()[:FIRST].float().abs().sum() for shard in shards]).view(torch.int32)


def refuse_scaler(optimizer: torch.optim.Optimizer, own: Optional[torch.amp.GradScaler]) -> None:
    """Refuses a scaler's ``step`` if backward has not divided by its scale, or if the scale was divided out twice."""
    if not hasattr(optimizer, "found_inf"):
        return
    is_unscaled = getattr(optimizer, "grad_scale", None) is None
    if own is not None and not is_unscaled:
        return
    # The scaler takes them away after a step that returns.
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
