"""The optimizers that the benchmark times. Before the timing, the first steps of each optimizer are checked.

A candidate owns its parameters, gradients and states. All candidates of a format start with the same values.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

import instep.torch

LR, BETA1, BETA2, WEIGHT_DECAY = 1e-3, 0.9, 0.999, 1e-2
CHECKED_STEPS = 2
Make = Callable[[list[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Candidate:
    """An optimizer of one library, in one format."""

    format: str
    """``"f32"``, ``"bf16"`` or ``"8-bit states"``. Candidates of one format are compared with instep's candidate of
    this format."""
    name: str
    make: Make
    package: str = "torch"
    """The package that has to be installed."""
    copies: bool = False
    """Whether the step also makes bf16 copies of f32 parameters, as the host's step does in offloaded training."""

    @property
    def label(self) -> str:
        """The candidate's format and name."""
        return f"{self.format}, {self.name}"

    @property
    def dtype(self) -> torch.dtype:
        """The type of parameters and gradients."""
        return torch.bfloat16 if self.format == "bf16" else torch.float32

    @property
    def keeps_masters(self) -> bool:
        """Whether the candidate's own parameters are the bf16 copies. The masters are then the f32 parameters."""
        return self.copies and self.is_ours

    @property
    def is_ours(self) -> bool:
        """Whether this is instep's candidate, with which the other candidates of its format are compared."""
        return self.package == "instep"


def _peer(module: str, name: str) -> Make:
    # A peer is imported when it is first made, because importing one changes settings of torch, or takes seconds.
    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"adamw_mode": True} if module.startswith("deepspeed") else {}
        with _stdout_on_stderr():
            found = getattr(importlib.import_module(module), name)
            made: torch.optim.Optimizer = found(params, lr=LR, weight_decay=WEIGHT_DECAY, **options)
        # DeepSpeed sets this variable. With it, every step of torch's optimizers would open NVML, which takes 100 us.
        os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
        return made

    return make


@contextlib.contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Redirects to stderr what another library prints while it builds its kernel, because stdout is for the table."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


CANDIDATES = [
    Candidate("f32", "instep.torch.AdamW", lambda params: instep.torch.AdamW(params, LR), "instep"),
    Candidate("f32", "torch AdamW, fused=True", lambda params: torch.optim.AdamW(params, LR, fused=True)),
    Candidate("f32", "torch AdamW, foreach=True", lambda params: torch.optim.AdamW(params, LR, foreach=True)),
    Candidate("f32", "DeepSpeedCPUAdam", _peer("deepspeed.ops.adam", "DeepSpeedCPUAdam"), "deepspeed"),
    Candidate("bf16", "instep.torch.AdamW", lambda params: instep.torch.AdamW(params, LR), "instep"),
    Candidate("bf16", "torch AdamW, fused=True", lambda params: torch.optim.AdamW(params, LR, fused=True)),
    Candidate("bf16", "torch AdamW, foreach=True", lambda params: torch.optim.AdamW(params, LR, foreach=True)),
    Candidate("8-bit states", "instep.torch.AdamW8bit", lambda params: instep.torch.AdamW8bit(params, LR), "instep"),
    Candidate("8-bit states", "bitsandbytes AdamW8bit", _peer("bitsandbytes.optim", "AdamW8bit"), "bitsandbytes"),
    Candidate("8-bit states", "torchao AdamW8bit", _peer("torchao.optim", "AdamW8bit"), "torchao"),
]


def _with_masters(states: str) -> Make:
    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"lr": LR, "weight_decay": WEIGHT_DECAY, "states": states, "master": "float32"}
        return instep.torch.FusedOptimizer(params, "adamw", **options)

    return make


# Peers copy after their step. All begin with f32 gradients in the host's memory, and end with f32 parameters and bf16 copies.
OFFLOADED = [
    Candidate("f32", "FusedOptimizer, masters", _with_masters("float32"), "instep", True),
    Candidate("f32", "torch AdamW, fused=True", CANDIDATES[1].make, "torch", True),
    Candidate("f32", "DeepSpeedCPUAdam", CANDIDATES[3].make, "deepspeed", True),
    Candidate("8-bit states", "FusedOptimizer, masters", _with_masters("8bit"), "instep", True),
    Candidate("8-bit states", "bitsandbytes AdamW8bit", CANDIDATES[8].make, "bitsandbytes", True),
    Candidate("8-bit states", "torchao AdamW8bit", CANDIDATES[9].make, "torchao", True),
]
FORMATS = list(dict.fromkeys(candidate.format for candidate in CANDIDATES))


@functools.cache
def _values(count: int) -> tuple[Tensor, Tensor]:
    """Returns gradients and first values of parameters. bf16 represents all of them exactly. The values of tensor k
    start at index k.

    No gradient is 0 or subnormal, and the sizes of all gradients are within a factor of 2. This limits the error of
    8-bit states. Parameters are below 2^-6, so a step of 1e-3 survives rounding to bf16.
    """
    k = torch.arange(count)
    grads = (128 + k % 113).float() * 2**-14 * (1 - 2 * (k % 3 == 0).float())
    return grads, (128 + k % 128).float() * 2**-14


@functools.cache
def _stepped(count: int, steps: int) -> Tensor:
    """The parameters after a number of steps of AdamW, in f64."""
    grads, params = (value.double() for value in _values(count))
    first, second = torch.zeros_like(grads), torch.zeros_like(grads)
    for number in range(1, steps + 1):
        first = BETA1 * first + (1 - BETA1) * grads
        second = BETA2 * second + (1 - BETA2) * grads * grads
        root = (second / (1 - BETA2**number)).sqrt() + 1e-8
        params = params * (1 - LR * WEIGHT_DECAY) - LR * first / (1 - BETA1**number) / root
    return params


class Made:
    """A candidate's optimizer with its parameters."""

    def __init__(self, candidate: Candidate, tensors: int, length: int) -> None:
        self.candidate, self.length = candidate, length
        self.params: list[Tensor] = []
        values = _values(tensors + length)
        for tensor in range(tensors):
            grad, start = (value[tensor : tensor + length].to(candidate.dtype, copy=True) for value in values)
            param = torch.nn.Parameter(start.bfloat16() if candidate.keeps_masters else start)
            if candidate.keeps_masters:
                param.grad_dtype = grad.dtype
            param.grad = grad
            self.params.append(param)
        self.optimizer = candidate.make(self.params)
        self.copies: list[Tensor] = []
        if candidate.copies:
            self.copies = [p.data if candidate.keeps_masters else p.detach().bfloat16() for p in self.params]

    def step(self) -> None:
        """Makes one step."""
        self.optimizer.step()
        if self.copies and not self.candidate.keeps_masters:
            torch._foreach_copy_(self.copies, [param.data for param in self.params])

    def steps(self, count: int) -> None:
        """Makes several steps."""
        for _ in range(count):
            self.step()

    def values(self) -> list[Tensor]:
        """The values that steps update. If the candidate has masters, which its first step makes, these values are the
        masters. Otherwise they are the parameters.
        """
        if self.candidate.keeps_masters:
            return [self.optimizer.state[param]["master"] for param in self.params]
        return [param.detach() for param in self.params]

    def check(self) -> Optional[str]:
        """Makes the first steps. Returns a text that says how the steps differ from AdamW in f64, or that the bf16 copies
        are wrong. Returns None if all is right.
        """
        for number in range(1, CHECKED_STEPS + 1):
            with _stdout_on_stderr():
                self.step()
            worst = self._distance(number)
            allowed = tolerance(self.candidate.format, number)
            if not worst <= allowed:  # Written so that NaN fails too.
                return f"differs from AdamW in f64 by {worst:.1e} after step {number}; {allowed:.1e} is allowed"
            if any(not torch.equal(copy, value.bfloat16()) for copy, value in zip(self.copies, self.values())):
                return f"copies are not the parameters in bf16 after step {number}"
        return None

    def _distance(self, steps: int) -> float:
        expected = _stepped(len(self.params) + self.length, steps)
        apart = [
            (value.double() - expected[tensor : tensor + self.length]).abs().max().item()
            for tensor, value in enumerate(self.values())
        ]
        return math.nan if any(map(math.isnan, apart)) else max(apart)


def tolerance(format: str, steps: int) -> float:
    """Returns the largest allowed distance of parameters from AdamW in f64 after a number of steps.

    Let u be the unit roundoff of the type. A step rounds the parameter twice: 2 u |p|. It rounds the change, which is
    at most lr, eight times: 8 u lr. Another library may compute 1 - beta2 in f32, with an error of 2^-24 / (1 - beta2)
    of the change. The error of an 8-bit code is at most 1/128 of the largest value of its block. Because gradients are
    within a factor of 2, the error of a code is at most 1/64 of the first moment and 1/32 of the second. The change of
    the second step contains 0.48 of the first error and 0.25 of the second. The sum of both is at most lr / 64.
    """
    unit = 2**-8 if format == "bf16" else 2**-24
    largest = 2**-6 + steps * LR
    each = 2 * unit * largest + LR * (8 * unit + 2**-24 / (1 - BETA2))
    coded = LR / 64 if format == "8-bit states" and steps > 1 else 0
    return steps * each + coded
