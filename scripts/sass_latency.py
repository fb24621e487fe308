#!/usr/bin/env python3
"""Reads from machine code how long a warp takes for a round of elements, and for the code around the round. It needs no
GPU.

    NVCC=$(scripts/cuda-toolchain.sh) scripts/sass_latency.py --kernel adamw --path f32 --architecture 90 --listing

One warp is traced through the kernel as nvcc compiled it (scripts/sass/). Figures are cycles and counts that were read
from machine code; they were not measured on a GPU. The fields of class Figures in scripts/sass/rounds.py say what each
column counts. The compiler lane compares every figure with kernels/record/latency.csv.
"""

import argparse, os, subprocess, sys, tempfile
from pathlib import Path

from sass import self_test
from sass.abi import Abi
from sass.elf import banks_of_binary
from sass.kernel import paths_of, read_kernel
from sass.listing import instructions_of, kernels_of
from sass.rounds import FIGURES
from sass.warp import TraceError

HERE = Path(__file__).resolve().parent.parent
ALIASES = {"adamw": "adam"}  # one rule; the launch has its decoupled decay


def without(name, suffixes):
    return next((name.removesuffix(suffix) for suffix in suffixes if name.endswith(suffix)), name)


def print_round(reading):
    """A line for each instruction; `-` if its guard is false, `~` if only some lanes execute it."""
    first, last = reading.round
    for position in range(first, last):
        event, instruction = reading.events[position], reading.events[position].instruction
        loads = [f"0x{reading.events[load].instruction.address:x}" for load in reading.waited[position]]
        note = (f"  <- {event.region}" if event.region else "") + (f"  waits for {' '.join(loads)}" if loads else "")
        mark = " " if event.executing == event.lanes else "-" if event.executing == 0 else "~"
        print(f"  {instruction.address:5x} {instruction.control.text()} {mark} {instruction.text}{note}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", nargs="+", help="optimizers, `norm`, or whole names of kernels; all otherwise")
    parser.add_argument("--path", nargs="+", help="like f32, bf16; all otherwise")
    parser.add_argument("--architecture", default="90")
    parser.add_argument("--root", type=Path, default=HERE, help="the tree whose kernels are compiled")
    parser.add_argument("--listing", action="store_true", help="print the round, with stalls, barriers and waits")
    parser.add_argument("--cubin", type=Path, help="read this one of --architecture; compile otherwise")
    parser.add_argument("--self-test", action="store_true", help="test the reader itself; needs no compiler")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test.run(Abi(arguments.root / "kernels"))
    nvcc = Path(os.environ.get("NVCC", "nvcc"))
    tool = nvcc.parent / "cuobjdump" if nvcc.parent != Path(".") else "cuobjdump"
    kernels = arguments.root / "kernels"
    abi = Abi(kernels)
    with tempfile.TemporaryDirectory() as folder:
        cubin = arguments.cubin or Path(folder) / "kernels.cubin"
        if arguments.cubin is None:
            subprocess.run([nvcc, "-optf", kernels / "nvcc.flags", "-I", kernels, "-cubin", f"-arch=sm_{arguments.architecture}",
                            kernels / "gpu/kernels.cu", "-o", cubin], check=True)
        sass = subprocess.run([tool, "--dump-sass", cubin], check=True, capture_output=True, text=True).stdout
        unpacked = Path(folder) / "unpacked"
        unpacked.mkdir()
        banks = banks_of_binary(tool, cubin, unpacked, abi.argument_bytes)
    print(f"{'kernel':15} {'path':22}", *FIGURES)
    wanted = {ALIASES.get(name, name) for name in arguments.kernel or ()}
    failed = printed = 0
    for (name, code), text in sorted(kernels_of(sass).items()):
        short = name.removeprefix("instep_step_").removeprefix("instep_")
        if wanted and not {name, short, without(short, ("_8bit", "_f32"))} & wanted:
            continue
        optimizer, paths = paths_of(abi, name)
        instructions = instructions_of(text) if paths else []
        for path in paths:
            if arguments.path and not {path.name, without(path.name, ("_measure", "_apply"))} & set(arguments.path):
                continue
            printed += 1
            try:
                reading = read_kernel(abi, name, instructions, optimizer, path, banks[name, code])
            except TraceError as error:
                failed += 1
                print(f"{short:15} {path.name:22} {error}", flush=True)
                continue
            columns = (f"{value:{len(column)}}" for column, value in zip(FIGURES, reading.figures.values()))
            print(f"{short:15} {path.name:22}", *columns, flush=True)
            if arguments.listing:
                print_round(reading)
    if not printed:
        sys.exit("sass_latency: no kernel and path of these names; leave --kernel and --path out to see all")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
