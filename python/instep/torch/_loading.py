"""What a state dict must be before anything of it is taken: of this optimizer, whole, and of these sizes and formats.

Nothing here changes an optimizer, so one that refuses a state dict stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional

from torch import Tensor

from .. import OPTIMIZERS, _native
from ._formats import MASTER_TYPES, Formats
from ._groups import hyper_of

Saved = tuple[Tensor, dict[str, Any], dict[str, Any]]
"""A parameter with its saved param group and its saved state."""
WITHOUT_COUNT = ("sgd", "lion")
"""Other programs save no count with these, and their updates do not depend on one."""


def with_defaults(key: str, group: dict[str, Any]) -> dict[str, Any]:
    """A saved param group with the flags that an older program did not know."""
    flags = {name: value for name, value in OPTIMIZERS[key].defaults.items() if isinstance(value, bool)}
    return {**flags, **group}


def refuse_unfit(key: str, formats: Formats, groups: Iterable[dict[str, Any]], saved: Iterable[Saved]) -> None:
    """Refuses what would be stepped differently here."""
    for group in groups:
        _refuse_group(key, group)
    for param, group, values in saved:
        kept = _native.state_names(key, hyper_of(key, with_defaults(key, group)))
        _refuse_parts(key, kept, values)
        _refuse_sizes(param, values)
        _refuse_formats(formats, param, kept, values)


def count_of(kept: Iterable[str], values: dict[str, Any]) -> int:
    """The updates that a saved state has had."""
    step = values.get("step")
    if step is None:
        # SGD's momentum has no count in torch: a buffer is there after the first update.
        return int(any(values.get(name) is not None for name in kept))
    number = _number(step)
    if number is None or not (0 <= number < 1 << 63 and number == int(number)):
        raise ValueError(f"state 'step' = {step!r}: not a number of updates; load a state as it was saved")
    return int(number)


def carried_of(key: str, values: dict[str, Any]) -> float:
    """The number that a saved state carries beside the count."""
    name = OPTIMIZERS[key].carried
    if name is None or values.get(name) is None:
        return 1.0
    number = _number(values[name])
    if number is None or not 0 <= number <= 1:
        raise ValueError(f"state {name!r} = {values[name]!r}: not a number from 0 to 1; load a state as it was saved")
    return float(number)


def _number(value: Any) -> Optional[float]:
    try:
        return value if isinstance(value, int) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _refuse_group(key: str, group: dict[str, Any]) -> None:
    name, known = OPTIMIZERS[key].name, OPTIMIZERS[key].defaults
    for flag in ("decoupled_weight_decay", "differentiable"):
        is_own = key == "adamw" and flag == "decoupled_weight_decay"
        if group.get(flag) and flag not in known and not is_own:
            raise ValueError(f"{flag} = True: {name} has no such option here; it is another rule")
    whole = with_defaults(key, group)
    missing = [hyper for hyper in known if hyper not in whole]
    if missing:
        raise ValueError(
            f"param group: has no {', '.join(missing)}, which {name} needs; add it to the group, or load a state of {name}"
        )
    _native.state_names(key, hyper_of(key, whole))


def _refuse_parts(key: str, kept: list[str], values: dict[str, Any]) -> None:
    for name in kept:
        if values.get(name) is not None and not isinstance(values[name], Tensor):
            word = type(values[name]).__name__
            raise ValueError(f"state {name!r} of type {word}: not a tensor; load a state as it was saved")
    counted = [] if key in WITHOUT_COUNT else ["step"]
    carried = OPTIMIZERS[key].carried
    numbers = counted if carried is None else [*counted, carried]
    found = [name for name in kept if values.get(name) is not None]
    missing = [name for name in [*kept, *numbers] if values.get(name) is None]
    if found and missing:
        raise ValueError(f"state of a parameter: has {', '.join(found)}, but no {', '.join(missing)}; load a whole state")
    count_of(kept, values)
    carried_of(key, values)


def _refuse_sizes(param: Tensor, values: dict[str, Any]) -> None:
    for name, value in values.items():
        is_whole = name != "step" and not name.endswith("_scales") and isinstance(value, Tensor)
        if is_whole and value.dim() > 0 and value.shape != param.shape:
            raise ValueError(
                f"state {name!r} of {tuple(value.shape)}: its parameter is {tuple(param.shape)}; "
                "load the state of the same model"
            )


def _refuse_formats(formats: Formats, param: Tensor, kept: list[str], values: dict[str, Any]) -> None:
    is_coded = formats.states_of(param.dtype) == "8bit"
    for name in (name for name in kept if values.get(name) is not None):
        if values[name].is_floating_point() == is_coded or is_coded and f"{name}_scales" not in values:
            raise ValueError(f"state {name!r} of {values[name].dtype}: saved with other states=; use the same")
    word = formats.master_of(param.dtype)
    if "master" in values and word != "none" and values["master"].dtype != MASTER_TYPES[word]:
        raise ValueError(f"state 'master' of {values['master'].dtype}: saved with another master=; use the same")
