"""The named classes: torch's signatures, torch's subclasses, the bits of FusedOptimizer, and 8 bits as in
bitsandbytes.
"""

import copy
import importlib.util
import inspect
import io
import pathlib
import sys
import warnings
from functools import partial

import pytest
import torch

import instep.torch
from instep import OPTIMIZERS
from instep.torch import SGD, AdamW, AdamW8bit, FusedOptimizer, Lion
from instep.torch.optimizer import key_of

CLASSES = {key: getattr(instep.torch, descriptor.name) for key, descriptor in OPTIMIZERS.items()}
NAMES = list(CLASSES)
SCRIPT = pathlib.Path(__file__).parents[2] / "scripts/named-optimizers.py"


def params(count=3, size=300):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size + k)) for k in range(count)]


def set_grads(some, seed):
    torch.manual_seed(seed)
    for param in some:
        param.grad = torch.randn_like(param)


def test_the_file_is_what_the_tables_make():
    spec = importlib.util.spec_from_file_location("named_optimizers", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text() == script.file(), "run scripts/named-optimizers.py --bless"


@pytest.mark.parametrize("key", NAMES)
def test_a_class_has_torchs_signature_defaults_and_base(key):
    one, torchs = CLASSES[key], getattr(torch.optim, OPTIMIZERS[key].name, None)
    own = inspect.signature(one).parameters
    assert {
        "foreach",
        "fused",
        "capturable",
        "differentiable",
        "max_norm",
        "states",
        "master",
        "seed",
        "threads",
    } <= own.keys()
    if torchs is None:
        assert list(own)[1 : 1 + len(OPTIMIZERS[key].defaults) - 1] == list(OPTIMIZERS[key].defaults)[:-1]
        return
    assert issubclass(one, torchs)
    theirs = inspect.signature(torchs).parameters
    assert [n for n in own if n in theirs] == list(theirs)
    for name, parameter in theirs.items():
        assert (own[name].kind, own[name].default) == (parameter.kind, parameter.default), name
    ours, expected = one(params()).param_groups[0], torchs(params()).param_groups[0]
    assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in expected.items() if k != "params"}


@pytest.mark.parametrize("key", NAMES)
def test_a_class_steps_as_fused_optimizer_does_after_a_copy_and_a_state_dict_too(key):
    one, other = params(), params()
    named, fused = CLASSES[key](one), FusedOptimizer(other, key)
    for step in range(4):
        if step == 2:
            file = io.BytesIO()
            torch.save(named.state_dict(), file)
            file.seek(0)
            named = CLASSES[key](one)
            named.load_state_dict(torch.load(file))
        if step == 3:
            one, named = copy.deepcopy((one, named))
        for some, optimizer in ((one, named), (other, fused)):
            set_grads(some, step)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize("key", NAMES)
def test_what_is_torchs_own_is_refused_by_name(key):
    optimizer = CLASSES[key](params())
    with pytest.raises(NotImplementedError, match="_init_group"):
        optimizer._init_group(optimizer.param_groups[0], [], [])
    with pytest.raises(NotImplementedError, match="share_memory"):
        optimizer.share_memory()
    with pytest.raises(NotImplementedError, match="differentiable"):
        CLASSES[key](params(), differentiable=True)
    CLASSES[key](params(), foreach=True, fused=False, capturable=False, differentiable=False)


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("key", NAMES)
def test_a_learning_rate_may_be_a_tensor_and_a_scheduler_moves_it(key, shape, foreach):
    (one,), (other,) = params(1), params(1)
    rate = torch.full(shape, 0.25)
    ours, plain = CLASSES[key]([one], rate, foreach=foreach), CLASSES[key]([other], 0.25)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (ours, plain)]
    for step in range(3):
        for param, optimizer, schedule in zip((one, other), (ours, plain), schedules):
            set_grads([param], step)
            optimizer.step()
            schedule.step()
        assert torch.equal(one, other)
    assert ours.param_groups[0]["lr"] is rate and rate == 0.25 / 8
    with pytest.raises(ValueError, match=r"lr of \(2,\)"):
        CLASSES[key](params(1), torch.ones(2))


@pytest.mark.parametrize("key", [key for key in NAMES if hasattr(torch.optim, OPTIMIZERS[key].name)])
def test_a_learning_rate_in_a_tensor_steps_as_torchs_does(key):
    (one,), (other,) = params(1), params(1)
    ours = CLASSES[key]([one], torch.tensor(0.1))
    torchs = getattr(torch.optim, OPTIMIZERS[key].name)([other], torch.tensor(0.1))
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (ours, torchs)]
    for step in range(3):
        for param, optimizer, schedule in zip((one, other), (ours, torchs), schedules):
            set_grads([param], step)
            optimizer.step()
            schedule.step()
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_ademamix_takes_the_three_betas_of_its_authors_code():
    both = []
    for settings in ({"betas": (0.8, 0.9, 0.99)}, {"betas": [0.8, 0.9, 0.99]}, {"betas": (0.8, 0.9), "beta3": 0.99}):
        some = params(1)
        optimizer = CLASSES["ademamix"](some, 0.1, alpha=2.0, **settings)
        assert optimizer.param_groups[0]["beta3"] == 0.99 and list(optimizer.param_groups[0]["betas"]) == [0.8, 0.9]
        for step in range(3):
            set_grads(some, step)
            optimizer.step()
        both.append(some[0])
    assert torch.equal(both[0], both[1]) and torch.equal(both[0], both[2])
    # The fourth argument of the authors' code is alpha.
    with pytest.raises(TypeError, match="beta3 = 2.0: betas has three numbers"):
        CLASSES["ademamix"](params(1), 0.1, (0.8, 0.9, 0.99), 2.0)
    for wrong in (0.9, (0.9,), (0.9, 0.9, 0.9, 0.9)):
        with pytest.raises(ValueError, match="betas = .*: not 2 numbers"):
            CLASSES["ademamix"](params(1), betas=wrong)


def test_a_wrapper_takes_a_class_for_its_key():
    assert key_of(AdamW) == "adamw"


def test_eight_bits_are_of_parameters_that_are_large_enough():
    small, large = torch.nn.Parameter(torch.ones(4095)), torch.nn.Parameter(torch.ones(4096))
    optimizer = AdamW8bit([small, large])
    for step in range(2):
        set_grads([small, large], step)
        optimizer.step()
    assert optimizer.state[small]["exp_avg"].dtype == torch.float32
    assert optimizer.state[large]["exp_avg"].dtype == torch.uint8 and "exp_avg_scales" in optimizer.state[large]
    again = AdamW8bit([small, large])
    again.load_state_dict(optimizer.state_dict())
    all_coded = AdamW8bit([torch.nn.Parameter(torch.ones(7))], min_8bit_size=0)
    set_grads(all_coded.param_groups[0]["params"], 0)
    all_coded.step()
    assert next(iter(all_coded.state.values()))["exp_avg"].dtype == torch.uint8


@pytest.mark.parametrize(
    "option",
    [
        {"amsgrad": True},
        {"optim_bits": 8},
        {"args": {}},
        {"percentile_clipping": 5},
        {"block_wise": False},
        {"is_paged": True},
    ],
)
def test_other_options_of_bitsandbytes_are_refused_by_name(option):
    with pytest.raises(NotImplementedError, match=next(iter(option))):
        AdamW8bit(params(), **option)


def test_arguments_of_8_bits_come_in_the_order_of_bitsandbytes():
    """The order is that of bitsandbytes 0.50. Earlier versions had two more options before the last option."""
    optimizer = AdamW8bit(params(1), 0.5, (0.8, 0.9), 1e-6, 0.25, False, 32, None, 100, False)
    [group] = optimizer.param_groups
    assert [group[name] for name in ("lr", "betas", "eps", "weight_decay", "amsgrad")] == [0.5, (0.8, 0.9), 1e-6, 0.25, False]
    AdamW8bit(params(1), percentile_clipping=100, block_wise=True)
    with pytest.raises(TypeError, match="positional"):
        AdamW8bit(params(1), 0.5, (0.8, 0.9), 1e-6, 0.25, False, 32, None, 100, 100, True)


@pytest.mark.parametrize(
    ("make", "names"),
    [(AdamW8bit, ["exp_avg", "exp_avg_sq"]), (Lion, ["exp_avg"]), (partial(SGD, momentum=0.9), ["momentum_buffer"])],
)
def test_a_state_of_bitsandbytes_is_refused(make, names):
    optimizer = make(params(1))
    state = {"step": 2, "state1": torch.zeros(300), "state2": torch.zeros(300)}
    hidden = {"step": 2, "__bnb_optimizer_quant_state__": {"state1": torch.zeros(300, dtype=torch.uint8)}}
    for values in (state, hidden) if make is AdamW8bit else (state,):
        with pytest.raises(ValueError, match=f"but no {', '.join(names)}"):
            optimizer.load_state_dict({"state": {0: values}, "param_groups": optimizer.state_dict()["param_groups"]})


def test_a_class_with_options_of_its_own_is_refused_where_a_key_is_meant():
    class Mine(AdamW):
        pass

    for other in (AdamW8bit, Mine):
        with pytest.raises(TypeError, match="give 'adamw', and its options"):
            FusedOptimizer(params(), other)


@pytest.mark.parametrize("key", NAMES)
def test_a_constructor_leaves_to_the_first_step_what_only_a_step_needs(key):
    [param] = some = params(1)
    optimizer = CLASSES[key](some)
    assert "_engine" not in vars(optimizer)
    twin = copy.deepcopy(optimizer)
    [other] = twin.param_groups[0]["params"]
    for one, own in ((optimizer, param), (twin, other)):
        set_grads([own], 1)
        one.step()
    assert torch.equal(param, other) and optimizer._engine is not twin._engine


def calls_of(make, *args):
    """Returns the number of calls of Python and C functions in a second construction."""
    count = 0

    def counts(_frame, event, _of):
        nonlocal count
        count += event in ("call", "c_call")

    make(*args)
    sys.setprofile(counts)
    try:
        make(*args)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("key", [key for key in NAMES if hasattr(torch.optim, OPTIMIZERS[key].name)])
def test_a_constructor_makes_no_more_calls_than_torchs(key):
    """benches/functional.py times constructors. Unlike a time, a count of calls does not depend on the machine's load."""
    torchs = getattr(torch.optim, OPTIMIZERS[key].name)
    assert calls_of(CLASSES[key], params(1)) <= calls_of(torchs, params(1))


@pytest.mark.parametrize("default", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adagrads_constructor_makes_torchs_states(dtype, default):
    torch.set_default_dtype(default)
    try:
        some = [torch.nn.Parameter(param.to(dtype)) for param in params()]
        groups = [{"params": some[:1]}, {"params": some[1:], "initial_accumulator_value": torch.tensor(0.1)}]
        ours = CLASSES["adagrad"](groups, initial_accumulator_value=0.1).state_dict()["state"]
        theirs = torch.optim.Adagrad(some, initial_accumulator_value=0.1).state_dict()["state"]
    finally:
        torch.set_default_dtype(torch.float32)
    for own, their in zip(ours.values(), theirs.values()):
        assert list(own) == list(their) == ["step", "sum"]
        assert all(own[name].dtype == their[name].dtype and torch.equal(own[name], their[name]) for name in own)


GIVEN = {
    "parameters": lambda some: some,
    "a generator": lambda some: (param for param in some),
    "a tuple": tuple,
    "names": lambda some: [(f"layer.{k}", param) for k, param in enumerate(some)],
    "a group of one parameter": lambda some: [{"params": some[0], "lr": 0.5, "note": "mine"}],
    "a group": lambda some: [{"lr": 0.5, "params": some}],
    "a group of a tuple": lambda some: [{"params": tuple(some)}],
    "a group of nothing": lambda some: [{"params": []}],
    "groups": lambda some: [{"params": some[:1]}, {"params": some[1:], "weight_decay": 0.0}],
    "tensors": lambda some: [param.detach() for param in some],
    "a parameter twice": lambda some: [some[0], some[0]],
    "a parameter in two groups": lambda some: [{"params": some[:1]}, {"params": some[:1]}],
    "no leaf": lambda some: [torch.nn.Parameter(torch.zeros(300), requires_grad=False).add_(some[0])],
    "no tensor": lambda some: [0.5],
    "no params": lambda some: [{"lr": 0.5}],
    "nothing": lambda some: [],
    "a parameter": lambda some: some[0],
    "a set": lambda some: {some[0]},
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("key", ["adamw", "sgd", "lion"])
def test_a_constructor_leaves_and_refuses_what_torchs_own_code_does(key, given, monkeypatch):
    """A constructor bypasses torch's add_param_group for a first group of plain parameters. The second construction of
    this test calls add_param_group.
    """

    def made(*_):
        some = params()
        groups = GIVEN[given](some)
        lists = [one["params"] for one in groups if isinstance(one, dict) and "params" in one] if type(groups) is list else []
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer = CLASSES[key](groups)
        except Exception as error:
            return type(error), str(error)
        places = {id(param): k for k, param in enumerate(some)}
        number = lambda param: places.get(id(param), param.shape)
        kept = [{**group, "params": list(map(number, group["params"]))} for group in optimizer.param_groups]
        assert not any(group["params"] is own for group in optimizer.param_groups for own in [groups, *lists])
        assert all(own is one for own, one in zip(optimizer.param_groups, groups) if isinstance(one, dict))
        types = {name: type(value) for name, value in vars(optimizer).items()}
        return [list(group.items()) for group in kept], types, [str(one.message) for one in caught]

    fast = made()
    monkeypatch.setattr(instep.torch.optimizer, "completed", lambda *_: False)
    assert fast == made()


@pytest.mark.parametrize("key", [key for key in NAMES if hasattr(torch.optim, OPTIMIZERS[key].name)])
def test_an_instance_has_every_attribute_of_torchs(key):
    torchs = vars(getattr(torch.optim, OPTIMIZERS[key].name)(params()))
    own = vars(CLASSES[key](params()))
    assert {name: type(value) for name, value in torchs.items() if name in own} == {n: type(own[n]) for n in torchs}
    assert all(not own[name] for name in torchs if name.endswith("_hooks"))


def test_groups_that_differ_in_turn_are_each_checked():
    for _ in range(2):
        for decay in (0.1, 0.0, 0.2):
            AdamW(params(), weight_decay=decay)
            with pytest.raises(ValueError, match="weight_decay"):
                AdamW(params(), weight_decay=-decay - 1.0)
        with pytest.raises(TypeError, match="weight_decay"):
            AdamW(params(), weight_decay="0.1")
        with pytest.raises(ValueError, match="lr"):
            AdamW([{"params": params(), "lr": torch.ones(2)}])
