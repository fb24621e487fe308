"""``optimizer.state`` is current when a user reads it, and steps use the values that a user writes to it."""

import collections
import copy
import io
import weakref

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.torch import FusedOptimizer

TORCH = {name.lower(): getattr(torch.optim, name) for name in dir(torch.optim) if name[0].isupper()}
BOTH = [key for key in instep.OPTIMIZERS if key in TORCH]
OPTIONS = {"sgd": {"momentum": 0.9, "dampening": 0.5}, "rmsprop": {"momentum": 0.5}}


def ours(params, key: str, **options) -> FusedOptimizer:
    return FusedOptimizer(params, key, lr=0.1, **{**OPTIONS.get(key, {}), **options})


def theirs(params, key: str, **options) -> torch.optim.Optimizer:
    return TORCH[key](params, lr=0.1, foreach=False, **{**OPTIONS.get(key, {}), **options})


def two() -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((3, 2), 1.0 + k)) for k in range(2)]


def step(optimizer: torch.optim.Optimizer, number: int) -> None:
    """Steps with gradients that differ from step to step and from parameter to parameter."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for k, param in enumerate(params):
        param.grad = (torch.linspace(-1, 1, param.numel()).view(param.shape) * (0.5 + k - 0.3 * number)).to(param.dtype)
    optimizer.step()


def assert_alike(params, others, rtol: float = 1e-5) -> None:
    for param, other in zip(params, others):
        torch.testing.assert_close(param, other, rtol=rtol, atol=2e-6, check_dtype=False)


def copied(state: dict) -> dict:
    return {name: copy.deepcopy(value) for name, value in state.items()}


def test_a_state_that_is_there_before_the_first_step_is_taken():
    param = nn.Parameter(torch.ones(4))
    optimizer = FusedOptimizer([param], "adam", lr=0.1)
    optimizer.state[param] = {"step": 5, "exp_avg": torch.ones(4), "exp_avg_sq": torch.full((4,), 4.0)}
    param.grad = torch.zeros(4)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((4,), 0.9926), rtol=0, atol=5e-5)
    assert optimizer.state[param]["step"] == 6


@pytest.mark.parametrize("key", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_states_of_every_optimizer_are_taken_before_the_first_step(key, dtype):
    params, others = ([nn.Parameter(param.detach().to(dtype)) for param in two()] for _ in range(2))
    wanted, optimizer = theirs(others, key), ours(params, key)
    for number in range(5):
        step(wanted, number)
    for param, other in zip(params, others):
        param.data.copy_(other.data)
        if other in wanted.state:
            optimizer.state[param] = copied(wanted.state[other])
    for one in (wanted, optimizer):
        step(one, 5)
    assert_alike(params, others, 1e-5 if dtype == torch.float32 else 1e-2)
    for param, other in zip(params, others):
        assert optimizer.state[param].keys() == wanted.state[other].keys()
        assert optimizer.state[param].get("step") == wanted.state[other].get("step")


def new_dicts(optimizer):
    for param in list(optimizer.state):
        optimizer.state[param] = dict(optimizer.state[param])


def new_tensors_in_new_dicts(optimizer):
    for param in list(optimizer.state):
        optimizer.state[param] = copied(optimizer.state[param])


def new_state(optimizer):
    optimizer.state = collections.defaultdict(dict, {param: copied(held) for param, held in optimizer.state.items()})


def new_memory(optimizer):
    for held in optimizer.state.values():
        for value in held.values():
            value.data = value.detach().clone()


def memory_of_a_loaded_dict(optimizer):
    saved = copy.deepcopy(optimizer.state_dict())
    for param in list(optimizer.state):
        del optimizer.state[param]
    optimizer.load_state_dict(saved)


def itself(optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


REPLACEMENTS = [new_dicts, new_tensors_in_new_dicts, new_state, new_memory, memory_of_a_loaded_dict, itself]


@pytest.mark.parametrize("replace", REPLACEMENTS, ids=lambda replace: replace.__name__)
@pytest.mark.parametrize("key", instep.OPTIMIZERS)
def test_equal_states_in_other_objects_go_on_with_the_same_bits(key, replace):
    params, others = two(), two()
    optimizer, wanted = ours(params, key), ours(others, key)
    for number in range(13):
        if number in (10, 12):
            replace(optimizer)
        for one in (optimizer, wanted):
            step(one, number)
        if number >= 10 and key != "sgd":
            assert optimizer.state[params[0]]["step"] == number + 1
    for param, other in zip(params, others):
        assert torch.equal(param, other)
        for name, value in wanted.state[other].items():
            assert torch.equal(value, optimizer.state[param][name]), name


@pytest.mark.parametrize("replace", REPLACEMENTS, ids=lambda replace: replace.__name__)
def test_the_eleventh_step_of_radam_is_the_eleventh_after_equal_states_were_put_in(replace):
    param = nn.Parameter(torch.zeros(4))
    optimizer = FusedOptimizer([param], "radam", lr=1.0)
    for number in range(11):
        if number == 10:
            replace(optimizer)
            param.data.zero_()
        param.grad = torch.ones(4)
        optimizer.step()
    # By hand: the rectification of the eleventh step. A second step would move by (1 - 0.9^11) / (1 - 0.9^2) = 3.61.
    last, at = 2 / (1 - 0.999) - 1, 2 / (1 - 0.999) - 1 - 2 * 11 * 0.999**11 / (1 - 0.999**11)
    rectified = ((at - 4) * (at - 2) * last / ((last - 4) * (last - 2) * at)) ** 0.5
    torch.testing.assert_close(param.detach(), torch.full((4,), -rectified), rtol=1e-4, atol=0)
    assert rectified == pytest.approx(0.05352, abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"states": "8bit"}, {"states": "bfloat16", "seed": 3}], ids=str)
@pytest.mark.parametrize("replace", REPLACEMENTS, ids=lambda replace: replace.__name__)
def test_it_is_so_with_states_of_fewer_bits_and_masters(replace, options):
    params, others = ([nn.Parameter(param.detach().bfloat16()) for param in two()] for _ in range(2))
    optimizer, wanted = (ours(some, "adamw", master="remainder16", **options) for some in (params, others))
    for number in range(6):
        if number == 3:
            replace(optimizer)
        for one in (optimizer, wanted):
            step(one, number)
    assert all(torch.equal(param, other) for param, other in zip(params, others))


def first_moment(state: dict) -> str:
    return next(name for name, value in state.items() if isinstance(value, Tensor) and value.dim() > 0)


WRITES = {
    "in_place": lambda state: state[first_moment(state)].mul_(0.5),
    "data": lambda state: setattr(state[first_moment(state)], "data", state[first_moment(state)] * 0.5),
    "new": lambda state: state.update({first_moment(state): state[first_moment(state)] * 0.5}),
    "step_in_place": lambda state: state["step"].zero_(),
    "step_data": lambda state: setattr(state["step"], "data", torch.tensor(50.0)),
    "step_new": lambda state: state.update(step=torch.tensor(50.0)),
}


# SGD has no step. NAdam's belongs to its product of momenta.
WRITTEN = [(key, write) for key in BOTH for write in WRITES if not (key == "sgd" and write.startswith("step"))]


@pytest.mark.parametrize("key, write", [pair for pair in WRITTEN if pair != ("nadam", "step_in_place")])
def test_what_a_user_writes_counts_as_in_torch(key, write):
    params, others = two(), two()
    optimizer, wanted = ours(params, key), theirs(others, key)
    for number in range(8):
        for one, some in ((optimizer, params), (wanted, others)):
            if number in (3, 4, 6):
                WRITES[write](one.state[some[0]])
            step(one, number)
        saved, states = optimizer.state_dict()["state"], wanted.state_dict()["state"]
        for k in states:
            assert saved[k].get("step") == states[k].get("step")
            assert_alike([saved[k][name] for name in states[k]], states[k].values())
    assert_alike(params, others)


UNCOUNTED = {
    "data": lambda value, number: value.data.fill_(number),
    "numpy": lambda value, number: value.detach().numpy().fill(number),
}


@pytest.mark.parametrize("write", UNCOUNTED)
@pytest.mark.parametrize("key", [key for key in instep.OPTIMIZERS if key != "sgd"])
def test_a_number_that_is_written_where_torch_counts_no_write_is_refused_before_anything_is_stepped(key, write):
    params = [*two(), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
    optimizer = ours(params, key)
    for name in ("step", "mu_product") if key == "nadam" else ("step",):
        for number in range(2):
            step(optimizer, number)
        before = [param.detach().clone() for param in params]
        number = optimizer.state[params[2]][name]
        old = float(number)
        UNCOUNTED[write](number, 0.5 if name == "mu_product" else 7.0)
        with pytest.raises(RuntimeError, match="written through .data or numpy"):
            step(optimizer, 2)
        assert all(map(torch.equal, before, params))
        # It goes on from a number that is written to the tensor itself.
        number.fill_(old)
        step(optimizer, 2)
        assert optimizer.state[params[2]]["step"] == optimizer.state[params[0]]["step"]


@pytest.mark.parametrize("key", BOTH)
def test_a_state_has_torchs_names_and_types_after_the_first_step(key):
    params, others = two(), two()
    optimizer, wanted = ours(params, key), theirs(others, key)
    for one in (optimizer, wanted):
        step(one, 0)
    for param, other in zip(params, others):
        held, state = optimizer.state[param], wanted.state[other]
        assert list(held) == list(state)
        for name in state.keys() - {"mu_product"}:  # The product of momenta is kept in float64.
            assert held[name].dtype == state[name].dtype and held[name].shape == state[name].shape


def test_a_value_that_was_given_other_memory_is_saved_as_it_is_now():
    param = nn.Parameter(torch.ones(4))
    optimizer = FusedOptimizer([param], "adamw")
    step(optimizer, 0)
    optimizer.state_dict()
    optimizer.state[param]["exp_avg"].data = torch.full((4,), 7.0)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], torch.full((4,), 7.0))


@pytest.mark.parametrize("master", [None, "float32"])
def test_what_is_not_ours_is_left_alone(master):
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = FusedOptimizer([param], "adamw", master=master)
    optimizer.state["epoch"] = 3
    optimizer.state[param]["mine"] = "kept"
    for number in range(3):
        step(optimizer, number)
        optimizer.state["epoch"] += 1
        optimizer.state[param][f"seen {number}"] = torch.ones(5)
    assert optimizer.state["epoch"] == 6 and optimizer.state[param]["step"] == 3
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"]["epoch"] == 6 and saved["state"][0]["mine"] == "kept"
    other = FusedOptimizer([param], "adamw", master=master)
    other.load_state_dict(saved)
    assert other.state["epoch"] == 6 and torch.equal(other.state[param]["seen 2"], torch.ones(5))


def test_a_hook_after_loading_sees_the_states():
    params, seen = two(), []
    source, target = ours(params, "adamw"), ours(params, "adamw")
    step(source, 0)
    target.register_load_state_dict_post_hook(lambda one: seen.extend(float(one.state[param]["step"]) for param in params))
    target.load_state_dict(source.state_dict())
    assert seen == [1.0, 1.0]


def test_sgd_without_momentum_has_no_entries():
    optimizers = [make(two(), "sgd", momentum=0.0, dampening=0.0) for make in (ours, theirs)]
    for one in optimizers:
        step(one, 0)
        assert dict(one.state) == one.state_dict()["state"] == {}


def test_a_state_dict_is_live_and_shares_no_memory_with_what_it_was_loaded_from():
    params, others = two(), two()
    optimizer, other = ours(params, "adamw"), ours(others, "adamw")
    step(optimizer, 0)
    saved = optimizer.state_dict()["state"][0]
    other.load_state_dict(optimizer.state_dict())
    step(optimizer, 1)
    assert saved["exp_avg"] is optimizer.state[params[0]]["exp_avg"] and saved["step"] == 2
    assert other.state[others[0]]["step"] == 1


@pytest.mark.parametrize("options", [{}, {"states": "8bit"}, {"master": "float32"}], ids=str)
def test_a_parameters_state_is_saved_with_its_own_bytes_alone(options):
    params = [nn.Parameter(torch.ones(count, dtype=torch.bfloat16)) for count in (1200, 1_000_000)]
    optimizer = FusedOptimizer(params, "adamw", **options)
    step(optimizer, 0)
    for value in optimizer.state[params[0]].values():
        assert value.untyped_storage().nbytes() == value.numel() * value.itemsize
    stream = io.BytesIO()
    torch.save(optimizer.state[params[0]], stream)
    assert len(stream.getvalue()) < 20_000


def bytes_of(optimizer: FusedOptimizer) -> int:
    runs = [run for arena in optimizer._engine.arenas for run in (*arena.states.values(), *arena.scales.values())]
    return sum(run.numel() * run.itemsize for run in runs)


def prune(optimizer, group, keep: Tensor) -> None:
    """Drops some rows of a tensor and of its moments, as a training of Gaussian splats does."""
    [old] = group["params"]
    held = optimizer.state.pop(old)
    for name in ("exp_avg", "exp_avg_sq"):
        held[name] = held[name][keep]
    group["params"][0] = nn.Parameter(old.detach()[keep])
    optimizer.state[group["params"][0]] = held


@pytest.mark.parametrize("at_once", [True, False], ids=["all-groups", "one-group"])
def test_replaced_parameters_are_freed_and_keep_their_states(at_once):
    def groups():
        return [{"params": [nn.Parameter(torch.linspace(0, 1, 2000 * width).view(2000, width))]} for width in (3, 1, 45)]

    optimizer, wanted = FusedOptimizer(groups(), "adam", lr=0.1), torch.optim.Adam(groups(), lr=0.1)
    old: list[weakref.ref] = []
    for number in range(100):
        for one in (optimizer, wanted):
            step(one, number)
        old += [weakref.ref(arena) for arena in optimizer._engine.arenas if arena not in [ref() for ref in old]]
        chosen = range(3) if at_once else [number % 3]
        for one in (optimizer, wanted):
            for k in chosen:
                length = len(one.param_groups[k]["params"][0])
                prune(one, one.param_groups[k], torch.arange(length) % 100 != number % 100)
    for one in (optimizer, wanted):
        step(one, 100)
    for mine, other in zip(optimizer.param_groups, wanted.param_groups):
        assert_alike(mine["params"], other["params"], 1e-3)
        assert optimizer.state[mine["params"][0]]["step"] == 101
    fresh = FusedOptimizer([nn.Parameter(group["params"][0].detach()) for group in optimizer.param_groups], "adam")
    step(fresh, 0)
    assert bytes_of(optimizer) <= 1.1 * bytes_of(fresh)
    alive = [arena for arena in (ref() for ref in old) if arena is not None]
    assert len(old) >= 100 and all(arena in optimizer._engine.arenas for arena in alive)


def test_a_parameter_that_neither_a_group_nor_a_state_has_is_freed():
    params = two()
    optimizer = ours(params, "adamw")
    step(optimizer, 0)
    gone = weakref.ref(params[1])
    del optimizer.state[params[1]], params[1]
    optimizer.param_groups[0]["params"].pop()
    step(optimizer, 1)
    assert gone() is None and optimizer.state[params[0]]["step"] == 2


@pytest.mark.parametrize("key, flag, off, on", [("sgd", "momentum", 0.0, 0.9), ("rmsprop", "centered", False, True)])
def test_states_that_a_group_keeps_no_more_stay_as_they_are_and_are_taken_up_again(key, flag, off, on):
    params, others = two(), two()
    optimizer, wanted = ours(params, key, **{flag: on}), theirs(others, key, **{flag: on})
    old = []
    for number in range(9):
        for one in (optimizer, wanted):
            if number in (3, 6):
                one.param_groups[0][flag] = off if number == 3 else on
            step(one, number)
        old += [weakref.ref(arena.states[name]) for arena in optimizer._engine.arenas for name in arena.states if number == 2]
        assert all((ref() is None) == (number > 2) for ref in old)
    assert_alike(params, others)
    for param, other in zip(params, others):
        assert_alike(optimizer.state[param].values(), [wanted.state[other][name] for name in optimizer.state[param]])


def test_a_count_above_two_to_the_24_goes_on_and_its_float_is_rounded():
    param = nn.Parameter(torch.ones(4))
    optimizer = FusedOptimizer([param], "adamw", lr=0.1)
    step(optimizer, 0)
    optimizer.state[param]["step"].fill_((1 << 24) - 1)
    for number in range(4):
        step(optimizer, number)
    # A dict of his own with the same tensors does not change the count.
    optimizer.state[param] = dict(optimizer.state[param])
    step(optimizer, 4)
    [arena] = optimizer._engine.arenas
    assert arena.counts()[0][0] == (1 << 24) + 4
    assert optimizer.state[param]["step"] == (1 << 24) + 4
    step(optimizer, 5)
    assert arena.counts()[0][0] == (1 << 24) + 5
    assert optimizer.state[param]["step"] == float(torch.tensor((1 << 24) + 5, dtype=torch.float32))


BROKEN = [
    ({"step": torch.tensor(-3.0)}, "not a number of updates"),
    ({"step": torch.tensor(0.5)}, "not a number of updates"),
    ({"exp_avg": None}, "no exp_avg"),
    ({"exp_avg": torch.ones(5)}, "its parameter is"),
    ({"exp_avg": 3}, "not a tensor"),
]


@pytest.mark.parametrize("change, text", BROKEN, ids=[text for _, text in BROKEN])
@pytest.mark.parametrize("stepped", [True, False])
def test_a_state_that_cannot_be_taken_is_refused_before_anything_is_stepped(change, text, stepped):
    params = two()
    optimizer = ours(params, "adamw")
    if stepped:
        step(optimizer, 0)
    before = [param.detach().clone() for param in params]
    whole = {"step": torch.tensor(2.0), "exp_avg": torch.ones(3, 2), "exp_avg_sq": torch.ones(3, 2)}
    optimizer.state[params[1]] = {**whole, **change}
    with pytest.raises(ValueError, match=text):
        step(optimizer, 1)
    assert all(torch.equal(param, old) for param, old in zip(params, before))


def test_a_sum_of_adagrad_counts_before_the_first_step_or_is_refused():
    params, others = two(), two()
    optimizer, wanted = ours(params, "adagrad"), theirs(others, "adagrad")
    optimizer.state_dict()
    for one, some in ((optimizer, params), (wanted, others)):
        one.state[some[0]]["sum"].fill_(9.0)
        for number in range(3):
            step(one, number)
    assert_alike(params, others)
    decaying = ours(params, "adagrad", lr_decay=0.5)
    decaying.state_dict()
    step(decaying, 0)
    decaying.state[params[0]]["step"].zero_()
    with pytest.raises(ValueError, match="set 'step' to 1"):
        step(decaying, 0)


def test_a_step_of_nadam_is_set_with_its_product():
    params, others = two(), two()
    optimizer, wanted = ours(params, "nadam"), theirs(others, "nadam")
    for one, some in ((optimizer, params), (wanted, others)):
        step(one, 0)
        one.state[some[0]]["step"].zero_()
    with pytest.raises(ValueError, match="at step 0: it is 1 before the first update alone"):
        step(optimizer, 1)
    for one, some in ((optimizer, params), (wanted, others)):
        one.state[some[0]]["mu_product"].fill_(1.0)
        step(one, 1)
    assert_alike(params, others)


def test_one_dict_for_two_parameters_becomes_two():
    params = two()
    optimizer = ours(params, "adamw")
    step(optimizer, 0)
    optimizer.state[params[0]] = optimizer.state[params[1]]
    for number in range(1, 3):
        step(optimizer, number)
    assert [float(optimizer.state[param]["step"]) for param in params] == [3.0, 3.0]
    assert not torch.equal(optimizer.state[params[0]]["exp_avg"], optimizer.state[params[1]]["exp_avg"])


def test_a_state_whose_every_step_a_gpu_has_skipped_is_hidden_again():
    params = two()
    optimizer = ours(params, "sgd")
    step(optimizer, 0)
    [arena] = optimizer._engine.arenas
    assert optimizer.state.keys() == set(params) and not arena.hidden
    # As after a first step on a GPU, which does not say at once whether it has skipped it.
    for param in params:
        del optimizer.state[param]
    arena.device, arena.hidden = torch.device("cuda", 0), {0, 1}
    arena.show_begun([0, 1])
    assert optimizer.state.keys() == set(params) and arena.unsure == {0, 1}
    optimizer.state[params[0]]["mine"] = 1
    arena.counts = lambda: [(0, 1.0), (3, 1.0)]
    arena.write_numbers()
    assert optimizer.state[params[0]] == {"mine": 1} and list(optimizer.state[params[1]]) == ["momentum_buffer"]
    assert arena.hidden == {0} and not arena.unsure


@pytest.mark.parametrize("master", ["remainder16", "remainder8"])
def test_weights_that_are_written_after_a_load_have_no_remainder_of_other_weights(master):
    param = torch.randn(300).bfloat16().requires_grad_()
    optimizer = FusedOptimizer([param], "adamw", lr=1e-3, master=master)
    for _ in range(3):
        param.grad = torch.randn_like(param)
        optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        param.copy_(torch.randn(300))
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert not optimizer.state[param]["master"].any()
