"""Checks states before they are loaded. A state must be complete, belong to this optimizer, and have the expected sizes
and formats.

This module checks state dicts, and entries that a user puts into ``state``. A check changes no optimizer, so a failed
check has no effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Optional

from torch import Tensor

from .. import OPTIMIZERS, _native
from ._arena import Progress
from ._formats import MASTER_TYPES, QUANTUM, Formats
from ._groups import Hyper, hyper_of, refuse_other_rule, torchs_keys
from ._kinds import goes_on_from, had_no_update
from ._sharded import formats_of, row_of, scales_shape

Saved = tuple[Tensor, dict[str, Any], dict[str, Any]]
"""A parameter with its saved param group and its saved state."""
WITHOUT_COUNT = ("sgd", "lion")
"""Optimizers with updates that do not depend on a step count. Other programs save no step count for them."""


def with_defaults(key: str, group: dict[str, Any]) -> dict[str, Any]:
    """Returns a saved param group, completed with defaults for keys that an older version or another program did not
    save.
    """
    flags = {name: value for name, value in OPTIMIZERS[key].defaults.items() if isinstance(value, bool)}
    return {**torchs_keys(key), **flags, **group}


def refuse_unfit(key: str, formats: Formats, groups: Iterable[dict[str, Any]], saved: Iterable[Saved]) -> None:
    """Refuses a saved group that this optimizer would step differently."""
    for group in groups:
        # torch.distributed.checkpoint saves nothing for a group without parameters.
        if group["params"]:
            _refuse_group(key, group)
    for param, group, values in saved:
        hyper = hyper_of(key, with_defaults(key, group))
        progress_of(key, formats, param, _native.state_names(key, hyper), hyper, values)


def progress_of(
    key: str, formats: Formats, param: Tensor, kept: Sequence[str], hyper: Hyper, values: dict[str, Any]
) -> Progress:
    """Checks that a state can be loaded, and returns its number of updates and its carried number."""
    _refuse_parts(key, kept, values)
    _refuse_sizes(param, kept, values)
    _refuse_formats(formats, param, kept, values)
    count = count_of(kept, values)
    if count == 0 and hyper.get("lr_decay") and goes_on_from(key, hyper, values):
        raise ValueError("state 'sum' with a 'step' of 0: it is the first step's that lr_decay counts from; set 'step' to 1")
    return count, carried_of(key, count, values)


def count_of(kept: Iterable[str], values: dict[str, Any]) -> int:
    """The number of updates after which a state was saved."""
    step = values.get("step")
    if step is None:
        # SGD's momentum has no count in torch. If there is a buffer, there was an update.
        found = [values.get(f"{name}_scales", values[name]) for name in kept if values.get(name) is not None]
        return int(bool(found) and not all(map(had_no_update, found)))
    number = _number(step)
    if number is None or not (0 <= number < 1 << 63 and number == int(number)):
        raise ValueError(f"state 'step' = {step!r}: not a number of updates; load a state as it was saved")
    return int(number)


def carried_of(key: str, count: int, values: dict[str, Any]) -> float:
    """The number that a saved state has in addition to its step count, or 1 if the optimizer or the saved state has no
    such number.
    """
    name = OPTIMIZERS[key].carried
    if name is None or values.get(name) is None:
        return 1.0
    number = _number(values[name])
    if number is None or not 0 <= number <= 1:
        raise ValueError(f"state {name!r} = {values[name]!r}: not a number from 0 to 1; load a state as it was saved")
    if (number == 1) != (count == 0):
        raise ValueError(f"state {name!r} = {number:g} at step {count}: it is 1 before the first update alone; set both")
    return float(number)


def _number(value: Any) -> Optional[float]:
    try:
        return value if isinstance(value, int) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _refuse_group(key: str, group: dict[str, Any]) -> None:
    name, known = OPTIMIZERS[key].name, OPTIMIZERS[key].defaults
    refuse_other_rule(key, group)
    whole = with_defaults(key, group)
    missing = [hyper for hyper in known if hyper not in whole]
    if missing:
        raise ValueError(f"param group: has no {', '.join(missing)}, which {name} needs; load a whole state of {name}")
    _native.state_names(key, hyper_of(key, whole))


def _refuse_parts(key: str, kept: Sequence[str], values: dict[str, Any]) -> None:
    for name in kept:
        if values.get(name) is not None and not isinstance(values[name], Tensor):
            word = type(values[name]).__name__
            raise ValueError(f"state {name!r} of type {word}: not a tensor; load a state as it was saved")
    counted = [] if key in WITHOUT_COUNT else ["step"]
    carried = OPTIMIZERS[key].carried
    numbers = counted if carried is None else [*counted, carried]
    found = [name for name in kept if values.get(name) is not None]
    missing = [name for name in [*kept, *numbers] if values.get(name) is None]
    if not found and kept and ("state1" in values or counted and _number(values.get("step"))):
        # "state1" is bitsandbytes' name. If these states were not refused, zeros would replace them.
        found = ["state1" if "state1" in values else "step"]
    if found and missing:
        raise ValueError(f"state of a parameter: has {', '.join(found)}, but no {', '.join(missing)}; load a whole state")


def _refuse_sizes(param: Tensor, kept: Sequence[str], values: dict[str, Any]) -> None:
    for name, value in values.items():
        is_whole = name in {*kept, "master"} and isinstance(value, Tensor)
        if is_whole and value.dim() > 0 and value.shape != param.shape:
            raise ValueError(
                f"state {name!r} of {tuple(value.shape)}: its parameter is {tuple(param.shape)}; "
                "load the state of the same model"
            )
        if name in {f"{kept_name}_scales" for kept_name in kept} and isinstance(value, Tensor):
            _refuse_scales(param, name, value)


def _refuse_scales(param: Tensor, name: str, value: Tensor) -> None:
    """Refuses 8-bit scales if the saved blocks have other boundaries than this parameter's blocks. If a parameter is
    sharded over ranks, each block must lie within a row.
    """
    expected = scales_shape(param)
    has_whole_rows = row_of(param) % QUANTUM == 0 or param.shape[:1] == (1,)
    if tuple(value.shape) != expected and not (has_whole_rows and value.numel() == math.prod(expected)):
        raise ValueError(
            f"state {name!r} of {tuple(value.shape)}: here its blocks are {expected}, since a DTensor's lie within "
            "rows; load it where the parameter is sharded as it was saved"
        )


def _refuse_formats(formats: Formats, param: Tensor, kept: Sequence[str], values: dict[str, Any]) -> None:
    is_coded = formats_of(formats, param).states_of(param.dtype) == "8bit"
    for name in (name for name in kept if values.get(name) is not None):
        if values[name].is_floating_point() == is_coded or is_coded and f"{name}_scales" not in values:
            raise ValueError(f"state {name!r} of {values[name].dtype}: saved with other states=; use the same")
    word = formats.master_of(param.dtype)
    if "master" in values and word != "none" and values["master"].dtype != MASTER_TYPES[word]:
        raise ValueError(f"state 'master' of {values['master'].dtype}: saved with another master=; use the same")
