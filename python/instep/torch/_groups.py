"""Param groups: their hyperparameters, the further keys of ``torch.optim``, and checks that refuse wrong settings.

This module depends only on torch and on the package's native module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from math import inf
from operator import is_, itemgetter
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import OPTIMIZERS, _native

Hyper = dict[str, Any]

LARGEST_NOTHING = 2.0**-150
"""The largest number that float32 rounds to 0."""

OF_ALL_GROUPS = frozenset({"states", "master", "seed", "threads", "min_8bit_size"})
"""Options of a whole optimizer, which a param group cannot have."""

TOGETHER = -1
"""The group is clipped by the norm over all groups without their own ``max_norm``."""

UNCLIPPED = -2
"""The group is not clipped. Its norm is computed anyway, because an infinite or NaN gradient may skip the step."""

RUNNING = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options for how ``torch.optim`` runs a step. They have no effect in this package. In torch, only ``differentiable`` changes
a result."""

KNOWN = frozenset(name for optimizer in OPTIMIZERS.values() for name in optimizer.defaults)
"""Hyperparameters of any optimizer. They are never reported as misspelt, because scripts give one group to several
optimizers."""


@cache
def torchs_keys(key: str) -> dict[str, Any]:
    """The keys and defaults of torch's optimizer of this name that this package's optimizer does not have."""
    descriptor = OPTIMIZERS[key]
    torchs = getattr(torch.optim, descriptor.name, None)
    if torchs is None:
        return {}
    defaults = torchs([torch.nn.Parameter(torch.zeros(0, device="cpu"))]).defaults
    return {name: value for name, value in defaults.items() if name not in descriptor.defaults}


@cache
def defaults_of(key: str) -> dict[str, Any]:
    """The defaults of all keys of a param group."""
    return {**OPTIMIZERS[key].defaults, **torchs_keys(key)}


@cache
def settings_of(key: str) -> frozenset[str]:
    """The names that an optimizer accepts as hyperparameters. Some of these names have no effect."""
    return frozenset({*defaults_of(key), *RUNNING})


def completed(group: dict[str, Any], defaults: dict[str, Any]) -> bool:
    """Completes an optimizer's first group as torch's ``add_param_group`` does, but faster. Returns whether the group
    was completed.

    Only a group of plain parameters without names, each listed once, is completed. torch's own code completes or
    refuses any other group.
    """
    given: Any = group.get("params") if type(group) is dict else None
    params = [given] if type(given) is Parameter else given[:] if type(given) is list else ()
    for param in params:
        if type(param) is not Parameter or not param.is_leaf:
            return False
    if not params or len(params) > 1 and len(set(map(id, params))) < len(params):
        return False
    group["params"] = params
    group.update(defaults if len(group) == 1 else defaults | group)
    return True


def hyper_of(key: str, group: dict[str, Any]) -> Hyper:
    """The hyperparameters of a param group, as plain numbers."""
    return {name: _plain(name, group[name], default) for name, default in OPTIMIZERS[key].defaults.items()}


def _plain(name: str, value: Any, default: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name} of {tuple(value.shape)}: not one number; give a tensor of one element")
    if isinstance(default, tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(default):
            raise ValueError(f"{name} = {value!r}: not {len(default)} numbers; give as many")
        return tuple(_number(name, part) for part in value)
    number = _number(name, value)
    return bool(number) if isinstance(default, bool) else number


def _number(name: str, value: Any) -> float:
    if isinstance(value, (str, bytes)):
        # Text is refused here, because ``float`` would accept a number as text, and any text is true.
        raise TypeError(f"{name} = {value!r}: a text; give a number")
    try:
        number = float(value)
        # A schedule may let these decay without limit. A value that float32 rounds to 0 is taken as 0.
        return 0.0 if name in ("lr", "weight_decay") and abs(number) <= LARGEST_NOTHING else number
    except (TypeError, ValueError):
        raise TypeError(f"{name} = {value!r}: not a number; give one") from None


def kept_states(key: str, hyper: Hyper) -> tuple[str, ...]:
    """The names of an optimizer's states with these hyperparameters. Checks the range of every hyperparameter except lr."""
    return _kept_states(key, tuple(hyper.values())[1:])


@lru_cache(256)
def _kept_states(key: str, values: tuple[Any, ...]) -> tuple[str, ...]:
    # ``values`` lacks the learning rate, the first hyperparameter: it changes most often, and no state depends on it.
    known = OPTIMIZERS[key].defaults
    return tuple(_native.state_names(key, dict(zip(known, (next(iter(known.values())), *values)))))


def refuse_settings(key: str, group: dict[str, Any]) -> None:
    """Refuses settings of a group that would not have the effect that the user intends."""
    for name in sorted(OF_ALL_GROUPS & group.keys()):
        raise TypeError(f"{name}: an option of the whole optimizer, not of a param group; give it to the constructor")
    known = OPTIMIZERS[key].defaults
    refuse_other_rule(key, group)
    others = group.keys() - KNOWN - torchs_keys(key).keys() - RUNNING - {"params", "param_names", "max_norm"}
    for name in sorted(others, key=str):
        edits, meant = min((_edits(str(name).lower(), one), one) for one in (*known, "max_norm"))
        # Short names are close to other words: "meta" is two letters from "betas".
        if edits <= (1 if len(meant) < 6 else 2):
            raise TypeError(f"{name}: {OPTIMIZERS[key].name} has no such hyperparameter; did you mean {meant}?")
    _native.state_names(key, hyper_of(key, group))
    limit_of(group)


def limit_of(group: Mapping[str, Any]) -> Optional[float]:
    """The value of ``max_norm`` of a group that is clipped alone, or None for any other group."""
    value = group.get("max_norm")
    limit = None if value is None else _number("max_norm", value)
    if limit is not None and not 0 < limit < inf:
        raise ValueError(f"max_norm = {value!r}: out of range; use a finite number above 0, or None")
    return limit


def clips_of(groups: Iterable[Mapping[str, Any]]) -> list[int]:
    """How each group is clipped: `TOGETHER`, `UNCLIPPED`, or the group's index if it is clipped alone."""
    return [
        TOGETHER if "max_norm" not in group else UNCLIPPED if group["max_norm"] is None else place
        for place, group in enumerate(groups)
    ]


def refuse_other_rule(key: str, group: dict[str, Any]) -> None:
    """Refuses options of ``torch.optim`` that would change an optimizer's rule."""
    if group.get("differentiable"):
        raise NotImplementedError("differentiable=True: autograd does not see a fused step; use False")
    flag = "decoupled_weight_decay"
    is_own = flag in OPTIMIZERS[key].defaults
    if not is_own and bool(group.get(flag, key == "adamw")) != (key == "adamw"):
        cure = {"adam": "use AdamW", "adamw": "use Adam"}.get(key, "leave it out")
        raise ValueError(f"{flag} = {group[flag]}: this is another rule than {OPTIMIZERS[key].name}'s; {cure}")


def _edits(name: str, meant: str) -> int:
    """The number of edits between two names: letters removed, added or replaced, and neighbours swapped."""
    before, row = [0] * (len(meant) + 1), list(range(len(meant) + 1))
    for i, letter in enumerate(name, 1):
        last, before, row = before, row, [i]
        for j, other in enumerate(meant, 1):
            edits = min(before[j] + 1, row[-1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and (letter, name[i - 2]) == (meant[j - 2], other):
                edits = min(edits, last[j - 2] + 1)
            row.append(edits)
    return row[-1]


def _may_change(value: Any) -> bool:
    """Whether the number in an object may change while the object stays the same, as in a tensor, an array or a list."""
    return not isinstance(value, (float, int)) and (not isinstance(value, tuple) or any(map(_may_change, value)))


class Settings:
    """A cache of the hyperparameters of param groups. A read converts only values that are new objects or that may change
    in place.
    """

    def __init__(self, key: str) -> None:
        self.key, self._values = key, itemgetter(*OPTIMIZERS[key].defaults)
        self._read: dict[int, tuple[Any, tuple[Any, ...], Hyper, bool]] = {}

    def of(self, group: dict[str, Any]) -> Hyper:
        """Returns the hyperparameters of a group. The same dict is returned until a hyperparameter changes."""
        values = self._values(group)
        known, read, hyper, may_change = self._read.get(id(group), (None, (), {}, False))
        if known is not group:
            hyper = hyper_of(self.key, group)
        elif not may_change and all(map(is_, values, read)):
            return hyper
        else:
            defaults = OPTIMIZERS[self.key].defaults.items()
            changed = {
                name: _plain(name, value, default)
                for (name, default), value, old in zip(defaults, values, read)
                if value is not old or _may_change(value)
            }
            if any(hyper[name] != value for name, value in changed.items()):
                hyper = {**hyper, **changed}
        self._read[id(group)] = group, values, hyper, any(map(_may_change, values))
        return hyper

    def forget_others(self, groups: Iterable[dict[str, Any]]) -> None:
        """Drops the cached hyperparameters of all groups except these."""
        self._read = {id(group): self._read[id(group)] for group in groups if id(group) in self._read}
