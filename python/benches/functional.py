"""Times functional.adamw_, functional.copy_ and optimizer constructors, and their counterparts in torch.

    python python/benches/functional.py [--rounds 31] [--elements 16777216] [--only adamw_ copy_ construction]

Every round times each implementation once. Steps alternate between two sets of gradients, except the steps of
functional.prepare. To increment the step counts, torch's fused call also calls `_foreach_add_`, as torch's optimizer
does. The loop of torch._fused_adamw_ makes both calls for each tensor. All copies are from float32 to bfloat16.
Constructors are given one parameter at a time. A line gives two medians with their ranges: the time in microseconds,
and the ratio to the time of the case's first line, which is instep's, in the same round. Above 1, instep is faster.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import instep.torch
from instep.torch import functional

SETTINGS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
Lists = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
Sides = dict[str, Callable[[], Callable[[], object]]]
"""What makes the next call of each side."""


def ours(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], steps: list[Tensor]
) -> None:
    functional.adamw_(params, grads, exp_avgs, exp_avg_sqs, steps, **SETTINGS)


def torchs(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], steps: list[Tensor]
) -> None:
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(params, grads, exp_avgs, exp_avg_sqs, [], steps, amsgrad=False, maximize=False, **SETTINGS)


def in_a_loop(*lists: list[Tensor]) -> None:
    for one in zip(*lists):
        torchs(*([tensor] for tensor in one))


def lists(count: int, elements: int) -> Lists:
    made = [[torch.randn(elements) for _ in range(count)] for _ in range(4)]
    return made[0], made[1], made[2], [tensor.square() for tensor in made[3]], [torch.zeros(()) for _ in range(count)]


def prepared(count: int, elements: int) -> Callable[[], None]:
    made = lists(count, elements)
    call = functional.prepare(functional.adamw_, *made, **SETTINGS)
    return lambda: call(lr=1e-3)


def fresh(side: Callable[..., None], count: int, elements: int) -> Callable[[], Callable[[], None]]:
    """An implementation with two sets of gradients, used alternately, because backward passes allocate gradients at
    changing addresses.
    """
    params, grads, *rest = lists(count, elements)
    both = [grads, [torch.randn(elements) for _ in range(count)]]

    def turn() -> Callable[[], None]:
        both.reverse()
        now = both[0]
        return lambda: side(params, now, *rest)

    return turn


def steps(count: int, elements: int) -> Sides:
    sides: Sides = {
        "functional.adamw_": fresh(ours, count, elements),
        "torch._fused_adamw_": fresh(torchs, count, elements),
    }
    if count * elements <= 1 << 20:
        sides["a loop of torch._fused_adamw_"] = fresh(in_a_loop, count, elements)
        ready = prepared(count, elements)
        sides["functional.prepare"] = lambda: ready
    return sides


def copies(count: int, elements: int) -> Sides:
    into, tensors = ([torch.zeros(elements, dtype=d) for _ in range(count)] for d in (torch.bfloat16, torch.float32))

    def in_a_loop() -> None:
        for one, other in zip(into, tensors):
            one.copy_(other)

    return {
        "functional.copy_": lambda: lambda: functional.copy_(into, tensors),
        "torch._foreach_copy_": lambda: lambda: torch._foreach_copy_(into, tensors),
        "a loop of torch.Tensor.copy_": lambda: in_a_loop,
    }


def constructors(count: int, elements: int, name: str) -> Sides:
    params = [torch.nn.Parameter(torch.zeros(elements)) for _ in range(count)]
    own, torchs = getattr(instep.torch, name), getattr(torch.optim, name.removesuffix("8bit"))
    return {
        f"instep.torch.{name}": lambda: lambda: [own([param]) for param in params],
        f"torch.optim.{torchs.__name__}": lambda: lambda: [torchs([param]) for param in params],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--elements", type=int, default=1 << 24, help="of all tensors together in the large cases")
    parser.add_argument("--only", nargs="+", choices=("adamw_", "copy_", "construction"))
    arguments = parser.parse_args()
    print("threads,tensors,elements,side,us,us_min,us_max,ratio,ratio_min,ratio_max")
    only = arguments.only or ("adamw_", "copy_", "construction")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in (1, 100, 10_000):
            for elements in sorted({16, 64, arguments.elements // count}):
                for kind, of_kind in (("adamw_", steps), ("copy_", copies)):
                    if kind in only:
                        measure(threads, count, elements, arguments.rounds, of_kind(count, elements))
        if "construction" in only:
            for name in ("AdamW", "Adam", "SGD", "Adagrad", "AdamW8bit"):
                measure(threads, 2000, 16, arguments.rounds, constructors(2000, 16, name))


def measure(threads: int, count: int, elements: int, rounds: int, sides: Sides) -> None:
    # Calls of some microseconds are timed many at a time.
    inner = max(1, 100 // count)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 2):
        for name, side in sides.items():
            calls = [side() for _ in range(inner)]
            start = time.perf_counter()
            for call in calls:
                call()
            if number >= 2:
                times[name].append((time.perf_counter() - start) * 1e6 / inner)
    own = next(iter(times.values()))
    for name, measured in times.items():
        ratios = [a / b for a, b in zip(measured, own)]
        values = [f(data) for data in (measured, ratios) for f in (statistics.median, min, max)]
        shown = ",".join(f"{value:.2f}" for value in values)
        print(f'{threads},{count},{elements},"{name}",{shown}', flush=True)


if __name__ == "__main__":
    main()
