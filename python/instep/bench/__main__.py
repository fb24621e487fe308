"""Times one AdamW step of instep and PyTorch, and of DeepSpeed, bitsandbytes and torchao if they are installed.

The benchmark takes about a minute, and longer on a busy machine. The first use of DeepSpeed or torchao also compiles
the kernels of that library. Before any candidate is timed, all candidates make their first steps from the same values,
and are compared with AdamW in f64. Then every round runs each candidate once. Each ratio is computed from two times of
the same round. The rounds have two halves. Before the second half, the candidates' memory is allocated again, in
reverse order.

With --offload it times the step of a training that keeps its states in the host's memory. This step reads f32 gradients
in the host's memory. It produces f32 parameters, and bf16 copies of them for the device. instep writes both in one
step. The other libraries make the copies after their step.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Optional

import torch

import instep

from . import machine
from .candidates import CANDIDATES, CHECKED_STEPS, OFFLOADED, Candidate, Made, tolerance
from .picture import draw
from .report import Case, Line, Results, csv, table
from .rounds import in_turn, milliseconds

LENGTH, BUCKET, MOST, BEYOND = 131_072, 50, 8, 128
# Seconds for which a case is timed, and the numbers of rounds in each of its halves. If the benchmark as a whole becomes
# late, for example because a library compiles its kernels, later cases get fewer seconds, but no fewer rounds than these.
CASE_S, WHOLE_S, LEAST_ROUNDS, MOST_ROUNDS = 8.0, 48.0, 3, 15
PEERS = ("deepspeed", "bitsandbytes", "torchao")
# If the tensors fit in the cache, one sample makes several steps, over this many elements in total. Reading the clock then
# costs little.
SAMPLE_ELEMENTS = 4 << 20


class Progress:
    """Shows progress on the standard error. In a terminal, one line is rewritten. Elsewhere, each stage has its own
    line.
    """

    def __init__(self, stages: int) -> None:
        self.stages, self.done, self.told = stages, 0, ""

    def stage(self, text: str) -> None:
        """Begins the next stage."""
        self.done += 1
        self.say(text, 0.0)

    def say(self, text: str, share: float) -> None:
        """Shows the current stage, and how much of it is done."""
        if sys.stderr.isatty():
            whole = (self.done - 1 + share) / self.stages
            bar = "#" * round(24 * whole)
            print(f"\r[{bar:<24}] {100 * whole:3.0f} %  {text[:44]:<44}", end="", file=sys.stderr, flush=True)
        elif text != self.told:
            print(f"{self.done} of {self.stages}: {text}", file=sys.stderr, flush=True)
        self.told = text

    def end(self) -> None:
        """Clears the progress line before the table is printed."""
        if sys.stderr.isatty():
            print(f"\r{'':<79}\r", end="", file=sys.stderr, flush=True)


def cases(quick: bool) -> list[Case]:
    """The cases: one bucket, a size that stays in the cache, and a size that does not fit into the cache."""
    length = LENGTH // 8 if quick else LENGTH
    resident = min(MOST, max(1, machine.last_level_cache() // 2 // (16 * LENGTH)))
    return [
        Case("bucket", BUCKET, length),
        Case("in cache", resident, length),
        Case("beyond cache", BEYOND, length),
    ]


def made(candidate: Candidate, case: Case) -> tuple[Optional[str], Optional[Made]]:
    """Returns a candidate that made correct first steps, or the reason why it cannot be timed."""
    if machine.version(candidate.package) is None:
        return "not installed", None
    try:
        ready = Made(candidate, case.tensors, case.length)
        wrong = ready.check()
    except Exception as error:  # The import, build or step of another library may raise any error.
        if candidate.is_ours:
            raise
        said = str(error).strip().splitlines() or [""]
        return f"does not run here: {type(error).__name__}: {said[0][:90]}", None
    if wrong and candidate.is_ours:
        raise SystemExit(f"{candidate.label}: {wrong}; please report it")
    return (f"not timed: {wrong}", None) if wrong else (None, ready)


def sample(ready: Made, case: Case) -> float:
    """Times a sample. Returns milliseconds per step.

    If the tensors fit in the cache, an untimed step first loads them. If they do not fit, the steps of the other
    candidates have evicted them, and the sample is one step.
    """
    if case.name != "in cache":
        return milliseconds(ready.step)
    steps = max(1, SAMPLE_ELEMENTS // case.elements)
    ready.step()
    return milliseconds(functools.partial(ready.steps, steps)) / steps


def rounds(fewest: int, most: int, seconds: float, say: Callable[[float], None]) -> Iterator[int]:
    """Yields the number of each round until the time is over. The first round is a warm-up."""
    start = time.monotonic()
    for number in range(most):
        spent = time.monotonic() - start
        if number >= fewest and spent > seconds:
            return
        say(min(1.0, max(spent / max(seconds, 1.0), number / most)))
        yield number


def time_in_turn(case: Case, lines: list[Line], half: str, fewest: int, most: int, until: float, progress: Progress) -> int:
    """Makes and compares the candidates in the order of these lines, and then times them in turn. Returns the number of
    rounds so far.
    """
    gc.collect()  # Memory of the other half that is in reference cycles.
    sides = {}
    for line in lines:
        progress.stage(f"{case.name}, {half} half: {line.candidate.label}, first steps")
        if line.missing is None:
            line.missing, ready = made(line.candidate, case)
            if ready is not None:
                sides[line.candidate.label] = functools.partial(sample, ready, case)
    text = f"{case.name}, {half} half: timed in turn"
    progress.stage(text)
    seconds = min(CASE_S / 2, until - time.monotonic())
    times = in_turn(sides, rounds(fewest + 1, most + 1, seconds, functools.partial(progress.say, text)))
    for line in lines:
        line.times += times.get(line.candidate.label, [])[1:]
        if line.missing is not None:
            line.times.clear()
    return max(len(line.times) for line in lines)


def run(case: Case, candidates: list[Candidate], quick: bool, begin: float, end: float, progress: Progress) -> Results:
    """Times all candidates of a case in two halves. Between the halves, the candidates are made again in reverse order.

    The memory that a process allocates first may be slower than its later memory: on one machine, steps in the first
    memory took 10 to 15 % longer. In one half, instep's memory is therefore allocated before another candidate's memory.
    In the other half, it is allocated after the other candidate's memory.
    """
    lines = [Line(candidate) for candidate in candidates]
    fewest, most = (1, 1) if quick else (LEAST_ROUNDS, MOST_ROUNDS)
    count = time_in_turn(case, lines, "first", fewest, most, (begin + end) / 2, progress)
    time_in_turn(case, lines[::-1], "second", count, count, end, progress)
    results = Results(case, lines)
    results.compare()
    return results


def main() -> None:
    """Reads the command line, measures, and writes the requested files."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m instep.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: torch.get_num_threads()")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draws a picture")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="writes every figure")
    parser.add_argument("--quick", action="store_true", help="an eighth of each size, two rounds; the figures mean little")
    parser.add_argument("--offload", action="store_true", help="times the step of offloaded training")
    arguments = parser.parse_args()
    if arguments.offload and not hasattr(torch.Tensor, "grad_dtype"):
        parser.error("--offload: parameters of bf16 have gradients of f32 only in a newer PyTorch; update it")
    candidates = OFFLOADED if arguments.offload else CANDIDATES
    if arguments.threads < 1:
        parser.error(f"--threads {arguments.threads}: at least one thread is needed")
    torch.set_num_threads(arguments.threads)
    others = machine.Others()

    named = [f"{peer} {machine.version(peer) or 'not installed'}" for peer in PEERS]
    versions = ", ".join([f"instep {instep.__version__}", f"torch {torch.__version__}", *named])
    processor = machine.processor()
    count = f"{arguments.threads} thread{'s' * (arguments.threads > 1)}"
    head = [
        f"{processor}; last-level cache {machine.last_level_cache() / (1 << 20):g} MiB; {count};"
        f" load before the run {machine.load()}",
        versions,
    ]
    if arguments.quick:
        head.append("quick: an eighth of each size, two rounds; the figures mean little")
    if arguments.offload:
        head.append("offloaded: f32 gradients in host memory; f32 parameters and bf16 copies of them after the step")
    formats = dict.fromkeys(candidate.format for candidate in candidates)
    allowed = ", ".join(f"{format} {tolerance(format, CHECKED_STEPS):.0e}" for format in formats)
    print(*head, sep="\n")
    print(f"compared after {CHECKED_STEPS} steps with AdamW in f64, at most apart by: {allowed}", flush=True)

    sizes = cases(arguments.quick)
    progress = Progress(2 * len(sizes) * (len(candidates) + 1))
    all_results = []
    for number, case in enumerate(sizes, 1):
        begin, end = (start + WHOLE_S * done / len(sizes) for done in (number - 1, number))
        all_results.append(run(case, candidates, arguments.quick, begin, end, progress))
        progress.end()
        print(f"\n{table(all_results[-1])}", flush=True)
    if arguments.csv:
        arguments.csv.write_text(csv(head, arguments.threads, all_results))
    if arguments.svg:
        arguments.svg.write_text(draw(f"{processor}, {count}", versions, all_results))
    share = others.share()
    if share is not None and share > 0.05:
        print(f"\nother processes or virtual machines used {share:.0%} of all cores' time: the figures mean little")
    print(f"\ntook {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
