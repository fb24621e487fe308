"""Makes a model wait for its steps: before each module's forward pass, and before its values are saved or loaded.

A module may read a parameter of another module, as attention reads the weight of its output projection. The first pass
finds such parameters, because they have a gradient although their module was not called. In later passes, every
module that has stepped parameters of its own waits for these parameters too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._offload_bucket import Bucket
from ._offload_engine import Offload, in_backward
from ._wrapped import OfOneModel


class Gates:
    """The hooks that make a model wait for its steps."""

    def __init__(self, model: nn.Module, offload: Offload) -> None:
        self.model, self.offload = model, offload
        self.called: set[int] = set()
        """Identities of parameters with a module that was called since the last backward pass."""
        self.everywhere: list[Bucket] = []
        self._hooked: set[int] = set()
        model.register_forward_pre_hook(OfOneModel(self._open))
        for module in model.modules():
            module.register_state_dict_pre_hook(OfOneModel(self._save))
            module.register_load_state_dict_pre_hook(OfOneModel(self._save))
        self.follow()

    def follow(self) -> None:
        """Adds hooks to the modules that have parameters of the engine."""
        for module in self.model.modules():
            has_any = any(id(param) in self.offload.place_of for param in module.parameters(recurse=False))
            if has_any and id(module) not in self._hooked:
                self._hooked.add(id(module))
                module.register_forward_pre_hook(OfOneModel(self._before))

    @torch.compiler.disable
    def _open(self, *_: Any) -> None:
        """Runs before the model's forward pass. Drops an earlier backward pass that has raised."""
        if self.offload.is_open and not in_backward():
            self.offload.abandon()

    @torch.compiler.disable
    def _before(self, module: nn.Module, *_: Any) -> None:
        self.offload.gate(self.everywhere)
        for param in module._parameters.values():
            place = self.offload.place_of.get(id(param))
            if place is not None:
                self.called.add(id(param))
                self.offload.gate(place[:1])

    def _save(self, *_: Any) -> None:
        if not in_backward():
            self.offload.wait()

    def note_pass(self, with_gradient: Sequence[Tensor]) -> None:
        """After a backward pass, finds the parameters that were read although their module was not called."""
        called, self.called = self.called, set()
        strays = [param for param in with_gradient if id(param) not in called]
        for bucket in (self.offload.place_of[id(param)][0] for param in strays):
            if bucket in self.everywhere:
                continue
            self.everywhere.append(bucket)
            if bucket in self.offload.late:
                names = [self.offload.names.get(id(param), "parameter") for param in strays]
                raise RuntimeError(
                    f"{', '.join(names[:3])}: read without a call of its module, maybe before its last step had come up; "
                    "call the module, or optimizer.wait() before the forward pass"
                )
