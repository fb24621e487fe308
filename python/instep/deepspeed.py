"""The op of DeepSpeed's CPU Adam: ``instep.deepspeed.install()`` puts the library's step in the place of the compiled one.

`DeepSpeedCPUAdam`, and with it ZeRO-Offload, then steps here, and no compiler is asked for. A step is that of
``instep.torch.functional``, on tensors of DeepSpeed's; nothing is kept of them between calls.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from .torch._lists import RULES

__all__ = ["Op", "install"]

UNCORRECTED = 2.0**60
"""A count at which every power of beta below 1 is 0, so that nothing is corrected for bias."""


class Op:
    """What ``CPUAdamBuilder().load()`` returns: the same functions, with the same arguments.

    Tensors are dense and on the CPU, all of one shape and order of elements: parameters and gradients of float32, bfloat16
    or float16, states of float32 or bfloat16. Other functions, such as ZenFlow's, are DeepSpeed's own, which it compiles
    when they are asked for.
    """

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._created: dict[int, str] = {}

    def create_adam(
        self,
        optimizer_id: int,
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        should_log: bool = False,
    ) -> int:
        """Notes whether weight decay is decoupled; all numbers come with each step."""
        self._created[optimizer_id] = "adamw" if adamw_mode else "adam"
        if should_log:
            print(f"instep: CPU Adam #{optimizer_id}, {self._created[optimizer_id]}")
        return 0

    def destroy_adam(self, optimizer_id: int) -> int:
        """Forgets an optimizer, if it is known."""
        self._created.pop(optimizer_id, None)
        return 0

    def adam_update(
        self,
        optimizer_id: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        params: Tensor,
        grads: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
    ) -> int:
        """Makes a parameter's update number ``step``, the first of which is 1.

        Raises ``ValueError`` or ``NotImplementedError`` before anything is written if a tensor or a number does not fit, and
        names it as the functions of ``instep.torch.functional`` do.
        """
        rule = self._rule(optimizer_id)
        if step < 1:
            raise ValueError(f"step = {step}: out of range; use 1 for the first update")
        count = torch.tensor(float(step - 1) if bias_correction else UNCORRECTED)
        lists = ([params], [grads], [count], None, None, [exp_avg], [exp_avg_sq], None)
        RULES[rule].native.step(lists, (lr, (beta1, beta2), eps, weight_decay, False, False), 1.0, None)
        return 0

    @torch.no_grad()
    def adam_rollback(
        self,
        optimizer_id: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        params: Tensor,
        grads: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
    ) -> int:
        """Undoes update number ``step``, from the gradients that it was made with. All tensors are of float32.

        It is computed in float64, but the update has rounded what it stored. So the old values return within 4 of float32's
        epsilon of the largest magnitude that went into the rounding: the old value, the new one, and what was added: to a
        parameter the update, to ``exp_avg`` the gradient, to ``exp_avg_sq`` its square.
        """
        rule = self._rule(optimizer_id)
        tensors = {"params": params, "grads": grads, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        for name, tensor in tensors.items():
            if tensor.dtype != torch.float32 or tensor.shape != params.shape:
                raise NotImplementedError(f"{name}: {tensor.dtype} of {tuple(tensor.shape)}; roll back float32 of one shape")
        decay = lr * weight_decay if rule == "adamw" else 0.0
        if step < 1 or not 0 < beta1 < 1 or not 0 < beta2 < 1 or decay == 1:
            raise ValueError("step, betas or weight_decay: this update has no inverse; load a checkpoint")
        first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
        p, g, m, v = (tensor.double() for tensor in tensors.values())
        p = (p + lr * (m / first) / ((v / second).sqrt() + eps)) / (1 - decay)
        if rule == "adam":
            g = g + weight_decay * p
        params.copy_(p)
        exp_avg.copy_((m - (1 - beta1) * g) / beta1)
        exp_avg_sq.copy_(((v - (1 - beta2) * g * g) / beta2).clamp_(min=0.0))
        return 0

    def _rule(self, optimizer_id: int) -> str:
        if optimizer_id not in self._created:
            raise ValueError(f"optimizer {optimizer_id}: not created; call create_adam first")
        return self._created[optimizer_id]

    def __getattr__(self, name: str) -> Any:
        """All other names are those of DeepSpeed's op."""
        if name.startswith("__"):
            raise AttributeError(name)
        loaded = self._builder._loaded_ops
        del loaded[self._builder.NAME]
        try:
            return getattr(self._builder().load(), name)
        finally:
            loaded[self._builder.NAME] = self


def install() -> Op:
    """Puts the library's op in the place of DeepSpeed's, for every ``DeepSpeedCPUAdam`` that is made from now on.

    A second call changes nothing. Raises ``RuntimeError`` if DeepSpeed has loaded its own op already, which its optimizers
    then go on with, and ``NotImplementedError`` for a version that loads ops in another way.
    """
    builder = importlib.import_module("deepspeed.ops.op_builder").CPUAdamBuilder
    loaded = getattr(builder, "_loaded_ops", None)
    if loaded is None:
        raise NotImplementedError("deepspeed: this version does not keep the ops that it has loaded; use 0.15 or later")
    known = loaded.get(builder.NAME)
    if isinstance(known, Op):
        return known
    if known is not None:
        raise RuntimeError("deepspeed: has loaded its own CPU Adam already; call install() before the first optimizer")
    op = loaded[builder.NAME] = Op(builder)
    return op
