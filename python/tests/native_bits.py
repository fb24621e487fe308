"""Trainings with the native module of the package, which give the same bits in every build and on every device. PyTorch
is not needed.

    python python/tests/native_bits.py         # the recorded bits, on this CPU
    python python/tests/native_bits.py --gpu   # and the same ones on a GPU

The program allocates device memory with the CUDA driver library that INSTEP_CUDA names, or else with libcuda.so.1. The
program therefore also runs on the software GPU, which PyTorch cannot use.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import hashlib
import os
import platform
import random
import sys
from collections.abc import Callable
from functools import partial

import instep
from instep import _native

Formats = tuple[str, str, str, str]
LENGTHS, OFFSETS, ARENA = (1000, 700), (0, 1024), 2048
BLOCK = 256  # elements that share a scale of 8-bit states
FORMATS = [
    ("float32", "float32", "none", "float32"),
    ("bfloat16", "bfloat16", "float32", "float32"),
    ("bfloat16", "float32", "remainder16", "bfloat16"),
    ("float32", "float32", "none", "8bit"),
]
RECORDED = (50, "10e00c241a970ff976922d78c19f1e2b5f2aa5075466ed0fa720fb7f1f037e8d")
BYTES = {"float32": 4, "bfloat16": 2, "8bit": 1, "remainder16": 2}


class Driver:
    """The few driver calls that allocate and copy memory."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(os.environ.get("INSTEP_CUDA", "libcuda.so.1"))
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: object) -> None:
        answer = getattr(self.library, name)(*arguments)
        if answer != 0:
            sys.exit(f"{name}: the driver answered {answer}")

    def alloc(self, size: int) -> int:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def write(self, address: int, data: bytes) -> None:
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

    def read(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return data.raw


class Host:
    """The same calls for the CPU's memory."""

    def __init__(self) -> None:
        self.kept: list[ctypes.Array[ctypes.c_char]] = []

    def alloc(self, size: int) -> int:
        self.kept.append(ctypes.create_string_buffer(size + 64))
        return -(-ctypes.addressof(self.kept[-1]) // 64) * 64

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)


def values(word: str, spread: float, chance: random.Random) -> bytes:
    """Returns an arena of random values as bytes."""
    floats = array.array("f", (chance.uniform(-spread, spread) for _ in range(ARENA))).tobytes()
    return floats if word == "float32" else b"".join(floats[k + 2 : k + 4] for k in range(0, len(floats), 4))


class Training:
    """The arena and the step of one optimizer, on the device of its memory."""

    def __init__(
        self,
        key: str,
        hyper: dict[str, _native.Value],
        formats: Formats,
        memory: Host | Driver,
        gpu: int | None,
    ) -> None:
        self.memory, self.formats = memory, formats
        param, grad, master, states = formats
        count = len(_native.state_names(key, hyper))
        sizes = [ARENA * BYTES[param], ARENA * BYTES[grad], ARENA * BYTES[master] if master != "none" else 0]
        sizes += [ARENA * BYTES[states]] * count + [ARENA // BLOCK * 4 if states == "8bit" else 0] * count
        self.runs = [(memory.alloc(size), size) if size else (0, 0) for size in sizes]
        for address, size in self.runs[2:]:
            memory.write(address, bytes(size))
        params = [(length, 0, at, k, 0, length, 0) for k, (length, at) in enumerate(zip(LENGTHS, OFFSETS))]
        self.step = _native.Step([(key, hyper)], params, ARENA, formats, None, "keep", 1, 0, gpu)
        states_at = [address for address, _ in self.runs[3:]]
        self.bound: _native.Bound = {
            "params": self.each(0),
            "grads": self.each(1),
            "states": states_at[:count],
            "scales": [address for address in states_at[count:] if address],
            "master": self.runs[2][0],
            "counts": 0,
            "carried": 0,
        }
        self.norm = _native.Norm(gpu)

    def each(self, run: int) -> list[int]:
        return [self.runs[run][0] + at * BYTES[self.formats[run]] for at in OFFSETS]

    def begin(self, params: bytes) -> None:
        self.memory.write(self.runs[0][0], params)
        master, word = self.runs[2][0], self.formats[2]
        if word == "float32":  # its upper halves are the parameters
            self.memory.write(master, b"".join(b"\0\0" + params[k : k + 2] for k in range(0, len(params), 2)))

    def pass_over(self, grads: bytes, max_norm: float | None) -> tuple[float, float, bool] | None:
        self.memory.write(self.runs[1][0], grads)
        factors = (4, 8.0, 0, 0)
        if max_norm is None:
            self.step.step(self.bound, factors, 0)
            return None
        self.norm.begin(factors, 0)
        self.step.add_norm(self.bound, self.norm, 0)
        self.norm.decide(max_norm, True, 0)
        self.step.step_decided(self.bound, self.norm, 0)
        return self.norm.decision()

    def bits(self) -> list[bytes]:
        return [self.memory.read(address, size) for address, size in self.runs if size]


def train(key: str, formats: Formats, sides: list[Training]) -> list[bytes]:
    """Trains on all sides, asserts that they agree, and returns the bits."""
    chance = random.Random(f"{key} {formats}")
    first = values(formats[0], 1.0, chance)
    for side in sides:
        side.begin(first)
    for max_norm in (None, None, 0.5):
        grads = values(formats[1], 3.0, chance)
        told = [side.pass_over(grads, max_norm) for side in sides]
        if told[0] != told[-1]:
            sys.exit(f"{key} in {formats}: norm, clip and whether it was skipped are {told[-1]}, and {told[0]} on the CPU")
    results = [(side.step.progress(), side.bits()) for side in sides]
    if results[0] != results[-1]:
        sys.exit(f"{key} in {formats}: other bits than on the CPU")
    return results[0][1]


def refusal(make: Callable[[], object]) -> str | None:
    try:
        make()
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    with_gpu = parser.parse_args().gpu
    if with_gpu and not instep.GPU_ARCHITECTURES:
        sys.exit("this package has no GPU kernels")
    devices: list[tuple[Host | Driver, int | None]] = [(Host(), None)] + ([(Driver(), 0)] if with_gpu else [])
    digest, trained = hashlib.sha256(), 0
    for key, descriptor in instep.OPTIMIZERS.items():
        for formats in FORMATS:
            make = [partial(Training, key, dict(descriptor.defaults), formats, *device) for device in devices]
            told = [refusal(one) for one in make]
            if told[0] != told[-1] or told[0] and formats == FORMATS[0]:
                sys.exit(f"{key} in {formats}: {told}")
            if told[0] is None:
                for bits in train(key, formats, [one() for one in make]):
                    digest.update(bits)
                trained += 1
    if (trained, digest.hexdigest()) != RECORDED:
        sys.exit(f"other bits than recorded: {(trained, digest.hexdigest())}")
    kernels = f"; the same on the GPU with kernels for {', '.join(instep.GPU_ARCHITECTURES)}" if with_gpu else ""
    print(f"{trained} trainings on {platform.machine()}: the recorded bits{kernels}")


main()
