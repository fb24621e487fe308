"""The functions over lists refuse wrong calls before they write anything. The error names the list and the index."""

import math

import pytest
import torch
from test_functional import ADAMW, adamw_lists, without_exchange

from instep.torch import functional


def put(list_, k, value):
    """Replaces a tensor of a list by a tensor that `value` makes from it."""

    def change(lists):
        lists[list_][k] = value(lists[list_][k])

    return change


def share(one, other):
    """Puts a tensor of one list into another list."""

    def change(lists):
        lists[other[0]][other[1]] = lists[one[0]][one[1]]

    return change


REFUSALS = {
    "length": (lambda lists: lists[2].pop(), ValueError, "exp_avgs: 5 tensors for 6 parameters"),
    "no tensor": (put(3, 5, lambda t: 1.0), TypeError, r"exp_avg_sqs\[5\]: of type float"),
    "no parameter": (put(0, 5, lambda t: None), TypeError, r"params\[5\]: of type NoneType"),
    "a tensor as list": (lambda lists: lists.__setitem__(1, torch.ones(6)), TypeError, "grads: not a list"),
    "shape": (put(1, 5, lambda t: torch.ones(6)), ValueError, r"grads\[5\]: of shape \[6\], where params\[5\]"),
    "type of a parameter": (
        put(0, 5, lambda t: t.double()),
        NotImplementedError,
        r"params\[5\]: of torch.float64; use float32",
    ),
    "type of a gradient": (put(1, 5, lambda t: t.int()), NotImplementedError, r"grads\[5\]: of torch.int32"),
    "type of a state": (put(2, 5, lambda t: t.half()), NotImplementedError, r"exp_avgs\[5\]: of torch.float16"),
    "types of states": (
        put(3, 5, lambda t: t.bfloat16()),
        NotImplementedError,
        r"exp_avg_sqs\[5\]: of another type than exp_avgs",
    ),
    "type of a count": (put(4, 5, lambda t: t.long()), NotImplementedError, r"state_steps\[5\]: of torch.int64; use float32"),
    "device": (put(1, 5, lambda t: t.to("meta")), NotImplementedError, r"grads\[5\]: "),
    "sparse": (put(1, 0, lambda t: t.to_sparse()), NotImplementedError, r"grads\[0\]: "),
    "gaps": (put(0, 2, lambda t: torch.ones(1400)[::2]), NotImplementedError, r"params\[2\]: strides \[2\]"),
    "gaps in a gradient": (put(1, 2, lambda t: torch.ones(1400)[::2]), NotImplementedError, r"grads\[2\]: strides \[2\]"),
    "expanded": (put(1, 2, lambda t: torch.ones(1).expand(700)), NotImplementedError, r"grads\[2\]: strides \[0\]"),
    "order": (put(1, 0, lambda t: t.t().contiguous().t()), ValueError, r"grads\[0\]: strides \[1, 3\], where params\[0\]"),
    "sign": (
        put(1, 1, lambda t: torch.ones(1, dtype=torch.cfloat).conj().imag),
        NotImplementedError,
        r"grads\[1\]: a view whose",
    ),
    "half a count": (put(4, 5, lambda t: t + 0.5), ValueError, r"state_steps\[5\]: not a count"),
    "a negative count": (put(4, 5, lambda t: t - 1), ValueError, r"state_steps\[5\]: not a count"),
    "a count that is NaN": (put(4, 5, lambda t: t * math.nan), ValueError, r"state_steps\[5\]: not a count"),
    "many counts": (put(4, 5, lambda t: torch.zeros(2)), ValueError, r"state_steps\[5\]: 2 elements"),
    "a state twice": (share((2, 0), (3, 0)), ValueError, r"exp_avgs\[0\] and exp_avg_sqs\[0\]: overlap"),
    "a gradient as state": (share((1, 2), (2, 2)), ValueError, "overlap"),
    "a count twice": (share((4, 0), (4, 1)), ValueError, r"state_steps\[0\] and state_steps\[1\]: overlap"),
    "parts of one": (put(3, 2, lambda t: 0), TypeError, "exp_avg_sqs"),
}


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "attributes"])
@pytest.mark.parametrize("what", list(REFUSALS))
def test_what_does_not_fit_is_refused_by_name_before_anything_is_written(what, exchange, monkeypatch):
    change, error, text = REFUSALS[what]
    if not exchange:
        without_exchange(monkeypatch)
    lists = adamw_lists()
    change(lists)
    tensors = [tensor for one in lists for tensor in one if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu"]
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(error, match=text):
        functional.adamw_(*lists, **ADAMW)
    with pytest.raises(error, match=text):
        functional.prepare(functional.adamw_, *lists, **ADAMW)
    for tensor, old in zip(tensors, before):
        same = torch.equal if not tensor.is_sparse else lambda a, b: torch.equal(a.to_dense(), b.to_dense())
        assert same(tensor, old) or tensor.isnan().any()


def test_overlapping_parts_of_one_tensor_are_refused_and_neighbours_are_not():
    whole = torch.zeros(3 * 700 + 10)
    lists = [[one[2]] for one in adamw_lists()]
    lists[0], lists[2], lists[3] = [whole[:700]], [whole[700:1400]], [whole[1400:2100]]
    functional.adamw_(*lists, **ADAMW)
    lists[3] = [whole[1399:2099]]
    with pytest.raises(ValueError, match=r"exp_avgs\[0\] and exp_avg_sqs\[0\]: overlap"):
        functional.adamw_(*lists, **ADAMW)
    lists[3], lists[1] = [whole[1400:2100]], [whole[1399:2099]]
    with pytest.raises(ValueError, match="overlap"):
        functional.adamw_(*lists, **ADAMW)


def test_lists_of_states_are_those_that_the_hyperparameters_need():
    lists = adamw_lists()
    more = [torch.zeros_like(param) for param in lists[0]]
    with pytest.raises(ValueError, match="max_exp_avg_sqs: missing, but AdamW keeps them"):
        functional.adamw_(*lists, amsgrad=True, **ADAMW)
    with pytest.raises(ValueError, match="max_exp_avg_sqs: given, but AdamW keeps none"):
        functional.adamw_(*lists, max_exp_avg_sqs=more, **ADAMW)
    functional.adamw_(*lists, amsgrad=True, max_exp_avg_sqs=more, **ADAMW)
    assert more[0].any()


@pytest.mark.parametrize(
    "changed, text",
    [
        ({"lr": -1.0}, "lr"),
        ({"beta1": 1.0}, "betas"),
        ({"lr": math.nan}, "lr"),
        ({"gradient_scale": -1.0}, "gradient_scale = -1"),
        ({"gradient_scale": math.nan}, "gradient_scale = NaN"),
        ({"threads": 0}, "threads = 0"),
        ({"threads": -3}, "threads = -3"),
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused_after_a_good_call_too(changed, text):
    lists = adamw_lists()
    for _ in range(2):
        before = lists[0][0].clone()
        with pytest.raises(ValueError, match=text):
            functional.adamw_(*lists, **{**ADAMW, **changed})
        assert torch.equal(lists[0][0], before)
        functional.adamw_(*lists, **ADAMW)


def test_a_preparation_refuses_what_is_no_step():
    with pytest.raises(ValueError, match="not a step"):
        functional.prepare(functional.norm_, [])
    with pytest.raises(TypeError, match="gradient_scale"):
        functional.prepare(functional.adamw_, *adamw_lists(), gradient_scale=1.0, **ADAMW)


@pytest.mark.parametrize(
    "tensors, error, text",
    [
        (torch.ones(2), TypeError, "tensors: one tensor"),
        ([torch.ones(2), 1.0], TypeError, r"tensors\[1\]: of type float"),
        ([torch.ones(2, dtype=torch.float64)], NotImplementedError, r"tensors\[0\]: of torch.float64"),
        ([torch.ones(4)[::2]], NotImplementedError, r"tensors\[0\]: strides"),
        ([torch.ones(2, device="meta")], NotImplementedError, r"tensors\[0\]: "),
    ],
    ids=str,
)
def test_a_norm_refuses_what_it_cannot_read(tensors, error, text):
    with pytest.raises(error, match=text):
        functional.norm_(tensors)
