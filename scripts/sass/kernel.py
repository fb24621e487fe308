"""Figures of the kernels in a binary: which paths each is launched for, and the trace of each path.

A kernel whose name ends in a form that SUFFIXES lacks is refused, because nothing would read its latency.
"""

import gc, hashlib, re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from .dependence import UnguardedLoad
from .launch import CODES, FLOATS, NORM, RUN_TILES, ZEROS, Launch
from .listing import instructions_of, kernels_of
from .rounds import read_trace
from .warp import BLOCK_THREADS, TraceError, WARP_LANES, Warp

SUFFIXES = {"": FLOATS, "_8bit": CODES, "_f32": FLOATS[:1]}
# Nothing to be followed: they read no tile.
WITHOUT_TILES = {"instep_begin", "instep_decide", "instep_publish", "instep_custom", "instep_add", "instep_cast"}


def paths_of(abi, name):
    """The optimizer that a kernel steps, if any, and its paths."""
    if name in WITHOUT_TILES:
        return None, []
    if name == "instep_norm":
        return None, NORM
    match = re.fullmatch(rf"instep_step_({'|'.join(abi.optimizers)})(_\w+)?", name)
    if not match or (match[2] or "") not in SUFFIXES:
        raise TraceError(f"{name}: no path is known for this kernel; name them in scripts/sass/kernel.py")
    optimizer, paths = match[1], SUFFIXES[match[2] or ""]
    if name == "instep_step_adam":
        paths = [*paths, *ZEROS]
    if not abi.is_scaled(optimizer):
        return optimizer, paths
    return optimizer, [replace(path, name=f"{path.name}_{part.lower()}", part=part) for part in ("MEASURE", "APPLY")
                       for path in paths]


def read_kernel(abi, name, instructions, optimizer, path, banks):
    warp = Warp(name, instructions, Launch(abi, path, optimizer), banks)
    try:
        return read_trace(warp.run(), warp.code, RUN_TILES * abi["TILE_ELEMENTS"], BLOCK_THREADS // WARP_LANES)
    except (UnguardedLoad, ValueError) as error:
        raise TraceError(f"{name}: {error}") from error


def read_paths(task):
    """A pair for each path of a kernel: the path, and its figures or the reason why there are none. It runs in a
    separate process.
    """
    gc.disable()  # a trace has no cycles, and its many events would be visited again and again
    abi, name, text, banks = task
    found = []
    try:
        optimizer, paths = paths_of(abi, name)
        instructions = instructions_of(text) if paths else []
    except (TraceError, ValueError) as error:
        return [("", str(error))]
    for path in paths:
        try:
            found.append((path.name, read_kernel(abi, name, instructions, optimizer, path, banks).figures))
        except TraceError as error:
            found.append((path.name, str(error)))
    return found


def read_binary(abi, sass, banks):
    """Figures, or a reason, by kernel, path and architecture. Equal machine code is read once."""
    keys, tasks = {}, {}
    for (name, code), text in kernels_of(sass).items():
        encodings = "".join(re.findall(r"/\* 0x([0-9a-f]{16}) \*/", text))
        keys[name, code] = key = (name, banks[name, code], hashlib.sha256(encodings.encode()).digest())
        tasks[key] = (abi, name, text, banks[name, code])
    with ProcessPoolExecutor() as pool:
        results = dict(zip(tasks, pool.map(read_paths, tasks.values())))
    return {(name, path, code): result for (name, code), key in keys.items() for path, result in results[key]}
