"""Param groups are clipped together, alone or not at all. The results have the same bits as with one ordinary optimizer
per clip. The tests take 20 s.
"""

import copy

import clip_cases
import pytest
import torch

import instep
from instep.torch import AdamW, FusedOptimizer, apply_optimizer_in_backward

KINDS = ["ddp", "fsdp", "fsdp offload"]


def stepped_beside(key, max_norm, dtype=torch.float32, **options):
    """Returns both sides after three steps, and the optimizer that has all groups."""
    ours, theirs = clip_cases.model_of(3).to(dtype), clip_cases.model_of(3).to(dtype)
    own = FusedOptimizer(clip_cases.groups_of(ours), key, max_norm=max_norm, **options)
    wanted = clip_cases.OneEach(theirs, key, max_norm, **options)
    for step in range(3):
        torch.manual_seed(step)
        batch = torch.randn(5, 7, dtype=dtype)
        for side in (ours, theirs):
            side(batch, clip_cases.FACTORS).backward()
        wanted.step()
        own.step()
        own.zero_grad()
        assert own.last_norm() == wanted.every[0].last_norm() or max_norm is None
    return ours, theirs, own


@pytest.mark.parametrize("max_norm", [0.1, None])
@pytest.mark.parametrize("key", instep.OPTIMIZERS)
def test_groups_have_the_bits_of_an_optimizer_for_each_clip(key, max_norm):
    ours, theirs, _ = stepped_beside(key, max_norm, lr=0.1)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


@pytest.mark.parametrize("options", [{"states": "8bit"}, {"master": "remainder16"}], ids=str)
def test_formats_do_not_matter_to_it(options):
    ours, theirs, _ = stepped_beside("adamw", 0.1, torch.bfloat16, **options)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def test_each_group_is_clipped_as_torch_clips():
    ours, theirs = clip_cases.model_of(1), clip_cases.model_of(1)
    groups = clip_cases.groups_of(ours)
    stepped = FusedOptimizer(groups, "sgd", lr=1.0, max_norm=0.1)
    for side in (ours, theirs):
        side(torch.ones(2, 7), clip_cases.FACTORS).backward()
    stepped.step()
    of = clip_cases.groups_of(theirs)
    together = [param for group in of if "max_norm" not in group for param in group["params"]]
    torch.nn.utils.clip_grad_norm_(together, 0.1)
    for group in of:
        if group.get("max_norm") is not None:
            torch.nn.utils.clip_grad_norm_(group["params"], group["max_norm"])
    torch.optim.SGD(theirs.parameters(), lr=1.0).step()
    for own, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_a_group_may_begin_and_end_to_clip_alone_and_keeps_its_states():
    ours, theirs = clip_cases.model_of(1), clip_cases.model_of(1)
    stepped = FusedOptimizer(clip_cases.groups_of(ours, [{}] * 5), "adamw", lr=0.1, max_norm=0.1)
    every = [FusedOptimizer(clip_cases.groups_of(theirs, [{}] * 5), "adamw", lr=0.1)]
    for limit in ({}, {"max_norm": 0.02}, {"max_norm": None}, {}):
        stepped.param_groups[2].pop("max_norm", None)
        stepped.param_groups[2].update(limit)
        for side in (ours, theirs):
            side(torch.ones(2, 7), clip_cases.FACTORS).backward()
        groups = clip_cases.groups_of(theirs, [{}, {}, limit, {}, {}])
        for one in (False, True):
            some = [p for group in groups if ("max_norm" in group) == one for p in group["params"]]
            if some and (not one or limit["max_norm"]):
                torch.nn.utils.clip_grad_norm_(some, limit["max_norm"] if one else 0.1)
        for optimizer in (stepped, *every):
            optimizer.step()
            optimizer.zero_grad()
        for own, other in zip(ours.parameters(), theirs.parameters()):
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    assert all(int(state["step"]) == 4 for state in stepped.state.values())


def test_many_groups_without_a_clip_are_one_launch():
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(50)]
    optimizer = AdamW([{"params": [param], "max_norm": None} for param in params], max_norm=1.0)
    for param in params:
        param.grad = torch.ones(3)
    optimizer.step()
    assert len(optimizer._engine.arenas) == 1 and optimizer.last_norm() == 0.0


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), float("nan"), "1.0", [1.0]])
def test_a_number_that_clips_nothing_is_refused_when_it_is_given_and_when_it_is_set(wrong):
    param = torch.nn.Parameter(torch.ones(3))
    with pytest.raises((ValueError, TypeError), match="max_norm = "):
        FusedOptimizer([{"params": [param], "max_norm": wrong}])
    optimizer = FusedOptimizer([{"params": [param], "max_norm": 1.0}])
    param.grad = torch.ones(3)
    optimizer.param_groups[0]["max_norm"] = wrong
    with pytest.raises((ValueError, TypeError), match="max_norm = "):
        optimizer.step()
    assert torch.equal(param, torch.ones(3))


def test_a_checkpoint_does_not_change_who_is_clipped():
    _, _, saved = stepped_beside("adamw", 0.1)
    ours = clip_cases.model_of(3)
    for limits in ([{}] * 5, clip_cases.LIMITS):
        other = FusedOptimizer(clip_cases.groups_of(ours, limits), "adamw", max_norm=0.1)
        other.load_state_dict(copy.deepcopy(saved.state_dict()))
        found = [{name: group[name] for name in ("max_norm",) if name in group} for group in other.param_groups]
        assert found == limits
        ours(torch.ones(2, 7), clip_cases.FACTORS).backward()
        other.step()


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("limits", [(1.0, 2.0), (1.0, None), (1.0, {})], ids=str)
def test_under_a_scaler_one_gradient_that_is_not_finite_skips_the_steps_of_all_groups(limits, is_fused):
    """With ``fused=True``, the scaler leaves the decision to the step, which gets the scale and ``found_inf``."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in limits]
    groups = [{"params": [p], **({"max_norm": limit} if limit != {} else {})} for p, limit in zip(params, limits)]
    optimizer = AdamW(groups, lr=0.1, max_norm=3.0, fused=is_fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for spoiled, wrong in ((0, torch.inf), (1, torch.nan), (None, 0.0)):
        factors = [wrong if place == spoiled else 1.0 for place in range(2)]
        scaler.scale(sum(param.sum() * factor for param, factor in zip(params, factors))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        is_same = [torch.equal(param, torch.ones(3)) for param in params]
        assert all(is_same) if spoiled is not None else not any(is_same), (spoiled, params)
    assert scaler.get_scale() == 2.0 and all(state["step"] == 1 for state in optimizer.state.values())


def test_without_a_scaler_an_infinite_gradient_spoils_only_groups_that_are_clipped_with_it():
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = AdamW([{"params": [param], "max_norm": 1.0} for param in params], lr=0.1)
    params[0].grad, params[1].grad = torch.full((3,), torch.inf), torch.ones(3)
    optimizer.step()
    assert params[0].isnan().all()
    assert params[1].isfinite().all() and not torch.equal(params[1], torch.ones(3))
    with pytest.raises(TypeError, match="skip_nonfinite"):
        FusedOptimizer(params, skip_nonfinite=True)


def test_one_parameters_optimizer_refuses_it():
    param = torch.nn.Parameter(torch.ones(3))
    apply_optimizer_in_backward("sgd", [param], {"lr": 0.1})
    [optimizer] = param._in_backward_optimizers
    optimizer.param_groups[0]["max_norm"] = 1.0
    with pytest.raises(ValueError, match="one parameter's optimizer does not know the norm"):
        param.sum().backward()
    assert torch.equal(param, torch.ones(3))


def test_a_slip_in_its_name_is_refused():
    with pytest.raises(TypeError, match="did you mean max_norm"):
        FusedOptimizer([{"params": [torch.nn.Parameter(torch.ones(3))], "max_nrom": 1.0}])


@pytest.mark.parametrize("max_norm", [0.1, None])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_clip_groups_as_ordinary_optimizers_do(two, kind, max_norm):
    two.run("clip_cases", "trained", kind=kind, max_norm=max_norm)


@pytest.mark.parametrize("kind", KINDS)
def test_one_gradient_that_is_not_finite_skips_the_steps_of_all_groups(two, kind):
    two.run("clip_cases", "skipped", kind=kind)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_with_whom_a_group_is_clipped_is_known_at_registration(two, kind):
    two.run("clip_cases", "fixed", kind=kind)


def test_an_offloaded_model_clips_groups():
    for max_norm in (0.1, None):
        clip_cases.trained(0, 1, "offload", max_norm)
    clip_cases.skipped(0, 1, "offload")
