"""Optimizers that run inside backward: no other optimizer may step their parameters.

A second optimizer would silently step the same parameters again. This module has no weak reference to a parameter,
because torch refuses to convert a sharded model if such a reference exists.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

ATTACHED = "_in_backward_optimizers"
"""PyTorch's own attribute of parameters, which DDP and FSDP1 look for."""


class Running(Protocol):
    """An optimizer that runs inside backward, with the attributes that this module reads."""

    param_groups: list[dict[str, Any]]
    _own: set[Tensor]
    _made_by: str


_running: weakref.WeakSet[Any] = weakref.WeakSet()


def claim(optimizer: Running) -> None:
    """Registers an optimizer as the only one that may step its parameters."""
    _watch_steps()
    _running.add(optimizer)


def refuse_claimed(params: Iterable[Tensor]) -> None:
    """Refuses parameters that are already stepped in backward."""
    params = set(params)
    if _owner_of(params) is not None:
        gc.collect()  # An unreferenced model keeps its optimizer until garbage collection.
    owner = _owner_of(params)
    if owner is not None:
        raise RuntimeError(f"params: another {owner._made_by} steps one of them; name others, or call it once")


def refuse_attached(params: Iterable[Tensor]) -> None:
    """Refuses parameters that have an optimizer of `apply_optimizer_in_backward`."""
    if any(getattr(param, ATTACHED, None) for param in params):
        raise RuntimeError("params: apply_optimizer_in_backward steps one of them; name others, or use one of the two alone")


def _owner_of(params: set[Tensor]) -> Any:
    return next((one for one in list(_running) if not params.isdisjoint(one._own)), None)


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_refuse_second)


def _refuse_second(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Refuses the step of an ordinary optimizer over parameters that backward has stepped."""
    if not _running or optimizer in _running:
        return
    params = {param for group in optimizer.param_groups for param in group["params"]}
    owner = _owner_of(params)
    # A wrapper that steps an inner optimizer has that optimizer's groups.
    if owner is None or any(group is own for group in optimizer.param_groups for own in owner.param_groups):
        return
    raise RuntimeError(
        f"{type(optimizer).__name__}: its parameters are stepped inside backward by {type(owner).__name__} already; "
        "step each by one of them alone"
    )
