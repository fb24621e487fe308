"""Compares optimizers in backward, without DDP, with PyTorch's function and with ordinary optimizers."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers

import instep
from instep.torch import FusedOptimizer, InBackwardOptimizer, apply_optimizer_in_backward, get_in_backward_optimizers


def two_layers(shared: bool = False) -> nn.Sequential:
    """Returns two linear layers, which may share a weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    if shared:
        model[1].weight = model[0].weight
    return model


def backward(model: nn.Module, step: int) -> None:
    """Makes one backward pass."""
    torch.manual_seed(step)
    model(torch.randn(4, 10)).pow(2).sum().backward()


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
def test_weights_and_biases_step_as_the_originals_step_them(shared):
    ours, theirs = two_layers(shared), two_layers(shared)
    for apply, model in ((apply_optimizer_in_backward, ours), (_apply_optimizer_in_backward, theirs)):
        apply(torch.optim.SGD, [layer.weight for layer in model], {"lr": 1e-3})
        apply(torch.optim.SGD, [layer.bias for layer in model], {"lr": 5e-4})
    for step in range(6):
        backward(ours, step)
        backward(theirs, step)
        for p, q in zip(ours.parameters(), theirs.parameters()):
            assert p.grad is None and q.grad is None
            assert torch.allclose(p, q, rtol=1e-6, atol=1e-7), step


def test_attached_optimizers_without_a_hook_leave_parameters_alone():
    model = two_layers()
    before = copy.deepcopy(model.state_dict())
    apply_optimizer_in_backward("sgd", model.parameters(), {"lr": 1.0}, register_hook=False)
    backward(model, 0)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is not None for p in model.parameters())
    for optimizer in get_in_backward_optimizers(model):
        optimizer.step()
    assert not any(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_several_optimizers_run_in_order():
    ours, theirs = two_layers(), two_layers()
    for lr in (0.003, 0.001):
        apply_optimizer_in_backward(torch.optim.Adam, ours.parameters(), {"lr": lr})
    wanted = [torch.optim.Adam(theirs.parameters(), lr=lr) for lr in (0.003, 0.001)]
    for step in range(6):
        backward(ours, step)
        backward(theirs, step)
        for optimizer in wanted:
            optimizer.step()
        theirs.zero_grad()
        for p, q in zip(ours.parameters(), theirs.parameters()):
            assert torch.allclose(p, q, rtol=1e-5, atol=1e-6), step
            p.data.copy_(q)


def test_every_parameter_has_its_own_optimizer_where_torch_looks_for_it():
    model = two_layers()
    apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 0.1})
    ours = get_in_backward_optimizers(model)
    assert len(ours) == 4 and all(isinstance(one, InBackwardOptimizer) for one in ours)
    assert [one is two for one, two in zip(ours, _get_in_backward_optimizers(model))] == [True] * 4
    assert [one.param_groups[0]["params"][0] is p for one, p in zip(ours, model.parameters())] == [True] * 4


def test_a_checkpoint_of_each_optimizer_resumes():
    model, twin = two_layers(), two_layers()
    for one in (model, twin):
        apply_optimizer_in_backward(torch.optim.AdamW, one.parameters(), {"lr": 0.01})
    for step in range(3):
        backward(model, step)
    twin.load_state_dict(model.state_dict())
    for one, two in zip(get_in_backward_optimizers(model), get_in_backward_optimizers(twin)):
        two.load_state_dict(copy.deepcopy(one.state_dict()))
    for step in range(3):
        backward(model, step)
        backward(twin, step)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters()))
    assert float(get_in_backward_optimizers(twin)[0].state_dict()["state"][0]["step"]) == 6


def test_an_unknown_optimizer_is_refused_before_anything_is_attached():
    model = two_layers()
    with pytest.raises(ValueError, match="use one of sgd"):
        apply_optimizer_in_backward(torch.optim.LBFGS, model.parameters(), {})
    assert not get_in_backward_optimizers(model)


@pytest.mark.parametrize(
    "options, frozen, text",
    [({"max_norm": 1.0}, False, "max_norm"), ({"lr": -1.0}, False, "lr = -1"), ({}, True, "takes no gradient")],
)
def test_what_backward_cannot_do_is_refused_before_anything_is_attached(options, frozen, text):
    model = two_layers()
    model[1].bias.requires_grad_(not frozen)
    with pytest.raises(ValueError, match=text):
        apply_optimizer_in_backward("sgd", model.parameters(), options)
    assert not get_in_backward_optimizers(model)


def test_optimizers_are_copied_and_saved_each_by_itself(tmp_path):
    model = two_layers()
    apply_optimizer_in_backward("adamw", model.parameters(), {"lr": 0.01})
    backward(model, 0)
    one = get_in_backward_optimizers(model)[0]
    twin = copy.deepcopy(one)
    assert float(twin.state_dict()["state"][0]["step"]) == 1
    torch.save(one.state_dict(), tmp_path / "one")
    assert (tmp_path / "one").stat().st_size < 8000
    assert model[0].weight._optimizer_classes == ["adamw"] and model[0].weight._optimizer_kwargs == [{"lr": 0.01}]


def test_small_parameters_may_keep_states_of_float32_and_go_on_from_a_saved_state():
    params = [torch.nn.Parameter(torch.ones(count)) for count in (8, 512)]
    twins = [torch.nn.Parameter(torch.ones(count)) for count in (8, 512)]
    for some in (params, twins):
        apply_optimizer_in_backward("adamw", some, {"states": "8bit", "min_8bit_size": 256})
    for _ in range(2):
        for param in params:
            param.square().sum().backward()
    for param, twin in zip(params, twins):
        twin.data.copy_(param)
        twin._in_backward_optimizers[0].load_state_dict(param._in_backward_optimizers[0].state_dict())
        for one in (param, twin):
            one.square().sum().backward()
        assert torch.equal(param, twin)
    kept = [param._in_backward_optimizers[0].state[param]["exp_avg"].dtype for param in params]
    assert kept == [torch.float32, torch.uint8]


class Given(torch.autograd.Function):
    """A function whose gradient is float32 for a parameter of any type."""

    @staticmethod
    def forward(ctx, param, grad):
        ctx.save_for_backward(grad)
        return param.float().sum()

    @staticmethod
    def backward(ctx, _):
        return ctx.saved_tensors[0].clone(), None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("key", instep.OPTIMIZERS)
def test_gradients_of_float32_are_taken_as_they_are(key, dtype):
    param, whole = (nn.Parameter(torch.ones(4, dtype=some)) for some in (dtype, torch.float32))
    param.grad_dtype = torch.float32
    options = {"lr": 2.0**-17, "states": "float32"}
    apply_optimizer_in_backward(key, [param], options)
    wanted = FusedOptimizer([whole], key, **options)
    for grad in (torch.full((4,), 70000.0), torch.full((4,), 1.00001)):
        Given.apply(param, grad).backward()
        whole.grad = grad
        wanted.step()
        if grad[0] == 70000:
            assert torch.equal(param, whole.to(dtype))
        for name, value in wanted.state[whole].items():
            found = param._in_backward_optimizers[0].state[param][name]
            # LAMB's norms are of parameters that are rounded here.
            assert torch.equal(found, value) or key == "lamb" and torch.allclose(found, value), name
