"""Adds a device named "hosted" (PrivateUse1) to PyTorch. The device's memory is host memory. Call `register` once per
process.

DLPack converts a host tensor to a tensor of the device over the same bytes. For each operation, DLPack converts the
operands back to host tensors. PyTorch does not know that the memory is shared: it refuses to mix the two devices,
copies tensors between them, and runs backward on a thread for the device, as for a GPU.
"""

import ctypes
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

CPU, EXTENSION = 1, 12
"""DLPack's numbers of the two devices."""

pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_libraries: list[torch.library.Library] = []


class Backend(backend_registration._DummyBackendModule):
    """The functions of `torch.hosted`."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(1, device="cpu")

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        """The host's generator makes all random numbers."""


def is_hosted(one: Any) -> bool:
    return isinstance(one, Tensor) and one.device.type == "hosted"


def over_the_same_bytes(tensor: Tensor, device: int) -> Tensor:
    """Returns a tensor of this device over the same bytes."""
    capsule = torch._C._to_dlpack(tensor.detach())
    field = ctypes.cast(pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int32))
    field[0] = device
    return torch._C._from_dlpack(capsule)


def inward(one: Any) -> Any:
    return over_the_same_bytes(one, CPU) if is_hosted(one) else one


def on_the_host(operation: Any, *given: Any, **named: Any) -> Any:
    """Runs an operation on host tensors with the same bytes. If the operation writes an operand in place, the result is
    this operand.
    """
    known: dict[int, tuple[Tensor, Tensor]] = {}

    def enter(one: Any) -> Any:
        if is_hosted(one):
            host = inward(one)
            known[id(host)] = host, one
            return host
        return torch.device("cpu") if isinstance(one, torch.device) else one

    def leave(one: Any) -> Any:
        if id(one) in known:
            return known[id(one)][1]
        return over_the_same_bytes(one, EXTENSION) if isinstance(one, Tensor) else one

    args, kwargs = tree_map(enter, (given, named))
    return tree_map(leave, operation(*args, **kwargs))


def copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    inward(to).copy_(inward(source))
    return to


def register() -> None:
    """Adds the device to this process."""
    if _libraries:
        return
    backend_registration._setup_privateuseone_for_python_backend("hosted", backend_module=Backend())
    every, known = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(on_the_host, "PrivateUse1")
    known.impl("_copy_from", copy_from, "PrivateUse1")
    known.impl("_local_scalar_dense", lambda one: inward(one).item(), "PrivateUse1")
    for overload in ("default", "start", "start_step"):  # PyTorch's own would resize their result.
        name = "arange" if overload == "default" else f"arange.{overload}"
        known.impl(name, partial(on_the_host, getattr(torch.ops.aten.arange, overload)), "PrivateUse1")
    _libraries.extend((every, known))
