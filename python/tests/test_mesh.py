"""States of 8 bits and stochastic rounding have the same bits on any mesh of ranks."""

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


# Each optimizer in two formats, each format with two optimizers.
CASES = [(key, *FORMATS[(at + k) % len(FORMATS)]) for at, key in enumerate(OPTIONS) for k in (0, 2)]


@pytest.mark.turns(4)
@pytest.mark.parametrize("key, dtype, formats", CASES, ids=str)
def test_shards_have_the_bits_of_one_rank(one, two, three, four, key, dtype, formats):
    given = {"key": key, "dtype": dtype, **formats}
    [expected] = one.run("mesh_cases", "trained", **given)
    for ranks in (two, three, four):
        assert set(ranks.run("mesh_cases", "trained", **given)) == {expected}
    assert set(four.run("mesh_cases", "trained", hsdp=True, **given)) == {expected}
    [expected] = one.run("mesh_cases", "stepped_after", **given)
    for ranks in (two, three):
        assert set(ranks.run("mesh_cases", "stepped_after", **given)) == {expected}


def test_a_checkpoint_goes_from_four_ranks_to_three_to_one(one, three, four, tmp_path):
    given = {"folder": str(tmp_path)}
    [expected] = one.run("mesh_cases", "resumed", first=0, last=STEPS + 2, ends=True, **given)
    four.run("mesh_cases", "resumed", first=0, last=2, ends=False, **given)
    three.run("mesh_cases", "resumed", first=2, last=STEPS, ends=False, **given)
    [found] = one.run("mesh_cases", "resumed", first=STEPS, last=STEPS + 2, ends=True, **given)
    assert found == expected


def test_states_saved_without_a_mesh_are_taken_where_rows_are_whole_blocks(two):
    two.run("mesh_cases", "other_blocks")
