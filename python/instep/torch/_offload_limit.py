"""A limit on the memory of a simulated device. Each tensor that is made inside the mode `Limit` counts towards the
limit until it is freed.

The mode counts each storage once, by its bytes. Tensors of other threads do not count, because they are in host memory.
"""

from __future__ import annotations

import weakref
from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Limit(TorchDispatchMode):
    """A mode in which new tensors count towards the limit."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.used, self.peak = most, 0, 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Optional[dict[str, Any]] = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in given:
                self._count(one.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or size == 0:
            return

        def gone(_: Any) -> None:
            self.used -= size
            del self._known[key]

        if self.used + size > self.most:
            raise MemoryError(f"simulated device: {self.used + size} bytes are more than its {self.most}; offload")
        self._known[key] = weakref.ref(storage, gone)
        self.used += size
        self.peak = max(self.peak, self.used)
