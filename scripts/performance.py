#!/usr/bin/env python3
"""Writes the tables of kernels/PERFORMANCE.md: predicted speeds, from kernels/record/latency.csv and a GPU's data sheet.

    scripts/performance.py          fails if the page is not what the record and the formula give
    scripts/performance.py --bless  writes it

The page explains the formula, and the basis of each assumption. Only the clock and the copy rate of the H200 were measured.
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
BUCKET_BYTES = 25 * 2**20
LAUNCHES = HERE / "src/cuda/launches.rs"
MANY_TILES = 1 << 17
NCCL_CTAS = (16, 24, 32)  # of 640 threads with 96 registers each, which leave no room for a block on their multiprocessor


# Cycles of a scheduler's unit for an instruction of a warp, which has 32 lanes. They are assumptions: they were not measured,
# and not checked against the CUDA C++ Programming Guide. Conversions to f64 are in xu.
CYCLES = {"fma": {"sm_80": 2}, "alu": 2, "xu": 8, "fp64": {"sm_80": 4, "sm_90": 2, "sm_100": 2}}


@dataclass(frozen=True)
class Assumptions:
    """The properties of a GPU that machine code does not show."""

    latency: float  # seconds of global memory under load
    exponent: float  # how well times overlap: infinite is perfectly, 1 not at all
    read_only: float  # how much faster memory is read than copied


LOW, USUAL, HIGH = Assumptions(800e-9, 2, 1.0), Assumptions(570e-9, 3, 1.05), Assumptions(450e-9, math.inf, 1.1)


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
    Gpu("H200", "sm_90", 132, 1.98e9, 4.28e12),
    Gpu("B200", "sm_100", 148, 1.85e9, 7.2e12),
]


def bytes_per_element(path, states, quantum):
    """Bytes moved between a kernel and memory. A word that a shift reads twice comes from a cache."""
    width = {"F32": 4, "BF16": 2, "F16": 2, "NONE": 0, "REMAINDER16": 2, "REMAINDER8": 1, "8BIT": 1 + 4 / quantum}
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


def norm_of(times, exponent):
    """The longest time, plus the part that the other times add to it."""
    longest = max(times)
    return longest if math.isinf(exponent) else sum(time**exponent for time in times) ** (1 / exponent)


def predict(gpu, row, size, run_elements, only_reads, given=USUAL):
    """``row`` has the figures of a warp, ``size`` the bytes of an element, and ``run_elements`` the number of
    elements of a block's tiles that are one run.
    """
    rounds = run_elements * 32 / THREADS / row["elements"]
    instructions = row["instructions"] + row["tile_instructions"] / rounds
    # While a block loads what comes before its first element, the others of its multiprocessor work.
    turnover = row["first_chain"] * given.latency * gpu.hertz
    stalls = row["stalls"] + (row["tile_stalls"] + turnover) / rounds
    # Cycles of a round of every warp of a multiprocessor.
    copy = WARPS * row["elements"] * size / (gpu.copy / gpu.multiprocessors / gpu.hertz)
    memory = copy / (given.read_only if only_reads else 1)
    units = {"issue": instructions}
    for unit, cycles in CYCLES.items():
        units[unit] = row[unit] * (cycles.get(gpu.architecture, 1) if isinstance(cycles, dict) else cycles)
    busiest = max(units, key=units.get)
    latency = row["latencies"] * given.latency * gpu.hertz + stalls
    cycles = {"memory": memory, busiest: WARPS / SCHEDULERS * units[busiest], "latency": latency}
    return Prediction(copy / norm_of(cycles.values(), given.exponent), max(cycles, key=cycles.get))


def short_share(tiles, tile_bytes, resident):
    """Number of tiles of a short share, as `short_shares` in LAUNCHES computes it."""
    text = LAUNCHES.read_text()
    large, share, turns = (int(re.search(rf"const {name}: u64 = (\d+)( << 10)?;", text)[1])
                           for name in ("LARGE_TILE_BYTES", "SHARE_BYTES", "LEAST_TURNS"))
    short = 1 if tile_bytes >= large << 10 else math.ceil((share << 10) / tile_bytes)
    return max(1, min(tiles // (turns * resident), short))


def share_of(tiles, tile_bytes, gpu, is_step=True):
    """Number of tiles of a block's share, as `short_shares` and `even_shares` in LAUNCHES compute it."""
    resident = BLOCKS * gpu.multiprocessors
    short = short_share(tiles, tile_bytes, resident)
    blocks = math.ceil(tiles / (short if is_step else math.ceil(tiles / resident)))
    return math.ceil(tiles / blocks), blocks


def late_seconds(gpu, row, run_elements, given=USUAL):
    """How long a block takes that starts only when other blocks end."""
    rounds = run_elements * 32 / THREADS / row["elements"]
    stalls = rounds * row["stalls"] + row["tile_stalls"]
    return (row["first_chain"] + rounds * row["latencies"]) * given.latency + stalls / gpu.hertz


def beside_nccl(gpu, path, row, tiles, tile, size):
    """Two lines: one for even shares, and one for short shares."""
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


@dataclass(frozen=True)
class Case:
    """A kernel on a path: bytes of an element, figures by architecture, elements of a tile."""

    kernel: str
    path: str
    size: float
    figures: dict
    tile: int

    @property
    def label(self):
        return self.kernel.removeprefix("instep_step_").removeprefix("instep_")

    def long(self, gpu, given=USUAL):
        """A prediction for many elements."""
        is_step = self.label != "norm" and not self.path.endswith("_measure")
        run, _ = share_of(MANY_TILES, self.size * self.tile, gpu, is_step)
        return predict(gpu, self.figures[gpu.architecture], self.size, run * self.tile, self.label == "norm", given)

    def bucket(self, gpu, given=USUAL, late=0.0, grads=BUCKET_BYTES):
        """Returns the seconds of a bucket with these bytes of gradients, and of a copy; a share `late` of a block
        ends after the rest.
        """
        row, elements = self.figures[gpu.architecture], grads / (2 if self.path.startswith(("bf16", "remainder")) else 4)
        run, _ = share_of(math.ceil(elements / self.tile), self.size * self.tile, gpu)
        copy = elements * self.size / gpu.copy
        steady = copy / predict(gpu, row, self.size, run * self.tile, False, given).share
        # It begins with what comes before the first element, and ends with the last round.
        ends = (row["first_chain"] + 1) * given.latency + late * late_seconds(gpu, row, run * self.tile, given)
        return steady + ends, copy


def ranged(shares):
    """A share of a copy: the usual value, and the range from the lowest to the highest."""
    low, usual, high = (f"{100 * share:.0f}" for share in shares)
    return f"{usual} ({low}-{high}) %"


def cell(case, gpu):
    """A share with its range, and the limit if it is not memory."""
    predictions = [case.long(gpu, given) for given in (LOW, USUAL, HIGH)]
    bound = predictions[1].bound
    return ranged(prediction.share for prediction in predictions) + ("" if bound == "memory" else f" {bound}")


def milliseconds(seconds):
    low, usual, high = (f"{1e3 * time:.3g}" for time in seconds)
    return f"{usual} ({high}-{low}) ms"


def of_many(cases, gpu):
    """Time and share of MANY_TILES tiles, for launches that follow each other."""
    copy = sum(MANY_TILES * case.tile * case.size / gpu.copy for case in cases)
    seconds = [sum(MANY_TILES * case.tile * case.size / gpu.copy / case.long(gpu, given).share for case in cases)
               for given in (LOW, USUAL, HIGH)]
    return f"{milliseconds(seconds)}, {ranged(copy / time for time in seconds)}"


def of_bucket(case, gpu, late=(0, 0, 0), grads=BUCKET_BYTES):
    """Time and share of a bucket. `late` has the share of a block that ends late, from the worst case to the best."""
    found = [case.bucket(gpu, given, part, grads) for given, part in zip((LOW, USUAL, HIGH), late)]
    return f"{milliseconds([time for time, _ in found])}, {ranged(copy / time for time, copy in found)}"


def tables():
    cases = [Case(*row) for row in rows()]
    heads = [gpu.name for gpu in GPUS]
    by_name = {(case.label, case.path): case for case in cases}
    adam, sixteen = by_name["adam", "f32"], by_name["adam", "bf16"]
    firsts = [
        ("AdamW, f32", [adam]),
        ("the same, no gradient ever", [by_name["adam", "f32_zeros"]]),
        ("AdamW, bf16", [sixteen]),
        ("the same, no gradient ever", [by_name["adam", "bf16_zeros"]]),
        ("AdamW, bf16 with stochastic rounding", [by_name["adam", "bf16_stochastic"]]),
        ("AdamW, bf16 with an f32 master", [by_name["adam", "bf16_master"]]),
        ("AdamW, 8-bit states", [by_name["adam_8bit", "8bit"]]),
        ("LAMB, f32", [by_name["lamb", "f32_measure"], by_name["lamb", "f32_apply"]]),
        ("LAMB, bf16", [by_name["lamb", "bf16_measure"], by_name["lamb", "bf16_apply"]]),
        ("norm, f32", [by_name["norm", "f32"]]),
        ("norm, bf16", [by_name["norm", "bf16"]]),
    ]
    records = [["256 Mi elements", *heads]] + [[name, *(of_many(of, gpu) for gpu in GPUS)] for name, of in firsts]
    for kind, case in (("f32", adam), ("bf16", sixteen)):
        records.append([f"bucket of 25 MiB, {kind}", *(of_bucket(case, gpu) for gpu in GPUS)])
        records.append([f"the same beside NCCL, {kind}", *(of_bucket(case, gpu, (1, 0.5, 0)) for gpu in GPUS)])
        records.append([f"bucket of 128 MiB, {kind}", *(of_bucket(case, gpu, grads=128 << 20) for gpu in GPUS)])
    long = [["kernel", "path", "bytes", *heads]]
    bucket, waiting = [["path", "bytes", *heads]], []
    for case in cases:
        long.append([case.label, case.path, f"{case.size:.4g}", *(cell(case, gpu) for gpu in GPUS)])
        if case.label in ("adam", "adam_8bit"):
            found = [[case.bucket(gpu, given) for given in (LOW, USUAL, HIGH)] for gpu in GPUS]
            bucket.append([case.path, f"{case.size:.4g}", *(ranged(copy / time for time, copy in of) for of in found)])
    for gpu in GPUS:
        for case in (sixteen, adam):
            tiles = math.ceil(BUCKET_BYTES / (2 if case is sixteen else 4) / case.tile)
            waiting += beside_nccl(gpu, case.path, case.figures[gpu.architecture], tiles, case.tile, case.size)
    head = ["GPU", "path", "shares", "tiles", "blocks", *(f"no slot beside {ctas}" for ctas in NCCL_CTAS), "a late block takes"]
    return {"records": records, "steps": long, "bucket": bucket, "nccl": [head, *waiting]}


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
