"""AdamW with 8-bit states, under bitsandbytes' name and signature, so that only an import changes in a program.

Positional arguments have the order of bitsandbytes 0.50. Options that only earlier versions have are accepted as
keywords. If this library does not implement an option, the constructor raises for any value but the default, and names
the option.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional

import torch

from .named import Named, Number, Pair

OTHERS = {
    "amsgrad": (False, 'use AdamW(amsgrad=True, states="8bit")'),
    "optim_bits": (32, "states have 8 bits; leave it out"),
    "args": (None, "leave it out"),
    "is_paged": (False, "states lie where their parameter does; leave it out"),
    "percentile_clipping": (100, "use max_norm="),
    "block_wise": (True, "scales are of blocks; leave it out"),
}
"""Options of bitsandbytes: the only supported value, and what to do instead of giving another value."""
SUPPORTED = tuple(value for value, _ in OTHERS.values())


def _refuse_others(given: tuple[Any, ...]) -> None:
    for (name, (supported, cure)), value in zip(OTHERS.items(), given):
        if value != supported:
            raise NotImplementedError(f"{name} = {value!r}: not supported; {cure}")


class AdamW8bit(Named, torch.optim.AdamW):
    """AdamW with 8-bit states and the signature of bitsandbytes' class of this name.

    Parameters of fewer than ``min_8bit_size`` elements have float32 states. The codes of 8-bit states differ from those of
    bitsandbytes, so neither library can use the other's checkpoints.
    """

    key = "adamw"

    def __init__(
        self,
        params: Iterable[Any],
        lr: Number = 0.001,
        betas: Pair = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: Number = 0.01,
        amsgrad: bool = False,
        optim_bits: int = 32,
        args: None = None,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
        *,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        max_norm: Optional[float] = None,
        master: Optional[str] = None,
        seed: Optional[int] = None,
        threads: Optional[int] = None,
    ) -> None:
        others = amsgrad, optim_bits, args, is_paged, percentile_clipping, block_wise
        if others != SUPPORTED:
            _refuse_others(others)
        hyper = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        self._make(params, "adamw", hyper, max_norm, "8bit", master, seed, threads, min_8bit_size)
