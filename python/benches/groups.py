"""Times many small parameters in groups of their own, where a step is mostly Python: FusedOptimizer and torch's AdamW.

    python python/benches/groups.py [--rounds 31] [--params 2000]

Sides run in turn in every round. A line gives the median of the times with their range, in milliseconds.
"""

import argparse
import statistics
import time

import torch

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


def schedule(optimizer: torch.optim.Optimizer, number: int) -> None:
    """As a scheduler writes a learning rate into every group."""
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 / (1 + number)


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
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(arguments.rounds):
            for name, optimizer in sides.items():
                if what == "step after a schedule":
                    schedule(optimizer, number)
                start = time.perf_counter()
                if what == "state_dict":
                    optimizer.state_dict()
                else:
                    optimizer.step()
                times[name].append((time.perf_counter() - start) * 1e3)
        for name, measured in times.items():
            print(f'"{what}","{name}",{statistics.median(measured):.2f},{min(measured):.2f},{max(measured):.2f}')


if __name__ == "__main__":
    main()
