"""Times whole training steps of a small GPT under DDP: with torch's fused AdamW after backward, and with instep inside
backward.

    torchrun --nproc-per-node 2 python/benches/training.py [--rounds 21] [--device cuda]

Every process trains separate models in turn: one with each optimizer, and one without an optimizer. The time of a
training step is that of the slowest rank. The exposed time of an optimizer is the time of a training step minus the time
of the same step without an optimizer.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from models import GPT  # noqa: E402

from instep.bench.rounds import Spread, ratios  # noqa: E402
from instep.torch import register_ddp  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    is_cuda = arguments.device == "cuda"
    if is_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if is_cuda else "gloo")
    settle = torch.cuda.synchronize if is_cuda else lambda: None
    sides = {}
    for name in ("torch, fused", "instep", "no optimizer"):
        torch.manual_seed(0)
        model = GPT(arguments.width, arguments.layers, 4, 64).to(arguments.device)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = None
        if name == "instep":
            optimizer = register_ddp(ddp, "adamw", lr=1e-3, gradients="sum")
        elif name == "torch, fused":
            optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, fused=True)
        sides[name] = (ddp, optimizer)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for round_index in range(arguments.rounds + 3):
        for name, (ddp, optimizer) in sides.items():
            batch = ddp.module.batch(2).to(arguments.device)
            dist.barrier()
            settle()
            start = time.perf_counter()
            logits = ddp(batch[:, :-1])
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
            if name == "torch, fused":
                optimizer.step()
            ddp.zero_grad()
            settle()
            taken = torch.tensor(time.perf_counter() - start, device=arguments.device)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if round_index >= 3:  # DDP rebuilds its buckets in the first rounds.
                times[name].append(taken.item() * 1e3)
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for p in sides["instep"][0].parameters())
        ranks = f"{dist.get_world_size()} ranks of 1 thread"
        print(f"torch {torch.__version__}, {arguments.device}, {ranks}, {parameters} parameters")
        print("side,ms,ms_min,ms_max,exposed_ms,over_instep,over_instep_min,over_instep_max")
        for name, measured in times.items():
            exposed = statistics.median(a - b for a, b in zip(measured, times["no optimizer"]))
            over_ours = ratios(measured, times["instep"])
            print(f'"{name}",{Spread.of(measured).row(3)},{exposed:.3f},{over_ours.row(3)}')
    # Gloo's threads still hold tensors of the last call, and need the interpreter to let go of them. The group ends them,
    # once nothing else holds the group.
    sides.clear()
    del ddp, optimizer, logits, batch, taken, model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
