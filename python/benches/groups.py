"""Times many small parameters in separate groups, where Python takes most of a step's time: FusedOptimizer and torch's
AdamW.

    python python/benches/groups.py [--rounds 31] [--params 2000]

Every round times each optimizer once. A line gives the median time with its range, in milliseconds.
"""

import argparse
import functools

import torch

from instep.bench.rounds import Spread, in_turn, milliseconds
from instep.torch import FusedOptimizer

SIDES = {
    "instep": lambda groups: FusedOptimizer(groups, "adamw"),
    "torch's AdamW": lambda groups: torch.optim.AdamW(groups),
    "torch's AdamW, fused=True": lambda groups: torch.optim.AdamW(groups, fused=True),
}


def groups(count: int) -> list[dict]:
    """Parameters of 64 elements with gradients."""
    made = [torch.nn.Parameter(torch.randn(64)) for _ in range(count)]
    for param in made:
        param.grad = torch.randn(64)
    return [{"params": [param]} for param in made]


def schedule(optimizer: torch.optim.Optimizer) -> None:
    """Writes a learning rate into every group, as a scheduler does."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.97


def sample(what: str, optimizer: torch.optim.Optimizer) -> float:
    """Milliseconds of one call."""
    if what == "state_dict":
        return milliseconds(optimizer.state_dict)
    if what == "step after a schedule":
        schedule(optimizer)
    return milliseconds(optimizer.step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--params", type=int, default=2000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sides = {name: make(groups(arguments.params)) for name, make in SIDES.items()}
    for optimizer in sides.values():
        optimizer.step()
    print("what,side,ms,ms_min,ms_max")
    for what in ("step", "step after a schedule", "state_dict"):
        sampled = {name: functools.partial(sample, what, optimizer) for name, optimizer in sides.items()}
        for name, measured in in_turn(sampled, range(arguments.rounds)).items():
            print(f'"{what}","{name}",{Spread.of(measured).row(2)}')


if __name__ == "__main__":
    main()
