"""Compares every step of an AdamW in another library's trainer with torch's AdamW, within a derived bound.

Before each step, a hook copies parameters and states. After the step, ``torch.optim.AdamW`` steps the copies with the
same gradients, and AdamW in f64 gives the exact values. Both f32 results must be within the bound of the exact values,
so they differ by at most twice the bound. The trainer's own code runs unchanged.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from instep.torch import FusedOptimizer

U = 2.0**-24
"""The unit roundoff of f32."""
SECOND_ORDER = 1.01
"""Room for terms of second order."""
NUMBERS = ("lr", "betas", "eps", "weight_decay")
NAMES = ("param", "exp_avg", "exp_avg_sq")


class Values(NamedTuple):
    """A parameter, its two moments and the number of steps so far."""

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int


def averaged(old: Tensor, term: Tensor, beta: float, given: int) -> tuple[Tensor, Tensor]:
    """Returns a moving average in f64, and a bound on its error in f32. ``term`` already has ``given`` roundings."""
    new = beta * old + (1 - beta) * term
    sums = 2 * beta * old.abs() + (3 + given) * (1 - beta) * (term.abs() + old.abs())
    return new, U * (sums + new.abs())


def exact_step(before: Values, grad: Tensor, lr: float, betas: tuple[float, float], eps: float, weight_decay: float):
    """Makes one AdamW step in f64. Returns param, exp_avg and exp_avg_sq, each with a bound on its error in f32.

    This is ``Element::update`` of integrations/shared/bound.rs for whole tensors, with states that are exact before the step
    and powers of the betas in f64. The bound holds whether an implementation computes moments as averages or as sums of
    products, and weight decay as a factor or as a difference.
    """
    p, g = before.param.double(), grad.double()
    m, m_off = averaged(before.exp_avg.double(), g, betas[0], 0)
    v, v_off = averaged(before.exp_avg_sq.double(), g * g, betas[1], 1)
    by1, by2 = (1 - beta ** (before.step + 1) for beta in betas)
    below = (v / by2).sqrt() + eps
    change = m / by1 / below
    relative = torch.where(v == 0, 0.0, v_off / v)
    off = m_off / by1 / below + change.abs() * (U + 0.5 * (relative + U) + 8 * U)
    new = p * (1 - lr * weight_decay) - lr * change
    p_off = U * (3 * p.abs() + 2 * new.abs()) + lr * (off + 2 * U * change.abs())
    return (new, SECOND_ORDER * p_off), (m, SECOND_ORDER * m_off), (v, SECOND_ORDER * v_off)


class Verdict:
    """Sums up the judged steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.worst: dict[str, tuple[float, str]] = {"ours": (0.0, ""), "torch": (0.0, "")}
        """The largest error on each side, as a share of its bound, and where it was."""

    def compare(self, side: str, name: str, got: Tensor, wanted: Tensor, bound: Tensor) -> None:
        """Records the error of one tensor of one of the two optimizers."""
        error = (got.detach().double() - wanted).abs()
        share = torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=torch.inf)
        largest = share.max().item() if share.numel() else 0.0
        if largest > self.worst[side][0]:
            self.worst[side] = (largest, f"{name} in step {self.steps}")

    def check(self) -> None:
        """Asserts that at least one step was made, and that all steps were within the bound."""
        assert self.steps, "no step of a judged optimizer was made"
        for side, (share, where) in self.worst.items():
            assert share <= 1, f"{side}: {where} is off by {share:.3g} times its bound"


def values_of(optimizer: torch.optim.Optimizer, param: Tensor) -> Values:
    """Returns the optimizer's states of a parameter, which are zeros before the first step."""
    state = optimizer.state.get(param, {})
    moments = [state[name] if name in state else torch.zeros_like(param) for name in NAMES[1:]]
    assert all(tensor.dtype is torch.float32 for tensor in (param, *moments)), "the bound is that of f32"
    return Values(param.detach(), *moments, int(state.get("step", 0)))


def torchs_step(groups: list[dict[str, Any]], before: dict[Tensor, Values]) -> dict[Tensor, Values]:
    """Steps copies of the parameters with torch's AdamW."""
    twins = {param: torch.nn.Parameter(values.param.clone()) for param, values in before.items()}
    optimizer = torch.optim.AdamW(
        [{"params": [twins[p] for p in group["params"]], **{name: group[name] for name in NUMBERS}} for group in groups]
    )
    for param, twin in twins.items():
        _, exp_avg, exp_avg_sq, step = before[param]
        twin.grad = param.grad
        if step:
            moments = {"exp_avg": exp_avg.clone(), "exp_avg_sq": exp_avg_sq.clone()}
            optimizer.state[twin] = {"step": torch.tensor(float(step)), **moments}
    optimizer.step()
    return {param: values_of(optimizer, twin) for param, twin in twins.items()}


def assert_close_runs(
    before: dict[str, Tensor], after: dict[str, Tensor], has_16_bits: bool = False, attention: Optional[str] = None
) -> None:
    """Compares the last values of two whole runs. The tolerance is chosen, not derived, because the rounding of one step
    changes the gradients of all later steps.

    ``attention`` names the biases that hold queries, keys and values. Attention does not depend on the bias of the
    keys, so the gradient of this bias is only rounding error, which AdamW scales up to a full step. Two runs therefore
    diverge in this bias, so this comparison leaves the bias out. The judge still checks each step of the bias.
    """
    tolerance = {"rtol": 1e-4, "atol": 2e-4 if has_16_bits else 1e-5}
    assert before.keys() == after.keys()
    for name, value in before.items():
        pairs = zip(after[name].chunk(3), value.chunk(3)) if value.dim() else [(after[name], value)]
        for part, (one, other) in enumerate(pairs):
            if not (part == 1 and attention and name.endswith(attention)):
                torch.testing.assert_close(one, other, **tolerance, msg=lambda text: f"{name}: {text}")


@contextlib.contextmanager
def judged(kinds: Any = FusedOptimizer) -> Iterator[Verdict]:
    """Judges every step of the optimizers of these classes, and checks the verdict at the end."""
    verdict = Verdict()
    open_steps: dict[torch.optim.Optimizer, dict[Tensor, Values]] = {}

    def copy(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if isinstance(optimizer, kinds):
            params = [param for group in optimizer.param_groups for param in group["params"]]
            held = {param: values_of(optimizer, param) for param in params}
            open_steps[optimizer] = {p: Values(*(t.clone() for t in held[p][:3]), held[p].step) for p in params}

    def judge(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not isinstance(optimizer, kinds):
            return
        # Gradients are read here: a closure may compute them inside the step.
        before, groups = open_steps.pop(optimizer), optimizer.param_groups
        verdict.steps += 1
        torchs = torchs_step(groups, before)
        for number, group in enumerate(groups):
            assert not group.get("amsgrad") and not group.get("maximize")
            numbers = {name: group[name] for name in NUMBERS}
            for index, param in enumerate(group["params"]):
                old, ours = before[param], values_of(optimizer, param)
                if param.grad is None:
                    wanted = [(tensor.double(), torch.zeros_like(tensor)) for tensor in old[:3]]
                else:
                    wanted = exact_step(old, param.grad, **numbers)
                    assert ours.step == old.step + 1, f"step count {ours.step} after {old.step}"
                for place, (name, exact) in enumerate(zip(NAMES, wanted)):
                    name = f"{name} of parameter {index} in group {number}"
                    verdict.compare("ours", name, ours[place], *exact)
                    verdict.compare("torch", name, torchs[param][place], *exact)

    handles = register_optimizer_step_pre_hook(copy), register_optimizer_step_post_hook(judge)
    try:
        yield verdict
    finally:
        for handle in handles:
            handle.remove()
    verdict.check()
