#!/usr/bin/env python3
"""Writes the tables of kernels/PERFORMANCE.md: predicted speeds, from kernels/record/latency.csv and a GPU's data sheet.

    scripts/performance.py          fails if the page is not what the record and the formula give
    scripts/performance.py --bless  writes it

The page says what the formula means. Nothing here was measured on a GPU.
"""

import argparse, csv, math, re, sys
from dataclasses import dataclass
from pathlib import Path

from sass.abi import Abi
from sass.kernel import paths_of

HERE = Path(__file__).resolve().parent.parent
PAGE, RECORD = HERE / "kernels/PERFORMANCE.md", HERE / "kernels/record/latency.csv"
BEGIN, END = "<!-- {} begins: scripts/performance.py --bless -->\n", "<!-- {} ends -->\n"
THREADS, SCHEDULERS, BLOCKS = 256, 4, 4  # of a block, of a multiprocessor, resident on one
WARPS = BLOCKS * THREADS // 32
LATENCY_SECONDS = 570e-9  # of global memory under load
EXPONENT = 3
BUCKET_BYTES = 25 * 2**20
LAUNCHES = HERE / "src/cuda/launches.rs"
NCCL_CTAS = (16, 24, 32)  # of 640 threads with 96 registers each, which leave no room for a block on their multiprocessor


@dataclass(frozen=True)
class Gpu:
    name: str
    architecture: str
    multiprocessors: int
    hertz: float  # under load of memory
    copy: float  # bytes a second, read and written


GPUS = [
    Gpu("A100 80 GB", "sm_80", 108, 1.41e9, 1.80e12),
    Gpu("H100 SXM", "sm_90", 132, 1.755e9, 3.0e12),
    Gpu("H200", "sm_90", 132, 1.755e9, 4.3e12),
    Gpu("B200", "sm_100", 148, 1.85e9, 7.2e12),
]


def bytes_per_element(path, states, quantum):
    """Moved between a kernel and memory; a word that a shift reads twice comes from a cache."""
    width = {"F32": 4, "BF16": 2, "NONE": 0, "REMAINDER16": 2, "REMAINDER8": 1, "8BIT": 1 + 4 / quantum}
    grad, param, master = width[path.grad], width[path.param], width[path.master]
    if states is None:  # the norm
        return grad
    moments = width[path.moments] * states
    # An f32 master stands for the parameter, which is then only written.
    reads = (0 if path.master == "F32" else param) + master
    if path.part == "MEASURE":
        return reads + grad + 2 * moments
    if path.part == "APPLY":
        return reads + moments + param + master
    return reads + grad + 2 * moments + param + master


@dataclass(frozen=True)
class Prediction:
    share: float  # of the time of a copy of as many bytes
    bound: str
    issue_share: float  # if issuing were all that takes time


def predict(gpu, row, size, run_elements):
    """`row`: figures of a warp; `size`: bytes of an element; `run_elements`: of a block's tiles that are one run."""
    rounds = run_elements * 32 / THREADS / row["elements"]
    instructions = row["instructions"] + row["tile_instructions"] / rounds
    # While a block loads what comes before its first element, the others of its multiprocessor work.
    turnover = row["first_chain"] * LATENCY_SECONDS * gpu.hertz
    stalls = row["stalls"] + (row["tile_stalls"] + turnover) / rounds
    # Cycles of a round of every warp of a multiprocessor.
    memory = WARPS * row["elements"] * size / (gpu.copy / gpu.multiprocessors / gpu.hertz)
    issue = WARPS / SCHEDULERS * instructions
    latency = row["latencies"] * LATENCY_SECONDS * gpu.hertz + stalls
    cycles = {"memory": memory, "issue": issue, "latency": latency}
    share = memory / sum(c**EXPONENT for c in cycles.values()) ** (1 / EXPONENT)
    return Prediction(share, max(cycles, key=cycles.get), min(1.0, memory / issue))


def share_bytes():
    """What a block's share of a step moves."""
    found = re.search(r"const SHARE_BYTES: u64 = (\d+) << (\d+);", LAUNCHES.read_text())
    return int(found[1]) << int(found[2])


def share_of(tiles, tile_bytes, gpu, is_step=True):
    """Tiles of a block's share, as `short_shares` and `even_shares` in LAUNCHES have them."""
    resident = BLOCKS * gpu.multiprocessors
    short = max(1, min(tiles // resident, math.ceil(share_bytes() / tile_bytes)))
    blocks = math.ceil(tiles / (short if is_step else math.ceil(tiles / resident)))
    return math.ceil(tiles / blocks), blocks


def late_seconds(gpu, row, run_elements):
    """How long a block takes that starts when the others end."""
    rounds = run_elements * 32 / THREADS / row["elements"]
    stalls = rounds * row["stalls"] + row["tile_stalls"]
    return (row["first_chain"] + rounds * row["latencies"]) * LATENCY_SECONDS + stalls / gpu.hertz


def beside_nccl(gpu, path, row, tiles, tile, size):
    """A line for even shares, and one for short ones."""
    for kind, is_step in (("even", False), ("short", True)):
        share, blocks = share_of(tiles, size * tile, gpu, is_step)
        waiting = [max(0, blocks - BLOCKS * (gpu.multiprocessors - ctas)) for ctas in NCCL_CTAS]
        late = late_seconds(gpu, row, share * tile) * 1e6
        yield [gpu.name, path, kind, f"{share}", f"{blocks}", *map(str, waiting), f"{late:.1f} us"]


def rows():
    """Kernel, path, bytes of an element and the figures by architecture."""
    abi = Abi(HERE / "kernels")
    with RECORD.open() as text:
        figures = {}
        for row in csv.DictReader(text):
            numbers = {name: int(value) for name, value in row.items() if value.isdigit()}
            figures.setdefault((row["kernel"], row["path"]), {})[row["architecture"]] = numbers
    for (kernel, name), by_architecture in figures.items():
        optimizer, paths = paths_of(abi, kernel)
        (path,) = (path for path in paths if path.name == name)
        states = None if optimizer is None else max(1, abi.optimizers[optimizer][1])
        yield kernel, name, bytes_per_element(path, states, abi["QUANTUM"]), by_architecture, abi["TILE_ELEMENTS"]


def cell(prediction):
    """A share; by which it is bound, if not by memory."""
    own = "" if prediction.bound == "memory" else f" ({prediction.bound})"
    return f"{100 * prediction.share:.0f} %{own}"


def tables():
    heads = ["kernel", "path", "bytes", *(gpu.name for gpu in GPUS)]
    long, bucket = [heads], [["path", *heads[2:]]]
    waiting = [["GPU", "path", "shares", "tiles", "blocks", *(f"no slot beside {ctas}" for ctas in NCCL_CTAS), "a late block takes"]]
    for kernel, path, size, figures, tile in rows():
        is_step, many = kernel != "instep_norm" and not path.endswith("_measure"), 1 << 17
        shares = [predict(gpu, figures[gpu.architecture], size, share_of(many, size * tile, gpu, is_step)[0] * tile) for gpu in GPUS]
        label = kernel.removeprefix("instep_step_").removeprefix("instep_")
        long.append([label, path, f"{size:.4g}", *map(cell, shares)])
        if label in ("adam", "adam_8bit"):
            elements = BUCKET_BYTES / (2 if path.startswith(("bf16", "remainder")) else 4)
            bucket.append([path, f"{size:.4g}"])
            for gpu in GPUS:
                tiles = math.ceil(elements / tile)
                run, _ = share_of(tiles, size * tile, gpu)
                if path in ("f32", "bf16"):
                    waiting += beside_nccl(gpu, path, figures[gpu.architecture], tiles, tile, size)
                steady = elements * size / gpu.copy / predict(gpu, figures[gpu.architecture], size, run * tile).share
                start = (figures[gpu.architecture]["first_chain"] + 1) * LATENCY_SECONDS
                bucket[-1].append(f"{100 * elements * size / gpu.copy / (steady + start):.0f} %")
    return {"steps": long, "bucket": bucket, "nccl": [waiting[0], *sorted(waiting[1:], key=lambda line: [gpu.name for gpu in GPUS].index(line[0]))]}


def table(lines):
    head, *body = ["| " + " | ".join(line) + " |\n" for line in lines]
    return head + "|" + "---|" * len(lines[0]) + "\n" + "".join(body)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bless", action="store_true", help="write the page")
    arguments = parser.parse_args()
    text = old = PAGE.read_text()
    for name, lines in tables().items():
        begin, end = BEGIN.format(name), END.format(name)
        before, rest = text.split(begin)
        text = before + begin + table(lines) + end + rest.split(end)[1]
    if arguments.bless:
        PAGE.write_text(text)
    elif text != old:
        sys.exit(f"{PAGE.name} is not what {RECORD.name} gives: run scripts/performance.py --bless, and read the difference")


main()
