"""Users change sizes, formats, states, weights and param groups of a FusedOptimizer. No such change is ignored
silently.
"""

import collections
import copy
import threading

import pytest
import torch

import instep
from instep.torch import FusedOptimizer

TORCH = {name.lower(): getattr(torch.optim, name) for name in dir(torch.optim) if name[0].isupper()}


def test_a_parameter_of_another_size_is_refused():
    whole = torch.ones(4096)
    param = torch.nn.Parameter(torch.ones(64))
    optimizer = FusedOptimizer([param], "adamw")
    param.grad = torch.ones(64)
    optimizer.step()
    for other in (whole[:10], whole):
        param.data = other
        param.grad = torch.ones_like(param)
        with pytest.raises(RuntimeError, match="make a new optimizer"):
            optimizer.step()
    assert torch.equal(whole, torch.ones(4096))


def test_hyperparameters_live_on_after_a_state_is_loaded():
    param = torch.nn.Parameter(torch.ones(8))
    optimizer = FusedOptimizer([param], "sgd", lr=1.0)
    param.grad = torch.ones(8)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert torch.equal(param, torch.full((8,), -0.5))
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(param, torch.full((8,), -0.5))


@pytest.mark.parametrize("master", ["float32", "remainder16"])
def test_a_master_follows_weights_that_somebody_else_has_written(master):
    param = torch.nn.Parameter(torch.zeros(300, dtype=torch.bfloat16))
    optimizer = FusedOptimizer([param], "sgd", lr=1e-3, master=master)
    for value in (0.0, 3.0, -2.0):
        with torch.no_grad():
            param.fill_(value)
        for _ in range(20):
            param.grad = torch.ones_like(param)
            optimizer.step()
        assert torch.allclose(param.float(), torch.full((300,), value - 0.02), atol=1e-2)
    optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
    with torch.no_grad():
        param.fill_(1.0)
    optimizer.step()
    assert torch.allclose(param.float(), torch.ones(300), atol=1e-2)


def trained(**options):
    param = torch.nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    optimizer = FusedOptimizer([param], "adamw", **options)
    param.grad = torch.ones_like(param)
    optimizer.step()
    return param, optimizer


@pytest.mark.parametrize(
    "saved, loaded",
    [
        ({"states": "8bit"}, {"states": "float32"}),
        ({"states": "float32"}, {"states": "8bit"}),
        ({"master": "remainder16"}, {"master": "float32"}),
        ({"master": "float32"}, {"master": "remainder16"}),
    ],
)
def test_states_of_another_format_are_refused(saved, loaded):
    _, source = trained(**saved)
    param, target = trained(**loaded)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(ValueError, match="use the same"):
        target.load_state_dict(source.state_dict())
    after = target.state_dict()
    assert all(torch.equal(v, after["state"][0][k]) for k, v in before["state"][0].items())


BROKEN = [
    (lambda saved: saved["state"][0].update(step=torch.tensor(-3.0)), "not a number of updates"),
    (lambda saved: saved["state"][0].update(step=1.5), "not a number of updates"),
    (lambda saved: saved["state"][0].update(step=float("nan")), "not a number of updates"),
    (lambda saved: saved["state"][0].pop("step"), "but no step"),
    (lambda saved: saved["state"][0].pop("mu_product"), "but no mu_product"),
    (lambda saved: saved["state"][0].update(mu_product=2.0), "not a number from 0 to 1"),
    (lambda saved: saved["state"][0].update(exp_avg=3), "of type int: not a tensor"),
    (lambda saved: saved["param_groups"][0].pop("betas"), "has no betas"),
    (lambda saved: saved["param_groups"][0].update(lr=-1.0), "lr = -1"),
]


@pytest.mark.parametrize("break_it, text", BROKEN, ids=[text for _, text in BROKEN])
def test_a_broken_state_dict_is_refused_and_nothing_of_it_is_taken(break_it, text):
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedOptimizer([param], "nadam", lr=0.5)
    param.grad = torch.ones(4)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    broken = copy.deepcopy(before)
    break_it(broken)
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(broken)
    assert str(optimizer.state_dict()) == str(before)
    optimizer.step()
    assert float(optimizer.state_dict()["state"][0]["step"]) == 2


def test_flags_that_an_older_program_did_not_save_have_their_defaults():
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedOptimizer([param], "adamw")
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["maximize"], saved["param_groups"][0]["amsgrad"]
    optimizer.load_state_dict(saved)
    param.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.param_groups[0]["amsgrad"] is False


@pytest.mark.parametrize("saved, loaded", [(False, True), (True, False)], ids=["later", "no-more"])
def test_a_state_may_have_other_flags_than_the_optimizer_that_loads_it(saved, loaded):
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    source = torch.optim.AdamW([params[0]], amsgrad=saved)
    target = FusedOptimizer([params[1]], "adamw", amsgrad=loaded)
    for param in params:
        param.grad = torch.ones(4)
    source.step()
    with torch.no_grad():
        params[1].copy_(params[0])
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    for _ in range(3):
        source.step()
        target.step()
    assert torch.allclose(params[0], params[1], rtol=0, atol=1e-6)


def test_the_momenta_of_nadam_may_have_become_a_product_of_zero():
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    source, target = torch.optim.NAdam([params[0]], lr=0.1), FusedOptimizer([params[1]], "nadam", lr=0.1)
    for param in params:
        param.grad = torch.ones(4)
    source.step()
    source.state[params[0]]["mu_product"].zero_()  # After a thousand updates it is too small for float32.
    source.state[params[0]]["step"].fill_(5000)
    with torch.no_grad():
        params[1].copy_(params[0])
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    for _ in range(3):
        source.step()
        target.step()
    assert torch.allclose(params[0], params[1], rtol=0, atol=1e-6)
    assert float(target.state_dict()["state"][0]["mu_product"]) == 0


def replace_the_dict(groups, param):
    groups[0] = {**groups[0], "lr": 0.0}


def move_to_another_group(groups, param):
    groups[1]["params"].append(groups[0]["params"].pop(0))


@pytest.mark.parametrize("change", [replace_the_dict, move_to_another_group])
def test_param_groups_that_the_user_replaces_are_those_of_the_next_step(change):
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.0}]
    optimizer = FusedOptimizer(groups, "sgd", lr=1.0)
    for param in params:
        param.grad = torch.ones(4)
    optimizer.step()
    change(optimizer.param_groups, params[0])
    optimizer.step()
    assert torch.equal(params[0], torch.zeros(4))
    optimizer.param_groups[-1]["lr"] = optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert torch.equal(params[0], torch.full((4,), -0.5))


def test_a_wrong_param_group_is_refused_when_it_is_added():
    first, second = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = FusedOptimizer([first], "sgd", lr=1.0)
    with pytest.raises(ValueError, match="lr = -1"):
        optimizer.add_param_group({"params": [second], "lr": -1.0})
    assert len(optimizer.param_groups) == 1


def test_a_gradient_that_no_kernel_takes_stops_the_step_of_every_type():
    params = [torch.nn.Parameter(torch.ones(4, 4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    params[0].grad, params[1].grad = torch.ones(4, 4), torch.eye(4, dtype=torch.bfloat16).to_sparse()
    with pytest.raises(NotImplementedError, match="sparse=False"):
        FusedOptimizer(params, "sgd", lr=1.0).step()
    assert torch.equal(params[0], torch.ones(4, 4))


def test_a_view_of_the_other_sign_is_read_with_its_sign_or_refused():
    param = torch.nn.Parameter(torch.ones(4))
    param.grad = torch._neg_view(torch.ones(4))
    FusedOptimizer([param], "sgd", lr=1.0).step()
    assert torch.equal(param, torch.full((4,), 2.0))
    view = torch.nn.Parameter(torch._neg_view(torch.ones(4)))
    view.grad = torch.ones(4)
    with pytest.raises(NotImplementedError, match="the other sign"):
        FusedOptimizer([view], "sgd", lr=1.0).step()


def test_another_rule_of_torch_is_refused():
    param = torch.nn.Parameter(torch.ones(4))
    wanted = torch.optim.Adam([param], decoupled_weight_decay=True)
    with pytest.raises(ValueError, match="another rule"):
        FusedOptimizer([param], "adam").load_state_dict(wanted.state_dict())
    FusedOptimizer([param], "adamw").load_state_dict(torch.optim.AdamW([param]).state_dict())


def test_a_clip_goes_on_where_a_type_has_no_gradient():
    params = [torch.nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    optimizer = FusedOptimizer(params, "sgd", lr=1.0, max_norm=1.0)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    params[1].grad = None
    before = params[0].detach().clone()
    optimizer.step()
    assert torch.allclose(before - params[0], torch.full((4,), 0.5), atol=1e-5)


def test_autograd_refuses_a_backward_through_parameters_that_were_stepped():
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedOptimizer([param], "sgd", lr=1.0)
    loss = (param**2).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reset", ["all", "one"])
def test_states_that_the_user_replaces_are_those_of_the_next_step(reset):
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = FusedOptimizer([param], "sgd", lr=1.0, momentum=0.5)
    for _ in range(2):
        param.grad = torch.ones(4)
        optimizer.step()
    before = param.detach().clone()
    if reset == "all":
        optimizer.state = collections.defaultdict(dict)
    else:
        optimizer.state[param]["momentum_buffer"] = torch.full((4,), 2.0)
    optimizer.step()
    assert torch.equal(before - param, torch.full((4,), 1.0 if reset == "all" else 2.0))


COUNTED = [
    ("adam", {"amsgrad": True}),
    ("adamw", {}),
    ("adamax", {}),
    ("nadam", {}),
    ("radam", {}),
    ("adagrad", {"lr_decay": 0.5, "initial_accumulator_value": 0.25}),
]


def replace_moments(optimizer, param):
    state = optimizer.state[param]
    first = next(name for name, value in state.items() if value.numel() == 4)
    state[first] = torch.full((4,), 2.0)


def replace_the_count(optimizer, param):
    optimizer.state[param]["step"] = torch.tensor(50.0)


def replace_both(optimizer, param):
    replace_moments(optimizer, param)
    replace_the_count(optimizer, param)


def replace_the_product(optimizer, param):
    optimizer.state[param]["mu_product"] = torch.tensor(0.125)


def begin_anew(optimizer, param):
    optimizer.state[param] = {}


def begin_all_anew(optimizer, param):
    optimizer.state = collections.defaultdict(dict)


REPLACED = [(*case, change) for case in COUNTED for change in (replace_moments, replace_the_count, replace_both)]
# torch makes Adagrad's states in the constructor, and never again.
REPLACED += [(*case, change) for case in COUNTED if case[0] != "adagrad" for change in (begin_anew, begin_all_anew)]
REPLACED += [("nadam", {}, replace_the_product)]


@pytest.mark.parametrize("reads", [False, True], ids=["unread", "read"])
@pytest.mark.parametrize("name, options, change", REPLACED, ids=lambda part: getattr(part, "__name__", str(part)))
def test_a_state_or_a_count_that_the_user_replaces_is_that_of_the_next_step(name, options, change, reads):
    makers = (FusedOptimizer, lambda params, _, **given: TORCH[name](params, foreach=False, **given))
    results = []
    for make in makers:
        params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
        optimizer = make(params, name, lr=0.1, **options)
        for step in range(6):
            for k, param in enumerate(params):
                param.grad = torch.full((4,), 0.5 + k - step)
            if step == 3:
                if reads:
                    optimizer.state_dict()
                change(optimizer, params[0])
            optimizer.step()
        states = optimizer.state_dict()["state"].values()
        numbers = [float(state.get(number, 0)) for state in states for number in ("step", "mu_product")]
        results.append((params, numbers))
    (ours, our_numbers), (theirs, their_numbers) = results
    assert our_numbers == pytest.approx(their_numbers, rel=1e-6)
    for p, q in zip(ours, theirs):
        assert torch.allclose(p, q, rtol=0, atol=2e-6)


def test_counts_go_on_where_a_parameter_leaves_its_group_and_comes_back():
    results = []
    for make in (lambda params: FusedOptimizer(params, "adamw", lr=0.1), lambda params: torch.optim.AdamW(params, lr=0.1)):
        params = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
        optimizer = make(params)
        for step in range(6):
            for k, param in enumerate(params):
                param.grad = torch.full((4,), 0.5 + k - step)
            if step == 2:
                away = optimizer.param_groups[0]["params"].pop(1)
            if step == 4:
                optimizer.param_groups[0]["params"].append(away)
            optimizer.step()
        results.append((params, [float(optimizer.state[param]["step"]) for param in params if optimizer.state_dict()]))
    (ours, our_counts), (theirs, their_counts) = results
    assert our_counts == their_counts == [6.0, 4.0, 6.0]
    for p, q in zip(ours, theirs):
        assert torch.allclose(p, q, rtol=0, atol=1e-6)


def test_a_sum_of_adagrad_that_had_no_update_is_its_own_groups_initial_value():
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    groups = [
        {"params": params[:1], "initial_accumulator_value": 0.25},
        {"params": params[1:], "initial_accumulator_value": 0.75},
    ]
    optimizer = FusedOptimizer(groups, "adagrad", initial_accumulator_value=0.5)
    # torch gives all groups the constructor's value, so each group has an optimizer of its own there.
    twins = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    wanted = [torch.optim.Adagrad(twins[:1], initial_accumulator_value=0.25)]
    wanted += [torch.optim.Adagrad(twins[1:], initial_accumulator_value=0.75)]
    params[2].grad = twins[2].grad = torch.ones(4)
    for _ in range(3):
        # The state dict is read before the first step, and again after each.
        states = optimizer.state_dict()["state"]
        theirs = [state for one in wanted for state in one.state_dict()["state"].values()]
        assert [float(state["step"]) for state in states.values()] == [float(state["step"]) for state in theirs]
        for ours, state in zip(states.values(), theirs):
            assert torch.equal(ours["sum"], state["sum"])
        for one in (optimizer, *wanted):
            one.step()
    assert torch.allclose(params[2], twins[2])


def test_a_state_of_adagrad_starts_as_torchs_in_every_way_of_saving_it():
    ours, theirs = ([torch.nn.Parameter(torch.ones(4)) for _ in range(2)] for _ in range(2))
    optimizer = FusedOptimizer(ours, "adagrad", lr=0.5, initial_accumulator_value=0.25)
    wanted = torch.optim.Adagrad(theirs, lr=0.5, initial_accumulator_value=0.25)
    # One parameter has had an update when it is saved, the other has not.
    for params, either in ((ours, optimizer), (theirs, wanted)):
        params[0].grad = torch.full((4,), 2.0)
        either.step()
    saved = optimizer.state_dict()["state"]
    for number, state in wanted.state_dict()["state"].items():
        assert torch.equal(saved[number]["sum"], state["sum"]) and saved[number]["step"] == state["step"]
    copied = copy.deepcopy(optimizer).state_dict()["state"]
    assert all(torch.equal(copied[number]["sum"], saved[number]["sum"]) for number in saved)
    goes_on = torch.optim.Adagrad(ours, lr=0.5)
    goes_on.load_state_dict(optimizer.state_dict())
    for params, either in ((ours, goes_on), (theirs, wanted)):
        params[0].grad, params[1].grad = None, torch.full((4,), 2.0)
        either.step()
    assert all(torch.allclose(param, other, rtol=1e-6) for param, other in zip(ours, theirs))


def test_reading_the_state_in_another_thread_does_not_disturb_a_step():
    param = torch.nn.Parameter(torch.zeros(1 << 16))
    param.grad = torch.ones_like(param)
    optimizer = FusedOptimizer([param], "adamw", threads=1)
    optimizer.step()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            optimizer.state_dict()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(300):
            optimizer.step()
    finally:
        done.set()
        reader.join()
    assert float(optimizer.state_dict()["state"][0]["step"]) == 301


def test_sharded_and_fake_parameters_are_refused_by_name():
    empty = torch.nn.Parameter(torch.ones(4))
    empty.untyped_storage().resize_(0)
    empty.grad = torch.ones(4)
    with pytest.raises(NotImplementedError, match="without memory of its own"):
        FusedOptimizer([empty], "sgd").step()
    with pytest.raises(ValueError, match="betas = .*not 2 numbers"):
        FusedOptimizer([torch.nn.Parameter(torch.ones(1))], "adamw", betas=(0.9, 0.99, 0.9))


@pytest.mark.parametrize("key", instep.OPTIMIZERS)
def test_states_that_a_step_under_inference_mode_makes_go_on_outside_of_it(key):
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 6)) for _ in range(2)]
    optimizers = [FusedOptimizer([param], key, lr=0.1) for param in params]
    for is_inside in (True, False, True):
        for param, optimizer in zip(params, optimizers):
            param.grad = torch.linspace(2, -1, 6)
            with torch.inference_mode(is_inside and optimizer is optimizers[0]):
                optimizer.step()
    assert torch.equal(*params)
    for name, value in optimizers[1].state[params[1]].items():
        ours = optimizers[0].state[params[0]][name]
        assert torch.equal(ours, value) and not ours.is_inference() and not ours.requires_grad
