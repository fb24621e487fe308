"""The record of figures, kernels/record/latency.csv, and two rules. A round issues all its loads before it waits. A
lane loads 16 bytes at a time if all its streams have one width.

A wait between two loads of a round costs a second latency of memory. That is hundreds of cycles. It adds no
instruction, so no other check sees it. Loads of 8 bytes keep half as much in flight.
"""

import csv

from .kernel import paths_of
from .rounds import FIGURES

EVERY = None
# Paths whose kernels wait between the loads of a round, on some architecture. A row that is no longer true is a fault.
SERIALISED = {}
# 16-bit streams of 8 bytes a lane. Eight elements of five streams do not fit into 64 registers, and two warps share a leaf of
# LAMB's norms, four elements a lane. A row that is no longer true is a fault.
NARROW = {(f"instep_step_{optimizer}", f"bf16{rounding}{part}") for rounding in ("", "_stochastic")
          for optimizer, part in (("ademamix", ""), ("lamb", "_measure"), ("lamb", "_apply"))}
COLUMNS = ["nvcc", "kernel", "path", "architecture", *FIGURES]


def judge_together(found, check, is_whole, serialised=SERIALISED):
    """``found`` has the figures by kernel, path and architecture. It is complete if it has all architectures."""
    pairs = {(name, path) for name, path, _ in found}
    listed = {(name, path) for name, path in pairs if path in serialised and name in (serialised[path] or {name})}
    for name, path in sorted(pairs):
        split = {code: figures for (n, p, code), figures in found.items()
                 if (n, p) == (name, path) and figures.together < figures.loads}
        if (name, path) in listed:
            check(split or not is_whole, f"{name}, {path}: the loads of a round are in flight together now; take it off"
                  " SERIALISED in scripts/sass/record.py")
            continue
        for code, figures in sorted(split.items()):
            check(False, f"sm_{code} {name}, {path}: {figures.together} of {figures.loads} loads of a round are issued before"
                  " the first wait for one; load every word first and convert afterwards")
    for path, kernels in serialised.items() if is_whole else ():
        for name in kernels or ():
            check((name, path) in pairs, f"{name}, {path}: SERIALISED names no such path; take it off")


def judge_width(found, abi, check):
    """The bytes of a lane's load, in paths whose streams all have one width and are aligned."""
    for (name, path, code), figures in sorted(found.items()):
        optimizer, paths = paths_of(abi, name)
        (path,) = (one for one in paths if one.name == path)
        widths = {path.grad} if optimizer is None else {path.grad, path.param, path.moments}
        if widths not in ({"F32"}, {"BF16"}, {"F16"}) or path.master != "NONE" or path.shift:
            continue
        states = 0 if optimizer is None else max(1, abi.optimizers[optimizer][1])
        streams = 1 if optimizer is None else states + (1 if path.part == "APPLY" else 2)
        width = figures.elements // 32 * streams * (4 if widths == {"F32"} else 2) / figures.loads
        expected = 8 if (name, path.name) in NARROW else 16
        check(width == expected, f"sm_{code} {name}, {path.name}: loads of {width:g} bytes a lane, expected {expected}")


def write(file, release, found):
    rows = [[release, name, path, f"sm_{code}", *figures.values()] for (name, path, code), figures in sorted(found.items())]
    with file.open("w", newline="") as out:
        csv.writer(out, lineterminator="\n").writerows([COLUMNS, *rows])


def compare(file, release, found, tolerance, check):
    """Checks that each figure is within the tolerance of its record, up and down. Returns the record's releases if they
    differ.
    """
    with file.open() as text:
        record = {(row["kernel"], row["path"], row["architecture"][3:]): row for row in csv.DictReader(text)}
    releases = {row["nvcc"] for row in record.values()}
    if releases != {release}:
        return releases
    for key, figures in sorted(found.items()):
        name, path, code = key
        where = f"sm_{code} {name}, {path}"
        if key not in record:
            check(False, f"{where} is not in {file.name}: run with --bless")
            continue
        for figure, value in zip(FIGURES, figures.values()):
            recorded = int(record[key][figure])
            check(abs(value - recorded) <= tolerance * recorded,
                  f"{where}: {figure} {value}, recorded {recorded}; --bless if meant")
    return None
