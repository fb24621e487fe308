"""Trains a small GPT in f32 and two low-precision formats, and compares losses with the spread of f32's losses over
seeds.

The GPT learns to predict the next byte of this repository's own text. A seed gives the same initial values and batches
in every format. ``--svg`` draws the loss curves of this run as a picture like that in docs/optimizers.md. At full
length, the program fails if a format's mean loss is outside the range of f32's losses.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python/tests"))
from models import GPT  # noqa: E402

from instep.torch import FusedOptimizer  # noqa: E402

FORMATS: dict[str, tuple[torch.dtype, Callable[[int], dict[str, Any]], str]] = {
    "f32 parameters and states": (torch.float32, lambda seed: {}, "#57606a"),
    "bf16 + remainder16, 8-bit states": (
        torch.bfloat16,
        lambda seed: {"master": "remainder16", "states": "8bit"},
        "#2f6db3",
    ),
    "bf16 rounded stochastically, 8-bit states": (torch.bfloat16, lambda seed: {"seed": seed, "states": "8bit"}, "#c2571a"),
}
"""By name: the parameters' type, the optimizer's options, and a colour. The first is the reference."""
WARM_UP, HELD_OUT, EVERY, FULL_STEPS, FULL_SEEDS = 0.1, 0.1, 10, 500, 5
WIDTH, HEIGHT, LEFT, TOP = 640, 300, 60, 56


def corpus() -> tuple[Tensor, Tensor]:
    """Returns the bytes to train on and the bytes to test on."""
    files = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("kernels/**/*.h"), *ROOT.glob("src/launch/*.rs")])
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    cut = int(len(text) * (1 - HELD_OUT))
    return text[:cut], text[cut:]


def pieces(text: Tensor, count: int, context: int, numbers: torch.Generator) -> Tensor:
    """Returns `count` random pieces of a text, each with `context + 1` bytes."""
    starts = torch.randint(len(text) - context - 1, (count,), generator=numbers)
    return torch.stack([text[start : start + context + 1] for start in starts])


def trained(name: str, seed: int, asked: argparse.Namespace) -> list[tuple[int, float]]:
    """Trains a model. Returns its loss on the held-out text after every tenth step and after the last step."""
    dtype, options, _ = FORMATS[name]
    learnt, tested = corpus()
    torch.manual_seed(seed)
    model = GPT(asked.width, asked.layers, 4, asked.context)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.02)  # as GPT-2; PyTorch's own embedding would begin at a loss of 70, not of ln 256
    model = model.to(dtype)
    optimizer = FusedOptimizer(model.parameters(), "adamw", lr=asked.lr, weight_decay=0.1, **options(seed))
    warm = max(1, int(asked.steps * WARM_UP))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm))
    batches = torch.Generator().manual_seed(seed)
    held = pieces(tested, 64, asked.context, torch.Generator().manual_seed(0))
    curve = []
    for step in range(1, asked.steps + 1):
        model.loss(pieces(learnt, asked.batch, asked.context, batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % EVERY == 0 or step == asked.steps:
            with torch.no_grad():
                curve.append((step, model.loss(held).item()))
    return curve


def draw(curves: dict[str, list[list[tuple[int, float]]]], title: str) -> str:
    """Draws the mean over seeds as a line for each format, and the range over seeds as a band for the reference."""
    values = [loss for all_seeds in curves.values() for curve in all_seeds for _, loss in curve]
    low, high = min(values), max(values)
    steps = [step for step, _ in next(iter(curves.values()))[0]]

    def at(step: float, loss: float) -> str:
        x = LEFT + (WIDTH - LEFT - 20) * step / steps[-1]
        return f"{x:.1f},{TOP + (HEIGHT - TOP - 40) * (high - loss) / ((high - low) or 1):.1f}"

    style = "text{font:13px Helvetica,Arial,sans-serif;fill:#24292f}.small{font-size:11px;fill:#57606a}"
    body = [f"<style>{style}</style>", f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>']
    body.append(f'<text x="10" y="20" font-weight="bold">{title}</text>')
    body.append(
        '<text x="10" y="38" class="small">Loss on held-out text, mean over seeds; the band is the range of f32.</text>'
    )
    for number, (name, all_seeds) in enumerate(curves.items()):
        columns = list(zip(*[[loss for _, loss in curve] for curve in all_seeds]))
        colour = FORMATS[name][2]
        if number == 0:
            edges = [at(step, max(column)) for step, column in zip(steps, columns)]
            edges += [at(step, min(column)) for step, column in reversed(list(zip(steps, columns)))]
            body.append(f'<polygon points="{" ".join(edges)}" fill="{colour}" opacity="0.25"/>')
        line = " ".join(at(step, statistics.fmean(column)) for step, column in zip(steps, columns))
        body.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        y = TOP + 20 + 18 * number
        body.append(f'<line x1="330" x2="354" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="3"/>')
        body.append(f'<text x="360" y="{y}">{name}</text>')
    for share in (0, 0.5, 1):
        loss, step = low + (high - low) * share, round(steps[-1] * share)
        body.append(f'<text x="10" y="{at(0, loss).split(",")[1]}" class="small">{loss:.2f}</text>')
        body.append(f'<text x="{at(step, low).split(",")[0]}" y="{HEIGHT - 14}" class="small">{step}</text>')
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n' + "\n".join(body) + "\n</svg>\n"


def main() -> None:
    """Trains every format with every seed, and prints the last losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, kind, default in [
        ("steps", int, FULL_STEPS),
        ("seeds", int, FULL_SEEDS),
        ("width", int, 128),
        ("layers", int, 2),
        ("context", int, 64),
        ("batch", int, 16),
        ("lr", float, 1e-3),
        ("processes", int, 1),
    ]:
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--svg", type=Path)
    asked = parser.parse_args()
    jobs = [(name, seed, asked) for name in FORMATS for seed in range(asked.seeds)]
    if asked.processes == 1:
        found = list(itertools.starmap(trained, jobs))
    else:
        with ProcessPoolExecutor(asked.processes, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
            found = list(pool.map(trained, *zip(*jobs)))
    curves = {name: found[k * asked.seeds : (k + 1) * asked.seeds] for k, name in enumerate(FORMATS)}
    reference = [curve[-1][1] for curve in next(iter(curves.values()))]
    print(f"{'format':<44} {'mean':>8} {'least':>8} {'greatest':>8}   loss after {asked.steps} steps, {asked.seeds} seeds")
    outside = []
    for name, of_seeds in curves.items():
        last = [curve[-1][1] for curve in of_seeds]
        mean = statistics.fmean(last)
        is_within = min(reference) <= mean <= max(reference)
        where = "within" if is_within else "outside"
        print(f"{name:<44} {mean:8.4f} {min(last):8.4f} {max(last):8.4f}   mean {where} the range of f32")
        outside += [] if is_within else [name]
    if asked.svg:
        asked.svg.write_text(draw(curves, f"A GPT of {asked.layers} layers, {asked.seeds} seeds"))
    if outside and asked.steps >= FULL_STEPS and asked.seeds >= FULL_SEEDS:
        sys.exit(f"{', '.join(outside)}: the mean loss is outside the range of f32's seeds")


if __name__ == "__main__":
    main()
