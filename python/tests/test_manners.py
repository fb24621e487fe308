"""FusedOptimizer behaves as a torch.optim user expects: param groups, options, gradients of other types, views,
scalers.
"""

import copy

import pytest
import torch
from conftest import build, give_gradients, largest_difference
from torch import nn

import instep
from instep.torch import FusedOptimizer

TORCH = {name.lower(): getattr(torch.optim, name) for name in dir(torch.optim) if name[0].isupper()}
BOTH = [key for key in instep.OPTIMIZERS if key in TORCH]


def one(*size: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(*(size or (4,)), dtype=dtype))


@pytest.mark.parametrize("key", BOTH)
def test_param_groups_have_torchs_keys_and_values(key):
    ours, theirs = FusedOptimizer([one()], key), TORCH[key]([one()])
    for mine, other in zip(ours.param_groups, theirs.param_groups):
        assert {name: value for name, value in mine.items() if name != "params"}.items() >= {
            name: value for name, value in other.items() if name not in ("params", "lr", "initial_accumulator_value")
        }.items()
        assert mine.keys() == other.keys()


@pytest.mark.parametrize("key", BOTH)
def test_state_dicts_are_equal_in_keys_and_load_both_ways(key):
    (ours, p), (theirs, q) = (
        (make([some]), some) for make, some in ((lambda ps: FusedOptimizer(ps, key), one()), (TORCH[key], one()))
    )
    for param, optimizer in ((p, ours), (q, theirs)):
        param.grad = torch.ones(4)
        optimizer.step()
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine["param_groups"][0].keys() == other["param_groups"][0].keys()
    assert [state.keys() for state in mine["state"].values()] == [state.keys() for state in other["state"].values()]
    theirs.load_state_dict(copy.deepcopy(mine))
    ours.load_state_dict(copy.deepcopy(other))
    for param, optimizer in ((p, ours), (q, theirs)):
        optimizer.step()
    assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


def test_how_torch_should_run_a_step_is_taken_and_differentiable_alone_refused():
    options = {"foreach": True, "fused": False, "capturable": True, "differentiable": False}
    for key in instep.OPTIMIZERS:
        FusedOptimizer([one()], key, **options)
        for make in (
            lambda: FusedOptimizer([one()], key, differentiable=True),
            lambda: FusedOptimizer([{"params": [one()], "differentiable": True}], key),
        ):
            with pytest.raises(NotImplementedError, match="differentiable=True"):
                make()
    with pytest.raises(ValueError, match="another rule.*use AdamW"):
        FusedOptimizer([one()], "adam", decoupled_weight_decay=True)
    with pytest.raises(ValueError, match="another rule.*use Adam$"):
        FusedOptimizer([one()], "adamw", decoupled_weight_decay=False)
    FusedOptimizer([one()], "nadam", decoupled_weight_decay=True)


MISSPELT = ["weight_decya", "weigth_decay", "weight_decai", "weightdecay", "Lr", "lrs", "beta", "amsgard", "maximise", "epss"]


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_key_of_a_param_group_is_refused_with_the_name_that_was_meant(name):
    meant = {"weight": "weight_decay", "lr": "lr", "beta": "betas", "ams": "amsgrad", "max": "maximize", "eps": "eps"}
    [wanted] = [
        hyper
        for start, hyper in meant.items()
        if name.lower().startswith(start) or name.startswith("weig") and start == "weight"
    ]
    with pytest.raises(TypeError, match=f"{name}: AdamW has no such hyperparameter; did you mean {wanted}?"):
        FusedOptimizer([{"params": [one()], name: 0.1}], "adamw")
    optimizer = FusedOptimizer([one()], "adamw")
    with pytest.raises(TypeError, match="did you mean"):
        optimizer.add_param_group({"params": [one()], name: 0.1})
    assert len(optimizer.param_groups) == 1


# Of schedulers, SWA, timm, Transformers, layer-wise decay, DCP and their users.
KEPT = [
    "initial_lr",
    "max_lr",
    "min_lr",
    "base_lr",
    "swa_lr",
    "lr_scale",
    "base_momentum",
    "max_momentum",
    "name",
    "id",
    "tag",
]
KEPT += [
    "param_names",
    "group_name",
    "layer_id",
    "lr_mult",
    "decay_mult",
    "weight_decay_scale",
    "use_muon",
    "ema",
    "type",
    "no",
]


@pytest.mark.parametrize("key", instep.OPTIMIZERS)
def test_other_keys_are_kept(key):
    optimizer = FusedOptimizer([{"params": [one()], **dict.fromkeys(KEPT, 3)}], key)
    assert all(optimizer.param_groups[0][name] == 3 for name in KEPT)
    twin = FusedOptimizer([one()], key)
    twin.load_state_dict(optimizer.state_dict())
    assert all(twin.param_groups[0][name] == 3 for name in KEPT)


def test_a_text_is_no_number():
    for options in ({"lr": "1e-3"}, {"betas": ("0.9", 0.99)}, {"weight_decay": "0"}):
        with pytest.raises(TypeError, match="a text; give a number"):
            FusedOptimizer([one()], "adamw", **options)
    optimizer = FusedOptimizer([one()], "adamw")
    optimizer.param_groups[0]["lr"] = "1e-3"
    optimizer.param_groups[0]["params"][0].grad = torch.ones(4)
    with pytest.raises(TypeError, match="lr = '1e-3'"):
        optimizer.step()


@pytest.mark.parametrize("states", [None, "8bit", "bfloat16"])
@pytest.mark.parametrize("key", instep.OPTIMIZERS)
def test_empty_parameters_of_any_type_are_stepped_beside_others(key, states):
    params = [one(300), one(0, dtype=torch.bfloat16), one(0), one(2, 0)]
    try:
        optimizer = FusedOptimizer(params, key, states=states)
    except ValueError as error:
        assert (key, states) in (("adadelta", "8bit"), ("rprop", "8bit")), error
        return
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert not torch.equal(params[0], torch.ones(300))
    if "step" in optimizer.state[params[0]]:
        assert all(optimizer.state[param]["step"] == 2 for param in params)
    twin = FusedOptimizer(params, key, states=states)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.step()


LATE = {
    "of torch.float64": lambda: one(dtype=torch.float64),
    "of torch.complex64": lambda: one(dtype=torch.complex64),
    "on meta": lambda: nn.Parameter(torch.ones(4, device="meta")),
    "share memory": lambda: nn.Parameter(torch.ones(1).expand(4)),
    "the other sign": lambda: nn.Parameter(torch._neg_view(torch.ones(4))),
}


@pytest.mark.parametrize("kind", LATE)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_what_one_parameter_is_refused_for_comes_before_any_other_is_stepped(kind, max_norm):
    params = [one(), one(dtype=torch.bfloat16), LATE[kind](), LATE[kind]()]
    optimizer = FusedOptimizer(params, "adamw", max_norm=max_norm)
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(NotImplementedError, match=f"parameter.*{kind}"):
        optimizer.step()
    assert torch.equal(params[0], torch.ones(4)) and torch.equal(params[1], torch.ones(4, dtype=torch.bfloat16))
    assert not optimizer.state


VIEWS = {
    "column": lambda w: w[..., 0],
    "every_second": lambda w: w[:, ::2],
    "block": lambda w: w[1:3, 1:3],
    "transposed_block": lambda w: w[1:3, 1:4, 1:].transpose(0, 1),
}


@pytest.mark.parametrize("dtype, options", [(torch.float32, {}), (torch.bfloat16, {"master": "float32"})], ids=str)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("key", BOTH)
def test_parameters_with_gaps_between_elements_are_stepped(key, view, dtype, options):
    wholes = [torch.linspace(-1, 1, 96, dtype=dtype).view(4, 6, 4) for _ in range(2)]
    ours, theirs = (nn.Parameter(VIEWS[view](whole)) for whole in wholes)
    optimizer = FusedOptimizer([ours], key, lr=0.1, **options)
    wanted = TORCH[key]([theirs], lr=0.1, foreach=False)
    for number in range(4):
        grad = torch.linspace(-1, 2, ours.numel(), dtype=dtype).view(ours.shape) * (1 - 0.4 * number)
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        optimizer.step()
        if dtype == torch.float32:
            wanted.step()
    if dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(wholes[0], wholes[1], rtol=1e-5, atol=2e-6)  # And nothing between them has changed.
    else:
        assert torch.equal(optimizer.state[ours]["master"].bfloat16(), ours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("max_norm", [None, 1e6])
def test_gradients_of_another_type_than_their_parameters_are_taken_as_they_are(dtype, max_norm):
    params = [one(dtype=dtype), one(dtype=dtype), one(dtype=dtype)]
    optimizer = FusedOptimizer(params, "sgd", lr=2.0**-17, momentum=0.5, max_norm=max_norm)
    for grads in ((70000.0, 1.0, None), (None, 1.0, 0.0)):
        for k, (param, grad) in enumerate(zip(params, grads)):
            param.grad_dtype = torch.float32 if k == 0 else dtype
            param.grad = None if grad is None else torch.full((4,), grad, dtype=param.grad_dtype)
        optimizer.step()
    assert torch.equal(params[0], torch.full((4,), 1 - 70000 * 2.0**-17, dtype=dtype))
    assert float(optimizer.state[params[0]]["momentum_buffer"][0]) == pytest.approx(70000, rel=4e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("key", instep.OPTIMIZERS)
def test_every_optimizer_steps_with_float32_gradients_as_they_are(key, dtype):
    param, whole = one(dtype=dtype), one()
    param.grad_dtype = torch.float32
    optimizers = [FusedOptimizer([some], key, lr=2.0**-17, states="float32") for some in (param, whole)]
    param.grad, whole.grad = torch.full((4,), 70000.0), torch.full((4,), 70000.0)
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(param, whole.to(dtype))
    for name, value in optimizers[1].state[whole].items():
        assert torch.equal(optimizers[0].state[param][name], value) and torch.isfinite(value).all()


def test_a_float32_gradient_moves_a_bfloat16_parameter_by_its_own_value():
    param, whole = one(dtype=torch.bfloat16), one()
    param.grad_dtype = torch.float32
    param.grad, whole.grad = torch.full((4,), 1.00001), torch.full((4,), 1.00001)
    optimizers = [
        FusedOptimizer([some], "adamw", states="float32", master=master)
        for some, master in ((param, "float32"), (whole, None))
    ]
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(optimizers[0].state[param]["master"], whole)
    assert torch.equal(optimizers[0].state[param]["exp_avg"], optimizers[1].state[whole]["exp_avg"])


def largest_gradient_difference(model, other) -> float:
    grads = [[one.grad for one in side.parameters() if one.grad is not None] for side in (model, other)]
    return max(float((p - q).abs().max() / (q.abs().max() * 2.0**-23).clamp(1e-30)) for p, q in zip(*grads))


def test_a_fused_step_takes_the_scale_out_of_gradients_of_any_form():
    param = nn.Parameter(torch.ones(3, 4))
    for grad in (torch.full((4, 3), 8.0).t(), torch.full((3, 8), 8.0)[:, ::2]):
        optimizer = FusedOptimizer([param], "sgd", lr=0.5, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(1))
        before, param.grad = param.detach().clone(), grad
        scaler.step(optimizer)
        assert param.grad is grad and torch.equal(grad, torch.full((3, 4), 2.0)) and torch.equal(param, before - 1.0)
        # Without a scaler nothing writes into it.
        optimizer.step()
        assert torch.equal(grad, torch.full((3, 4), 2.0)) and torch.equal(param, before - 2.0)


@pytest.mark.parametrize("fused", [None, False, True])
def test_a_scaler_leaves_its_scale_in_gradients_with_fused_alone_and_clips_between(fused):
    ours, theirs = build(), build()
    optimizer, wanted = (
        FusedOptimizer(ours.parameters(), "adamw", fused=fused),
        torch.optim.AdamW(theirs.parameters(), fused=fused),
    )
    assert (
        getattr(optimizer, "_step_supports_amp_scaling", False)
        == getattr(wanted, "_step_supports_amp_scaling", False)
        == bool(fused)
    )
    assert copy.deepcopy(optimizer)._step_supports_amp_scaling == bool(fused)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    for number in range(6):
        give_gradients(theirs, ours, number)
        for model, one_, scaler in ((ours, optimizer, scalers[0]), (theirs, wanted, scalers[1])):
            scaler.scale(torch.ones(1))
            with torch.no_grad():
                for param in model.parameters():
                    if param.grad is not None:
                        param.grad.mul_(float("inf") if number == 2 else scaler.get_scale())
            if number % 2:
                scaler.unscale_(one_)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(one_)
            scaler.update()
        if number != 2:  # What torch leaves in a pass that it skips depends on how it skips.
            assert largest_gradient_difference(ours, theirs) <= 16
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert optimizer.state_dict()["state"][0]["step"] == 5
    assert largest_difference(ours, theirs) <= 16


def test_last_norm_is_that_of_the_last_step():
    param = one()
    optimizer = FusedOptimizer([param], "sgd", lr=1.0, max_norm=1.0)
    assert optimizer.last_norm() is None
    for value in (3.0, 5.0):
        param.grad = torch.full((4,), value)
        optimizer.step()
        assert optimizer.last_norm() == 2 * value
    assert FusedOptimizer([param], "sgd").last_norm() is None


@pytest.mark.parametrize("key", instep.OPTIMIZERS)
def test_an_empty_group_may_be_saved_without_its_hyperparameters(key):
    optimizers = [FusedOptimizer([{"params": []}, {"params": [one()], "lr": 0.25}], key, lr=0.5) for _ in range(2)]
    saved = copy.deepcopy(optimizers[0].state_dict())
    saved["param_groups"][0] = {"params": []}
    saved["param_groups"][1]["lr"] = 0.125
    optimizers[1].load_state_dict(saved)
    assert [group["lr"] for group in optimizers[1].param_groups] == [0.5, 0.125]
    optimizers[1].param_groups[0]["params"].append(one())
    for group in optimizers[1].param_groups:
        group["params"][0].grad = torch.ones(4)
    optimizers[1].step()
