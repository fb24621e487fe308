"""A model on the device of `hosted.py` is offloaded. Its parameters have the same bits as after steps on the host. The
tests need no GPU.
"""

import pytest
import torch
from ranks import Ranks


@pytest.fixture(scope="module")
def process():
    """Returns a new process, because a registered device cannot be removed from a process."""
    ranks = Ranks(1)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_norm": 0.1},
        {"ring_bytes": 70000},
        {"accumulate": "host"},
        {"dtype": torch.bfloat16, "states": "8bit", "master": "remainder16", "max_norm": 0.1},
    ],
    ids=str,
)
def test_a_model_on_a_device_of_pytorchs_own_has_the_bits_of_the_host(process, options):
    process.run("offload_cases", "on_hosted", **options)
