"""Compares FusedOptimizer with torch.optim: both make the same updates and behave in the same way."""

import copy
import io
import os
import pickle
import select
import signal
import threading
import time

import pytest
import torch
from conftest import build, give_gradients, largest_difference

import instep
from instep.torch import FusedOptimizer
from instep.torch._arena import Arena
from instep.torch._norm import GlobalNorm

TORCH = {name.lower(): getattr(torch.optim, name) for name in dir(torch.optim) if name[0].isupper()}
# The options that PyTorch's own tests give each optimizer, without those that choose how a step is run.
CONFIGURATIONS = [
    ("sgd", {"lr": 1e-2}),
    ("sgd", {"lr": 1e-2, "weight_decay": 0.5}),
    ("sgd", {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}),
    ("sgd", {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    ("sgd", {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    ("adam", {}),
    ("adam", {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    ("adam", {"lr": 1e-2, "betas": (0.8, 0.88), "eps": 1e-6, "maximize": True}),
    ("adamw", {}),
    ("adamw", {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    ("adamw", {"lr": torch.tensor(1e-3)}),
    ("adagrad", {"lr": 0.1}),
    ("adagrad", {"lr": 0.1, "lr_decay": 0.5, "weight_decay": 0.1}),
    ("adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1}),
    ("adadelta", {}),
    ("adadelta", {"weight_decay": 0.1, "rho": 0.95}),
    ("adamax", {}),
    ("adamax", {"weight_decay": 0.1, "maximize": True}),
    ("rmsprop", {"lr": 1e-3}),
    ("rmsprop", {"lr": 1e-3, "centered": True, "momentum": 0.1, "weight_decay": 0.1}),
    ("rprop", {"lr": 2e-4, "etas": (0.5, 1.5), "step_sizes": (2e-6, 100.0)}),
    ("nadam", {"lr": 1e-3, "weight_decay": 0.1}),
    ("nadam", {"lr": 1e-3, "decoupled_weight_decay": True}),
    ("radam", {"lr": 1e-3, "weight_decay": 0.1}),
]
# Roundings of one step are a few units of the last place; 30 steps of a chaotic start add some.
FEW_UNITS = {torch.float32: 16.0, torch.bfloat16: 4.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name, options", CONFIGURATIONS, ids=str)
def test_updates_are_those_of_torch(twins, name, options, dtype):
    ours, theirs = twins(dtype)
    wanted = TORCH[name](theirs.parameters(), **options)
    optimizer = FusedOptimizer(ours.parameters(), name, **options)
    for step in range(8):
        give_gradients(theirs, ours, step)
        if step == 2:
            for model in (ours, theirs):
                model.zero_grad()
        if step == 4:
            theirs.first.bias.grad = ours.first.bias.grad = None
        wanted.step()
        optimizer.step()
        assert largest_difference(ours, theirs) <= FEW_UNITS[dtype], step
        if dtype == torch.bfloat16:
            # A state of 8 bits rounds differently and stays so: each step is compared by itself.
            with torch.no_grad():
                for p, q in zip(theirs.parameters(), ours.parameters()):
                    q.copy_(p)
            optimizer.load_state_dict(copy.deepcopy(wanted.state_dict()))


@pytest.mark.parametrize("name", ["adamw", "sgd", "nadam", "rprop"])
def test_state_dicts_go_both_ways(twins, name):
    ours, theirs = twins()
    options = {"lr": 1e-2, "momentum": 0.9} if name == "sgd" else {"lr": 1e-2}
    wanted = TORCH[name](theirs.parameters(), **options)
    optimizer = FusedOptimizer(ours.parameters(), name, **options)
    for step in range(9):
        give_gradients(theirs, ours, step)
        wanted.step()
        optimizer.step()
        if step == 3:
            stream = io.BytesIO()
            torch.save(wanted.state_dict(), stream)
            stream.seek(0)
            optimizer = FusedOptimizer(ours.parameters(), name)
            optimizer.load_state_dict(torch.load(stream, weights_only=True))
        if step == 6:
            saved = copy.deepcopy(optimizer.state_dict())
            wanted = TORCH[name](theirs.parameters(), **options)
            wanted.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert largest_difference(ours, theirs) <= FEW_UNITS[torch.float32]


@pytest.mark.parametrize("through", [pickle.dumps, copy.deepcopy], ids=["pickle", "deepcopy"])
def test_a_copy_goes_on_with_the_same_bits(through):
    model = build()
    optimizer = FusedOptimizer(model.parameters(), "adamw", lr=1e-2, master=None)
    give_gradients(model, model, 0)
    optimizer.step()
    pair = (model, optimizer)
    twin, other = pickle.loads(pickle.dumps(pair)) if through is pickle.dumps else copy.deepcopy(pair)
    for step in range(3):
        give_gradients(model, twin, step)
        optimizer.step()
        other.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters()))
    assert float(other.state_dict()["state"][0]["step"]) == 4


@pytest.mark.parametrize("change", ["transposed", "sliced", "expanded", "moved"])
def test_gradients_of_any_strides_step_alike(change):
    values = torch.randn(6, 4)
    param, wanted = (torch.nn.Parameter(torch.ones(6, 4)) for _ in range(2))
    ours, theirs = FusedOptimizer([param], "adamw", lr=0.1), torch.optim.AdamW([wanted], lr=0.1, foreach=False)
    for step in range(3):
        grads = {
            "transposed": values.t().contiguous().t(),
            "sliced": torch.stack([values, values * 7], dim=2)[:, :, 0],
            "expanded": values[:, :1].expand(6, 4),
            "moved": values.clone(),
        }
        param.grad = grads[change]
        wanted.grad = param.grad.contiguous().clone()
        ours.step()
        theirs.step()
        values = values.sin()
    assert (param - wanted).abs().max() <= 1e-6


def test_states_follow_a_parameter_to_other_strides():
    weight = torch.nn.Parameter(torch.randn(4, 3, 5, 5))
    twin = torch.nn.Parameter(weight.detach().clone())
    ours, theirs = FusedOptimizer([weight], "adamw", lr=0.1), FusedOptimizer([twin], "adamw", lr=0.1)
    for step in range(4):
        twin.grad = torch.randn(4, 3, 5, 5)
        weight.grad = twin.grad.clone(memory_format=torch.preserve_format)
        ours.step()
        theirs.step()
        if step == 1:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(weight, twin)
    ours.state_dict()
    assert torch.equal(ours.state[weight]["exp_avg"], theirs.state[twin]["exp_avg"])


def test_groups_and_types_may_mix_and_come_later(twins):
    ours, theirs = twins()
    for model in (ours, theirs):
        model.second.to(torch.bfloat16)
    groups = lambda m: [
        {"params": m.conv.parameters(), "lr": 0.1},
        {"params": m.first.parameters(), "weight_decay": 0.0},
    ]
    optimizer, wanted = FusedOptimizer(groups(ours), "adamw"), torch.optim.AdamW(groups(theirs))
    for step in range(6):
        torch.manual_seed(step)
        for p, q in zip(ours.parameters(), theirs.parameters()):
            p.grad = torch.randn(p.shape).to(p.dtype)
            q.grad = p.grad.clone()
        if step == 2:
            for o, m in ((optimizer, ours), (wanted, theirs)):
                o.add_param_group({"params": [*m.second.parameters(), m.scale], "lr": 1e-2})
        if step == 4:
            for o in (optimizer, wanted):
                o.param_groups[1]["lr"] = 0.5
        optimizer.step()
        wanted.step()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(p.float(), q.float(), rtol=0, atol=4 * torch.finfo(p.dtype).eps)
    assert len(optimizer.state_dict()["state"]) == len(wanted.state_dict()["state"])


def test_momentum_may_cycle_and_begin_later(twins):
    ours, theirs = twins()
    optimizer = FusedOptimizer(ours.parameters(), "sgd", lr=0.1)
    wanted = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(6):
        for o in (optimizer, wanted):
            o.param_groups[0]["momentum"] = 0.0 if step < 2 else 0.5 + 0.05 * step
        give_gradients(theirs, ours, step)
        optimizer.step()
        wanted.step()
    assert largest_difference(ours, theirs) <= FEW_UNITS[torch.float32]


def test_schedulers_closures_and_hooks_work_as_on_any_optimizer(twins):
    ours, theirs = twins()
    optimizer, wanted = FusedOptimizer(ours.parameters(), "adam", lr=0.1), torch.optim.Adam(theirs.parameters(), lr=0.1)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=8) for o in (optimizer, wanted)]
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    for step in range(5):
        give_gradients(theirs, ours, step)
        assert optimizer.step(lambda: 7) == 7
        wanted.step()
        for schedule in schedules:
            schedule.step()
    assert seen == [1] * 5
    assert largest_difference(ours, theirs) <= FEW_UNITS[torch.float32]


def test_the_gradient_scaler_is_obeyed(twins):
    ours, theirs = twins()
    optimizer, wanted = FusedOptimizer(ours.parameters(), "adamw"), torch.optim.AdamW(theirs.parameters())
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    x = torch.randn(4, 3, 6, 6)
    for step in range(6):
        theirs.zero_grad()
        loss = theirs(x).pow(2).mean() * (float("inf") if step == 2 else 1.0)
        scalers[0].scale(loss)
        scalers[1].scale(loss).backward()
        for p, q in zip(ours.parameters(), theirs.parameters()):
            p.grad = q.grad.clone()
        for o, scaler in ((optimizer, scalers[0]), (wanted, scalers[1])):
            scaler.step(o)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert float(optimizer.state_dict()["state"][0]["step"]) == 5
    assert largest_difference(ours, theirs) <= FEW_UNITS[torch.float32]


def test_a_clip_is_that_of_clip_grad_norm(twins):
    ours, theirs = twins()
    optimizer = FusedOptimizer(ours.parameters(), "adamw", lr=1e-2, max_norm=0.05)
    wanted = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for step in range(6):
        give_gradients(theirs, ours, step)
        if step == 3:
            ours.scale.grad = theirs.scale.grad = None
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        assert norm > 0.05
        optimizer.step()
        wanted.step()
    assert largest_difference(ours, theirs) <= FEW_UNITS[torch.float32]


@pytest.mark.parametrize(
    "options", [{"states": "8bit"}, {"states": "8bit", "seed": 3}, {"states": "bfloat16", "seed": 5}], ids=str
)
def test_states_of_fewer_bits_resume_with_the_same_bits(options):
    model, twin = build(), build()
    optimizer = FusedOptimizer(model.parameters(), "adamw", lr=1e-2, **options)
    for step in range(3):
        give_gradients(model, twin, step)
        optimizer.step()
    with torch.no_grad():
        for p, q in zip(model.parameters(), twin.parameters()):
            q.copy_(p)
    other = FusedOptimizer(twin.parameters(), "adamw", **options)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(3):
        give_gradients(model, twin, step)
        optimizer.step()
        other.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters()))


def test_no_native_count_is_read_for_a_state_dict(monkeypatch):
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(20)]
    optimizer = FusedOptimizer(params, "adamw")
    for param in params:
        param.grad = torch.ones(2)
    optimizer.step()
    monkeypatch.setattr(Arena, "counts", lambda _: pytest.fail("a count was read"))
    assert all(float(state["step"]) == 1 for state in optimizer.state_dict()["state"].values())


def test_a_master_keeps_what_bfloat16_loses():
    param = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    optimizer = FusedOptimizer([param], "sgd", lr=1e-4, master="float32")
    for _ in range(100):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert torch.allclose(optimizer.state[param]["master"], torch.full((1000,), 0.99), atol=1e-5)
    assert torch.equal(param, torch.full((1000,), 0.99, dtype=torch.bfloat16))


class Adam(torch.optim.Optimizer):
    """Another program's optimizer, with a class name that the library uses."""


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda p: FusedOptimizer(p, "lars"), ValueError, "use one of sgd, "),
        (
            lambda p: FusedOptimizer(p, "adamw", momentum=0.9),
            TypeError,
            "AdamW has no such hyperparameter; use lr, betas",
        ),
        (lambda p: FusedOptimizer(p, "adamw", betas=(1.0, 0.9)), ValueError, "betas.0 = 1"),
        (lambda p: FusedOptimizer(p, "adamw", lr=float("nan")), ValueError, "lr = NaN"),
        (lambda p: FusedOptimizer(p, "sgd", nesterov=True), ValueError, "works only with momentum"),
        (lambda p: FusedOptimizer(p, "adamw", states="4bit"), ValueError, "use one of float32, bfloat16, 8bit"),
        (lambda p: FusedOptimizer(p, "adamw", max_norm=0.0), ValueError, "max_norm = 0.0"),
        (lambda p: FusedOptimizer(p, "adamw", max_norm=float("nan")), ValueError, "max_norm = nan"),
        (lambda p: FusedOptimizer(p, "adamw", threads=100000), ValueError, "threads = 100000"),
        (lambda p: FusedOptimizer(p, "adamw", threads=0), ValueError, "threads = 0"),
        (lambda p: FusedOptimizer(p, "adamw", threads=1.5), ValueError, "threads = 1.5"),
        (lambda p: FusedOptimizer(p, "adamw", seed=-1), ValueError, "seed = -1"),
        (lambda p: FusedOptimizer(p, 3), TypeError, "neither a name nor a class"),
        (lambda p: FusedOptimizer(p, Adam), ValueError, "not a class of torch.optim"),
        (lambda p: FusedOptimizer([], "adamw"), ValueError, "empty parameter list"),
    ],
)
def test_wrong_options_are_refused_by_name(make, error, text):
    with pytest.raises(error) as caught:
        make([torch.nn.Parameter(torch.zeros(3))])
    assert text in str(caught.value)


def refused(param, error, text, optimizer="adamw"):
    before = param.detach().clone()
    with pytest.raises(error) as caught:
        FusedOptimizer([param], optimizer).step()
    assert text in str(caught.value)
    assert torch.equal(param.detach(), before)


def test_tensors_that_no_kernel_takes_are_refused():
    double = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    double.grad = torch.ones(3, dtype=torch.float64)
    refused(double, NotImplementedError, "float64: no kernel has this type")
    expanded = torch.nn.Parameter(torch.zeros(4, 1).expand(4, 2))
    expanded.grad = torch.ones(4, 2)
    refused(expanded, NotImplementedError, "its elements share memory")
    sparse = torch.nn.Parameter(torch.zeros(4, 4))
    sparse.grad = torch.eye(4).to_sparse()
    refused(sparse, NotImplementedError, "torch.sparse_coo")


def test_a_norm_takes_each_batch_once_and_may_be_decided_when_no_parameter_has_a_gradient():
    optimizer = FusedOptimizer(build().parameters(), "sgd", lr=1.0)
    params = list(optimizer._listed())
    optimizer._adopt(params)
    engine, norm = optimizer._engine, GlobalNorm(torch.device("cpu"))
    norm.begin((1, 1.0, 0, 0))
    norm.decide(1.0, True, ())
    assert norm.last() == 0.0
    [batch] = engine.route(params).batches([torch.ones_like(param) for param in params])
    norm.begin((1, 1.0, 0, 0))
    prepared = norm.add(engine, batch)
    with pytest.raises(RuntimeError, match="added to this norm already"):
        norm.add(engine, batch)
    decided = norm.decide(1.0, True, ())
    engine.step_decided(batch, prepared, decided)
    with pytest.raises(RuntimeError, match="stepped by this decision already"):
        engine.step_decided(batch, prepared, decided)


def test_a_model_that_moves_after_the_first_step_is_refused():
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = FusedOptimizer([param], "adamw")
    param.grad = torch.ones(3)
    optimizer.step()
    param.data = param.data.to(torch.bfloat16)
    param.grad = torch.ones(3, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="make a new optimizer"):
        optimizer.step()


def test_half_a_state_and_that_of_another_model_are_refused(twins):
    ours, theirs = twins()
    wanted = torch.optim.AdamW(theirs.parameters())
    give_gradients(theirs, ours, 0)
    wanted.step()
    optimizer = FusedOptimizer(ours.parameters(), "adamw")
    saved = copy.deepcopy(wanted.state_dict())
    del saved["state"][2]["exp_avg_sq"]
    with pytest.raises(ValueError, match="has exp_avg, but no exp_avg_sq"):
        optimizer.load_state_dict(saved)
    other = copy.deepcopy(wanted.state_dict())
    other["state"][0]["exp_avg"] = torch.zeros(5)
    with pytest.raises(ValueError, match="its parameter is"):
        optimizer.load_state_dict(other)
    assert not optimizer.state


def test_a_child_by_fork_is_refused_and_the_parent_goes_on():
    param = torch.nn.Parameter(torch.zeros(1 << 21))
    param.grad = torch.ones_like(param)
    optimizer = FusedOptimizer([param], "adamw", threads=2)
    optimizer.step()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            optimizer.step()
            text = "stepped"
        except RuntimeError as error:
            text = str(error)
        os.write(writing, text.encode())
        os._exit(0)
    assert b"has forked since" in os.read(reading, 1000)
    os.waitpid(child, 0)
    optimizer.step()


def test_an_optimizer_that_a_child_by_fork_makes_has_threads_of_its_own():
    param = torch.nn.Parameter(torch.zeros(1 << 21))
    param.grad = torch.ones_like(param)
    FusedOptimizer([param], "sgd", lr=1.0, threads=2).step()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # As the worker of a DataLoader: torch's own threads do not exist here.
        FusedOptimizer([param], "sgd", lr=1.0, threads=2).step()
        os.write(writing, str(param[-1].item()).encode())
        os._exit(0)
    ended, _, _ = select.select([reading], [], [], 60)
    if not ended:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert ended and os.read(reading, 100) == b"-2.0"


def test_other_threads_run_during_a_step_and_a_busy_step_is_refused():
    param = torch.nn.Parameter(torch.zeros(1 << 22))
    param.grad = torch.ones_like(param)
    optimizer = FusedOptimizer([param], "adamw", threads=1)
    optimizer.step()
    refusals = []
    deadline = time.monotonic() + 60

    def run() -> None:
        while not refusals and time.monotonic() < deadline:
            try:
                optimizer.step()
            except RuntimeError as error:
                refusals.append(str(error))

    # One thread can only meet another one inside a step if a step lets others run.
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refusals and all("in use by another thread" in text for text in refusals)


def test_a_compiled_function_may_call_it():
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedOptimizer([param], "sgd", lr=1.0)

    @torch.compile(backend="eager")
    def train(x):
        loss = (param * x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train(torch.ones(4))
    assert torch.equal(param, torch.zeros(4))


def test_the_package_lists_every_optimizer():
    assert instep.OPTIMIZERS["adamw"].defaults["betas"] == (0.9, 0.999)
    assert set(instep.OPTIMIZERS) == {c[0] for c in CONFIGURATIONS} | {"lion", "lamb", "ademamix"}
