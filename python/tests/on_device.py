"""Runs cases on a GPU or on the CPU, without pytest, for machines that have a GPU but few installed packages.

    python python/tests/on_device.py --device cuda        # or torchrun, with one rank per GPU

Each case is a function of `ddp_cases`, of `offload_cases` or of this file, over NCCL or gloo. The exit status is 1 if a
case fails.
"""

import argparse
import copy
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import ddp_cases
import offload_cases
import torch
import torch.distributed as dist
from models import make

from instep.torch import FusedOptimizer, apply_optimizer_in_backward


def gradients(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Runs backward in one model, and copies its gradients to the other model."""
    ours.zero_grad()
    ours.loss(ours.batch()).backward()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        q.grad = p.grad.clone()


def fused(rank: int, world: int, key: str, dtype: torch.dtype, **options: Any) -> None:
    """`FusedOptimizer` agrees with torch's optimizer, step by step from the same values."""
    ours = make("gpt", dtype)
    theirs = copy.deepcopy(ours)
    optimizer = FusedOptimizer(ours.parameters(), key, **ddp_cases.OPTIONS[key], **options)
    reference = ddp_cases.TORCH[key](theirs.parameters(), **ddp_cases.OPTIONS[key])
    for step in range(5):
        gradients(ours, theirs)
        if "max_norm" in options:
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), options["max_norm"])
        optimizer.step()
        reference.step()
        ddp_cases.assert_close(ours, theirs, 64 if dtype == torch.float32 else 8, f"step {step}")
        with torch.no_grad():
            for p, q in zip(ours.parameters(), theirs.parameters()):
                q.copy_(p)


def saved(rank: int, world: int, **options: Any) -> None:
    """A training that is saved and loaded continues with the same bits, even with low-precision states and masters."""
    ours = make("gpt", torch.bfloat16)
    twin = copy.deepcopy(ours)
    optimizers = [FusedOptimizer(model.parameters(), "adamw", lr=1e-2, **options) for model in (ours, twin)]
    for step in range(6):
        gradients(ours, twin)
        optimizers[0].step()
        if step == 2:
            twin.load_state_dict(ours.state_dict())
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        elif step > 2:
            optimizers[1].step()
            assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), twin.parameters())), step


def alone(rank: int, world: int) -> None:
    """Optimizers that run inside backward also work without DDP."""
    ours = make("gpt")
    theirs = copy.deepcopy(ours)
    apply_optimizer_in_backward("sgd", ours.parameters(), {"lr": 1e-2, "momentum": 0.9})
    reference = torch.optim.SGD(theirs.parameters(), lr=1e-2, momentum=0.9)
    for step in range(4):
        batch = ours.batch()
        ours.loss(batch).backward()
        theirs.loss(batch).backward()
        reference.step()
        reference.zero_grad()
        assert all(param.grad is None for param in ours.parameters())
        ddp_cases.assert_close(ours, theirs, 256, f"step {step}")


def ddp(name: str, **options: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns a case of `ddp_cases`."""
    return getattr(ddp_cases, name), options


CASES: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    # torch keeps AdamW's states of float16 parameters in float16, where they underflow.
    *[(fused, {"key": "adamw", "dtype": dtype}) for dtype in (torch.float32, torch.bfloat16)],
    *[(fused, {"key": "sgd", "dtype": dtype}) for dtype in (torch.float32, torch.bfloat16, torch.float16)],
    (fused, {"key": "adamw", "dtype": torch.float32, "max_norm": 0.1}),
    *[(saved, options) for options in ({}, {"states": "8bit"}, {"master": "float32"}, {"master": "remainder16", "seed": 1})],
    (alone, {}),
    *[ddp("compare", steps=6, gradient_as_bucket_view=view) for view in (False, True)],
    ddp("compare", steps=6, model="resnet", optimizer="sgd", static_graph=True),
    ddp("compare", steps=6, dtype=torch.bfloat16),
    *[ddp("compare", steps=6, gradients=policy) for policy in ("clear", "sum")],
    *[ddp("compare", steps=6, max_norm=0.1, gradient_as_bucket_view=view) for view in (False, True)],
    ddp("compare", steps=6, micro_batches=2, schedule=True),
    *[ddp("subset", chosen=chosen, view=True) for chosen in ("first", "none")],
    *[ddp("unused", view=False, in_backward=inside) for inside in (False, True)],
    ddp("scaler"),
    *[ddp("in_backward", model="gpt", optimizer="adam", view=view, before=True) for view in (False, True)],
    ddp("mixed_ownership", view=False),
    ddp("resume"),
    ddp("own_sum"),
    ddp("mixed_types"),
    *[ddp("strides", view=True, in_backward=inside) for inside in (False, True)],
    *[ddp("overflow", in_backward=inside) for inside in (False, True)],
    ddp("changes"),
    ddp("frozen_and_saved"),
    *[
        (offload_cases.on_device, options)
        for options in ({}, {"max_norm": 0.1}, {"ring_bytes": 70000}, {"accumulate": "host"})
    ],
    (offload_cases.on_device, {"dtype": torch.bfloat16, "states": "8bit", "master": "remainder16", "max_norm": 0.1}),
    *[(offload_cases.fsdp_on_device, options) for options in ({}, {"max_norm": 0.1})],
    (offload_cases.fsdp_on_device, {"dtype": torch.bfloat16, "states": "bfloat16", "master": "float32", "max_norm": 0.1}),
    *[
        (offload_cases.in_ddp, {**options, "unused": True, "device": None})
        for options in ({}, {"max_norm": 0.1}, {"scales": True})
    ],
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    device = parser.parse_args().device
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        # Both sides of a comparison compute the same gradients: no 10-bit products, and no order of sums that changes.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
    torch.set_default_device(device)
    store = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", **store)
    failed = 0
    for case, options in CASES:
        # On one line, before the case: the last line of a run that hangs names it.
        print(case.__name__, options, end=" ... ", flush=True)
        torch.manual_seed(1000 + rank)
        start = time.perf_counter()
        try:
            case(rank, world, **options)
            print(f"ok, {time.perf_counter() - start:.1f} s", flush=True)
        except Exception:
            failed += 1
            print("FAILED", flush=True)
            traceback.print_exc()
    dist.destroy_process_group()
    print(f"{len(CASES)} cases on {device}, {failed} failed", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
