"""Compares our optimizer inside backward with torch.optim after backward, under FSDP on real processes."""

import pytest
import torch


@pytest.mark.turns(4)
@pytest.mark.parametrize("wrapper", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model": "resnet", "optimizer": "sgd"},
        {"optimizer": "adam", "dtype": torch.bfloat16},
        {"max_norm": 0.1},
        {"max_norm": 0.1, "gradients": "clear"},
        {"gradients": "clear"},
        {"micro_batches": 3},
        {"schedule": True},
    ],
    ids=str,
)
def test_shards_are_those_of_fsdp_and_torch(two, wrapper, options):
    two.run("fsdp_cases", "compare", wrapper=wrapper, **options)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"policy": "bf16"},
        {"policy": "bf16-reduced", "max_norm": 0.1},
        {"divide_factor": 1.0},
        {"frozen": True},
        {"offload": True, "gradients": "clear"},
    ],
    ids=str,
)
def test_every_policy_of_fsdp2_is_obeyed(two, options):
    two.run("fsdp_cases", "compare", **options)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_norm": 0.1},
        {"hsdp": True, "max_norm": 0.1},
        {"hsdp": True, "micro_batches": 2},
        {"wrapper": "fsdp1", "max_norm": 0.1},
    ],
    ids=str,
)
def test_four_ranks_do_as_two(four, options):
    four.run("fsdp_cases", "compare", steps=5, **options)


def test_a_branch_that_no_rank_used_stays_as_it_is(two):
    two.run("fsdp_cases", "unused")


def test_an_infinite_gradient_on_one_rank_skips_the_step_everywhere(two):
    two.run("fsdp_cases", "scaler")


def test_a_checkpoint_of_two_ranks_is_loaded_at_four(two, four, tmp_path):
    two.run("fsdp_cases", "save", folder=str(tmp_path))
    of_two = two.run("fsdp_cases", "load", folder=str(tmp_path))
    of_four = four.run("fsdp_cases", "load", folder=str(tmp_path))
    assert len(of_two[0]) == len(of_four[3]) > 0
    assert all(torch.equal(a, b) for a, b in zip(of_two[0], of_four[3]))


def test_a_training_goes_on_from_torch_and_to_torch(two):
    two.run("fsdp_cases", "resume")


def test_masters_are_sharded_as_their_parameters(two):
    two.run("fsdp_cases", "masters")


def test_a_backward_that_failed_is_forgotten(two):
    two.run("fsdp_cases", "failed_pass")


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_an_ordinary_optimizer_steps_shards(two, max_norm):
    two.run("fsdp_cases", "ordinary", max_norm=max_norm)


@pytest.mark.parametrize("wrapper", ["fsdp2", "fsdp1"])
def test_a_rank_without_any_part_decides_with_the_others(two, wrapper):
    two.run("fsdp_cases", "empty_rank", wrapper=wrapper)


def test_parameters_outside_the_subset_keep_their_gradient(two):
    two.run("fsdp_cases", "subset")


def test_the_registry_registers(two):
    two.run("fsdp_cases", "overlapped")


def test_states_are_copied_in_memory(two):
    two.run("fsdp_cases", "copied")


def test_misuse_is_refused_by_name(two):
    two.run("fsdp_cases", "misuse")
