"""The registry of overlapped optimizers, with the names and meaning of PyTorch's ``_optimizer_overlap``.

This registry refuses a second entry for a class. PyTorch's registry silently replaces the first entry, because its
check looks for the class in the values instead of the keys.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Optional, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from .ddp import DDPOptimizer, register_ddp
from .fsdp import FSDPOptimizer, register_fsdp
from .optimizer import key_of

Registered = TypeVar("Registered", bound=type)
_registered: dict[type, type] = {}


def register_overlapped(optim_cls: type) -> Callable[[Registered], Registered]:
    """Returns a decorator that registers a class as the overlapped form of ``optim_cls`` and its subclasses."""

    def decorator(overlapped: Registered) -> Registered:
        if optim_cls in _registered:
            raise ValueError(f"{optim_cls.__name__}: {_registered[optim_cls].__name__} overlaps it already")
        _registered[optim_cls] = overlapped
        return overlapped

    return decorator


class OverlappedOptimizer(ABC):
    """An optimizer that a distributed wrapper runs inside backward."""

    def __init__(self, optim_cls: type) -> None:
        self.optim_cls = optim_cls

    @abstractmethod
    def register_ddp(self, ddp: DistributedDataParallel) -> Any:
        """Registers the optimizer with a DDP model."""

    def register_fsdp(self, fsdp: torch.nn.Module) -> Any:
        """Registers the optimizer with an FSDP model."""
        raise NotImplementedError(f"{type(self).__name__}: does not support FSDP; use DDP, or step after backward")


@register_overlapped(torch.optim.Optimizer)
class OverlappedStandardOptimizer(OverlappedOptimizer):
    """The overlapped form of an optimizer of ``torch.optim`` that this library implements."""

    def __init__(self, optim_cls: type, params: Optional[Iterable[Any]], *args: Any, **kwargs: Any) -> None:
        super().__init__(optim_cls)
        key_of(optim_cls)
        self.params = params
        names = [name for name in inspect.signature(optim_cls).parameters if name != "params"]
        self.options = {**dict(zip(names, args)), **kwargs}

    def register_ddp(self, ddp: DistributedDataParallel) -> DDPOptimizer:
        """Registers the optimizer with a DDP model, as `instep.torch.register_ddp` does."""
        return register_ddp(ddp, self.optim_cls, params=self.params, **self.options)

    def register_fsdp(self, fsdp: torch.nn.Module) -> FSDPOptimizer:
        """Registers the optimizer with an FSDP model, as `instep.torch.register_fsdp` does."""
        return register_fsdp(fsdp, self.optim_cls, params=self.params, **self.options)


def as_overlapped_optim(optim_cls: type, params: Optional[Iterable[Any]], *args: Any, **kwargs: Any) -> OverlappedOptimizer:
    """Makes the overlapped form of an optimizer's class. If no form is registered for this class, makes the form of
    the nearest base class that has one.
    """
    for base in inspect.getmro(optim_cls):
        if base in _registered:
            return _registered[base](optim_cls, params, *args, **kwargs)
    names = ", ".join(sorted(known.__name__ for known in _registered))
    raise ValueError(f"{optim_cls.__name__}: no overlapped form; register one, or derive from {names}")
