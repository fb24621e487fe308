"""PyTorch's own tables of optimizer tests, as its wheel carries them: every configuration, and every wrong argument.

The tables say how a step is to be run, too (``foreach``, ``capturable``, ...); such entries are torch's alone.
"""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.testing._internal.common_optimizers import optim_db

import instep
from instep.torch import FusedOptimizer

RUNNING = {"foreach", "fused", "capturable", "differentiable"}
OURS = [info for info in optim_db if info.optim_cls.__name__.lower() in instep.OPTIMIZERS]
CONFIGURATIONS = [
    pytest.param(info.optim_cls, case.kwargs, id=f"{info.optim_cls.__name__}-{case.desc}")
    for info in OURS
    for case in info.optim_inputs_func(device="cpu")
    if not RUNNING & case.kwargs.keys()
]
ERRORS = [
    pytest.param(info.optim_cls, case, id=f"{info.optim_cls.__name__}-{case.error_regex[:40]}")
    for info in OURS
    for case in info.optim_error_inputs_func(device="cpu", dtype=torch.float32)
    if not RUNNING & case.optimizer_error_input.kwargs.keys() and "betas must be either" not in case.error_regex
]


def test_the_tables_cover_what_torch_and_instep_both_have():
    names = {info.optim_cls.__name__.lower() for info in OURS}
    assert names == set(instep.OPTIMIZERS) - {"lion", "lamb", "ademamix"}
    assert len(CONFIGURATIONS) > 50 and len(ERRORS) > 80


class Perceptron(nn.Module):
    """Two layers, and a parameter without dimensions that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid())
        self.extra = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("optim_cls, options", CONFIGURATIONS)
def test_seven_iterations_agree_in_parameters_and_states(optim_cls, options):
    ours, theirs = Perceptron(), Perceptron()
    optimizer = FusedOptimizer(ours.parameters(), optim_cls, **options)
    wanted = optim_cls(theirs.parameters(), **options, foreach=False)
    x = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    for iteration in range(7):
        for model, one in ((ours, optimizer), (theirs, wanted)):
            one.zero_grad()
            if iteration != 2:  # Nothing has a gradient then.
                model(x).sum().backward()
            if 3 <= iteration < 5:
                model.layers[0].weight.grad = None
            one.step()
        for p, q in zip(ours.parameters(), theirs.parameters()):
            assert_close(p, q)
    states = optimizer.state_dict()["state"]
    for number, state in wanted.state_dict()["state"].items():
        for name, value in state.items():
            if value is not None:
                assert_close(states[number][name], value, check_dtype=False)


@pytest.mark.parametrize("optim_cls, case", ERRORS)
def test_wrong_arguments_raise_what_they_raise_in_torch(optim_cls, case):
    given = case.optimizer_error_input
    params = [nn.Parameter(torch.zeros(2))] if given.params is None else given.params
    if issubclass(case.error_type, Warning):
        with pytest.warns(case.error_type, match=case.error_regex):
            FusedOptimizer(params, optim_cls, **given.kwargs)
        return
    with pytest.raises(case.error_type):
        FusedOptimizer(params, optim_cls, **given.kwargs)
