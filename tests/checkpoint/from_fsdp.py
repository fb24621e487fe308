"""Writes `from_fsdp.safetensors`: parameters and AdamW's states after three steps on two ranks of PyTorch's FSDP.

python3 tests/checkpoint/from_fsdp.py FILE

A second file, `from_fsdp_next.safetensors`, has the same tensors after a fourth step, and the gradients of that step.
Both ranks have the same data, so the mean of their gradients has the bits of one gradient. A model without shards
computes that gradient.

`fully_shard` shards by rows, `FullyShardedDataParallel` shards flat parameters, and both must give the same files. Some
sizes do not divide by two: 5 columns, 17 rows and 3 rows. The script leaves out `cpu_offload`: with it, torch 2.15
saves the second moments of `FullyShardedDataParallel` on the CPU in place of the first moments.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

RANKS = 2
NEXT = "_next"


def train(rank: int, layout: str, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=RANKS)
    torch.manual_seed(3)
    model = network()
    if layout == "rows":
        for part in [model[0], model[2], model]:
            fully_shard(part)
    else:
        model = FullyShardedDataParallel(model, use_orig_params=layout == "flat, original", device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    tensors = whole(model, optimizer)
    alone = network()
    alone.load_state_dict({name: tensors[f"param.{name}"] for name in alone.state_dict()})
    for part in [model, alone]:
        backward(part, 3)
    optimizer.step()
    after = whole(model, optimizer) | {f"grad.{name}": param.grad for name, param in alone.named_parameters()}
    if rank == 0:
        save_file(tensors, path)
        save_file(after, path + NEXT)
    dist.barrier()
    dist.destroy_process_group()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 17), nn.Tanh(), nn.Linear(17, 3))


def backward(model: nn.Module, step: int) -> None:
    torch.manual_seed(step)
    model(torch.randn(4, 5)).square().sum().backward()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Returns parameters and states that torch has gathered from the shards of all ranks."""
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    params = get_model_state_dict(model, options=options)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    tensors = {f"param.{name}": value.clone() for name, value in params.items()}
    return tensors | {name: value.clone() for name, value in states.items() if name.startswith("state.")}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for layout in ["rows", "flat", "flat, original"]:
            path = os.path.join(folder, layout)
            mp.spawn(train, (layout, path), nprocs=RANKS)
            files.append((Path(path).read_bytes(), Path(path + NEXT).read_bytes()))
    assert files[0] == files[1] == files[2], "torch's layouts give different states"
    file = Path(sys.argv[1])
    file.write_bytes(files[0][0])
    file.with_stem(file.stem + NEXT).write_bytes(files[0][1])


if __name__ == "__main__":
    main()
