"""Compares FusedOptimizer with torch's optimizer under ZeRO and local SGD, and after loading checkpoints of other world
sizes. The tests take 25 s.
"""

import pytest
import state_cases
import torch

import instep

BOTH = [key for key in instep.OPTIMIZERS if key in state_cases.TORCH]
OPTIONS = {"sgd": {"momentum": 0.9}, "rmsprop": {"momentum": 0.5, "centered": True}}


def options_of(key: str) -> dict:
    return {"lr": 0.1, **OPTIONS.get(key, {})}


@pytest.mark.parametrize("resumes", [False, True], ids=["whole", "resumed"])
@pytest.mark.parametrize("key", BOTH)
def test_zero_steps_and_resumes_as_with_torchs_optimizer(two, key, resumes):
    two.run("state_cases", "zero", key=key, options=options_of(key), resumes=resumes)


@pytest.mark.parametrize("key", BOTH)
def test_local_sgd_averages_and_resumes_as_with_torchs_optimizer(two, key):
    two.run("state_cases", "local_sgd", key=key, options=options_of(key))


CASES = [(key, options_of(key)) for key in BOTH] + [("sgd", {"lr": 0.1})]


@pytest.mark.turns(4)
@pytest.mark.parametrize("key, options", CASES, ids=[f"{key}-{len(options)}" for key, options in CASES])
def test_a_checkpoint_goes_from_two_ranks_to_four_to_one_and_to_torchs_optimizer_and_back(
    two, four, one, key, options, tmp_path
):
    reference = state_cases.model()
    params = list(reference.parameters())
    wanted = state_cases.make("theirs", [{"params": params[:1], "lr": 0.05}, {"params": params[1:]}], key, options)
    state_cases.train(reference, wanted, range(6))
    # Every way in which a checkpoint changes hands, and those of ours alone.
    ways = [("ours", "theirs", "ours"), ("theirs", "ours", "theirs"), ("ours", "ours", "ours")]
    for way in ways:
        last = None
        for k, (ranks, side) in enumerate(zip((two, four, one), way)):
            at = str(tmp_path / f"{'-'.join(way)}-{k}")
            results = ranks.run(
                "state_cases",
                "checkpoint",
                key=key,
                options=options,
                side=side,
                numbers=(2 * k, 2 * k + 2),
                load=last,
                save=at,
            )
            last = at
        for result in results:
            for param, other in zip(result, reference.parameters()):
                torch.testing.assert_close(param, other.detach(), rtol=1e-5, atol=2e-6)


ENTRIES = ["after", "ddp", "fsdp", "in_backward"]


@pytest.mark.parametrize("entry", [*ENTRIES, "named", "fsdp1", "offload"])
def test_states_of_all_optimizers_are_shown_as_in_torch_at_every_entry(two, entry):
    two.run("state_cases", "shown", entry=entry)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_given_state_is_taken_before_the_first_step_of_every_entry(two, entry):
    two.run("state_cases", "issue", entry=entry)


@pytest.mark.parametrize("entry", [*ENTRIES, "named", "fsdp1", "offload"])
def test_a_sum_of_adagrad_that_is_written_before_the_first_step_counts_in_every_entry(two, entry):
    two.run("state_cases", "first_sums", entry=entry)


@pytest.mark.parametrize("master", ["float32", "remainder16"])
@pytest.mark.parametrize("entry", [*ENTRIES, "named", "fsdp1", "offload"])
def test_weights_that_a_user_writes_are_not_overwritten_from_masters_of_other_weights(two, entry, master):
    two.run("state_cases", "other_weights", entry=entry, master=master)


@pytest.mark.parametrize("key", [key for key in BOTH if key not in ("sgd", "nadam")])
@pytest.mark.parametrize("entry", ENTRIES)
def test_what_a_user_puts_into_states_counts_in_every_entry(two, entry, key):
    two.run("state_cases", "entries", entry=entry, key=key)
