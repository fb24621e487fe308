"""The tests share these helpers: groups of processes, small models, and equal gradients for both sides of a
comparison.
"""

import collections
import copy
import os

import pytest
import torch
from ranks import Ranks


def pytest_configure(config):
    config.addinivalue_line("markers", "turns(count): cases that take so many turns of INSTEP_CI_TURN; without it, all run")


def pytest_collection_modifyitems(config, items):
    """Selects the cases of a long list that run in this turn. The marker gives the number of consecutive turns that
    together run all cases.
    """
    turn = os.environ.get("INSTEP_CI_TURN")
    if turn is None:
        return
    seen: collections.Counter[str] = collections.Counter()
    later = []
    for item in items:
        marker = item.get_closest_marker("turns")
        if marker is None:
            continue
        number = seen[item.nodeid.split("[")[0]]
        seen[item.nodeid.split("[")[0]] += 1
        if (number + int(turn)) % marker.args[0] != 0:
            later.append(item)
    config.hook.pytest_deselected(items=later)
    items[:] = [item for item in items if item not in later]


@pytest.fixture(scope="session")
def groups():
    """All tests share one group for each number of processes, because a group takes seconds to start."""
    started: dict[int, Ranks] = {}
    yield lambda count: started.setdefault(count, Ranks(count))
    for ranks in started.values():
        ranks.close()


@pytest.fixture
def one(groups):
    """Returns a group of one process."""
    return groups(1)


@pytest.fixture
def two(groups):
    """Returns two processes."""
    return groups(2)


@pytest.fixture
def three(groups):
    """Returns three processes."""
    return groups(3)


@pytest.fixture
def four(groups):
    """Returns four processes."""
    return groups(4)


class Small(torch.nn.Module):
    """A model with a convolution, a norm, a transposed weight and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.norm = torch.nn.BatchNorm2d(8)
        self.first = torch.nn.Linear(8, 16)
        self.second = torch.nn.Linear(16, 8)
        self.second.weight = torch.nn.Parameter(self.first.weight.detach().t().clone())
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).relu().mean(dim=(2, 3))
        return self.second(self.first(x).tanh()) * self.scale


def build(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Returns the model, always with the same values."""
    torch.manual_seed(1)
    return Small().to(dtype)


@pytest.fixture
def twins():
    """Returns a function that makes two equal models."""

    def make(dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, torch.nn.Module]:
        model = build(dtype)
        return model, copy.deepcopy(model)

    return make


def give_gradients(model: torch.nn.Module, other: torch.nn.Module, seed: int) -> None:
    """Runs backward in one model and copies its gradients into the other one."""
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, 3, 6, 6, dtype=dtype)
    model.zero_grad()
    model(x).float().pow(2).mean().backward()
    for p, q in zip(model.parameters(), other.parameters()):
        q.grad = None if p.grad is None else p.grad.clone()


def largest_difference(model: torch.nn.Module, other: torch.nn.Module) -> float:
    """Returns the largest difference over all parameters, in units in the last place of each parameter's largest value
    (at least 0.001).
    """
    worst = 0.0
    for p, q in zip(model.parameters(), other.parameters()):
        unit = torch.finfo(p.dtype).eps * max(p.detach().float().abs().max().item(), 1e-3)
        worst = max(worst, (p.detach().float() - q.detach().float()).abs().max().item() / unit)
    return worst
