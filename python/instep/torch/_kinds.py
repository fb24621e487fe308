"""A kind is the set of properties that all parameters of one arena share. This module also refuses parameters that no
kernel can step.

This module stores no reference to a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .. import OPTIMIZERS, _native
from ._formats import QUANTUM, STATE_TYPES, WORDS, Formats
from ._groups import TOGETHER, Hyper, hyper_of, kept_states, refuse_settings
from ._sharded import Holders, formats_of, is_distributed, refuse_unsteppable, shard_of

MOST_ASKED, MOST_ACCEPTED = 128, 8

FIRST = {"adagrad": ("sum", "initial_accumulator_value"), "rprop": ("step_size", "lr")}
"""States that begin with the value of a hyperparameter. The first step takes the hyperparameter, not the value in memory."""


NO_UPDATE = -0.0
"""The value of an SGD buffer, or of its scales, that is shown before its first update. SGD has no step count that shows
whether there was an update."""


class Kind(NamedTuple):
    """The properties that all parameters of an arena share."""

    dtype: torch.dtype
    device: torch.device
    holders: Holders
    formats: Formats
    names: tuple[str, ...]
    """The names of the states."""
    word: str
    """The element type of the states."""
    clip: int
    """How the parameters' groups are clipped (see `clips_of`)."""


def kind_of(
    key: str, formats: Formats, param: Tensor, shard: Tensor, holders: Holders, hyper: Hyper, clip: int = TOGETHER
) -> Kind:
    """The kind of a parameter with this shard and these hyperparameters. Refuses a parameter that no kernel can step."""
    refuse_unsteppable(key, formats, param, holders)
    formats = formats_of(formats, param)
    dtype, device = shard.dtype, shard.device
    if shard.layout is not torch.strided:
        raise NotImplementedError(f"parameter of layout {shard.layout}: no kernel has it; give its to_dense()")
    if dtype not in WORDS:
        raise NotImplementedError(f"parameter of {dtype}: no kernel has this type; use {', '.join(WORDS.values())}")
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"parameter on {device}: no kernel runs there; use cpu or cuda")
    if shard.numel() > 0 and (is_distributed(shard) or shard.data_ptr() == 0):
        raise NotImplementedError(
            f"parameter of type {type(shard).__name__}: without memory of its own; give plain tensors or DTensors"
        )
    if shard.is_neg():
        raise NotImplementedError("parameter: a view whose memory has the other sign; give its resolve_neg()")
    if has_overlap(shard):
        raise NotImplementedError("parameter: its elements share memory; give its clone()")
    return Kind(dtype, device, holders, formats, *states_of(key, formats, dtype, hyper), clip)


def states_of(key: str, formats: Formats, dtype: torch.dtype, hyper: Hyper) -> tuple[tuple[str, ...], str]:
    """The names of the states of a parameter with these formats and hyperparameters, and the states' element type."""
    field = OPTIMIZERS[key].needs_float32_states
    word = formats.states_of(torch.float32 if field is not None and hyper[field] else dtype)
    return kept_states(key, hyper), word


def adagrads_first_state(formats: Formats, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    """The states that torch's Adagrad makes in its constructor, for a parameter of a checked group. Returns an empty
    dict if the parameter has no values yet, or if its states are 8-bit states, which the first step makes.
    """
    if is_lazy(param) or param.is_meta:
        return {}
    # Only 8-bit states depend on a parameter's size. A program may make an optimizer for each of thousands of parameters.
    word = (formats_of(formats, param) if formats.states == "8bit" else formats).states_of(param.dtype)
    if word == "8bit":
        return {}
    name, source = FIRST["adagrad"]
    value = torch.full_like(param, float(group[source]), dtype=STATE_TYPES[word], requires_grad=False)
    return {"step": torch.zeros(()), name: value}


_accepted: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
"""Settings of groups that were accepted, by optimizer, formats and dtypes: a program may make an optimizer for each of
thousands of parameters."""


def refuse_group(key: str, formats: Formats, group: dict[str, Any]) -> None:
    """Refuses a group if its settings would not have the intended effect, or if the optimizer does not support the
    formats.
    """
    params, settings = group["params"], group.copy()
    # Most programs that make many optimizers give each of them one parameter.
    dtypes = (params[0].dtype,) if len(params) == 1 else frozenset([param.dtype for param in params])
    settings["params"] = None
    asked = key, formats, dtypes
    try:
        if settings in _accepted.get(asked, ()):
            return
    except Exception:  # Arrays, large tensors and a user's class may raise here. The code below checks them.
        pass
    refuse_settings(key, group)
    _refuse_formats(key, formats, dtypes, hyper_of(key, group))
    # A group with a tensor is not remembered, because the number in the tensor may change.
    if all(isinstance(part, (float, int, str, NoneType)) for value in settings.values() for part in _parts(value)):
        if asked not in _accepted and len(_accepted) >= MOST_ASKED:
            _accepted.clear()
        accepted = _accepted.setdefault(asked, [])
        accepted.append(settings)
        del accepted[:-MOST_ACCEPTED]


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _refuse_formats(key: str, formats: Formats, dtypes: Iterable[torch.dtype], hyper: Hyper) -> None:
    for dtype in WORDS.keys() & set(dtypes):
        _, word = states_of(key, formats, dtype, hyper)
        words = WORDS[dtype], WORDS[dtype], formats.master_of(dtype), word
        _native.Step(
            [(key, hyper)], [(1, 0, 0, 0, 0, 1, 0)], QUANTUM, words, formats.seed_of(dtype, word), "keep", 1, 0, None
        )


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill one piece of memory without gaps, in any order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride()), key=lambda pair: (pair[1], pair[0])):
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def has_overlap(tensor: Tensor) -> bool:
    """Whether several elements may share one place in memory, as in an expanded tensor."""
    reach = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride()), key=lambda pair: pair[1]):
        if size > 1 and stride < reach:
            return tensor.numel() > 0
        reach += (size - 1) * stride
    return False


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a parameter's states. If the parameter is dense, its states have the same strides. If the
    parameter has gaps between its elements, the states have the strides of a dense copy.
    """
    return tensor.stride() if is_dense(tensor) else torch.empty_like(tensor, device="meta").stride()


def had_no_update(value: Any) -> bool:
    """Whether a state has had no update, which means that all its values are `NO_UPDATE`."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    shard = shard_of(value)
    return bool((torch.signbit(shard) & (shard == 0)).all())


def goes_on_from(key: str, hyper: Hyper, values: dict[str, Any]) -> bool:
    """Whether the next step must read these states although their count is 0. An ordinary first step does not read
    states.
    """
    if key not in FIRST:
        return False
    name, source = FIRST[key]
    value = values.get(name)
    if value is None or not value.is_floating_point():
        return False
    if key == "rprop" and bool((value == 0).all()):
        return False  # These are the zeros of new memory: no step leaves a step size of 0.
    return not bool((value == torch.tensor(hyper[source], dtype=value.dtype, device=value.device)).all())
