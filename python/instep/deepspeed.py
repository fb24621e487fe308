"""The op of DeepSpeed's CPU Adam: ``instep.deepspeed.install()`` replaces DeepSpeed's compiled op by this library's step.

`DeepSpeedCPUAdam`, and thus ZeRO-Offload, then steps with this library and needs no compiler. A step is a call of
``instep.torch.functional`` on DeepSpeed's tensors. No call stores a tensor for later calls.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from .torch._lists import RULES

__all__ = ["Op", "install"]

UNCORRECTED = 2.0**60
"""A step count for which ``beta ** count`` is 0 for every beta below 1. There is then no bias correction."""


class Op:
    """Replaces the op that ``CPUAdamBuilder().load()`` returns. This class has the same functions, with the same
    arguments.

    Tensors are dense, on the CPU, and all have the same shape and order of elements. Parameters and gradients are
    float32, bfloat16 or float16. States are float32 or bfloat16. This class does not implement other functions, such as
    those of ZenFlow. The first use of such a function makes DeepSpeed load its own op, which may run a compiler, and
    creates all optimizers in that op as well.
    """

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._own: Any = None
        self._created: dict[int, tuple[float, float, float, float, float, bool]] = {}

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
        """Makes an optimizer. Later steps use only ``adamw_mode`` of these arguments, because each step receives its own
        hyperparameters.
        """
        self._created[optimizer_id] = lr, beta1, beta2, eps, weight_decay, adamw_mode
        if self._own is not None:
            self._own.create_adam(optimizer_id, *self._created[optimizer_id], False)
        if should_log:
            print(f"instep: CPU Adam #{optimizer_id}, {self._rule(optimizer_id)}")
        return 0

    def destroy_adam(self, optimizer_id: int) -> int:
        """Removes an optimizer, if there is one with this number."""
        self._created.pop(optimizer_id, None)
        if self._own is not None:
            self._own.destroy_adam(optimizer_id)
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
        """Makes one update of a parameter. ``step`` is the number of this update, counted from 1.

        If a tensor or a number is not allowed, this raises ``ValueError`` or ``NotImplementedError`` before anything is
        written. The error names the tensor or number as in ``instep.torch.functional``.
        """
        numbers = lr, (beta1, beta2), eps, weight_decay, False, False
        lists = [params], [grads], None, [exp_avg], [exp_avg_sq]
        return self._update(optimizer_id, step, bias_correction, numbers, lists)

    def adam_update_multi(
        self,
        optimizer_id: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
        bias_correction: bool,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        stale_params: Sequence[Tensor],
        parallel: bool = True,
    ) -> int:
        """Makes one update of each parameter, and copies the new values into ``stale_params``, which may be empty.

        Errors are raised as for `adam_update`. With ``parallel=False``, the step runs on the calling thread.
        """
        numbers = lr, (beta1, beta2), epsilon, weight_decay, False, False
        lists = params, grads, stale_params or None, exp_avgs, exp_avg_sqs
        return self._update(optimizer_id, step, bias_correction, numbers, lists, None if parallel else 1)

    def _update(
        self,
        optimizer_id: int,
        step: int,
        bias_correction: bool,
        numbers: tuple[Any, ...],
        lists: tuple[Any, ...],
        threads: Optional[int] = None,
    ) -> int:
        rule = self._rule(optimizer_id)
        if step < 1:
            raise ValueError(f"step = {step}: out of range; use 1 for the first update")
        params, grads, copies, exp_avgs, exp_avg_sqs = lists
        counts = [torch.tensor(float(step - 1) if bias_correction else UNCORRECTED) for _ in params]
        RULES[rule].native.step((params, grads, counts, copies, None, exp_avgs, exp_avg_sqs, None), numbers, 1.0, threads)
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
        """Undoes the update with the number ``step``, given the gradients of that update. All tensors are float32.

        The arithmetic is float64, but the update has rounded the values that it stored. The error of a restored value is at
        most 4 float32 epsilons times the largest of the old value, the new value and the summand. The summand is the change
        for a parameter, the gradient for ``exp_avg``, and its square for ``exp_avg_sq``.
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
        return "adamw" if self._created[optimizer_id][-1] else "adam"

    def __getattr__(self, name: str) -> Any:
        """For an attribute that this class lacks, returns the attribute of DeepSpeed's own op."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._load_own(), name)

    def _load_own(self) -> Any:
        """Returns DeepSpeed's own op. Only the first call loads the op, because a load may run a compiler."""
        if self._own is None:
            loaded = self._builder._loaded_ops
            loaded.pop(self._builder.NAME, None)
            try:
                own = self._builder().load()
            finally:
                loaded[self._builder.NAME] = self
            # The functions of this op look optimizers up by id, and crash at an id that the op does not know.
            for optimizer_id, arguments in self._created.items():
                own.create_adam(optimizer_id, *arguments, False)
            self._own = own
        return self._own


def install() -> Op:
    """Replaces DeepSpeed's op by `Op`, for every ``DeepSpeedCPUAdam`` that is made from now on.

    A second call does nothing. Raises ``RuntimeError`` if DeepSpeed has already loaded its own op, because existing
    optimizers keep that op. Raises ``NotImplementedError`` for a DeepSpeed version that loads ops differently.
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
