"""Param groups: a misspelt key or a wrong value is refused before any step, and foreign keys are kept. The tests take
2 s.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.torch import FusedOptimizer, apply_optimizer_in_backward, register_ddp, register_fsdp
from instep.torch._groups import KNOWN

KEPT = [
    "params",
    "param_names",
    "initial_lr",
    "max_lr",
    "min_lr",
    "base_momentum",
    "max_momentum",
    "swa_lr",
    "lr_scale",
    "lr_mult",
]
KEPT += ["group_name", "name", "meta", "tag", "id", "wd", "step", "d_lr", "foreach", "fused", "capturable", "differentiable"]
KEPT += ["layer_decay", "fix_step", "use_muon", "is_frozen", "weight_decay_end", 3]


def slips(name: str) -> list[str]:
    """Yields a name with one letter lost, doubled, replaced, or swapped with its neighbour."""
    middle = len(name) // 2
    doubled, swapped = name[:middle] + name[middle] + name[middle:], name[:-2] + name[-1] + name[-2]
    lost = [name[:middle] + name[middle + 1 :]] if len(name) > 2 else []
    return [one for one in (*lost, doubled, swapped, name.upper()) if one != name]


@pytest.mark.parametrize("key", instep.OPTIMIZERS)
def test_a_slip_in_a_key_is_refused_with_the_name_that_was_meant(key):
    for name in instep.OPTIMIZERS[key].defaults:
        for slip in slips(name):
            if slip in KNOWN:
                continue
            optimizer = FusedOptimizer([nn.Parameter(torch.ones(1))], key)
            group = {"params": [nn.Parameter(torch.ones(1))], slip: 0.1}
            for call in (lambda: FusedOptimizer([group], key), lambda: optimizer.add_param_group(dict(group))):
                with pytest.raises(TypeError, match=f"{slip}: .* has no such hyperparameter; did you mean {name}"):
                    call()
            assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("key", instep.OPTIMIZERS)
def test_keys_of_others_are_kept(key):
    group = {
        "params": [nn.Parameter(torch.ones(1))],
        **{name: None for name in KEPT if name not in ("params", "param_names")},
    }
    group |= {name: None for name in KNOWN if name not in instep.OPTIMIZERS[key].defaults}
    group |= {"decoupled_weight_decay": key == "adamw", "differentiable": False}
    kept = FusedOptimizer([group], key).param_groups[0]
    assert all(name in kept for name in KEPT if name != "param_names")


@pytest.mark.parametrize("key", instep.OPTIMIZERS)
def test_text_is_no_number(key):
    for name, default in instep.OPTIMIZERS[key].defaults.items():
        for wrong in ("1e-3", "False", b"1", None, [0.1]):
            value = (wrong, wrong) if isinstance(default, tuple) else wrong
            with pytest.raises((TypeError, ValueError), match=name):
                FusedOptimizer([nn.Parameter(torch.ones(1))], key, **{name: value})
            optimizer = FusedOptimizer([nn.Parameter(torch.ones(1))], key)
            optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
            optimizer.param_groups[0][name] = value
            with pytest.raises((TypeError, ValueError), match=name):
                optimizer.step()
            assert optimizer.param_groups[0]["params"][0] == 1


def test_every_entry_refuses_a_slip():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        group = {"params": list(model.parameters()), "weight_decya": 0.1}
        with pytest.raises(TypeError, match="did you mean weight_decay"):
            register_ddp(DistributedDataParallel(model), "adamw", params=[group])
        sharded = fully_shard(nn.Linear(2, 2))
        with pytest.raises(TypeError, match="did you mean weight_decay"):
            register_fsdp(sharded, "adamw", params=[{**group, "params": list(sharded.parameters())}])
        with pytest.raises(TypeError, match="has no such hyperparameter"):
            apply_optimizer_in_backward("adamw", model.parameters(), {"weight_decya": 0.1})
        with pytest.raises(TypeError, match="lr = '1e-3': a text"):
            apply_optimizer_in_backward("adamw", model.parameters(), {"lr": "1e-3"})
    finally:
        dist.destroy_process_group()


def test_the_last_norm_is_there_after_an_ordinary_step():
    param = nn.Parameter(torch.zeros(2))
    optimizer = FusedOptimizer([param], "sgd", lr=1.0, max_norm=1.0)
    assert optimizer.last_norm() is None
    param.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert optimizer.last_norm() == 5.0


@pytest.mark.parametrize("kind", ["list of betas", "tensors in betas", "array as lr"])
def test_a_number_that_changes_inside_its_container_counts(kind):
    import numpy

    def trained(make):
        param = torch.nn.Parameter(torch.ones(1))
        zeros = torch.tensor(0.0), torch.tensor(0.0)
        betas = {"list of betas": [0.0, 0.0], "tensors in betas": zeros}.get(kind, (0.0, 0.0))
        lr = numpy.array(0.1) if kind == "array as lr" else 0.1
        optimizer = make([param], lr=lr, betas=betas, eps=1.0)
        for gradient in (1.0, 2.0):
            param.grad = torch.full((1,), gradient)
            optimizer.step()
            if kind == "list of betas":
                betas[0] = 0.5
            elif kind == "tensors in betas":
                betas[0].fill_(0.5)
            else:
                lr *= 0.5
        return param.item()

    expected = {"list of betas": 0.9 - 0.05, "tensors in betas": 0.9 - 0.05}.get(kind)
    found = trained(lambda params, **hyper: FusedOptimizer(params, "adam", **hyper))
    one_step = 1 - 0.1 * 1 / (1 + 1)
    # By hand: m after two steps with beta1 of 0, then 0.5, over 1 - beta1^2; v is the square of the last gradient.
    second = (0.5 * 1 + 0.5 * 2) / (1 - 0.25) if expected else 2.0
    assert found == pytest.approx(one_step - (0.1 if expected else 0.05) * second / (2 + 1), rel=1e-6)


@pytest.mark.parametrize("option", ["states", "master", "seed", "threads", "min_8bit_size"])
def test_an_option_of_the_whole_optimizer_is_refused_in_a_group(option):
    with pytest.raises(TypeError, match=f"{option}.*constructor"):
        FusedOptimizer([{"params": [torch.nn.Parameter(torch.ones(1))], option: 1}])


@pytest.mark.parametrize("key", ["sgd", "adamw", "rmsprop", "lamb"])
def test_a_rate_that_decays_for_ever_ends_as_zero(key):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedOptimizer([param], key, lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    for _ in range(330):
        param.grad = torch.ones(3)
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] < 1e-300 and torch.isfinite(param).all()


@pytest.mark.parametrize("key", ["sgd", "adamw", "adagrad"])
def test_an_empty_parameter_without_a_gradient_stops_no_step(key):
    empty, param = torch.nn.Parameter(torch.ones(0)), torch.nn.Parameter(torch.ones(2))
    optimizer = FusedOptimizer([empty, param], key, lr=0.5, max_norm=1.0)
    for has_gradient in (True, False, True):
        empty.grad = torch.ones(0) if has_gradient else None
        param.grad = torch.ones(2)
        before = param.detach().clone()
        optimizer.step()
        assert not torch.equal(param, before)


def test_a_parameter_of_another_shape_is_refused_by_name_before_anything_changes():
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedOptimizer([param])
    param.grad = torch.ones(4)
    optimizer.step()
    param.data, param.grad = torch.ones(2), torch.ones(2)
    states = {name: value[:2].clone() if value.dim() else value.clone() for name, value in optimizer.state[param].items()}
    optimizer.state[param] = states
    for _ in range(2):
        with pytest.raises(ValueError, match=r"parameter of \(2,\).*\(4,\)"):
            optimizer.step()
