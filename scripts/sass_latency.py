#!/usr/bin/env python3
"""Reads from machine code how long a warp takes for a round of elements, and for what surrounds it. Needs no GPU.

    NVCC=$(scripts/cuda-toolchain.sh) scripts/sass_latency.py --kernel adamw --path f32 --architecture 90 --listing

One warp is traced through the kernel as nvcc compiled it (scripts/sass/). Figures are cycles and counts by reading; they
are not measured on a GPU. The fields of class Figures in scripts/sass/rounds.py say what each column counts.
"""

import argparse, os, re, subprocess, sys, tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from sass.dependence import UnguardedLoad  # noqa: E402
from sass.abi import Abi  # noqa: E402
from sass.launch import CODES, FLOATS, NORM, Launch  # noqa: E402
from sass.listing import instructions_of, kernels_of  # noqa: E402
from sass.rounds import FIGURES, read_trace  # noqa: E402
from sass.warp import BLOCK_THREADS, TraceError, Warp  # noqa: E402

ALIASES = {"adamw": "adam"}  # one rule; the launch has its decoupled decay
HERE = Path(__file__).resolve().parent.parent


def paths_of(abi, name):
    """The optimizer of a kernel, and the paths that it is launched for. None: this kernel steps no elements."""
    if name == "instep_norm":
        return None, NORM
    match = re.fullmatch(rf"instep_step_({'|'.join(abi.optimizers)})(_\w+)?", name)
    if not match:
        return None
    optimizer, kind = match.groups()
    paths = {None: FLOATS, "_8bit": CODES, "_f32": [FLOATS[0]]}[kind]
    if " change(" not in (abi.kernels / f"rules/{optimizer}.h").read_text():
        return optimizer, paths
    return optimizer, [replace(path, name=f"{path.name}_{part.lower()}", part=part) for part in ("MEASURE", "APPLY")
                       for path in paths]


def read_kernel(abi, name, instructions, optimizer, path, param_base):
    warp = Warp(name, instructions, Launch(abi, path, optimizer), param_base)
    try:
        return read_trace(warp.run(), warp.code, abi["TILE_ELEMENTS"], BLOCK_THREADS // 32)
    except (UnguardedLoad, ValueError) as error:
        raise TraceError(f"{name}, {path.name}: {error}") from error


def param_bases(resource_usage, argument_bytes, architecture=None):
    """Where arguments start in constant bank 0, by kernel and architecture: they end it."""
    found = {}
    images = resource_usage.split("arch = sm_")
    for image in images[1:] or images:  # only a fat binary names architectures
        code = re.match(r"\d+", image)[0] if images[1:] else architecture
        for name, size in re.findall(r"Function (\w+):\n.*?CONSTANT\[0\]:(\d+)", image):
            found[name, code] = int(size) - argument_bytes
    return found


def print_round(reading):
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
    parser.add_argument("--cubin", type=Path, help="read this one; compile otherwise")
    arguments = parser.parse_args()
    nvcc = Path(os.environ.get("NVCC", "nvcc"))
    tool = nvcc.parent / "cuobjdump" if nvcc.parent != Path(".") else "cuobjdump"
    kernels = arguments.root / "kernels"
    abi = Abi(kernels)
    with tempfile.TemporaryDirectory() as folder:
        cubin = arguments.cubin or Path(folder) / "kernels.cubin"
        if arguments.cubin is None:
            subprocess.run([nvcc, "-optf", kernels / "nvcc.flags", "-I", kernels, "-cubin", f"-arch=sm_{arguments.architecture}",
                            kernels / "gpu/kernels.cu", "-o", cubin], check=True)
        sass, usage = (subprocess.run([tool, flag, cubin], check=True, capture_output=True, text=True).stdout
                       for flag in ("--dump-sass", "--dump-resource-usage"))
    bases = param_bases(usage, abi.sizes["InstepStepArgs"], arguments.architecture)
    print(f"{'kernel':15} {'path':22}", *(f"{name:>{len(name)}}" for name in FIGURES))
    failed = 0
    for (name, code), text in sorted(kernels_of(sass).items()):
        wanted = name.removeprefix("instep_step_").removeprefix("instep_")
        known = paths_of(abi, name)
        optimizer = wanted.removesuffix("_8bit").removesuffix("_f32")
        if known is None or arguments.kernel and not {name, wanted, optimizer} & {ALIASES.get(k, k) for k in arguments.kernel}:
            continue
        instructions = instructions_of(text)
        for path in known[1]:
            if arguments.path and not {path.name, path.name.removesuffix("_measure").removesuffix("_apply")} & set(arguments.path):
                continue
            try:
                reading = read_kernel(abi, name, instructions, known[0], path, bases[name, code])
            except TraceError as error:
                failed += 1
                print(f"{wanted:15} {path.name:22} {error}", flush=True)
                continue
            print(f"{wanted:15} {path.name:22}", *(f"{value:{len(column)}}" for column, value in
                                                     zip(FIGURES, reading.figures.values())), flush=True)
            if arguments.listing:
                print_round(reading)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
