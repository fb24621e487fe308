"""Times the exposed part of an offloaded step during the work of a simulated GPU, with and without a clip.

    python python/benches/offload.py [--rounds 11] [--layers 8] [--elements 2097152] [--device cuda] [--svg FILE] [--csv FILE]

The simulated GPU sleeps instead of computing, so its work uses no core. The simulated GPU copies on the host between
two buffers, while a real GPU has a copy engine. With `--device cuda`, a real GPU runs the work and the copies. Forward
and backward together take 1, 2 and 4 times as long as the step. "after backward" is what FSDP2 with CPUOffloadPolicy
does: gradients are copied to the host during backward, and the step and the uploads run after backward. Exposed time is
the time of a training step minus the time of a training step without an optimizer in the same round.

With a clip, an optimizer step may begin only after the last gradient, so only a forward pass can hide the step.

`--plan` names the command `instep`. The predictions of `instep plan --offload=torch` are compared with the measured
passes. The plan gets speeds from the same passes: the median times of a pass without an optimizer, of a bucket's step
and of a bucket's copies. A step and copies slow each other down when they overlap, so predicted times may be too short.
The bytes must be equal.

With `--step-ms`, a step also sleeps for the given time, and a norm sleeps for a seventh of it. Without `--fsdp`, the
simulated GPU takes a fifth of the given time to copy all buckets in one direction. Give small tensors with `--elements`.
On a busy machine, such a run still shows how much time the order of work exposes, but not the speed of the kernels.

    torchrun --nproc-per-node 2 python/benches/offload.py --fsdp [--step-ms 400 --elements 262144] [--plan instep]

With `--fsdp`, each layer is a unit of `fully_shard` with CPUOffloadPolicy over gloo, and "after backward" is a pass of FSDP2
followed by one fused step. Gathers and sums are part of the pass without an optimizer, so a plan counts them as the GPU's
work.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from instep.bench.machine import load, processor
from instep.bench.rounds import Spread, milliseconds
from instep.torch import FusedOptimizer, offload
from instep.torch._offload_device import Cuda, Device
from instep.torch._offload_simulated import Simulated

TIMES = (1, 2, 4)


cycles_per_second = 0.0
"""Of the GPU, if there is one."""


def work(seconds: float) -> None:
    """Keeps the device busy without using a core of the host."""
    if cycles_per_second:
        torch.cuda._sleep(int(seconds * cycles_per_second))
    else:
        time.sleep(seconds)


def settle() -> None:
    """Waits for a GPU."""
    if cycles_per_second:
        torch.cuda.synchronize()


def calibrate() -> float:
    """The number of clock cycles of the GPU in a second."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        begin.record()
        torch.cuda._sleep(100_000_000)
        end.record()
        torch.cuda.synchronize()
    return 100_000_000 / (begin.elapsed_time(end) / 1e3)


class Work(torch.autograd.Function):
    """A layer on the simulated GPU: forward takes a third of the time, and backward takes two thirds and returns a
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.shape, ctx.seconds = weight.shape, seconds
        work(seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        work(2 * ctx.seconds / 3)
        return grad, torch.full(ctx.shape, 1e-3, device=grad.device), None


def sharded(model: nn.Module) -> nn.Module:
    """A unit of FSDP2 for each layer."""
    for module in [*model, model]:
        fully_shard(module, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return model


class Layer(nn.Module):
    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))
        self.seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return Work.apply(x, self.weight, self.seconds)


def lengthen(engine: Any, milliseconds_of_step: float, layers: int) -> None:
    """Adds a sleep to each norm and each step of an engine. A norm takes a seventh of a step's time, because it reads 4
    bytes per element and a step moves 28.
    """
    share = milliseconds_of_step / 1e3 / layers
    for name, seconds in (("_run", share), ("step_decided", share), ("add_norm", share / 7)):
        real = getattr(engine, name)

        def call(batch: Any, *given: Any, real: Any = real, seconds: float = seconds) -> Any:
            time.sleep(seconds * len(batch.indices))
            return real(batch, *given)

        setattr(engine, name, call)


class Clock(list[tuple[str, object]]):
    """Records how long the buckets' copies and steps took, in milliseconds."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.began: dict[tuple[str, object], float] = {}
        self.took: dict[str, list[float]] = {"down": [], "up": [], "step": []}

    def append(self, note: tuple[str, object]) -> None:
        (what, _, happens), label = note[0].partition(" "), note[1]
        if happens == "begins":
            self.began[what, label] = time.perf_counter()
        elif happens == "ends" and (what, label) in self.began:
            self.took[what].append(1e3 * (time.perf_counter() - self.began.pop((what, label))))

    def median(self, *names: str) -> float:
        return statistics.median([took for name in names for took in self.took[name]])


class AfterBackward:
    """Copies gradients down during backward, then steps, and then copies parameters up."""

    def __init__(self, model: nn.Module, device: Device, max_norm: Any, threads: int) -> None:
        self.params, self.device = list(model.parameters()), device
        self.mirrors = [nn.Parameter(self.page_locked(param)) for param in self.params]
        for param, mirror in zip(self.params, self.mirrors):
            mirror.grad = self.page_locked(param)
        self.optimizer = FusedOptimizer(self.mirrors, "adamw", max_norm=max_norm, threads=threads)
        self.copies: list[Any] = []
        """Events of copies, and their sources until then."""
        for param, mirror in zip(self.params, self.mirrors):
            param.register_post_accumulate_grad_hook(lambda param, mirror=mirror: self.go_down(param, mirror))

    def page_locked(self, param: Tensor) -> Tensor:
        return self.device.page_locked(4 * param.numel()).view(torch.float32).copy_(param.detach())

    def go_down(self, param: Tensor, mirror: Tensor) -> None:
        grad, param.grad = param.grad, None
        self.copies.append((self.device.down([(mirror.grad, grad)], [self.device.mark([grad])], None), grad))

    def step(self) -> None:
        for event, _ in self.copies:
            event.wait()
        self.copies.clear()
        self.optimizer.step()
        self.device.up([(param.data, mirror.data) for param, mirror in zip(self.params, self.mirrors)], (), None).wait()


def foresee(instep: Path, arguments: argparse.Namespace, clips: bool, milliseconds_of: dict[str, float]) -> Any:
    """Returns the prediction of `instep plan` for a pass, given the measured times of the GPU's work, a bucket's step
    and a bucket's copy.
    """
    elements, tokens = arguments.layers * arguments.elements, 1_000_000
    ranks = dist.get_world_size() if arguments.fsdp else 1
    speeds = {
        "compute": 6 * elements * tokens / (milliseconds_of["work"] * 1e9),
        "host-memory": 28 * arguments.elements / ranks / (milliseconds_of["step"] * 1e6),
        "host-link": 1e9 if arguments.fsdp else 4 * arguments.elements / (milliseconds_of["copy"] * 1e6),
        "bus": 1e9,
        "latency": 0.0,
        "launch": 0.0,
        "tokens": tokens,
    }
    shape = ["--strategy=fsdp", "--world-size", ranks] if arguments.fsdp else ["--bucket-cap-mib=1"]
    layers = {"repeat": arguments.layers, "params": [{"name": "layer.{}", "shape": [arguments.elements]}]}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "model.json"
        config.write_text(json.dumps({"params": [layers]}))
        command = [instep, "plan", "--offload=torch", "--json", "--config", config, *shape]
        command += [f"--{name}={value}" for name, value in speeds.items()] + ["--max-norm=1"] * clips
        return json.loads(subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--elements", type=int, default=1 << 21, help="of a layer, which is a bucket")
    parser.add_argument("--threads", type=int, default=1, help="of a step")
    parser.add_argument("--step-ms", type=float, help="what a step sleeps, and a bucket's copy a fifth of its share")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--plan", type=Path, help="the command instep; layers then have at least 1 MiB")
    parser.add_argument("--fsdp", action="store_true", help="shards of fully_shard with CPUOffloadPolicy, by torchrun")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    if arguments.plan and arguments.device != "cpu":
        parser.error("--plan: the durations of copies and steps are recorded on the simulated device alone")
    if arguments.plan and arguments.elements < 1 << 18:
        parser.error("--plan: buckets of a plan have at least 1 MiB; give --elements of 262144 or more")
    if arguments.fsdp and ("RANK" not in os.environ or arguments.device != "cpu"):
        parser.error("--fsdp: start it by torchrun, on the CPU")
    if arguments.fsdp:
        dist.init_process_group("gloo")
    is_first = not arguments.fsdp or dist.get_rank() == 0
    if not is_first:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
    torch.set_num_threads(1)
    if arguments.device == "cuda":
        global cycles_per_second
        cycles_per_second = calibrate()

    clocks: dict[str, Clock] = {}

    def device(name: str) -> Device:
        if arguments.device == "cuda":
            return Cuda(torch.device("cuda", torch.cuda.current_device()))
        slept = arguments.step_ms
        bytes_per_second = slept and 4 * arguments.elements / (slept / 1e3 / arguments.layers / 5)
        clocks[name] = Clock()
        return Simulated(bytes_per_second=bytes_per_second, record=clocks[name])

    sides: dict[str, tuple[nn.Module, Any]] = {}
    for name in ("no optimizer", "after backward", "offload", "after backward, clip", "offload, clip"):
        model = nn.Sequential(*(Layer(arguments.elements) for _ in range(arguments.layers))).to(arguments.device)
        model = sharded(model) if arguments.fsdp else model
        max_norm = 1.0 if "clip" in name else None
        if name == "no optimizer":
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
            sides[name] = model, None
        elif name.startswith("after") and arguments.fsdp:
            sides[name] = model, FusedOptimizer(model.parameters(), "adamw", max_norm=max_norm, threads=arguments.threads)
        elif name.startswith("after"):
            sides[name] = model, AfterBackward(model, device(name), max_norm, arguments.threads)
        elif arguments.fsdp:
            sides[name] = model, offload(model, "adamw", max_norm=max_norm, threads=arguments.threads)
            clocks[name] = sides[name][1]._offload.device.record = Clock()
        else:
            given = {"max_norm": max_norm, "bucket_bytes": 1, "threads": arguments.threads, "device": device(name)}
            sides[name] = model, offload(model, "adamw", **given)
    x = torch.zeros(1, requires_grad=True, device=arguments.device)

    def train(name: str, seconds: float) -> float:
        model, optimizer = sides[name]
        for layer in model:
            layer.seconds = seconds / len(model)
        model(x).sum().backward()  # Steps of the next forward pass count in the pass that they delay.
        settle()
        if arguments.fsdp:
            dist.barrier()

        def step() -> None:
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
            model(x).sum().backward()
            settle()

        return milliseconds(step)

    for name in sides:
        train(name, 0.0)
    after = sides["after backward"][1]
    step = after.step if arguments.fsdp else after.optimizer.step
    stepping = statistics.median(milliseconds(step) for _ in range(5))
    if arguments.fsdp:  # Ranks simulate the same work.
        longest = torch.tensor(stepping)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        stepping = longest.item()
    if arguments.step_ms:
        for _, optimizer in list(sides.values())[1:]:
            inner = getattr(optimizer, "optimizer", optimizer)
            lengthen(inner._engine, arguments.step_ms, arguments.layers)
        stepping = arguments.step_ms
    copying = 0.0  # FSDP's own copies are no copies here.
    if not arguments.fsdp:
        source, target = after.params[0].data, after.mirrors[0].data
        copying = statistics.median(milliseconds(lambda: target.copy_(source)) for _ in range(9))
    if arguments.step_ms and not arguments.fsdp:
        copying = arguments.step_ms / arguments.layers / 5
    # Of the last bucket in backward, nothing of it can be hidden: its gradient goes down, its parameters go up.
    most = stepping / arguments.layers + 2 * copying
    print(
        f"{processor()}, {load()}; {arguments.layers} buckets of {arguments.elements} elements; {arguments.threads} thread(s)"
    )
    floors = {times: max(0.0, stepping * (1 - times / 3)) + most for times in TIMES}
    print(f"a step takes {stepping:.1f} ms; a bucket's step and its copies down and up {most:.1f} ms")
    rows = []
    for times in TIMES:
        samples: dict[str, list[float]] = {name: [] for name in sides}
        for clock in clocks.values():
            clock.forget()
        for _ in range(arguments.rounds):
            for name in sides:
                samples[name].append(train(name, times * stepping / 1e3))
        for name in list(sides)[1:]:
            exposed = Spread.of([one - other for one, other in zip(samples[name], samples["no optimizer"])])
            rows.append((times, name, exposed))
            print(f"GPU work {times} x step, {name}: exposed {exposed.show(1)} ms, {exposed.median / stepping:.2f} steps")
        for name in ("offload", "offload, clip") if arguments.plan else ():
            clock, work_ms = clocks[name], statistics.median(samples["no optimizer"])
            took = {"work": work_ms, "step": clock.median("step")}
            if not arguments.fsdp:
                took["copy"] = clock.median("down", "up")
            plan = foresee(arguments.plan, arguments, "clip" in name, took)
            if not arguments.fsdp:  # Nothing can lock FSDP's shards here.
                assert plan["page_locked_bytes"] == sides[name][1].page_locked_bytes(), name
            foreseen, measured = plan["pass_ns"] / 1e6, statistics.median(samples[name])
            ratio = f"{measured:.1f} ms measured, {foreseen:.1f} ms foreseen, ratio {foreseen / measured:.3f}"
            print(f"GPU work {times} x step, {name}: a pass takes {ratio}")
        print(f"GPU work {times} x step: with a clip, no forward pass hides more than all but {floors[times]:.1f} ms")
    if arguments.csv and is_first:
        lines = ["gpu_work_in_steps,side,exposed_ms_median,low,high,step_ms,bucket_step_and_copies_ms"]
        lines += [f"{times},{name.replace(',', ' with')},{e.row(2)},{stepping:.2f},{most:.2f}" for times, name, e in rows]
        arguments.csv.write_text("\n".join(lines) + "\n")
    if arguments.svg and is_first:
        arguments.svg.write_text(picture(rows, stepping, most))
    for _, optimizer in sides.values():
        if hasattr(optimizer, "close"):
            optimizer.close()


def picture(rows: list[tuple[int, str, Spread]], stepping: float, most: float) -> str:
    """Draws bars of exposed time, in units of the step's time. A dashed line marks the time of one bucket's step and of
    its copies down and up.
    """
    width, left, bar, scale = 720, 250, 18, 400.0
    largest = max(1.0, *(e.median / stepping for _, _, e in rows))
    lines, y = [], 52
    for times in TIMES:
        lines.append(f'<text x="10" y="{y}" font-weight="bold">GPU work of {times} times the step</text>')
        y += 10
        for _, name, exposed in (row for row in rows if row[0] == times):
            share = max(0.0, exposed.median / stepping)
            color = "#c0392b" if name.startswith("after") else "#2e86c1"
            lines.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{name}</text>')
            lines.append(
                f'<rect x="{left}" y="{y}" width="{share / largest * scale:.1f}" height="{bar - 4}" fill="{color}"/>'
            )
            lines.append(f'<text x="{left + share / largest * scale + 6:.1f}" y="{y + 12}">{share:.2f}</text>')
            y += bar
        y += 26
    at = left + most / stepping / largest * scale
    lines.append(f'<line x1="{at:.1f}" y1="40" x2="{at:.1f}" y2="{y - 26}" stroke="#555" stroke-dasharray="4 3"/>')
    lines.append(
        f'<text x="{at:.1f}" y="{y - 12}" text-anchor="middle" fill="#555">one bucket: step, copy down, copy up</text>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" height="{y}" role="img" '
            'font-family="sans-serif" font-size="13">',
            f'<rect width="{width}" height="{y}" fill="white"/>',
            '<text x="10" y="22" font-size="15">Exposed time of an AdamW step on the host, in steps (medians)</text>',
            *lines,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    main()
