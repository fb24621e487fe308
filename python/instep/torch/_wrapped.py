"""Checks, before every forward pass, that a wrapper's hooks are still on the model's parameters.

When torch converts a model, a parameter may become another tensor, and the wrapper's hooks remain on the old tensor. A
parameter that is unfrozen later has no hook. In both cases the parameter would silently not be stepped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Optional, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

_form = attrgetter("_cdata", "dtype", "device")
"""A parameter's tensor, with its type and device, on which torch's hooks depend."""

_SEEN = "instep: seen"


class OfOneModel:
    """A hook that is not copied with its model."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *given: Any) -> Any:
        return self._call(*given)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _nothing, ()


def _nothing() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    pass


class Wrapped:
    """The parameters of a wrapped model at the time of registration."""

    def __init__(self, model: nn.Module, stepped: Iterable[Tensor], frozen: Iterable[tuple[str, Tensor]]) -> None:
        names = {id(param): name for name, param in model.named_parameters()}
        self.params = list(stepped)
        self.names = [names.get(id(param), "parameter") for param in self.params]
        self.frozen = list(frozen)
        self.follow()

    def converted(self) -> list[tuple[str, Tensor]]:
        """The parameters that are now other tensors, or have another type or device."""
        forms = list(map(_form, self.params))
        if forms == self._forms:
            return []
        return [(name, p) for name, p, one, two in zip(self.names, self.params, self._forms, forms) if one != two]

    def follow(self) -> None:
        """Records the current tensors."""
        self._forms = list(map(_form, self.params))

    def refuse_converted(self) -> None:
        """Raises if `converted` finds a parameter, because the wrapper's hooks cannot follow it."""
        for name, param in self.converted():
            raise RuntimeError(
                f"{name}: converted to {param.dtype} on {param.device} after it was wrapped, and the hooks did not follow; "
                "convert first, then wrap and register anew"
            )

    def refuse_unfrozen(self, remedy: str) -> None:
        """Raises if a parameter was frozen at registration and is not frozen now."""
        for name, param in self.frozen:
            if param.requires_grad:
                raise RuntimeError(
                    f"{name}: takes a gradient, which it did not when it was wrapped, so nothing steps it; {remedy}"
                )


class WrappedByDDP(Wrapped):
    """The parameters that DDP reduces. DDP's hooks are on the accumulation nodes that autograd had when the model was
    wrapped.
    """

    def __init__(self, model: nn.Module, stepped: Iterable[Tensor], frozen: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__(model, stepped, frozen)
        self._strides = list(map(Tensor.stride, self.params))
        self._nodes = list(map(_node_of, self.params))
        self._note_storages()

    def refuse_changed(self) -> None:
        """Raises if DDP's hooks would miss a parameter's gradient, or if a parameter has other strides than when it was
        wrapped.
        """
        self.refuse_converted()
        strides = list(map(Tensor.stride, self.params))
        if strides != self._strides:
            name = next(name for name, old, new in zip(self.names, self._strides, strides) if old != new)
            raise RuntimeError(
                f"{name}: has other strides than when it was wrapped, and the buckets did not follow; "
                "set the memory format first, then wrap and register anew"
            )
        if list(map(_storage_of, self.params)) == self._storages:
            return
        for name, param, node in zip(self.names, self.params, self._nodes):
            if param.requires_grad and _node_of(param) is not node:
                raise RuntimeError(
                    f"{name}: converted and back after it was wrapped, and the hooks did not follow; "
                    "convert first, then wrap and register anew"
                )
        self._note_storages()

    def _note_storages(self) -> None:
        # A weak reference keeps the storage's address from being used again, but does not keep its memory. A conversion
        # frees memory, and could otherwise get the same address.
        self._seen = [StorageWeakRef(param.untyped_storage()) for param in self.params]
        self._storages = list(map(_storage_of, self.params))


def refuse_unhooked(ddp: DistributedDataParallel, params: Iterable[Tensor]) -> None:
    """Raises if DDP has no hook on a parameter. DDP holds references to the nodes that have its hooks. This function
    marks a parameter's node, and fetches the node again. A node without DDP's hooks is usually freed in between, so its
    mark is gone.
    """
    if ddp._use_python_reducer:  # The Python reducer hooks the parameters themselves, which stay.
        return
    names = {id(param): name for name, param in ddp.module.named_parameters()}
    for param in params:
        _metadata_of(param)[_SEEN] = True
        if _metadata_of(param).pop(_SEEN, None) is None:
            name = names.get(id(param), "parameter")
            raise RuntimeError(
                f"{name}: converted after it was wrapped, or unfrozen, so DDP has no hook on it; "
                "convert and unfreeze first, then wrap"
            )


def _storage_of(param: Tensor) -> int:
    address: int = param.untyped_storage()._cdata
    return address


def _metadata_of(param: Tensor) -> dict[str, Any]:
    """The metadata of the node that accumulates a parameter's gradients."""
    return cast(dict[str, Any], get_gradient_edge(param).node.metadata)


def _node_of(param: Tensor) -> Optional[Node]:
    """The node that accumulates a parameter's gradients. A conversion to another type or device makes a new node."""
    return get_gradient_edge(param).node if param.requires_grad else None


def of_one_that_lives(call: Callable[..., Any]) -> Callable[..., None]:
    """Returns a hook for a parameter. The hook calls a method. The hook does not keep the method's object alive,
    because the garbage collector does not see such hooks.
    """
    method = weakref.WeakMethod(call)

    def hook(*given: Any) -> None:
        found = method()
        if found is not None:
            found(*given)

    return hook


def before_forward(model: nn.Module, check: Callable[[], None]) -> None:
    """Calls ``check`` before each forward pass of a model, if gradients are enabled."""

    def call(*_: Any) -> None:
        if torch.is_grad_enabled():
            check()

    model.register_forward_pre_hook(OfOneModel(call))


def before_backward(model: nn.Module, begin: Callable[[Tensor], Optional[Tensor]]) -> None:
    """Calls ``begin`` with the gradient of each of a model's outputs, as soon as it is computed. The first call comes
    before any parameter has a gradient.
    """

    def watch(_: nn.Module, __: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(begin)

    model.register_forward_hook(OfOneModel(watch))
