"""Finds which parameters had a gradient, on this rank and on any rank, for models that do not use all parameters.

For a parameter without a gradient, DDP sums zeros, and does not tell its hook that the gradient is missing. Plain DDP
leaves such a gradient None, so an optimizer does not step the parameter. If an optimizer stepped the parameter with
zeros, momentum and weight decay would change it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

_used: set[int] = set()
"""Identities of the watched parameters that have had a gradient. An attribute would be saved with a model, but the hook
that sets it would not. A weak reference would keep torch from converting the parameter."""


def watch(params: Iterable[Tensor]) -> None:
    """Adds a hook that notes when a parameter's gradient is accumulated."""
    for param in params:
        if _note not in (param._post_accumulate_grad_hooks or {}).values():
            _used.discard(id(param))
            param.register_post_accumulate_grad_hook(_note)


def _note(param: Tensor) -> None:
    _used.add(id(param))


class Usage:
    """Records which parameters of a model were used, over all micro-batches since the last sum."""

    def __init__(self, params: Iterable[Tensor], group: dist.ProcessGroup) -> None:
        self.params, self.group = list(params), group
        watch(self.params)

    def anywhere(self, params: list[Tensor], device: torch.device) -> tuple[Future[Any], Tensor]:
        """Asks all ranks which of these parameters were used. Returns a future and flags. The flags are complete when
        the future is done.
        """
        flags = torch.tensor([id(param) in _used for param in params], dtype=torch.int32, device=device)
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        return work.get_future(), flags

    def clear(self) -> None:
        """Clears the recorded usage, after the last bucket."""
        _used.difference_update(map(id, self.params))


def usage_of(ddp: DistributedDataParallel, params: Iterable[Tensor]) -> Optional[Usage]:
    """The usage of a model if DDP was made with ``find_unused_parameters`` or ``static_graph``, otherwise None."""
    return Usage(params, ddp.process_group) if ddp.find_unused_parameters or ddp.static_graph else None
