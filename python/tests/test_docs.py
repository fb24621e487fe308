"""Runs the programs of docs/python.md in order, in one process with its own group."""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.fixture(scope="module")
def group():
    """Starts a group of one process."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_page_has_programs():
    assert len(PROGRAMS) == 8


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda text: text.splitlines()[0])
def test_a_program_of_the_page_trains(program, group):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 1))
    before = model[0].weight.detach().clone()
    batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(3)]
    names = {"torch": torch, "model": model, "batches": batches}
    exec(program, {**names, "DistributedDataParallel": DistributedDataParallel, "fully_shard": fully_shard})
    after = model[0].weight.detach()
    assert not torch.equal(after.full_tensor() if isinstance(after, DTensor) else after, before)
