"""Compares FusedOptimizer with torch's optimizer under PyTorch's schedulers and weight averaging. The tests take 6 s."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from instep.torch import FusedOptimizer


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def groups(net: nn.Module) -> list[dict]:
    return [{"params": net[0].parameters()}, {"params": [*net[1].parameters(), *net[2].parameters()], "lr": 0.5}]


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05}),
    "tensor-lr": (torch.optim.Adam, {"lr": 0.05}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.05, "momentum": 0.5}),
}
SCHEDULES = {
    "lambda": lambda o: schedules.LambdaLR(o, [lambda epoch: 0.9**epoch, lambda epoch: 1 / (1 + epoch)]),
    "multiplicative": lambda o: schedules.MultiplicativeLR(o, lambda epoch: 0.9),
    "step": lambda o: schedules.StepLR(o, 3, 0.1),
    "multi_step": lambda o: schedules.MultiStepLR(o, [2, 5, 5, 9]),
    "constant": lambda o: schedules.ConstantLR(o, 0.5, 4),
    "linear": lambda o: schedules.LinearLR(o, 0.1, total_iters=5),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.9),
    "polynomial": lambda o: schedules.PolynomialLR(o, 6, 2.0),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 8, 1e-4),
    "warm_restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3, 2),
    "one_cycle": lambda o: schedules.OneCycleLR(o, [0.1, 0.5], total_steps=20),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, [0.1, 0.5], step_size_up=3, cycle_momentum="momentum" in o.defaults),
    "chained": lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o, 0.5, 3), schedules.ExponentialLR(o, 0.9)]),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o, 0.1, 2), schedules.ExponentialLR(o, 0.9)], [3]
    ),
    "swa": lambda o: SWALR(o, swa_lr=0.02, anneal_epochs=4),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, factor=0.5, patience=1),
}


def numbers(optimizer: torch.optim.Optimizer) -> list:
    """Returns the values that a schedule may write, for all groups."""
    names = ("lr", "momentum", "betas", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")
    plain = lambda value: float(value) if isinstance(value, torch.Tensor) else value
    return [{name: plain(group[name]) for name in names if name in group} for group in optimizer.param_groups]


def train(net: nn.Module, optimizer: torch.optim.Optimizer, schedule, number: int) -> None:
    """Steps with gradients that depend only on the step's number. Real gradients would be mere rounding errors at the
    batch norm.
    """
    torch.manual_seed(number)
    net(torch.randn(8, 3))
    for param in net.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    schedule.step(*([1.0] if isinstance(schedule, schedules.ReduceLROnPlateau) else []))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_schedule_has_the_same_numbers_and_effect_and_resumes(name, schedule):
    cls, options = OPTIMIZERS[name]
    options = {**options, "lr": torch.tensor(0.05)} if name == "tensor-lr" else options
    (net, optimizer), (other, wanted) = (
        (one, make(groups(one)))
        for make, one in (
            (lambda ps: FusedOptimizer(ps, cls, **copy.deepcopy(options)), model()),
            (lambda ps: cls(ps, **copy.deepcopy(options)), model()),
        )
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Such as "lr_scheduler.step() before optimizer.step()".
        warnings.filterwarnings("ignore", "The epoch parameter")
        ours, theirs = SCHEDULES[schedule](optimizer), SCHEDULES[schedule](wanted)
        for number in range(12):
            train(net, optimizer, ours, number)
            train(other, wanted, theirs, number)
            assert numbers(optimizer) == numbers(wanted)
            if number == 6:
                saved = copy.deepcopy((optimizer.state_dict(), ours.state_dict()))
                optimizer = FusedOptimizer(groups(net), cls, **copy.deepcopy(options))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    ours = SCHEDULES[schedule](optimizer)
                optimizer.load_state_dict(saved[0])
                ours.load_state_dict(saved[1])
                optimizer._opt_called = True
    for p, q in zip(net.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_a_schedule_that_steps_first_is_warned_of():
    net = model()
    optimizer = FusedOptimizer(net.parameters(), "adamw")
    schedule = schedules.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match="before"):
        schedule.step()


def test_a_schedule_and_its_optimizer_are_freed_without_the_collector():
    net = model()
    optimizer = FusedOptimizer(net.parameters(), "adamw")
    schedule = schedules.LambdaLR(optimizer, lambda epoch: 1.0)
    train(net, optimizer, schedule, 0)
    seen = weakref.ref(optimizer), weakref.ref(schedule), weakref.ref(optimizer._engine)
    gc.disable()
    try:
        del schedule, optimizer
        assert all(ref() is None for ref in seen)
    finally:
        gc.enable()


def test_a_group_that_is_added_later_is_scheduled_with_the_others():
    net, other = model(), model()
    pairs = []
    for one, make in (
        (net, lambda ps: FusedOptimizer(ps, "adamw", lr=0.1)),
        (other, lambda ps: torch.optim.AdamW(ps, lr=0.1)),
    ):
        optimizer = make(one[0].parameters())
        schedule = schedules.ExponentialLR(optimizer, 0.5)
        train(one, optimizer, schedule, 0)
        optimizer.add_param_group({"params": one[2].parameters(), "lr": 0.3, "initial_lr": 0.3})
        schedule.base_lrs.append(0.3)
        for number in range(1, 4):
            train(one, optimizer, schedule, number)
        pairs.append(optimizer)
    assert numbers(pairs[0]) == numbers(pairs[1])
    for p, q in zip(net.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.9)], ids=["mean", "ema"])
@pytest.mark.parametrize("use_buffers", [False, True])
def test_averages_of_weights_are_those_of_torch(average, use_buffers):
    averages = []
    for make in (
        lambda ps: FusedOptimizer(ps, "sgd", lr=0.1, momentum=0.9),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    ):
        net = model()
        optimizer, averaged = make(net.parameters()), AveragedModel(net, multi_avg_fn=average, use_buffers=use_buffers)
        schedule, swa = schedules.CosineAnnealingLR(optimizer, 4), SWALR(optimizer, 0.05, anneal_epochs=2)
        history = []
        for number in range(8):
            train(net, optimizer, schedule if number < 4 else swa, number)
            if number >= 4:
                averaged.update_parameters(net)
                history.append(net[0].weight.detach().clone())
        if average is None:
            torch.testing.assert_close(averaged.module[0].weight, torch.stack(history).mean(0))
        torch.manual_seed(9)
        update_bn([torch.randn(8, 3) for _ in range(3)], averaged)
        saved = copy.deepcopy(averaged.state_dict())
        averaged.load_state_dict(saved)
        averages.append(list(averaged.state_dict().values()))
        # The average has memory of its own, and the optimizer goes on with the model's.
        train(net, optimizer, swa, 8)
        assert torch.equal(averaged.module[0].weight, saved["module.0.weight"])
    for ours, theirs in zip(*averages):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_weights_that_are_swapped_for_their_average_go_on_as_the_users():
    net = model()
    optimizer, averaged = FusedOptimizer(net.parameters(), "adamw", lr=0.1), AveragedModel(net)
    schedule = schedules.ConstantLR(optimizer)
    for number in range(3):
        train(net, optimizer, schedule, number)
        averaged.update_parameters(net)
    with torch.no_grad():
        for param, mean in zip(net.parameters(), averaged.module.parameters()):
            param.data = mean.detach().clone()
    before = [param.detach().clone() for param in net.parameters()]
    optimizer.param_groups[0]["lr"] = 0.0
    train(net, optimizer, schedule, 3)
    assert all(torch.equal(param, old) for param, old in zip(net.parameters(), before))
    assert optimizer.state[net[0].weight]["step"] == 4
