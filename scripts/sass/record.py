"""The record of figures, kernels/record/latency.csv, and the rule that a round asks for all its elements before it waits.

A wait between two loads of a round costs a second latency of memory, hundreds of cycles, and no instruction: no other
check sees it.
"""

import csv

from .rounds import FIGURES

EVERY = None
# Paths whose kernels wait between the loads of a round, on some architecture. A row that is no longer true is a fault.
SERIALISED = {}
COLUMNS = ["nvcc", "kernel", "path", "architecture", *FIGURES]


def judge_together(found, check, is_whole, serialised=SERIALISED):
    """`found`: figures by kernel, path and architecture; whole if it is of all architectures."""
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


def write(file, release, found):
    rows = [[release, name, path, f"sm_{code}", *figures.values()] for (name, path, code), figures in sorted(found.items())]
    with file.open("w", newline="") as out:
        csv.writer(out, lineterminator="\n").writerows([COLUMNS, *rows])


def compare(file, release, found, tolerance, check):
    """Each figure within the tolerance of its record, either way. Returns the record's releases, if others."""
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
