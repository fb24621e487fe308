"""Requirements on a list of parameters: each appears once, none overlaps another, and Adagrad's states exist from the
beginning.
"""

import copy

import pytest
import torch
from torch import nn

import instep
from instep.torch import FusedOptimizer, apply_optimizer_in_backward


def one(count: int = 4) -> nn.Parameter:
    return nn.Parameter(torch.ones(count))


def give(params) -> None:
    for param in params:
        param.grad = torch.ones_like(param)


def test_a_parameter_that_is_listed_twice_is_refused_wherever_it_comes_from():
    first, second = one(), one()
    twice = pytest.raises(ValueError, match="listed twice")
    with twice, pytest.warns(UserWarning, match="duplicate"):
        FusedOptimizer([first, second, first], "sgd", lr=1.0)
    optimizer = FusedOptimizer([first], "sgd", lr=1.0)
    with twice, pytest.warns(UserWarning, match="duplicate"):
        optimizer.add_param_group({"params": [second, second]})
    assert len(optimizer.param_groups) == 1
    for group in (optimizer.param_groups[0], {**optimizer.param_groups[0], "params": []}):
        changed = copy.copy(optimizer.param_groups)
        optimizer.param_groups += [group] if not group["params"] else []
        optimizer.param_groups[-1]["params"].append(first)
        give([first])
        with twice:
            optimizer.step()
        optimizer.param_groups[-1]["params"].pop()
        optimizer.param_groups = changed
    assert torch.equal(first, torch.ones(4))
    optimizer.step()
    assert torch.equal(first, torch.zeros(4))


SHARED = {
    "the same": lambda w: (w, w.view(-1)),
    "a part": lambda w: (w, w[1:3, 0]),
    "halves that meet": lambda w: (w[:3].flatten(), w[2:].flatten()),
    "columns that meet": lambda w: (w[:, :2], w[:, 1:]),
    "another type": lambda w: (w[..., 0], w.view(torch.bfloat16)[0, 0]),
}


@pytest.mark.parametrize("key", ["sgd", "adamw", "lamb"])
@pytest.mark.parametrize("shared", SHARED)
def test_parameters_over_the_same_memory_are_refused_before_anything_is_stepped(shared, key):
    whole, other = torch.ones(4, 4, 4), one()
    params = [other, *map(nn.Parameter, SHARED[shared](whole))]
    optimizer = FusedOptimizer(params, key)
    give(params)
    with pytest.raises(NotImplementedError, match="shares memory with another one"):
        optimizer.step()
    assert torch.equal(whole, torch.ones(4, 4, 4)) and torch.equal(other, torch.ones(4)) and not optimizer.state
    # One that comes later, too.
    optimizer = FusedOptimizer(params[:2], key)
    optimizer.step()
    optimizer.add_param_group({"params": params[2:]})
    with pytest.raises(NotImplementedError, match="shares memory with another one"):
        optimizer.step()


BESIDE = {
    "columns": lambda w: [w[:, k] for k in range(4)],
    "parts": lambda w: [w[:2].view(-1), w[2], w[3, :1], w[3, 1:]],
    "odd and even": lambda w: [w[:, ::2], w[:, 1::2]],
}


@pytest.mark.parametrize("beside", BESIDE)
def test_parameters_between_each_others_elements_are_stepped_as_by_torch(beside):
    wholes = [torch.linspace(-1, 1, 64).view(4, 4, 4) for _ in range(2)]
    ours, theirs = ([nn.Parameter(part) for part in BESIDE[beside](whole)] for whole in wholes)
    optimizer, wanted = FusedOptimizer(ours, "adamw", lr=0.1), torch.optim.AdamW(theirs, lr=0.1, foreach=False)
    for _ in range(3):
        give(ours)
        give(theirs)
        optimizer.step()
        wanted.step()
    torch.testing.assert_close(*wholes, rtol=1e-5, atol=2e-6)


def by_itself(params, **options):
    return [FusedOptimizer(params, "adagrad", **options)]


def in_backward(params, **options):
    apply_optimizer_in_backward("adagrad", params, options)
    return [one for param in params for one in param._in_backward_optimizers]


@pytest.mark.parametrize("make", [by_itself, in_backward])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adagrad_has_torchs_states_before_the_first_step(make, dtype):
    ours, theirs = ([nn.Parameter(torch.ones(3, 4, dtype=dtype).t()) for _ in range(2)] for _ in range(2))
    optimizers = make(ours, initial_accumulator_value=0.25)
    wanted = torch.optim.Adagrad(theirs, initial_accumulator_value=0.25, foreach=False)
    states = {param: held for one in optimizers for param, held in one.state.items()}
    for param, other in zip(ours, theirs):
        assert states[param].keys() == wanted.state[other].keys()
        for name, value in wanted.state[other].items():
            assert torch.equal(states[param][name], value) and states[param][name].dtype == value.dtype
            assert states[param][name].stride() == value.stride()
    # A value that a group has later is no longer asked for.
    for one in (*optimizers, wanted):
        one.param_groups[0]["initial_accumulator_value"] = 0.75
    for _ in range(2):
        for param, other in zip(ours, theirs):
            other.grad = torch.full_like(other, 0.5)
            (param * 0.5).sum().backward()
        for one in optimizers if make is by_itself else ():
            one.step()
            one.zero_grad()
        wanted.step()
        for param, other in zip(ours, theirs):
            torch.testing.assert_close(param, other, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_adagrads_first_states_follow_a_model_to_another_type_and_out_of_meta():
    for device in ("cpu", "meta"):
        model = nn.Linear(3, 2, device=device)
        optimizer = FusedOptimizer(model.parameters(), "adagrad", initial_accumulator_value=0.25)
        model.to_empty(device="cpu").to(torch.bfloat16)
        params = list(model.parameters()) if device == "cpu" else optimizer.param_groups[0]["params"]
        if device == "meta":
            params[:] = model.parameters()
        for param in params:
            param.data.fill_(1.0)
        give(params)
        optimizer.step()
        sums = [optimizer.state[param]["sum"] for param in params]
        assert all(torch.equal(value, torch.full_like(value, 1.25)) and value.dtype == torch.bfloat16 for value in sums)


@pytest.mark.parametrize("key", [key for key in instep.OPTIMIZERS if key != "adagrad"])
def test_no_other_optimizer_has_states_before_its_first_step(key):
    params = [one(), one()]
    optimizer = FusedOptimizer(params, key, states="8bit" if key == "lamb" else None)
    give(params[:1])
    assert not optimizer.state and not optimizer.state_dict()["state"]
    optimizer.step()
    assert params[1] not in optimizer.state and 1 not in optimizer.state_dict()["state"]
