"""Optimizer steps on one GPU: instep beside PyTorch's own, in one process, on the same shapes and the same stream.

Every round runs every candidate once, and ratios are taken within a round. Results are compared before anything is
timed: instep's with the CPU's bits, PyTorch's with the formulas in f64. A wrong result gets a separate row, and the
exit status is 1. A candidate that PyTorch refuses is reported as SKIPPED. After each round, the file has the medians of
all rounds so far. benches/README.md explains the columns.
"""

import argparse
import ctypes
import pathlib
import statistics
import sys
import time
import warnings

try:
    import torch

    import peers
    from gpu_shapes import SHAPES, bucket_count
    from peers import WORLD_SIZE, values
    from rows import Rows, commit
except ImportError as error:
    print(f"torch_gpu.py: {error}; benches/peers/setup.sh makes the environment", file=sys.stderr)
    raise SystemExit(2) from None

# Names, and their numbers in the C entry.
OPTIMIZERS = {"adamw": 0, "adam": 1, "sgd": 2, "momentum": 3}
# Values repeat after so many elements; the CPU's entry takes multiples of 256.
PERIOD = 613 * 977
CPU_LENGTH = -(-PERIOD // 256) * 256
# Launches that a device sample queues at most, so that none waits for room.
QUEUE = 900
# The GPU is busy for so long before a shape's first round: clocks drop while results are compared.
WARM_UP_S = 0.3


def make_torch(optimizer, params, **options):
    if optimizer == "adamw":
        return torch.optim.AdamW(params, **options)
    if optimizer == "adam":
        return torch.optim.Adam(params, **options)
    return torch.optim.SGD(params, momentum=0.9 if optimizer == "momentum" else 0.0, **options)


class Functional:
    """The step in the hook of `register_ddp`: `step_param` of the functional optimizer, one parameter after the other."""

    def __init__(self, optimizer, params, fused):
        from torch.distributed.optim.functional_adam import _FunctionalAdam
        from torch.distributed.optim.functional_adamw import _FunctionalAdamW
        from torch.distributed.optim.functional_sgd import _FunctionalSGD

        self.params = params
        with warnings.catch_warnings(record=True):  # TorchScript's, at every functional optimizer, which no filter stops
            if optimizer in ("adam", "adamw"):
                made = (_FunctionalAdam if optimizer == "adam" else _FunctionalAdamW)(params, fused=fused)
            else:
                made = _FunctionalSGD(params, lr=1e-3, momentum=0.9 if optimizer == "momentum" else 0.0, fused=fused)
        self.optimizer = made

    def step(self):
        for param in self.params:
            self.optimizer.step_param(param, param.grad)


class Tensors:
    """Flat gradients and parameters of some buckets; each parameter is a separate tensor."""

    def __init__(self, buckets, segments, length, device):
        grads, params = values(buckets * segments * length, device)
        self.flat = [flat.clone() for flat in grads.view(buckets, -1)]
        self.params = [[part.clone() for part in whole.view(segments, -1)] for whole in params.view(buckets, -1)]

    def all_params(self):
        return torch.cat([param.detach().flatten() for bucket in self.params for param in bucket])


class Torch(Tensors):
    """Parameters with gradients that are views of one flat bucket, as in DistributedDataParallel."""

    def __init__(self, buckets, segments, length, device, divide, per_parameter, make):
        super().__init__(buckets, segments, length, device)
        self.divide, self.optimizers = divide, []
        self.params = [[torch.nn.Parameter(param) for param in bucket] for bucket in self.params]
        for flat, bucket in zip(self.flat, self.params):
            for param, grad in zip(bucket, flat.view(segments, -1)):
                param.grad = grad
            groups = [[param] for param in bucket] if per_parameter else [bucket]
            self.optimizers.append([make(group) for group in groups])

    def step(self, bucket):
        if self.divide:
            self.flat[bucket].div_(WORLD_SIZE)
        for optimizer in self.optimizers[bucket]:
            optimizer.step()

    def restore(self, buckets):
        """Undoes the in-place division. Otherwise gradients would shrink to subnormals, which are slow."""
        if self.divide:
            for bucket in buckets:
                self.flat[bucket].mul_(WORLD_SIZE)

    def close(self):
        self.optimizers = self.params = self.flat = None


class CTensors(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("buckets", "segments", "length")]
    _fields_ += [(name, ctypes.POINTER(ctypes.c_void_p)) for name in ("params", "grads")]


class Instep(Tensors):
    """instep's passes over all buckets: Begin, and for each bucket one launch that also divides the gradients."""

    def __init__(self, lib, number, stream, buckets, segments, length, device):
        super().__init__(buckets, segments, length, device)
        self.lib = lib
        # PyTorch's stream fills the tensors; the stepper is on the same one.
        pointers = lambda tensors: (ctypes.c_void_p * len(tensors))(*map(self.address, tensors))
        params = pointers([param for bucket in self.params for param in bucket])
        self.tensors = CTensors(buckets, segments, length, params, pointers(self.flat))
        ordinal = torch.device(device).index or 0
        self.handle = lib.instep_peers_gpu_open(
            number, ordinal, stream.cuda_stream, WORLD_SIZE, ctypes.byref(self.tensors)
        )
        assert self.handle, "instep refused the shape"

    def address(self, tensor):
        return tensor.data_ptr()

    def step_all(self):
        assert self.lib.instep_peers_gpu_pass(self.handle)

    def close(self):
        assert self.lib.instep_peers_gpu_close(self.handle)
        self.params = self.flat = None


def library():
    lib = peers.library()
    try:
        lib.instep_peers_gpu_open.restype = ctypes.c_void_p
    except AttributeError:
        print("torch_gpu.py: the C entry has no GPU in it; cargo build --release -p instep-peers --features cuda, with "
              "NVCC or INSTEP_FATBIN", file=sys.stderr)
        raise SystemExit(2) from None
    lib.instep_peers_gpu_open.argtypes = [ctypes.c_uint32, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_uint32,
                                          ctypes.POINTER(CTensors)]
    for name in ("instep_peers_gpu_pass", "instep_peers_gpu_close"):
        getattr(lib, name).restype = ctypes.c_bool
        getattr(lib, name).argtypes = [ctypes.c_void_p]
    return lib


def candidates(optimizer, lib, stream, shape, device):
    """For each candidate's name, the function that makes the candidate. instep comes first."""
    plain = lambda **options: lambda params: make_torch(optimizer, params, **options)
    hook = lambda fused: lambda params: Functional(optimizer, params, fused)
    make = lambda divide, per_parameter, optimizer: lambda: Torch(*shape, device, divide, per_parameter, optimizer)
    return {
        "instep": lambda: Instep(lib, OPTIMIZERS[optimizer], stream, *shape, device),
        "torch foreach": make(False, False, plain(foreach=True)),
        "torch fused": make(False, False, plain(fused=True)),
        "torch div_ + foreach": make(True, False, plain(foreach=True)),
        "torch div_ + fused": make(True, False, plain(fused=True)),
        "hook: div_ + functional per parameter": make(True, False, hook(False)),
        "hook: div_ + functional fused per parameter": make(True, False, hook(True)),
        "hook: div_ + default per parameter": make(True, True, plain()),
        "hook: div_ + fused per parameter": make(True, True, plain(fused=True)),
    }


def cpu_bits(lib, number):
    """The first PERIOD parameters after one step of instep on the CPU."""
    cpu = peers.Instep(lib, 1, 1, CPU_LENGTH, 1, number)
    cpu.step(0)
    period = cpu.first_bucket()[:PERIOD].clone()
    cpu.close()
    return period


def formula(optimizer, divided):
    """2000 parameters after one step of PyTorch's plain loop in f64."""
    grads, params = (x.double() for x in values(2000))
    param = torch.nn.Parameter(params)
    param.grad = grads / WORLD_SIZE if divided else grads
    make_torch(optimizer, [param], foreach=False).step()
    return param.detach()


def wrong_bits(got, period):
    """The first element of instep's result that differs from the CPU's, or None."""
    wanted = period.to(got.device)
    for start in range(0, len(got), PERIOD):
        part = got[start : start + PERIOD]
        same = part.view(torch.int32) == wanted[: len(part)].view(torch.int32)
        if not same.all():
            return f"element {start + int((~same).nonzero()[0])} differs from the CPU's"
    return None


def far_off(got, wanted):
    worst = (got[: len(wanted)].double().cpu() - wanted).abs().max().item()
    return None if worst < 1e-6 else f"{worst} from the formula in f64"


def build(optimizer, lib, stream, shape, device, only):
    """Returns the candidates that can run here, instep among them, and the wrong results of their first steps."""
    period, made, wrong = cpu_bits(lib, OPTIMIZERS[optimizer]), {}, {}
    for name, make in candidates(optimizer, lib, stream, shape, device).items():
        if only and name != "instep" and not any(word in name for word in only):
            continue
        if name == "instep":
            made[name] = make()
            made[name].step_all()
            wrong[name] = wrong_bits(made[name].all_params(), period)
            continue
        try:
            candidate = make()
            for bucket in range(shape[0]):
                candidate.step(bucket)
        except (RuntimeError, TypeError, ValueError) as error:
            print(f"SKIPPED: {name}, {optimizer}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
            continue
        candidate.restore(range(shape[0]))
        wrong[name] = far_off(candidate.all_params(), formula(optimizer, candidate.divide))
        made[name] = candidate
    return made, {name: what for name, what in wrong.items() if what}


def warm_up(made, buckets):
    """Runs all candidates in turn until the GPU has worked for WARM_UP_S, as measured by events."""
    busy_s = 0.0
    while busy_s < WARM_UP_S:
        for candidate in made.values():
            busy_s += device_sample(candidate, buckets, 0, 1, 0)[0] * (buckets if isinstance(candidate, Instep) else 1)
            if isinstance(candidate, Torch):
                candidate.restore([0])


def wall_sample(candidate, buckets):
    """Seconds per bucket until the calls return, and until the GPU has finished."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    if isinstance(candidate, Instep):
        candidate.step_all()
    else:
        for bucket in range(buckets):
            candidate.step(bucket)
    returned = time.perf_counter()
    torch.cuda.synchronize()
    ended = time.perf_counter()
    return (returned - start) / buckets, (ended - start) / buckets


def device_sample(candidate, buckets, first, count, cycles):
    """Seconds per bucket between two events. A kernel of `cycles` cycles keeps the GPU busy while all the work is queued."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    if cycles:
        torch.cuda._sleep(cycles)
    events[0].record()
    if isinstance(candidate, Instep):
        candidate.step_all()
        count = buckets
    else:
        for k in range(count):
            candidate.step((first + k) % buckets)
    events[1].record()
    queued_in_time = not events[0].query()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) * 1e-3 / count, queued_in_time


def show(xs, digits):
    return f"{statistics.median(xs):.{digits}f} ({min(xs):.{digits}f}-{max(xs):.{digits}f})"


def ratios(times, name, quantity):
    return [peer / ours for peer, ours in zip(times[name][quantity], times["instep"][quantity])]


def lines_of(optimizer, shape_name, times, wrong, late):
    """The figures of the rounds so far, as CSV."""
    lines = [",".join([name, optimizer, shape_name, "mismatch", "1", "1", "1", "1", "0"]) for name in wrong]
    for name, quantities in times.items():
        for quantity, us in quantities.items():
            ratio = ratios(times, name, quantity)
            for label, xs in ((quantity, us), (quantity.replace("us", "times_instep"), ratio)):
                figures = [f"{x:.5f}" for x in (statistics.median(xs), min(xs), max(xs))]
                counts = [str(len(xs)), str(late[name])]
                lines.append(",".join([name, optimizer, shape_name, label] + figures + counts))
    return lines


def run(optimizer, shape_name, options, lib, rows):
    """Whether all results were right."""
    device = torch.device("cuda", options.device)
    segments, length = SHAPES[shape_name]
    states = {"sgd": 0, "momentum": 1}.get(optimizer, 2)
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    buckets = bucket_count(shape_name, l2_bytes, states, options.buckets)
    if options.quick:
        length = max(length >> 8, 256)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        made, wrong = build(optimizer, lib, stream, (buckets, segments, length), device, options.only)
        for name, what in wrong.items():
            print(f"MISMATCH: {name}, {optimizer}, {shape_name}: {what}")
        times = {name: {"device_us": [], "host_us": [], "wall_us": []} for name in made}
        late = dict.fromkeys(made, 0)
        host_s = dict.fromkeys(made, 1e-3)
        warm_up(made, buckets)
        for round_ in range(options.rounds + 1):
            for name, candidate in made.items():
                returned, ended = wall_sample(candidate, buckets)
                if isinstance(candidate, Torch):
                    candidate.restore(range(buckets))
                # A launch-bound candidate fills the queue with one bucket; others get all of them.
                launches = 8 * segments if name.startswith("hook") else 8
                count = max(1, min(buckets, QUEUE // launches))
                host_s[name] = max(host_s[name], returned)
                # About two cycles per nanosecond: at least twice the host's time.
                cycles = int(4e9 * host_s[name] * (buckets if name == "instep" else count))
                first = round_ * count % buckets
                seconds, in_time = device_sample(candidate, buckets, first, count, cycles)
                if isinstance(candidate, Torch):
                    candidate.restore([(first + k) % buckets for k in range(count)])
                if round_:
                    for quantity, value in (("device_us", seconds), ("host_us", returned), ("wall_us", ended)):
                        times[name][quantity].append(value * 1e6)
                    late[name] += not in_time
            if round_:
                rows.put((optimizer, shape_name), lines_of(optimizer, shape_name, times, wrong, late))
        for candidate in made.values():
            candidate.close()
    print(f"\n{optimizer}, {shape_name}: {segments} x {length} elements, {buckets} buckets; us per bucket, median (min-max)")
    for name, quantities in times.items():
        line = f"  {name:<45}"
        for quantity, us in quantities.items():
            line += f"{quantity} {show(us, 1):<28} x instep {show(ratios(times, name, quantity), 2):<22}"
        print(line.rstrip() + (f" *{late[name]}" if late[name] else "") + (" MISMATCH" if name in wrong else ""))
    if any(late.values()):
        print("  *: so many device samples began before all was queued, and may hold time of the host's")
    return not wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--optimizer", action="append", choices=OPTIMIZERS)
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--buckets", type=int, default=16, help="at most this many per candidate, and at least 8")
    parser.add_argument("--only", action="append", help="candidates whose name contains this; instep always runs")
    parser.add_argument("--quick", action="store_true", help="small shapes: checks that everything runs")
    parser.add_argument("--csv", type=pathlib.Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch_gpu.py: PyTorch finds no CUDA device here; peers.py compares on the CPU", file=sys.stderr)
        raise SystemExit(2)
    torch.cuda.set_device(options.device)
    lib = library()
    name = torch.cuda.get_device_properties(options.device).name
    head = f"# torch {torch.__version__}, CUDA {torch.version.cuda}; {name}; commit {commit()}"
    print(head)
    rows = Rows(options.csv, [head, "candidate,optimizer,shape,quantity,median,min,max,rounds,late_samples"])
    is_right = True
    for optimizer in options.optimizer or OPTIMIZERS:
        for shape in options.shape or SHAPES:
            is_right &= run(optimizer, shape, options, lib, rows)
            torch.cuda.empty_cache()
    raise SystemExit(0 if is_right else 1)


if __name__ == "__main__":
    main()
