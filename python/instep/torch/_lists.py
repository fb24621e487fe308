"""The common code of the functions of ``instep.torch.functional``.

The functions store no tensor between calls. They cache lengths, dtypes, hyperparameters and the corresponding launches.
Each call reads addresses, values and step counts from its tensors.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .. import OPTIMIZERS, _native
from ._threads import openmp

TensorList = Sequence[Tensor]
Gradients = Sequence[Optional[Tensor]]

PARTS = {
    "betas": ("beta1", "beta2"),
    "etas": ("etaminus", "etaplus"),
    "step_sizes": ("step_size_min", "step_size_max"),
}
"""The names of a pair's two numbers in torch's functions, by the pair's name."""

EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
"""DLPack's table of functions; None in a torch before 2.9."""


def _increment_version() -> Callable[[list[Tensor]], None]:
    """Returns the C++ function that torch's ``increment_version`` calls. If this torch has no such function, returns
    ``increment_version``.
    """
    direct: Any = getattr(torch._C, "_increment_version", None)
    try:
        direct([])
    except TypeError:
        return torch.autograd.graph.increment_version
    return direct


class Rule:
    """An optimizer as a function over lists."""

    def __init__(self, key: str) -> None:
        self.key, descriptor = key, OPTIMIZERS[key]
        functions = torch.get_num_threads, _increment_version(), openmp()
        self.native = _native.Lists(key, torch.Tensor, torch.nn.Parameter, EXCHANGE, functions)
        states = _native.all_state_names(key)
        always = _native.state_names(key, dict(descriptor.defaults))
        self.always = [f"{name}s" for name in states if name in always]
        self.sometimes = [f"{name}s" for name in states if name not in always]
        self.carried = descriptor.carried and f"{descriptor.carried}s"
        self.lists = ["params", "grads", "state_steps", "copies", self.carried, *(f"{name}s" for name in states)]
        self.hyper = [PARTS.get(name, (name,)) for name in descriptor.defaults]


RULES = {key: Rule(key) for key in OPTIMIZERS}
_move = RULES["sgd"].native.move


class Clipped(NamedTuple):
    """The result of a clip."""

    norm: float
    """The norm of the gradients before the clip."""
    coefficient: float
    """The factor that clips the gradients. It is 1 if the norm is within its limit."""


def prepare(function: Callable[..., None], *lists: Any, **options: Any) -> _native.Prepared:
    """Prepares calls of a function of ``instep.torch.functional``, for tensors that keep their addresses.

    The arguments are those of the function, without ``gradient_scale``. Call the result with ``lr=`` and
    ``gradient_scale=``, both optional. The result keeps the tensors' memory alive, and each call reads values and
    counts from this memory. Calling the result does not check the tensors again. If a tensor gets another ``data`` or
    size, call `prepare` again. Autograd does not detect that these calls change the parameters.
    """
    rule = RULES.get(function.__name__.removesuffix("_"))
    if rule is None or function.__module__ != "instep.torch.functional":
        raise ValueError(f"{function!r}: not a step of instep.torch.functional; give one, such as adamw_")
    if "gradient_scale" in options:
        raise TypeError("gradient_scale: not an argument of a preparation; give it to each call")
    bound = inspect.signature(function).bind(*lists, **options)
    bound.apply_defaults()
    given = bound.arguments
    taken = tuple(None if name is None else given[name] for name in rule.lists)
    numbers = [tuple(given[part] for part in parts) for parts in rule.hyper]
    hyper = tuple(values if len(values) > 1 else values[0] for values in numbers)
    return rule.native.prepare(taken, hyper, given["threads"])


def norm_(tensors: Gradients, *, threads: Optional[int] = None) -> float:
    """Returns the norm of all elements of a list's tensors.

    The sum of squares is exact, so the number of threads and the order of tensors do not change any bit of the norm. A
    None in the list is ignored.
    """
    norm, _ = _measured(tensors, None, threads)
    return norm


def clip_(
    tensors: Gradients,
    max_norm: float,
    *,
    in_place: bool = True,
    error_if_nonfinite: bool = False,
    threads: Optional[int] = None,
) -> Clipped:
    """Clips the norm of all elements of a list's tensors to ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does.

    With ``in_place=False``, this function writes nothing. Then pass ``gradient_scale=coefficient`` to the step. This
    saves a pass over the gradients. As in torch, the coefficient is 0 if the norm is infinite, and NaN if the norm is
    NaN.
    """
    clipped = Clipped(*_measured(tensors, max_norm, threads))
    if error_if_nonfinite and not math.isfinite(clipped.norm):
        raise RuntimeError(f"norm of the gradients is {clipped.norm}; skip the step, or use error_if_nonfinite=False")
    if in_place and clipped.coefficient != 1.0:
        with torch.no_grad():
            torch._foreach_mul_([tensor for tensor in tensors if tensor is not None], clipped.coefficient)
    return clipped


def add_(into: TensorList, tensors: TensorList, *, threads: Optional[int] = None) -> None:
    """Adds each tensor to the tensor at the same index in ``into``. The result is bit for bit that of
    ``into[k].add_(tensors[k])``.

    Tensors of both lists are float32 or bfloat16, in any mix, so bfloat16 gradients can accumulate in float32. A sum is
    computed in float32, and rounded once when it is stored.
    """
    _move(into, tensors, True, threads)


def copy_(into: TensorList, tensors: TensorList, *, threads: Optional[int] = None) -> None:
    """Copies each tensor to the tensor at the same index in ``into``. The result is bit for bit that of
    ``into[k].copy_(tensors[k])``.

    The tensors may have the same types as for `add_`.
    """
    _move(into, tensors, False, threads)


def _measured(tensors: Gradients, max_norm: Optional[float], threads: Optional[int]) -> tuple[float, float]:
    if isinstance(tensors, Tensor):
        raise TypeError("tensors: one tensor; give a list")
    some = [tensor for tensor in tensors if tensor is not None]
    return RULES["sgd"].native.norm(some, max_norm, threads)
