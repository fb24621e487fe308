"""Element types of parameters, states and masters, in PyTorch's words.

By default states have their parameter's type, as in ``torch.optim``. For float16 parameters the default is float32
states, because a second moment in float16 underflows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Optional

import torch

WORDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
MASTER_TYPES = {"float32": torch.float32, "remainder16": torch.uint16, "remainder8": torch.uint8}
STATE_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}

QUANTUM = 256
"""A parameter's states start at a multiple of this number of elements. It is also the length of a block of 8-bit states."""

LEAST_ROW = 128
"""The shortest row, in elements, for 8-bit states of a parameter that is sharded over ranks. Each row has its own blocks, so
8-bit states of shorter rows would take more memory than they save."""


class Formats(NamedTuple):
    """The formats in which values are stored. The function `formats` makes this object from a user's options."""

    states: Optional[str] = None
    """``"float32"``, ``"bfloat16"`` or ``"8bit"``. None stands for the parameter's type."""
    master: Optional[str] = None
    """``"float32"``, ``"remainder16"`` or ``"remainder8"`` for 16-bit parameters. None stands for no master."""
    seed: Optional[int] = None
    """The seed of stochastic rounding. None rounds to nearest."""
    min_8bit_size: int = 0
    """Parameters of fewer elements have float32 states instead of 8-bit ones, as in bitsandbytes."""

    def of_size(self, elements: int, row: Optional[int] = None) -> Formats:
        """The formats of a parameter with this number of elements, and with rows of this length if it is sharded by rows."""
        is_small = self.states == "8bit" and (elements < self.min_8bit_size or row is not None and row < LEAST_ROW)
        return self._replace(states="float32", min_8bit_size=0) if is_small else self

    def states_of(self, dtype: torch.dtype) -> str:
        """The states' format for parameters of this type, such as ``"float32"``."""
        return self.states or ("bfloat16" if dtype == torch.bfloat16 else "float32")

    def master_of(self, dtype: torch.dtype) -> str:
        """The masters' format for parameters of this type. float32 parameters have no masters."""
        return "none" if self.master is None or dtype == torch.float32 else self.master

    def seed_of(self, dtype: torch.dtype, states: str) -> Optional[int]:
        """The seed, or None if parameters and states of these types are never rounded."""
        rounds_states = states != "float32"
        rounds_params = dtype == torch.bfloat16 and self.master_of(dtype) in ("none", "remainder8")
        return self.seed if rounds_states or rounds_params else None


@lru_cache(64)
def formats(
    states: Optional[str] = None, master: Optional[str] = None, seed: Optional[int] = None, min_8bit_size: int = 0
) -> Formats:
    """The formats for these options. Results are cached, because a program may make an optimizer for each of thousands
    of parameters.
    """
    for name, word, known in (("states", states, STATE_TYPES), ("master", master, MASTER_TYPES)):
        if word is not None and word not in known:
            raise ValueError(f"{name} = {word!r}: not known; use one of {', '.join(known)}, or None")
    return Formats(states, master, seed, min_8bit_size)


def padded(elements: int) -> int:
    """The number of elements, rounded up to whole blocks of 8-bit states."""
    return -(-elements // QUANTUM) * QUANTUM
