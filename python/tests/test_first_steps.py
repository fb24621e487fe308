"""A parameter's first step is right at every entry even if the training was saved and loaded before. The tests take
10 s.
"""

import pytest
from first_cases import TORCH

import instep

BOTH = [key for key in instep.OPTIMIZERS if key in TORCH]
OPTIONS = {
    "sgd": {"momentum": 0.9, "dampening": 0.5},
    "rmsprop": {"momentum": 0.5, "centered": True},
    "adagrad": {"initial_accumulator_value": 0.25},
}
ENTRIES = ["after", "ddp", "fsdp", "fsdp1", "in_backward", "in_backward_ddp"]


def options_of(key: str) -> dict:
    return {"lr": 0.1, **OPTIONS.get(key, {})}


@pytest.mark.parametrize("key", BOTH)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_parameter_without_an_update_has_no_state_and_its_first_step_is_torchs(two, entry, key):
    two.run("first_cases", "saved_before", entry=entry, key=key, options=options_of(key))
    two.run("first_cases", "saved_at_once", entry=entry, key=key, options=options_of(key))


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("key", ["sgd", "adamw", "rprop", "adagrad"])
@pytest.mark.parametrize("entry", ["ddp", "fsdp", "fsdp1"])
def test_a_checkpoint_before_the_first_step_or_after_it_goes_on_with_the_same_bits(two, entry, key, steps, tmp_path):
    options = options_of(key)
    two.run("first_cases", "checkpointed", entry=entry, key=key, options=options, steps=steps, at=str(tmp_path))
