"""Param groups: hyperparameters as plain numbers, and keys that look like a hyperparameter's and are none.

Any other key of a group is its owner's: schedulers and model libraries keep numbers of their own there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from .. import OPTIMIZERS

Hyper = dict[str, Any]
SHORT = 5
"""Names of so few letters are near to words of their own: of these, one edit is a slip, of longer ones two."""
KNOWN = frozenset(name for optimizer in OPTIMIZERS.values() for name in optimizer.defaults)
"""Scripts give one group to several optimizers, so a hyperparameter of another one is no slip."""


def hyper_of(key: str, group: dict[str, Any]) -> Hyper:
    """The hyperparameters of a param group, as plain numbers."""
    hyper: Hyper = {}
    for name, default in OPTIMIZERS[key].defaults.items():
        value = group[name]
        if isinstance(default, tuple):
            if not isinstance(value, (tuple, list)) or len(value) != len(default):
                raise ValueError(f"{name} = {value!r}: not {len(default)} numbers; give as many")
            hyper[name] = tuple(_number(name, part) for part in value)
        else:
            number = _number(name, value)
            hyper[name] = bool(number) if isinstance(default, bool) else number
    return hyper


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name} of {tuple(value.shape)}: not one number; give a tensor of one element")
    if isinstance(value, (str, bytes)):
        # Python reads numbers from text, and takes any text for true.
        raise TypeError(f"{name} = {value!r}: text; give a number")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} = {value!r}: not a number; give one") from None


def refuse_misspelt(key: str, names: Iterable[Any]) -> None:
    """Refuses keys that are a hyperparameter's but for a slip, since nothing would ever read them."""
    for name in names:
        if not isinstance(name, str) or name in KNOWN:
            continue
        for meant in OPTIMIZERS[key].defaults:
            if _edits(name.lower(), meant) <= (1 if len(meant) <= SHORT else 2):
                raise ValueError(f"param group: {name!r} is no hyperparameter of {OPTIMIZERS[key].name}; {meant!r} is")


def _edits(one: str, other: str) -> int:
    """Insertions, deletions, replacements and swaps of neighbours that make one word of the other."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one):
        last, before, row = before, row, [i + 1]
        for j, wanted in enumerate(other):
            best = min(before[j] + (letter != wanted), before[j + 1] + 1, row[j] + 1)
            if i and j and one[i - 1] == wanted and letter == other[j - 1]:
                best = min(best, last[j - 1] + 1)
            row.append(best)
    return row[-1]
