"""AdamW on the CPU: instep beside PyTorch and DeepSpeed, in one process, on the same shapes.

Every round runs every candidate once, and ratios are taken within a round. The memory bus of a shared machine drifts
from minute to minute. Results are compared before anything is timed. A peer that cannot be loaded is reported
as SKIPPED. benches/README.md explains the columns.
"""

import argparse
import ctypes
import math
import os
import pathlib
import statistics
import time

# Set by DeepSpeed and read by every torch optimizer step, which would then open NVML each time: 100 us a call.
os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)

import torch

from rows import ROOT, Rows, commit

WORLD_SIZE = 8
SHAPES = {"l2": (1, 1 << 16), "l3": (1, 1 << 20), "bucket": (50, 131072), "dram": (1, 16 << 20)}
# A bundle has the library beside its scripts.
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT if (ROOT / "release").is_dir() else ROOT / "target"))
# DeepSpeed builds its kernel at first use, and looks for ninja here.
os.environ["PATH"] = f"{TARGET / 'peers/venv/bin'}:{os.environ['PATH']}"


def library():
    lib = ctypes.CDLL(str(TARGET / "release" / "libinstep_peers.so"))
    lib.instep_peer_new.restype = ctypes.c_void_p
    lib.instep_peer_new.argtypes = [ctypes.c_uint32] * 2 + [ctypes.c_size_t] * 3 + [ctypes.c_uint32, ctypes.c_size_t]
    lib.instep_peer_elements.restype = ctypes.c_void_p
    lib.instep_peer_elements.argtypes = [ctypes.c_void_p, ctypes.c_uint8]
    lib.instep_peer_step.restype = ctypes.c_bool
    lib.instep_peer_step.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32]
    lib.instep_peer_free.argtypes = [ctypes.c_void_p]
    return lib


def values(count, device="cpu"):
    """Gradients and parameters without zeros. They come from tables, so they have the same bits on every device."""
    k = torch.arange(count, device=device)
    grads = (torch.arange(613).float() - 306.3) * 1e-2
    params = 0.5 + torch.arange(977).float() * 1e-3
    return grads.to(device)[k % 613], params.to(device)[k % 977]


class Instep:
    """instep's step, which also divides. Precisions: f32 (0), bf16 rounded to nearest (1) or stochastically (2)."""

    def __init__(self, lib, buckets, segments, length, threads, optimizer=0, precision=0):
        self.lib, self.buckets = lib, buckets
        self.handle = lib.instep_peer_new(optimizer, precision, buckets, segments, length, WORLD_SIZE, threads)
        assert self.handle, "instep refused the shape"
        count, dtype = buckets * segments * length, torch.bfloat16 if precision else torch.float32

        def array(k):
            size = count * dtype.itemsize
            memory = (ctypes.c_uint8 * size).from_address(lib.instep_peer_elements(self.handle, k))
            return torch.frombuffer(memory, dtype=dtype)

        self.params, self.grads = array(0), array(1)
        self.grads[:], self.params[:] = values(count)

    def step(self, bucket):
        assert self.lib.instep_peer_step(self.handle, bucket, bucket + 1)

    def first_bucket(self):
        return self.params[: len(self.params) // self.buckets].clone()

    def close(self):
        self.params = self.grads = None
        self.lib.instep_peer_free(self.handle)


class Torch:
    """Parameters with gradients that are views of one flat bucket, as in DistributedDataParallel."""

    def __init__(self, buckets, segments, length, divide, per_parameter, make, dtype=torch.float32):
        self.divide, self.buckets = divide, []
        grads, params = (x.to(dtype) for x in values(buckets * segments * length))
        for bucket in range(buckets):
            flat = grads.view(buckets, -1)[bucket].clone()
            owned = []
            for start in range(0, segments * length, length):
                first = bucket * segments * length + start
                param = torch.nn.Parameter(params[first : first + length].clone())
                param.grad = flat[start : start + length]
                owned.append(param)
            groups = [[param] for param in owned] if per_parameter else [owned]
            self.buckets.append((flat, owned, [make(group) for group in groups]))

    def step(self, bucket):
        flat, _, optimizers = self.buckets[bucket]
        if self.divide:
            flat.div_(WORLD_SIZE)
        for optimizer in optimizers:
            optimizer.step()

    def first_bucket(self):
        return torch.cat([param.detach() for param in self.buckets[0][1]])


class Functional:
    """The step in the hook of `register_ddp`: `step_param` of the functional optimizer, one parameter after the other."""

    def __init__(self, params, fused):
        from torch.distributed.optim.functional_adamw import _FunctionalAdamW

        self.params = params
        self.optimizer = _FunctionalAdamW(params, fused=fused)

    def step(self):
        for param in self.params:
            self.optimizer.step_param(param, param.grad)


def candidates(buckets, segments, length, threads, lib, skipped, dtype):
    adamw = lambda **options: lambda params: torch.optim.AdamW(params, **options)
    make = lambda divide, per_parameter, optimizer: lambda: Torch(
        buckets, segments, length, divide, per_parameter, optimizer
    )
    if dtype == "bf16":
        instep = lambda precision: lambda: Instep(lib, buckets, segments, length, threads, precision=precision)
        bf16 = lambda divide: lambda: Torch(
            buckets, segments, length, divide, False, adamw(fused=True), torch.bfloat16
        )
        return {
            "instep": instep(1),
            "instep stochastic": instep(2),
            "torch fused": bf16(False),
            "torch div_ + fused": bf16(True),
        }
    found = {
        "instep": lambda: Instep(lib, buckets, segments, length, threads),
        "torch single": make(False, False, adamw(foreach=False, fused=False)),
        "torch foreach": make(False, False, adamw(foreach=True)),
        "torch fused": make(False, False, adamw(fused=True)),
        "torch div_ + fused": make(True, False, adamw(fused=True)),
        "hook: div_ + functional per parameter": make(True, False, lambda params: Functional(params, False)),
        "hook: div_ + functional fused per parameter": make(True, False, lambda params: Functional(params, True)),
        "hook: div_ + default per parameter": make(True, True, adamw()),
        "hook: div_ + fused per parameter": make(True, True, adamw(fused=True)),
    }
    if "deepspeed" in skipped:
        return found
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
        deepspeed = lambda params: DeepSpeedCPUAdam(params, adamw_mode=True, weight_decay=1e-2)
        deepspeed([torch.nn.Parameter(torch.zeros(8))])
        found["DeepSpeedCPUAdam"] = make(False, False, deepspeed)
    except Exception as error:  # whatever its build says
        print(f"SKIPPED: DeepSpeedCPUAdam: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
    return found


def verify(name, candidate, divided, dtype):
    """Compares one step of the first 2000 elements with AdamW in f64. The tolerance of bf16 is 2^-7, a unit in the last
    place of a value from 1 to 2.
    """
    candidate.step(0)
    grads, params = (x[:2000].to(torch.bfloat16 if dtype == "bf16" else torch.float32).double() for x in values(2000))
    grads = grads / WORLD_SIZE if divided else grads
    moved = params * (1 - 1e-3 * 1e-2) - 1e-3 * grads / (grads.abs() + 1e-8)
    worst = (candidate.first_bucket()[:2000].double() - moved).abs().max().item()
    assert worst < (2**-7 if dtype == "bf16" else 1e-6), f"{name}: {worst}"


def sample(candidate, buckets, sweeps, clock):
    seconds = 0.0
    for _ in range(sweeps):
        start = clock()
        for bucket in range(buckets):
            candidate.step(bucket)
        seconds += clock() - start
        # Untimed: the divide is in place, and gradients that shrink to subnormals would be slow.
        if getattr(candidate, "divide", False):
            for flat, _, _ in candidate.buckets:
                flat.mul_(WORLD_SIZE)
    return seconds


def cache_bytes():
    sizes = pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(size.read_text().strip()[:-1]) << 10 for size in sizes), default=32 << 20)


def available_bytes():
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def run(shape, threads, options, rows):
    segments, length = SHAPES[shape]
    elements = segments * length
    # Ten candidates share the cache, so a few buckets each are enough to leave it; a cached case runs alone long enough.
    beyond = math.ceil(4 * cache_bytes() / (16 * elements)) + 1
    fitting = max(2, int(0.8 * available_bytes() / (10 * 16 * elements)))
    buckets = 1 if shape in ("l2", "l3") else 2 if options.quick else min(beyond, options.buckets, fitting)
    torch.set_num_threads(threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    made = {}
    for name, build in candidates(buckets, segments, length, threads, library(), options.skip, options.dtype).items():
        if options.only and not any(word in name for word in options.only):
            continue
        made[name] = build()
        verify(name, made[name], "instep" in name or "div_" in name, options.dtype)
        if getattr(made[name], "divide", False):
            made[name].buckets[0][0].mul_(WORLD_SIZE)
    sweeps = max(1, round(2e7 / (elements * buckets)))
    times = {name: [] for name in made}
    for round_ in range(options.rounds + 1):
        for name, candidate in made.items():
            sample(candidate, buckets, 1, clock)
            seconds = sample(candidate, buckets, sweeps, clock)
            if round_:
                times[name].append(seconds * 1e9 / (elements * buckets * sweeps))
    print(f"\n{options.dtype}, {shape}, {segments} x {length} elements, {buckets} buckets, {threads} threads; median (min-max)")
    lines = []
    for name, ns in times.items():
        ratio = [peer / ours for peer, ours in zip(ns, times["instep"])]
        show = lambda xs, digits: f"{statistics.median(xs):.{digits}f} ({min(xs):.{digits}f}-{max(xs):.{digits}f})"
        print(f"  {name:<45}{show(ns, 3):<24} ns/element   x instep {show(ratio, 2)}")
        for quantity, xs in (("ns_per_element", ns), ("times_instep", ratio)):
            line = [name, shape if options.dtype == "f32" else f"{shape} {options.dtype}", threads, quantity] + [f"{x:.5f}" for x in (statistics.median(xs), min(xs), max(xs))]
            lines.append(",".join(map(str, line)))
    rows.put((shape, threads), lines)
    for name in [name for name in made if "instep" in name]:
        made.pop(name).close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--threads", action="append", type=int)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32", help="of everything")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--buckets", type=int, default=16, help="at most this many per candidate")
    parser.add_argument("--only", action="append", help="candidates whose name contains this; instep always runs")
    parser.add_argument("--skip", action="append", default=[], choices=["deepspeed"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--csv", type=pathlib.Path)
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine: CPU time; one thread only")
    options = parser.parse_args()
    if options.cpu_time and options.threads != [1]:
        parser.error("--cpu-time adds threads up; say --threads 1")
    if options.only:
        options.only.append("instep")
    head = f"# torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; load {os.getloadavg()[0]:.1f}; commit {commit()}; {'CPU' if options.cpu_time else 'wall'} time; GOMP_SPINCOUNT {os.environ.get('GOMP_SPINCOUNT', 'unset')}"
    print(head)
    rows = Rows(options.csv, [head, "candidate,shape,threads,quantity,median,min,max"])
    for threads in options.threads or [1, 2]:
        for shape in options.shape or SHAPES:
            run(shape, threads, options, rows)


if __name__ == "__main__":
    main()
