"""Tests the functions over lists: they have FusedOptimizer's bits, accept any mix of types, and follow tensors that
move.
"""

import importlib.util
import inspect
import math
import pathlib
import threading

import pytest
import torch
from torch import Tensor

from instep import OPTIMIZERS, _native
from instep.torch import FusedOptimizer, functional
from instep.torch._lists import EXCHANGE, RULES

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts/functional-optimizers.py"
SHAPES = [(3, 5), (1,), (700,), (), (0,), (2, 1, 3)]
ADAMW = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "eps": 1e-8}

SETTINGS = [(key, {}) for key in OPTIMIZERS] + [
    ("adamw", {"amsgrad": True, "maximize": True}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("rmsprop", {"centered": True}),
    ("rmsprop", {"momentum": 0.5, "centered": True}),
]


def parts_of(key, changed):
    """Returns the hyperparameters as keyword arguments of the function."""
    parts = {}
    for names, (name, default) in zip(RULES[key].hyper, OPTIMIZERS[key].defaults.items()):
        value = changed.get(name, default)
        parts.update(zip(names, value if len(names) > 1 else (value,)))
    return parts


def states_of(key, changed, params, dtype=None):
    """Returns states before the first step, by the names of the function's lists."""
    hyper = {**OPTIMIZERS[key].defaults, **changed}
    names = [f"{name}s" for name in _native.state_names(key, hyper)]
    states = {name: [torch.zeros_like(p, dtype=dtype or p.dtype) for p in params] for name in names}
    if RULES[key].carried:
        states[RULES[key].carried] = [torch.ones((), dtype=torch.float64) for _ in params]
    return states


def made(seed, dtypes=(torch.float32,), shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtypes[k % len(dtypes)]) for k, s in enumerate(shapes)]


def steps(count):
    return [torch.zeros(()) for _ in range(count)]


def adamw_lists(dtypes=(torch.float32,), state=None):
    params = made(0, dtypes)
    return [params, made(1, dtypes), *states_of("adamw", {}, params, state).values(), steps(len(params))]


def test_the_file_is_what_the_tables_make():
    spec = importlib.util.spec_from_file_location("functional_optimizers", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text() == script.file(), "run scripts/functional-optimizers.py --bless"


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16,), (torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("key, changed", SETTINGS, ids=str)
def test_a_function_steps_to_the_bits_of_fused_optimizer(key, changed, dtypes):
    state = torch.float32 if changed.get("centered") else None
    params, twins = made(0, dtypes), [torch.nn.Parameter(p) for p in made(0, dtypes)]
    optimizer = FusedOptimizer(twins, key, **changed)
    states, counts = states_of(key, changed, params, state), steps(len(params))
    for step in range(4):
        lr = 0.01 / (1 + step)
        grads = made(10 + step, dtypes)
        optimizer.param_groups[0]["lr"] = lr
        for twin, grad in zip(twins, grads):
            twin.grad = grad.clone()
        optimizer.step()
        before = [grad.clone() for grad in grads]
        hyper = {**parts_of(key, changed), "lr": lr}
        getattr(functional, f"{key}_")(params, grads, **states, state_steps=counts, **hyper)
        assert all(map(torch.equal, params, twins)), step
        assert all(map(torch.equal, grads, before)) and counts == [step + 1] * len(params)
    for name, values in states.items():
        for value, twin in zip(values, twins):
            assert torch.equal(value, optimizer.state[twin][name.removesuffix("s")]), name


def test_adamw_is_torchs_within_rounding():
    ours, theirs = adamw_lists(), adamw_lists()
    for step in range(3):
        ours[1] = theirs[1] = made(step)
        functional.adamw_(*ours, **ADAMW)
        torch._foreach_add_(theirs[4], 1)
        torch._fused_adamw_(*theirs[:4], [], theirs[4], amsgrad=False, maximize=False, **ADAMW)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,), (torch.bfloat16,), (torch.bfloat16, torch.float16, torch.float32)], ids=str
)
def test_copies_are_the_stepped_parameters_rounded(dtypes):
    lists, alone = adamw_lists(), adamw_lists()
    lists[1] = alone[1] = made(1, (torch.bfloat16, torch.float32))
    copies = [torch.full_like(p, math.nan, dtype=dtypes[k % len(dtypes)]) for k, p in enumerate(lists[0])]
    given = [None if k == 2 else copy for k, copy in enumerate(copies)]
    functional.adamw_(*lists, given, **ADAMW)
    functional.adamw_(*alone, **ADAMW)
    assert all(map(torch.equal, lists[0], alone[0]))
    for k, (copy, param) in enumerate(zip(copies, lists[0])):
        assert torch.equal(copy, param.to(copy.dtype)) if k != 2 else copy.isnan().all()


def test_a_parameter_without_a_gradient_is_passed_over():
    lists, whole = adamw_lists(), adamw_lists()
    before = lists[0][2].clone()
    lists[1][2] = None
    version = lists[0][2]._version, lists[0][0]._version
    functional.adamw_(*lists, **ADAMW)
    functional.adamw_(*whole, **ADAMW)
    assert torch.equal(lists[0][2], before) and lists[4] == [1, 1, 0, 1, 1, 1] and not lists[2][2].any()
    assert (lists[0][2]._version, lists[0][0]._version) == (version[0], version[1] + 1)
    lists[1][2] = whole[1][2]
    functional.adamw_(*lists, **ADAMW)
    assert torch.equal(lists[0][2], whole[0][2]) and lists[4] == [2, 2, 1, 2, 2, 2]


@pytest.mark.parametrize("has_table", [True, False])
@pytest.mark.parametrize("key, name", [(key, name) for key in ("adamw", "nadam") for name in RULES[key].lists if name])
def test_a_tensor_whose_memory_has_moved_is_found_where_it_is(key, name, has_table, monkeypatch):
    if not has_table:
        without_exchange(monkeypatch, key)
    hyper, function = {**OPTIMIZERS[key].defaults, "amsgrad": True}, getattr(functional, f"{key}_")
    changed = {name: value for name, value in hyper.items() if name in OPTIMIZERS[key].defaults}

    def all_lists():
        params = made(0)
        lists = {"params": params, "grads": made(1), **states_of(key, changed, params), "state_steps": steps(len(params))}
        return {**lists, "copies": made(2, (torch.bfloat16,))}

    lists, still = all_lists(), all_lists()
    kept = []
    for step in range(3):
        for tensor in lists[name]:
            kept.append(tensor.data)
            tensor.data = tensor.data.clone()
            kept[-1].fill_(math.nan)
        for each in (lists, still):
            function(**each, **parts_of(key, changed))
    assert all(torch.equal(a, b) for one, other in zip(lists.values(), still.values()) for a, b in zip(one, other))
    assert all(old.isnan().all() for old in kept)


def test_counts_that_differ_are_each_its_own():
    lists = adamw_lists()
    counts = [0.0, 7.0, 3.0, 1000.0, 0.0, 2.0**24]
    for tensor, count in zip(lists[4], counts):
        tensor.fill_(count)
    alone = [[[tensor.clone()] for tensor in one] for one in lists]
    functional.adamw_(*lists, **ADAMW)
    for k, count in enumerate(counts):
        functional.adamw_(*(one[k] for one in alone), **ADAMW)
        assert torch.equal(lists[0][k], alone[0][k][0])
        assert lists[4][k] == torch.tensor(count + 1)


def test_gradients_are_multiplied_by_the_scale_as_torch_multiplies():
    for scale in (0.0, 0.3, 1.0, 3.7, 2.0**-20, 1e9):
        lists, scaled = adamw_lists(), adamw_lists()
        torch._foreach_mul_(scaled[1], scale)
        functional.adamw_(*lists, gradient_scale=scale, **ADAMW)
        functional.adamw_(*scaled, **ADAMW)
        assert all(map(torch.equal, lists[0], scaled[0])), scale


def test_the_count_of_threads_changes_no_bit():
    shapes = [(50_000,), (3,), (70_000,)]
    results = []
    for threads in (1, 2, 5):
        params = made(0, shapes=shapes)
        lists = [params, made(1, shapes=shapes), *states_of("adamw", {}, params).values(), steps(3)]
        functional.adamw_(*lists, threads=threads, **ADAMW)
        results.append(lists)
    for other in results[1:]:
        assert all(torch.equal(a, b) for one, two in zip(results[0], other) for a, b in zip(one, two))


def test_any_order_of_elements_is_stepped_if_all_tensors_have_it():
    lists, plain = adamw_lists(), adamw_lists()
    for one in lists[:4]:
        one[0] = one[0].t().contiguous().t()
    functional.adamw_(*lists, **ADAMW)
    functional.adamw_(*plain, **ADAMW)
    assert not lists[0][0].is_contiguous() and all(map(torch.equal, lists[0], plain[0]))


def test_calls_in_threads_step_their_own_tensors():
    every, expected = [adamw_lists() for _ in range(4)], adamw_lists()
    barrier = threading.Barrier(4)

    def run(lists):
        barrier.wait()
        for _ in range(50):
            functional.adamw_(*lists, **ADAMW)

    threads = [threading.Thread(target=run, args=(lists,)) for lists in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(50):
        functional.adamw_(*expected, **ADAMW)
    assert all(torch.equal(a, b) for lists in every for one, two in zip(lists, expected) for a, b in zip(one, two))


def test_tuples_parameters_that_need_gradients_and_a_rate_in_a_tensor_are_taken():
    lists, plain = adamw_lists(), adamw_lists()
    lists[0] = [torch.nn.Parameter(param) for param in lists[0]]
    functional.adamw_(*map(tuple, lists), **{**ADAMW, "lr": torch.tensor(0.1, dtype=torch.float64)})
    functional.adamw_(*plain, **ADAMW)
    assert all(map(torch.equal, lists[0], plain[0]))


def test_autograd_refuses_a_backward_pass_through_old_values():
    lists = adamw_lists()
    lists[0] = [torch.nn.Parameter(param) for param in lists[0]]
    loss = lists[0][2].square().sum()
    functional.adamw_(*lists, **ADAMW)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_tensor_at_all_is_no_step():
    functional.adamw_([], [], [], [], [], **ADAMW)
    assert functional.norm_([]) == 0.0 and functional.clip_([None], 1.0) == (0.0, 1.0)


def without_exchange(monkeypatch, key="adamw"):
    """Makes the function read tensors as in a torch that lacks DLPack's table."""
    from instep.torch._threads import openmp

    torchs = torch.get_num_threads, torch.autograd.graph.increment_version, openmp()
    own = _native.Lists(key, torch.Tensor, torch.nn.Parameter, None, torchs)
    monkeypatch.setattr(functional, f"_{key}", own.step)
    monkeypatch.setattr(RULES[key], "native", own)


def test_tensors_are_read_alike_without_dlpacks_table(monkeypatch):
    assert EXCHANGE is not None or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    dtypes = torch.float32, torch.bfloat16, torch.float16
    lists, others = adamw_lists(dtypes, torch.float32), adamw_lists(dtypes, torch.float32)
    functional.adamw_(*lists, **ADAMW)
    without_exchange(monkeypatch)
    functional.adamw_(*others, **ADAMW)
    assert all(torch.equal(a, b) for one, two in zip(lists, others) for a, b in zip(one, two))


def test_gradients_may_share_memory_for_they_are_only_read():
    lists, plain = adamw_lists(), adamw_lists()
    both = torch.randn(15)
    lists[1][0] = plain[1][0] = both.view(3, 5)
    lists[1][5], plain[1][5] = both[2:8].view(2, 1, 3), both[2:8].view(2, 1, 3).clone()
    functional.adamw_(*lists, **ADAMW)
    functional.adamw_(*plain, **ADAMW)
    assert all(map(torch.equal, lists[0], plain[0]))


def test_nadams_products_may_be_of_float32_as_torchs_are():
    params = made(0)
    states = states_of("nadam", {}, params)
    exact = {name: [t.clone() for t in one] for name, one in states.items()}
    states["mu_products"] = [torch.ones(()) for _ in params]
    counts, theirs = steps(len(params)), steps(len(params))
    others = [param.clone() for param in params]
    for step in range(3):
        functional.nadam_(params, made(step), **states, state_steps=counts, **parts_of("nadam", {}))
        functional.nadam_(others, made(step), **exact, state_steps=theirs, **parts_of("nadam", {}))
    torch.testing.assert_close(params, others, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(states["mu_products"][0].double(), exact["mu_products"][0], rtol=1e-6, atol=0.0)
    with pytest.raises(ValueError, match="step_count|mu_product"):
        states["mu_products"][0].fill_(2.0)
        functional.nadam_(params, made(0), **states, state_steps=counts, **parts_of("nadam", {}))


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("key, changed", SETTINGS, ids=str)
def test_a_prepared_call_steps_to_the_same_bits(key, changed, dtypes):
    function, hyper = getattr(functional, f"{key}_"), parts_of(key, changed)
    state = torch.float32 if changed.get("centered") else None
    both = []
    for _ in range(2):
        params = made(0, dtypes)
        grads = [None if k == 2 else grad for k, grad in enumerate(made(1, dtypes))]
        both.append((params, grads, states_of(key, changed, params, state), steps(len(params))))
    (_, grads, states, counts), (others, other_grads, other_states, other_counts) = both
    call = functional.prepare(function, both[0][0], grads, **states, state_steps=counts, **hyper)
    assert counts == [0] * 6
    for step, (lr, scale) in enumerate([(0.1, 1.0), (0.1, 0.5), (0.02, 1.0), (0.02, 1.0)]):
        for own, other, new in zip(grads, other_grads, made(step, dtypes)):
            if own is not None:
                own.copy_(new)
                other.copy_(new)
        call(lr=lr, gradient_scale=scale)
        function(others, other_grads, **other_states, state_steps=other_counts, gradient_scale=scale, **{**hyper, "lr": lr})
        assert all(map(torch.equal, both[0][0], others)), step
        assert counts == other_counts, step
        for name, values in states.items():
            assert all(map(torch.equal, values, other_states[name])), (step, name)
        # The user's own counts, of some parameters: 1,000 updates more, and one less.
        for own in (counts, other_counts):
            own[0] += 1000 * int(step == 0)
            own[3] -= int(step == 2)
    assert counts == [1004, 4, 0, 3, 4, 4]


def test_a_prepared_call_refuses_a_number_that_is_no_count_and_has_changed_nothing():
    lists = adamw_lists()
    call = functional.prepare(functional.adamw_, *lists, **ADAMW)
    call()
    before = [[tensor.clone() for tensor in one] for one in lists]
    for wrong in (0.5, -1.0, math.nan, math.inf, 2.0**63):
        lists[4][5].fill_(wrong)
        with pytest.raises(ValueError, match=r"state_steps\[5\]: not a count"):
            call()
    lists[4][5].fill_(1.0)
    with pytest.raises(ValueError, match="lr"):
        call(lr=-1.0)
    assert all(map(torch.equal, before[0] + before[4], lists[0] + lists[4]))
    call()
    functional.adamw_(*before, **ADAMW)
    assert all(map(torch.equal, before[0], lists[0]))


def test_equal_counts_with_other_carried_numbers_are_stepped_by_their_own():
    params = made(0)
    lists = {"params": params, "grads": made(1), **states_of("nadam", {}, params), "state_steps": steps(len(params))}
    for k, (count, product) in enumerate(zip(lists["state_steps"], lists["mu_products"])):
        count.fill_(7.0)
        product.fill_(0.1 * (k + 1))
    alone = [{name: [values[k].clone()] for name, values in lists.items()} for k in range(len(params))]
    functional.nadam_(**lists, **parts_of("nadam", {}))
    for k, own in enumerate(alone):
        functional.nadam_(**own, **parts_of("nadam", {}))
        assert all(torch.equal(values[k], own[name][0]) for name, values in lists.items()), k


def test_a_prepared_call_keeps_memory_that_its_tensors_have_left():
    lists = adamw_lists()
    call = functional.prepare(functional.adamw_, *lists, **ADAMW)
    old = lists[0][2].data
    before = old.clone()
    lists[0][2].data = torch.zeros(700)
    del lists[1:]
    call()
    assert not torch.equal(old, before) and not lists[0][2].any()


DTYPES = [(torch.float32,), (torch.bfloat16,), (torch.float16,), (torch.float32, torch.bfloat16, torch.float16)]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_the_norm_is_that_of_float64_and_exact(dtypes):
    tensors = made(3, dtypes, [(1000,), (7, 3), (), (0,), (50_001,)])
    expected = torch.cat([tensor.double().flatten() for tensor in tensors]).norm().item()
    norm = functional.norm_([tensors[0], None, *tensors[1:]])
    assert norm == pytest.approx(expected, rel=1e-13)
    parts = [part for tensor in reversed(tensors) for part in tensor.flatten().split(17)]
    assert functional.norm_(parts, threads=3) == norm == functional.norm_(tensors, threads=1)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_a_clip_is_torchs(dtypes):
    for max_norm in (0.5, 1e6):
        tensors, theirs = made(3, dtypes), [torch.nn.Parameter(tensor) for tensor in made(3, dtypes)]
        for param in theirs:
            param.grad = param.detach().clone()
        torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        clipped = functional.clip_(tensors, max_norm)
        assert (clipped.coefficient == 1.0) == (max_norm == 1e6) and clipped.norm == functional.norm_(made(3, dtypes))
        for tensor, param in zip(tensors, theirs):
            torch.testing.assert_close(
                tensor, param.grad, rtol=1e-2 if len(dtypes) > 1 or dtypes[0].itemsize == 2 else 1e-5, atol=0.0
            )
        if max_norm == 0.5:
            assert functional.norm_(tensors) == pytest.approx(max_norm, rel=1e-2)


def test_a_clip_by_its_coefficient_steps_to_the_bits_of_one_in_place():
    by_scale, in_place = adamw_lists(), adamw_lists()
    before = [grad.clone() for grad in by_scale[1]]
    clipped = functional.clip_(by_scale[1], 0.5, in_place=False)
    assert all(map(torch.equal, by_scale[1], before)) and clipped == functional.clip_(in_place[1], 0.5)
    functional.adamw_(*by_scale, gradient_scale=clipped.coefficient, **ADAMW)
    functional.adamw_(*in_place, **ADAMW)
    assert all(map(torch.equal, by_scale[0], in_place[0]))


def test_gradients_that_are_not_finite_are_clipped_as_torch_does_or_raised():
    for value, coefficient in ((math.inf, 0.0), (math.nan, math.nan)):
        tensors = [torch.tensor([1.0, value])]
        clipped = functional.clip_(tensors, 1.0, in_place=False)
        assert str(clipped) == str(functional.Clipped(value, coefficient))
        with pytest.raises(RuntimeError, match="norm of the gradients is"):
            functional.clip_(tensors, 1.0, error_if_nonfinite=True)
        with pytest.raises(ValueError, match="max_norm"):
            functional.clip_(tensors, 0.0)


def test_every_optimizer_has_a_function_with_its_hyperparameters():
    for key in OPTIMIZERS:
        function = getattr(functional, f"{key}_")
        own = inspect.signature(function).parameters
        assert list(own)[:2] == ["params", "grads"] and {"state_steps", "copies", "gradient_scale", "threads"} <= own.keys()
        assert f"{key}_" in functional.__all__
    assert list(inspect.signature(functional.adamw_).parameters)[:6] == [
        "params",
        "grads",
        "exp_avgs",
        "exp_avg_sqs",
        "state_steps",
        "copies",
    ]


WORDS = [torch.float32, torch.bfloat16]


def odd(dtype, seed):
    """Returns values of every kind: midpoints between two bfloat16 values, infinities, NaN, both zeros, the smallest
    value.
    """
    torch.manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (40_000,), dtype=torch.int32)
    kinds = torch.tensor([0, -(2**31), 0x7F800000, 0x7FC00001, 0x7F800001, 1, 0x7F7FFFFF, 0x3F808000, 0x3F818000])
    bits[: len(kinds)] = kinds.to(torch.int32)
    value = bits.view(torch.float32)
    return value if dtype == torch.float32 else value.to(dtype)


def same_bits(one, other):
    """Returns whether two tensors have the same bits. Any two NaNs count as equal, because processors differ in which
    operand's NaN they return.
    """
    words = torch.int32 if one.dtype == torch.float32 else torch.int16
    return bool(((one.view(words) == other.view(words)) | (one.isnan() & other.isnan())).all())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("source", WORDS, ids=str)
@pytest.mark.parametrize("target", WORDS, ids=str)
def test_lists_are_added_and_copied_with_torchs_bits(target, source, threads):
    tensors = [odd(source, seed) for seed in range(5)] + [torch.ones(0, dtype=source), torch.ones((), dtype=source)]
    for ours, theirs in ((functional.add_, Tensor.add_), (functional.copy_, Tensor.copy_)):
        into = [odd(target, 10 + seed) for seed in range(5)] + [torch.ones(0, dtype=target), torch.ones((), dtype=target)]
        expected = [tensor.clone() for tensor in into]
        for tensor, value in zip(expected, tensors):
            theirs(tensor, value)
        versions = [tensor._version for tensor in into]
        ours(tuple(into), iter(tensors), threads=threads)
        assert all(map(same_bits, into, expected)), ours
        assert all(tensor._version == version + 1 for tensor, version in zip(into, versions))


def test_a_mix_of_types_is_added_and_any_order_of_elements_kept():
    into = [torch.ones(3, 5).t(), torch.ones(4, dtype=torch.bfloat16)]
    functional.add_(into, [torch.arange(15.0).view(3, 5).bfloat16().t(), torch.full((4,), 2.0)])
    assert torch.equal(into[0], 1 + torch.arange(15.0).view(3, 5).t()) and into[1].tolist() == [3.0] * 4
    functional.add_([], [])


@pytest.mark.parametrize(
    "into, tensors, kind, text",
    [
        ([torch.ones(2)], [], ValueError, "tensors: 0 for 1"),
        ([torch.ones(2)], [torch.ones(3)], ValueError, r"tensors\[0\]: shape"),
        ([torch.ones(2, 3)], [torch.ones(3, 2).t()], ValueError, r"tensors\[0\]: shape .* strides"),
        ([torch.ones(2)], [torch.ones(2).half()], NotImplementedError, r"tensors\[0\]: of torch.float16"),
        ([torch.ones(2).double()], [torch.ones(2)], NotImplementedError, r"into\[0\]: of torch.float64"),
        ([torch.ones(4)[::2]], [torch.ones(2)], NotImplementedError, r"into\[0\]: strides"),
        (torch.ones(2, 2), [torch.ones(2)] * 2, TypeError, "into: not a list"),
        ([torch.ones(2), None], [torch.ones(2)] * 2, TypeError, r"into\[1\]"),
    ],
)
def test_what_cannot_be_added_is_refused_by_its_place_before_anything_is_written(into, tensors, kind, text):
    for call in (functional.add_, functional.copy_):
        with pytest.raises(kind, match=text):
            call(into, tensors)
        assert all(bool((tensor == 1).all()) for tensor in into if tensor is not None)


def test_memory_that_is_written_twice_or_read_too_is_refused():
    memory = torch.ones(10)
    for into, tensors in (
        ([memory[:6], memory[4:]], [torch.ones(6), torch.ones(6)]),
        ([memory[:6]], [memory[4:]]),
        ([memory], [memory]),
    ):
        with pytest.raises(ValueError, match="overlap"):
            functional.add_(into, tensors)
    both = [torch.zeros(10), torch.zeros(10)]
    functional.add_(both, [memory, memory])
    assert all(torch.equal(one, memory) for one in both)


def test_copies_of_every_short_length_and_start_have_torchs_bits_and_leave_what_is_beside_them():
    source, memory = odd(torch.float32, 0)[:400], odd(torch.bfloat16, 1)[:400]
    for length in range(140):
        own, theirs = memory.clone(), memory.clone()
        start = length % 7
        functional.copy_([own[start : start + length]], [source[5 : 5 + length]])
        theirs[start : start + length].copy_(source[5 : 5 + length])
        assert same_bits(own, theirs), length


LAST_LEVEL = pathlib.Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


@pytest.mark.skipif(not LAST_LEVEL.exists(), reason="Linux does not tell the size of the last-level cache")
@pytest.mark.parametrize("source", WORDS, ids=str)
@pytest.mark.parametrize("target", WORDS, ids=str)
def test_copies_that_fit_no_cache_have_torchs_bits_and_leave_what_is_beside_them(target, source):
    cache_bytes = int(LAST_LEVEL.read_text().strip().removesuffix("K")) << 10
    # One that is streamed, and short ones.
    lengths = [*range(0, 200, 9), cache_bytes // (target.itemsize + source.itemsize) + 12_345, *range(7, 5000, 700)]
    some = odd(source, 0)
    values = [some.repeat(length // len(some) + 1)[:length] for length in lengths]
    around = torch.full((sum(lengths) + 3 * len(lengths) + 20,), 7.0, dtype=target)

    def inside(memory):
        start = 3
        for length in lengths:
            yield memory[start : start + length]
            start += length + 3

    expected = around.clone()
    for into, value in zip(inside(expected), values):
        into.copy_(value)
    for threads in (1, 2):
        memory = around.clone()
        functional.copy_(list(inside(memory)), values, threads=threads)
        assert same_bits(memory, expected), threads
