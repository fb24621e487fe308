"""Kinds of parameters: what must be alike for states to lie together, what no kernel takes, and what first steps do.

Nothing here keeps a parameter.
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

MOST_ACCEPTED = 1024

FIRST = {"adagrad": ("sum", "initial_accumulator_value"), "rprop": ("step_size", "lr")}
"""States whose first value is a hyperparameter. A first step takes it from there, not from memory."""


NO_UPDATE = -0.0
"""What fills the buffer of an SGD, or its scales, where it is shown before its first update: it has no count beside it."""


class Kind(NamedTuple):
    """What the parameters of an arena have in common."""

    dtype: torch.dtype
    device: torch.device
    holders: Holders
    formats: Formats
    names: tuple[str, ...]
    """The states that are kept."""
    word: str
    """Their element type."""
    clip: int
    """The groups with whose gradients theirs are clipped."""


def kind_of(
    key: str, formats: Formats, param: Tensor, shard: Tensor, holders: Holders, hyper: Hyper, clip: int = TOGETHER
) -> Kind:
    """The kind of a parameter, of which a shard is stepped with these hyperparameters. What no kernel steps is refused."""
    refuse_unsteppable(key, formats, param, holders)
    formats = formats_of(formats, param)
    dtype, device = shard.dtype, shard.device
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
    """The states of such a parameter, and their element type."""
    field = OPTIMIZERS[key].needs_float32_states
    word = formats.states_of(torch.float32 if field is not None and hyper[field] else dtype)
    return kept_states(key, hyper), word


def first_state(key: str, formats: Formats, param: Tensor, hyper: Hyper) -> dict[str, Any]:
    """A state whose first value is a hyperparameter, as torch's optimizer has it before its first step, if it can be had."""
    if is_lazy(param) or param.is_meta:
        return {}
    _, word = states_of(key, formats_of(formats, param), param.dtype, hyper)
    if word == "8bit":
        return {}
    name, source = FIRST[key]
    value = torch.full_like(param, hyper[source], dtype=STATE_TYPES[word], requires_grad=False)
    return {"step": torch.tensor(0.0), name: value}


_accepted: set[tuple[Any, ...]] = set()
"""Groups that were accepted, but for their parameters: a program may make an optimizer for each of thousands."""


def refuse_group(key: str, formats: Formats, group: dict[str, Any]) -> None:
    """Refuses a group that would be stepped otherwise than its user means, or in formats that its optimizer cannot have."""
    dtypes = {param.dtype for param in group["params"]}
    values = [value for name, value in group.items() if name != "params"]
    asked = (key, formats, frozenset(dtypes), tuple(group), *values)
    try:
        if asked in _accepted:
            return
    except TypeError:  # A list has no hash.
        pass
    refuse_settings(key, group)
    _refuse_formats(key, formats, dtypes, hyper_of(key, group))
    # The number in a tensor may change.
    is_plain = all(isinstance(part, (float, int, str, NoneType)) for value in values for part in _parts(value))
    if is_plain and len(_accepted) < MOST_ACCEPTED:
        _accepted.add(asked)


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
    """Whether its elements fill one run of memory, in any order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride()), key=lambda pair: (pair[1], pair[0])):
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def has_overlap(tensor: Tensor) -> bool:
    """Whether elements may lie in the same place, as an expanded tensor's do."""
    reach = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride()), key=lambda pair: pair[1]):
        if size > 1 and stride < reach:
            return tensor.numel() > 0
        reach += (size - 1) * stride
    return False


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of its states: its own, or those of a copy if its elements have gaps between them."""
    return tensor.stride() if is_dense(tensor) else torch.empty_like(tensor, device="meta").stride()


def had_no_update(value: Any) -> bool:
    """Whether a state was shown before its first update."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    shard = shard_of(value)
    return bool((torch.signbit(shard) & (shard == 0)).all())


def goes_on_from(key: str, hyper: Hyper, values: dict[str, Any]) -> bool:
    """Whether states with a count of 0 must be read by the next step, as those of a first step are not."""
    if key not in FIRST:
        return False
    name, source = FIRST[key]
    value = values.get(name)
    if value is None or not value.is_floating_point():
        return False
    if key == "rprop" and bool((value == 0).all()):
        return False  # As memory starts. No step leaves such sizes.
    return not bool((value == torch.tensor(hyper[source], dtype=value.dtype, device=value.device)).all())
