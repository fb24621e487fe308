"""Tests where states are placed in memory, and what a step checks when nothing has changed."""

import contextlib
import copy
import mmap
import re
import time
from pathlib import Path

import pytest
import torch

from instep.torch import FusedOptimizer
from instep.torch._threads import openmp


def stepped(length: int) -> tuple[torch.Tensor, FusedOptimizer]:
    """Returns a parameter of this length after one step, and its optimizer."""
    param = torch.nn.Parameter(torch.ones(length))
    optimizer = FusedOptimizer([param], "adamw")
    param.grad = torch.ones(length)
    optimizer.step()
    return param, optimizer


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages to ask for")
def test_large_states_ask_for_huge_pages():
    param, optimizer = stepped(4 << 20)
    maps = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    for name in ("exp_avg", "exp_avg_sq"):
        at = optimizer.state[param][name].data_ptr()
        [found] = [text for text in maps if int(text.split("-")[0], 16) <= at < int(re.split("[- ]", text)[1], 16)]
        assert " hg" in found.split("VmFlags:")[1]


@pytest.mark.parametrize("length", [1000, 4 << 20])
def test_parameters_and_states_start_apart_in_a_page(length: int):
    param, optimizer = stepped(length)
    starts = [tensor.data_ptr() % 4096 for tensor in optimizer.state[param].values() if tensor.dim() > 0]
    distances = [abs(a - b) for k, a in enumerate(starts) for b in starts[:k]]
    assert all(512 <= distance <= 4096 - 512 for distance in distances)


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_state_that_is_replaced_counts_from_the_next_step_on_and_the_count_of_updates_goes_on(is_saved: bool):
    param, optimizer = stepped(1000)
    reference = torch.optim.AdamW([torch.nn.Parameter(param.detach().clone())])
    twin = reference.param_groups[0]["params"][0]
    reference.load_state_dict(copy.deepcopy(optimizer).state_dict())
    for round_index in range(4):
        for side, one in ((optimizer, param), (reference, twin)):
            one.grad = torch.full((1000,), 0.5)
            if round_index == 1 and is_saved:
                side.state_dict()
            if round_index == 2:
                side.state[one]["exp_avg"] = torch.full((1000,), -3.0)
            side.step()
        torch.testing.assert_close(param, twin)


def test_two_states_that_change_places_are_noticed():
    params = [torch.nn.Parameter(torch.full((4,), 1.0 + k)) for k in range(2)]
    optimizer = FusedOptimizer(params, "sgd", lr=1.0, momentum=0.5)
    for grads in ((1.0, 8.0), (0.0, 0.0)):
        for param, grad in zip(params, grads):
            param.grad = torch.full((4,), grad)
        optimizer.step()
        first, second = params
        optimizer.state[first], optimizer.state[second] = dict(optimizer.state[second]), dict(optimizer.state[first])
    assert params[0].tolist() == [1.0 - 1.0 - 4.0] * 4
    assert params[1].tolist() == [2.0 - 8.0 - 0.5] * 4


def threads_of_our_own() -> int:
    """Returns how many threads the library has started in this process."""
    names = (task / "comm" for task in Path("/proc/self/task").iterdir())
    count = 0
    for name in names:
        with contextlib.suppress(OSError):  # A thread may end meanwhile.
            count += name.read_text().startswith("instep-pool")
    return count


@pytest.mark.skipif(not Path("/proc/self/task").exists() or openmp() == 0, reason="torch has no OpenMP threads here")
def test_a_step_runs_on_torchs_threads_and_follows_their_number(monkeypatch):
    before, results = torch.get_num_threads(), []
    try:
        for team in (openmp, lambda: 0):
            monkeypatch.setattr("instep.torch._engine.openmp", team)
            torch.set_num_threads(1)
            param, optimizer = stepped(1 << 20)
            [arena] = optimizer._engine.arenas
            alone, started = next(iter(arena.live.values())), threads_of_our_own()
            torch.set_num_threads(2)
            optimizer.step()
            assert next(iter(arena.live.values())) is not alone
            # A thread takes its name when it first runs, which may be after the step.
            deadline = time.monotonic() + 60
            while team is not openmp and threads_of_our_own() == started and time.monotonic() < deadline:
                time.sleep(0.01)
            assert threads_of_our_own() == started + (team is not openmp)
            assert optimizer.state_dict()["state"][0]["step"] == 2
            results.append(param.detach().clone())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
