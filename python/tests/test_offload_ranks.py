"""Tests offloaded training with FSDP2 and DDP on real processes. The bits equal those of steps after backward."""

import pytest
import torch
from ranks import Ranks


@pytest.fixture(scope="module")
def one():
    """Returns a new process."""
    ranks = Ranks(1)
    yield ranks
    ranks.close()


FSDP = [
    {},
    {"max_norm": 0.1},
    {"scales": True, "max_norm": 0.1},
    {"micro_batches": 3},
    {"dtype": torch.bfloat16, "master": "float32", "states": "float32", "max_norm": 0.1},
    {"dtype": torch.bfloat16, "master": "remainder16", "states": "bfloat16"},
    {"policy": "bf16"},
    {"states": "8bit", "max_norm": 0.1},
    {"model": "resnet", "max_norm": 0.1},
]
DDP = [
    {},
    {"max_norm": 0.1},
    {"scales": True, "max_norm": 0.1},
    {"micro_batches": 3},
    {"unused": True},
    {"unused": True, "max_norm": 0.1},
    {"wrapping": {"gradient_as_bucket_view": True}},
    {"wrapping": {"static_graph": True}, "max_norm": 0.1},
    {"model": "resnet"},
    {"dtype": torch.bfloat16, "master": "float32", "states": "8bit"},
]


@pytest.mark.parametrize("options", FSDP, ids=str)
def test_shards_on_the_host_have_the_bits_of_a_step_after_backward(two, options):
    two.run("offload_cases", "in_fsdp", **options)


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.1}, {"scales": True}, {"hsdp": True, "max_norm": 0.1}], ids=str)
def test_shards_of_four_ranks_do_as_those_of_two(four, options):
    four.run("offload_cases", "in_fsdp", **options)


@pytest.mark.parametrize("name", ["in_fsdp", "in_ddp"])
@pytest.mark.parametrize("options", [{}, {"max_norm": 0.1}], ids=str)
def test_one_rank_does_as_several(one, name, options):
    one.run("offload_cases", name, **options)


@pytest.mark.parametrize("options", DDP, ids=str)
def test_buckets_of_ddp_have_the_bits_of_a_step_after_backward(two, options):
    two.run("offload_cases", "in_ddp", **options)


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.1}, {"scales": True}], ids=str)
def test_buckets_of_four_ranks_do_as_those_of_two(four, options):
    four.run("offload_cases", "in_ddp", **options)


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.1}], ids=str)
def test_shards_have_the_bits_of_steps_with_the_same_gradients(one, two, options):
    for ranks in (one, two):
        ranks.run("offload_cases", "fsdp_on_device", **options)


@pytest.mark.parametrize("options", [{"scales": False}, {"scales": False, "max_norm": 0.1}, {"scales": True}], ids=str)
def test_backward_returns_before_its_last_step_ends(two, options):
    two.run("offload_cases", "beside_the_trainer", **options)


@pytest.mark.parametrize("beside", [None, 1])
def test_steps_wait_for_copies_that_end_after_the_hook(one, two, beside):
    for ranks in (one, two):
        ranks.run("offload_cases", "copied_late", beside=beside)


@pytest.mark.parametrize("option", [{"bucket_bytes": 1}, {"ring_bytes": 1}, {"accumulate": "host"}], ids=str)
def test_options_of_buckets_are_refused_where_units_are_the_buckets(one, option):
    with pytest.raises(AssertionError, match=f"{next(iter(option))}.*: FSDP's units are the buckets"):
        one.run("offload_cases", "in_fsdp", **option)


def test_a_checkpoint_that_is_saved_beside_a_step_is_loaded_at_other_numbers_of_ranks(one, two, four, tmp_path):
    two.run("offload_cases", "save", folder=str(tmp_path))
    found = [ranks.run("offload_cases", "load", folder=str(tmp_path))[0] for ranks in (one, two, four)]
    assert len(found[0]) > 0
    for values in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], values))


def test_a_rank_whose_step_fails_keeps_no_other_rank_waiting(two):
    two.run("offload_cases", "failing")
