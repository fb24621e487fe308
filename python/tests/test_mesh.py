"""Training with 8-bit states and stochastic rounding gives the same bits on any mesh of ranks."""

import pytest
import torch
from mesh_cases import OPTIONS, STEPS

FORMATS = [
    (torch.float32, {"states": "8bit"}),
    (torch.float32, {"states": "8bit", "seed": 5}),
    (torch.bfloat16, {"states": "8bit", "seed": 5}),
    (torch.bfloat16, {"states": "8bit", "master": "remainder16"}),
    (torch.bfloat16, {"seed": 5}),
]


# Each optimizer in two formats, and each with stochastic rounding of bfloat16 alone.
CASES = [(key, *FORMATS[(at + k) % len(FORMATS)]) for at, key in enumerate(OPTIONS) for k in (0, 2)]
CASES += [(key, *FORMATS[-1]) for key in ("adamw", "adam", "lion")]
ROWS = [("adamw", *FORMATS[1]), ("lion", *FORMATS[2]), ("sgd", *FORMATS[4])]


@pytest.mark.turns(5)
@pytest.mark.parametrize("key, dtype, formats", CASES, ids=str)
def test_shards_have_the_bits_of_one_rank(one, two, three, four, key, dtype, formats):
    given = {"key": key, "dtype": dtype, **formats}
    [expected] = one.run("mesh_cases", "trained", **given)
    for ranks in (two, three, four):
        assert set(ranks.run("mesh_cases", "trained", **given)) == {expected}
    assert set(four.run("mesh_cases", "trained", hsdp=True, **given)) == {expected}
    [expected] = one.run("mesh_cases", "stepped_after", **given)
    for ranks in (two, three, four):
        assert set(ranks.run("mesh_cases", "stepped_after", **given)) == {expected}
    assert set(four.run("mesh_cases", "stepped_after", hsdp=True, **given)) == {expected}


@pytest.mark.turns(3)
@pytest.mark.parametrize("key, dtype, formats", ROWS, ids=str)
def test_rows_of_tensor_parallelism_have_the_bits_of_one_rank(one, four, key, dtype, formats):
    given = {"key": key, "dtype": dtype, **formats}
    [expected] = one.run("mesh_cases", "trained_by_rows", **given)
    assert set(four.run("mesh_cases", "trained_by_rows", **given)) == {expected}


def test_cuts_that_would_change_the_bits_are_refused(four):
    four.run("mesh_cases", "refused_cuts")


# Without a seed, SGD has no step count. With one, the count must be in the checkpoint.
@pytest.mark.turns(2)
@pytest.mark.parametrize("key, dtype", [("adamw", torch.float32), ("sgd", torch.bfloat16)], ids=str)
def test_a_checkpoint_goes_from_four_ranks_to_three_to_one(one, three, four, tmp_path, key, dtype):
    given = {"folder": str(tmp_path), "key": key, "dtype": dtype}
    [expected] = one.run("mesh_cases", "resumed", first=0, last=STEPS + 2, ends=True, **given)
    four.run("mesh_cases", "resumed", first=0, last=2, ends=False, **given)
    three.run("mesh_cases", "resumed", first=2, last=STEPS, ends=False, **given)
    [found] = one.run("mesh_cases", "resumed", first=STEPS, last=STEPS + 2, ends=True, **given)
    assert found == expected


def test_states_saved_without_a_mesh_are_taken_where_rows_are_whole_blocks(two):
    two.run("mesh_cases", "other_blocks")
