"""PyTorch's own tables of optimizer tests, as its wheel has them: every optimizer, every input, every wrong argument.

The file lists each difference between torch and this library with its reason, and no other difference is allowed. The
tests take 6 s.
"""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.testing._internal.common_optimizers import optim_db

import instep
from instep.torch import FusedOptimizer

NOT_HERE = {
    "Adafactor": "its states are factored, so they have other shapes than their parameter",
    "ASGD": "nobody has asked for it",
    "LBFGS": "calls a closure several times in a step",
    "Muon": "multiplies matrices; the rules here go element by element",
    "SparseAdam": "takes sparse gradients alone, which no kernel reads",
}
TAKEN = {
    "betas must be either both floats or both Tensors": "tensors are read as numbers, one by one",
    "lr as a Tensor is not supported for capturable=False and foreach=True": "foreach has no effect here",
    r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True": "foreach has no effect here",
}
REFUSED = {
    ".*a parameter group with duplicate parameters.*": "stepped twice by torch, which warns; here one launch steps all"
}
RUNNING = ("foreach", "fused", "capturable")
"""How torch is to run a step. Here it has no effect. ``differentiable=True`` is refused."""
OURS = [info for info in optim_db if info.optim_cls.__name__ not in NOT_HERE]


def without_running(options: dict) -> dict:
    """On the CPU, torch refuses ``capturable``."""
    return {name: value for name, value in options.items() if name not in RUNNING}


# The table of a GPU has all that the CPU's has, and more. Its tensors are on the CPU.
CONFIGURATIONS = [
    pytest.param(info.optim_cls, case.kwargs, id=f"{info.optim_cls.__name__}-{k}-{case.desc}")
    for info in OURS
    for k, case in enumerate(info.optim_inputs_func(device="cuda"))
]
ERRORS = [
    pytest.param(info.optim_cls, case, id=f"{info.optim_cls.__name__}-{k}-{case.error_regex[:40]}")
    for info in OURS
    for k, case in enumerate(info.optim_error_inputs_func(device="cpu", dtype=torch.float32))
]


def test_the_tables_cover_what_torch_and_instep_both_have():
    names = {info.optim_cls.__name__.lower() for info in OURS}
    assert names == set(instep.OPTIMIZERS) - {"lion", "lamb", "ademamix"}
    assert NOT_HERE.keys() <= {info.optim_cls.__name__ for info in optim_db}
    assert len(CONFIGURATIONS) > 90 and len(ERRORS) > 90


@pytest.mark.parametrize("name", NOT_HERE)
def test_an_optimizer_that_is_not_here_is_refused_with_those_that_are(name):
    with pytest.raises(ValueError, match="not known; use one of sgd, adam"):
        FusedOptimizer([nn.Parameter(torch.zeros(2))], getattr(torch.optim, name))


class Perceptron(nn.Module):
    """A model of two layers, and a parameter without dimensions that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid())
        self.extra = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def groups_of(model: Perceptron) -> list[dict]:
    return [
        {"params": list(model.layers[0].parameters())},
        {"params": [*model.layers[2].parameters(), model.extra], "lr": 0.02},
    ]


@pytest.mark.parametrize("in_groups", [False, True], ids=["one-group", "groups"])
@pytest.mark.parametrize("optim_cls, options", CONFIGURATIONS)
def test_seven_iterations_agree_in_parameters_and_states(optim_cls, options, in_groups):
    ours, theirs = Perceptron(), Perceptron()
    params = [groups_of(model) if in_groups else model.parameters() for model in (ours, theirs)]
    optimizer = FusedOptimizer(params[0], optim_cls, **copy.deepcopy(options))
    wanted = optim_cls(params[1], **without_running(copy.deepcopy(options)), foreach=False)
    x = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    for iteration in range(7):
        for model, one in ((ours, optimizer), (theirs, wanted)):
            one.zero_grad()
            if iteration != 2:  # Nothing has a gradient then.
                model(x).sum().backward()
            if 3 <= iteration < 5:
                model.layers[0].weight.grad = None
            one.step()
        if iteration == 4:
            saved = wanted.state_dict(), optimizer.state_dict()
            assert saved[0]["state"].keys() == saved[1]["state"].keys()
            optimizer.load_state_dict(copy.deepcopy(saved[0]))
            wanted.load_state_dict(copy.deepcopy(saved[1]))
            for group in wanted.param_groups:
                group.update({name: False for name in RUNNING if name in group})
        for p, q in zip(ours.parameters(), theirs.parameters()):
            assert_close(p, q)
    states = optimizer.state_dict()["state"]
    for number, state in wanted.state_dict()["state"].items():
        assert state.keys() == states[number].keys()
        for name, value in state.items():
            assert_close(states[number][name], value, check_dtype=False)


@pytest.mark.parametrize("running", RUNNING)
@pytest.mark.parametrize("info", OURS, ids=lambda info: info.optim_cls.__name__)
def test_how_torch_runs_a_step_changes_no_bit(info, running):
    for case in info.optim_inputs_func(device="cpu"):
        results = []
        for options in ({}, {running: True}):
            model = Perceptron()
            optimizer = FusedOptimizer(model.parameters(), info.optim_cls, **{**case.kwargs, **options})
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 2)).sum().backward()
                optimizer.step()
            results.append(list(model.parameters()))
        assert all(torch.equal(p, q) for p, q in zip(*results)), case.desc
        with pytest.raises(NotImplementedError, match="differentiable=True"):
            FusedOptimizer(model.parameters(), info.optim_cls, **{**case.kwargs, "differentiable": True})


@pytest.mark.parametrize("optim_cls, case", ERRORS)
def test_wrong_arguments_raise_what_they_raise_in_torch(optim_cls, case):
    given = case.optimizer_error_input
    params = [nn.Parameter(torch.zeros(2))] if given.params is None else given.params
    if case.error_regex in TAKEN:
        FusedOptimizer(params, optim_cls, **given.kwargs)
        return
    if case.error_regex in REFUSED:
        with pytest.warns(case.error_type), pytest.raises(ValueError, match="listed twice"):
            FusedOptimizer(params, optim_cls, **given.kwargs)
        return
    if issubclass(case.error_type, Warning):
        with pytest.warns(case.error_type, match=case.error_regex):
            FusedOptimizer(params, optim_cls, **given.kwargs)
        return
    with pytest.raises(case.error_type):
        FusedOptimizer(params, optim_cls, **given.kwargs)
