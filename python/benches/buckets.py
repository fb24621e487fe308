"""Times the work that follows the all-reduce of one bucket: PyTorch's overlapped optimizer, its variants, and instep, in
one process.

    python python/benches/buckets.py [--rounds 31] [--threads 1] [--device cuda]

The bucket has 25 MiB in 50 parameters, each in separate memory, as under DDP. All steps use the same memory for the
bucket. Every round times each implementation once. An output line gives the median time, and the median ratio to
instep's time in the same round, each with its range. After the first step, the parameters of all implementations are
compared. The "copy" line is a plain memory copy of as many bytes as AdamW moves: 28 per element. The ratio in this line
is the share of copy bandwidth that instep reaches.
"""

import argparse
import functools
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.distributed.optim import as_functional_optim
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from instep.bench.rounds import Spread, in_turn, milliseconds, ratios
from instep.torch import FusedOptimizer, register_ddp

ELEMENTS, PARAMS, WORLD_SIZE = 25 * (1 << 20) // 4, 50, 2
LR = 1e-3
Side = tuple[list[Tensor], Callable[[Tensor], object]]


class Bucket:
    """Imitates the bucket that DDP passes to a hook. The bucket's sum is already complete."""

    def __init__(self, params: list[Tensor], buffer: Tensor) -> None:
        self.params, self.flat = params, buffer

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return list(self.flat.split([p.numel() for p in self.params]))

    def parameters(self) -> list[Tensor]:
        return self.params


def params(device: str) -> nn.ParameterList:
    """Returns the same parameters for every implementation."""
    torch.manual_seed(0)
    size = ELEMENTS // PARAMS
    return nn.ParameterList(nn.Parameter(torch.randn(size).to(device)) for _ in range(PARAMS))


def done(value: Tensor) -> Future[Tensor]:
    """A future that is complete."""
    future: Future[Tensor] = Future(devices=[value.device] if value.is_cuda else None)
    future.set_result(value)
    return future


def original(device: str, fused: bool) -> Side:
    """PyTorch's ``_hook_then_optimizer``: it divides the bucket by WORLD_SIZE, then steps each parameter."""
    own = list(params(device))
    optimizer = as_functional_optim(torch.optim.AdamW, LR, fused=fused)

    def divide(_: object, bucket: Bucket) -> Future[Tensor]:
        return done(bucket.buffer().div_(WORLD_SIZE))

    hook = _hook_then_optimizer(divide, _OptimizerHookState(optimizer))
    return own, lambda buffer: hook(None, Bucket(own, buffer)).wait()


def flat(device: str) -> Side:
    """One fused step over a flat copy of the parameters. Under DDP a step has more work, because the parameters are
    separate tensors.
    """
    own = nn.Parameter(torch.cat([p.detach().flatten() for p in params(device)]))
    optimizer = torch.optim.AdamW([own], LR, fused=True)

    def step(buffer: Tensor) -> None:
        own.grad = buffer.div_(WORLD_SIZE)
        optimizer.step()

    return [own], step


def ours(device: str, gradients: str) -> Side:
    """instep's hook."""
    model = params(device)
    ddp = DistributedDataParallel(model)
    optimizer = register_ddp(ddp, "adamw", lr=LR, gradients=gradients, hook=lambda bucket: done(bucket.buffer()))
    own = list(model)
    optimizer._divisor = WORLD_SIZE
    return own, lambda buffer: optimizer.hook(None, Bucket(own, buffer)).wait()


def after_backward(device: str, make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Side:
    """An ordinary optimizer over views of the bucket. It steps after the bucket is divided by WORLD_SIZE."""
    own = list(params(device))
    optimizer = make(own)

    def step(buffer: Tensor) -> None:
        buffer.div_(WORLD_SIZE)
        for param, grad in zip(own, Bucket(own, buffer).gradients()):
            param.grad = grad
        optimizer.step()

    return own, step


def copy(device: str) -> Side:
    """A copy that moves as many bytes as AdamW: 28 per element of the bucket."""
    source, target = (torch.ones(ELEMENTS * 28 // 8, device=device) for _ in range(2))
    return [], lambda _: target.copy_(source)


SIDES: dict[str, Callable[[str], Side]] = {
    "instep": lambda device: ours(device, "sum"),
    "instep, gradients cleared": lambda device: ours(device, "clear"),
    "instep, mean kept": lambda device: ours(device, "average"),
    "_hook_then_optimizer": lambda device: original(device, False),
    "_hook_then_optimizer, fused=True": lambda device: original(device, True),
    "div_ and one fused step, flat": flat,
    "div_ and FusedOptimizer": lambda device: after_backward(device, lambda own: FusedOptimizer(own, "adamw", lr=LR)),
    "div_ and torch's AdamW, fused=True": lambda device: after_backward(
        device, lambda own: torch.optim.AdamW(own, LR, fused=True)
    ),
    "copy of as many bytes": copy,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    is_cuda = arguments.device == "cuda"
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    dist.init_process_group("nccl" if is_cuda else "gloo", rank=0, world_size=1)
    settle = torch.cuda.synchronize if is_cuda else lambda: None
    summed = torch.randn(ELEMENTS).to(arguments.device)
    sides = {name: make(arguments.device) for name, make in SIDES.items()}
    results = {}
    buffer = torch.empty_like(summed)
    for name, (own, step) in sides.items():
        buffer.copy_(summed)
        step(buffer)
        if own:
            results[name] = torch.cat([p.detach().flatten() for p in own])
    for name, values in results.items():
        assert torch.allclose(values, results["instep"], rtol=0, atol=1e-6), name

    def sample(step: Callable[[Tensor], object]) -> float:
        buffer.copy_(summed)
        settle()
        return milliseconds(lambda: (step(buffer), settle()))

    sampled = {name: functools.partial(sample, step) for name, (_, step) in sides.items()}
    times = in_turn(sampled, range(arguments.rounds))
    print(f"torch {torch.__version__}, {arguments.device}, {arguments.threads} threads, {arguments.rounds} rounds")
    print("side,ms,ms_min,ms_max,over_instep,over_instep_min,over_instep_max")
    for name, measured in times.items():
        print(f'"{name}",{Spread.of(measured).row(3)},{ratios(measured, times["instep"]).row(3)}')
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
