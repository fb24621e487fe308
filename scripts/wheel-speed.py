#!/usr/bin/env python3
"""Times AdamW's step of two builds of the Python package's native half, per instruction set, on one thread.

    scripts/wheel-speed.py WHEEL/instep/_native.abi3.so target/release/libinstep_python.so

This process loads both, and they step the same memory in turn, so neither has better memory. A ratio is the first one's time
divided by the second one's in the same round. The table has the medians over rounds, and the ratio's quartiles. Times are CPU
time of the thread, because other programs may interrupt it.
"""

import argparse, ctypes, importlib.machinery, importlib.util, os, statistics, time

FORMATS = {
    "f32": ("float32", "float32", "none", "float32"),
    "bf16": ("bfloat16", "bfloat16", "none", "bfloat16"),
    "8-bit": ("float32", "float32", "none", "8bit"),
}
SETS = ("baseline", "avx2", "avx512")
ELEMENTS = (1 << 14, 1 << 18, 1 << 22)  # f32 takes 256 KiB, 4 MiB and 64 MiB: the second cache, the third, and memory
BYTES = {"float32": 4, "bfloat16": 2, "8bit": 1}
BLOCK = 256  # elements that share a scale
SAMPLE_ELEMENTS = 1 << 18  # a sample steps at least these, so that the call costs little


class Memory:
    """The tensors of one parameter. Each begins at a page. Parameters and gradients are 2^-6, and states are 0."""

    def __init__(self, elements, formats):
        param, grad, _, states = formats
        sizes = [elements * BYTES[param], elements * BYTES[grad]]
        sizes += [elements * BYTES[states]] * 2 + ([elements // BLOCK * 4] * 2 if states == "8bit" else [])
        self.kept = [ctypes.create_string_buffer(size + 4096) for size in sizes]
        at = [-(-ctypes.addressof(run) // 4096) * 4096 for run in self.kept]
        for address, size, word in zip(at, sizes, (param, grad)):
            ctypes.memset(address, 0, size)
            one = b"\x80\x3c" if word == "bfloat16" else b"\x00\x00\x80\x3c"
            ctypes.memmove(address, one * (size // len(one)), size)
        self.bound = {
            "params": at[:1], "grads": at[1:2], "states": at[2:4], "scales": at[4:],
            "master": 0, "counts": 0, "carried": 0,
        }  # fmt: skip


def load(path):
    """Returns the native half at a path, beside any other that is loaded."""
    loader = importlib.machinery.ExtensionFileLoader("instep._native", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location("instep._native", path, loader=loader))
    loader.exec_module(module)
    return module


def stepper(native, elements, formats, isa):
    """Returns a step of one build, or None if this machine lacks the instruction set."""
    os.environ["INSTEP_ISA"] = isa
    hyper = next(dict(defaults) for _, key, defaults, *_ in native.descriptors() if key == "adamw")
    params = [(elements, 0, 0, 0, 0, elements, 0)]
    try:
        return native.Step([("adamw", hyper)], params, elements, formats, None, "keep", 1, 0, None)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        if isa not in str(error):
            raise
        return None


def sample(step, bound, steps):
    """Returns the time of one step, in microseconds."""
    start = time.thread_time_ns()
    for _ in range(steps):
        step.step(bound, (1, 1.0, 0, 0), 0)
    return (time.thread_time_ns() - start) / steps / 1e3


def timed(steps, memory, count, rounds):
    """Returns both steps' times in each round. The first round warms up, and the order alternates."""
    times = [], []
    for number in range(rounds + 1):
        for side in (0, 1) if number % 2 else (1, 0):
            times[side].append(sample(steps[side], memory.bound, count))
    return [side[1:] for side in times]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs=2, metavar="LIBRARY")
    parser.add_argument("--names", nargs=2, default=("first", "second"))
    parser.add_argument("--rounds", type=int, default=101)
    arguments = parser.parse_args()
    natives = [load(path) for path in arguments.libraries]
    head = ["set", "states", "elements", *(f"{name}, us" for name in arguments.names), "ratio", "quartiles"]
    print(("{:10}{:8}{:>10}{:>12}{:>12}{:>8}  {}").format(*head))
    for isa in SETS:
        for word, formats in FORMATS.items():
            for elements in ELEMENTS:
                steps = [stepper(native, elements, formats, isa) for native in natives]
                if None in steps:
                    continue
                times = timed(steps, Memory(elements, formats), max(1, SAMPLE_ELEMENTS // elements), arguments.rounds)
                low, ratio, high = statistics.quantiles([a / b for a, b in zip(*times)], n=4)
                first, second = map(statistics.median, times)
                row = f"{isa:10}{word:8}{elements:10}{first:12.1f}{second:12.1f}{ratio:8.3f}  {low:.3f} to {high:.3f}"
                print(row, flush=True)
        if stepper(natives[0], 1, FORMATS["f32"], isa) is None:
            print(f"{isa:10}not on this machine")


main()
