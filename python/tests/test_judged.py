"""The judge of steps passes a right AdamW and fails a wrong one. The tests take under a second."""

import pytest
import torch
from judged import judged
from torch.optim.optimizer import register_optimizer_step_post_hook

import instep.torch


def train(steps: int = 6) -> None:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(size) * 10 ** torch.randn(size)) for size in ((64, 32), (100,), (), (5,))]
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0, "lr": 0.1}]
    optimizer = instep.torch.AdamW(groups, lr=1e-3, betas=(0.8, 0.99), weight_decay=0.1)
    for _ in range(steps):
        for param in params[:3]:
            param.grad = torch.randn_like(param) * 10 ** (2 * torch.randn_like(param))
        optimizer.step()


def test_every_step_is_within_the_bound():
    with judged() as verdict:
        train()
    assert verdict.steps == 6
    assert 0 < verdict.worst["ours"][0] <= 1 and 0 < verdict.worst["torch"][0] <= 1


@pytest.mark.parametrize("name, value", [("lr", 1.01), ("weight_decay", 1.01), ("eps", 1e6), ("betas", 1.001)])
def test_a_wrong_hyperparameter_fails(name, value):
    def change(optimizer, *_):
        """Runs after the step and before the judge, so the judge reads other hyperparameters than the step used."""
        for group in optimizer.param_groups if isinstance(optimizer, instep.torch.AdamW) else ():
            group[name] = tuple(value * beta for beta in group[name]) if name == "betas" else value * group[name]

    handle = register_optimizer_step_post_hook(change)
    try:
        with pytest.raises(AssertionError, match="ours: param|ours: exp_avg"), judged():
            train(1)
    finally:
        handle.remove()


def test_a_run_without_a_step_fails():
    with pytest.raises(AssertionError, match="no step"), judged():
        train(0)
