#!/usr/bin/env python3
"""Plants one mistake at a time into the driver calls of the library's own tests. The software GPU must name it.

A row of FAULTS has the mistake, the variable that plants it, its value with {n} for the number of the call, the calls
to try, a test, and the phrases of the report, one of which must appear. The calls are tried in order up to the first
whose mistake is named. The library is not built again: the software GPU makes, leaves out or falsifies the call, as a
mistake in the library would.

A row of SOURCES is a mistake in the library's source: file, text, replacement. It is planted into a copy of the tree
and needs a build, so `--sources` runs these.
"""

import argparse, importlib.util, os, re, subprocess, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NORM, REPLAY, NCCL = "cuda::bitexact::a_global_norm", "cuda::bitexact::replayed_graphs", "cuda::gpu::nccl::"
STREAM = "cuda::gpu::shards::a_trainers_stream"
OFFLOAD = "cuda::offload::every_optimizer"
FAULTS = [
    ("a wait that is missing", "INSTEP_GPU_FAIL", "cuStreamWaitEvent:{n}=0", range(1, 13), NORM, "software gpu: race: "),
    ("an event recorded before its work", "INSTEP_GPU_PLANT", "early:{n}", range(12, 40), NORM, "software gpu: race: "),
    ("a call without its context", "INSTEP_GPU_FAIL", "cuCtxPushCurrent:{n}=0", range(1, 3), NORM, "CUDA_ERROR_INVALID_CONTEXT"),
    ("an event without times that is timed", "INSTEP_GPU_PLANT", "plain:{n}", range(1, 3),
     "cuda::bitexact::a_recording", "cuEventElapsedTime"),
    ("a capture left unjoined", "INSTEP_GPU_FAIL", "cuStreamWaitEvent:{n}=0", range(16, 30), REPLAY,
     "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"),
    ("a capture that failed and is left unjoined", "INSTEP_GPU_FAIL", "cuStreamWaitEvent:{n}=0", range(116, 122),
     "cuda::gpu::captures::", "is destroyed while it is captured"),
    # The compiler lane of mutate-sources.py finds it before anything runs: "an argument that Rust does not know".
    ("an argument one field short", "INSTEP_GPU_PLANT", "short:{n}", range(1, 5), NORM, "software gpu: out of bounds: instep_begin"),
    ("accesses too small by one element", "INSTEP_GPU_PLANT", "narrow:{n}", range(5, 12), NORM,
     "software gpu: unclaimed: kernel instep_step"),
    ("NCCL's call in progress taken for done", "INSTEP_NCCL_FAIL", "look:{n}=0", range(9, 20), NCCL + "two_ranks_learn",
     "software gpu: race: nccl"),
    # The copy races with the all-gather, and with the allocation before it: whichever ran last is named.
    ("a wait for an all-gather that is missing", "INSTEP_GPU_FAIL", "cuStreamWaitEvent:{n}=0", range(8, 20), STREAM,
     ("race: copy (stream", "used before it was allocated: ")),
    ("a bucket given up while a stream reads it", "INSTEP_GPU_FAIL", "cuStreamWaitEvent:{n}=0", range(8, 20), STREAM,
     "software gpu: freed in use: "),
    ("a call of the host that does not wait for its copy", "INSTEP_GPU_FAIL", "cuStreamWaitEvent:{n}=0", range(14, 20), OFFLOAD,
     "software gpu: race: host function"),
    ("a copy that does not wait for the host's step", "INSTEP_GPU_FAIL", "cuStreamWaitEvent:{n}=0", range(16, 22), OFFLOAD,
     "software gpu: race: copy to the GPU"),
    ("memory freed while a stream uses it", "INSTEP_GPU_FAIL", "cuStreamWaitEvent:{n}=0", range(1, 20),
     "cuda::failures::memory_that_the_trainers_stream", "software gpu: freed in use: "),
    ("memory freed before the work that uses it", "INSTEP_GPU_PLANT", "early:{n}", range(1, 40),
     "cuda::failures::memory_that_the_trainers_stream", "software gpu: freed in use: "),
    ("a kernel that fails as it runs", "INSTEP_GPU_FAIL", "kernel:{n}=700", range(1, 3), NORM, "CUDA_ERROR_ILLEGAL_ADDRESS"),
    ("a call of NCCL that fails", "INSTEP_NCCL_FAIL", "ncclAllReduce:{n}=1", range(2, 3), NCCL + "a_group_of_one",
     'call: "ncclAllReduce", code: 1,'),
    ("a call of NCCL that fails in a group", "INSTEP_NCCL_FAIL", "ncclAllReduce:{n}=1", range(2, 6), NCCL + "two_ranks_sum_many",
     'call: "ncclAllReduce", code: 1,'),
    ("a group of NCCL's that fails at its end", "INSTEP_NCCL_FAIL", "ncclGroupEnd:{n}=1", range(1, 4), NCCL + "two_ranks_sum_many",
     'call: "ncclGroupEnd", code: 1,'),
    ("a communicator that breaks", "INSTEP_NCCL_FAIL", "look:{n}=6", range(6, 7), NCCL + "a_group_of_one", "code: 6,"),
]
SOURCES = [
    ("a state's accesses short by an element", "src/op/mod.rs", "                        touch(Span::within(memory, bucket, start, end), true);",
     "                        let short = u64::from(matches!(memory, Memory::State(_)) && start + 1 < end);\n"
     "                        touch(Span::within(memory, bucket, start, end - short), true);", "cuda::mixed",
     "software gpu: unclaimed: "),
    ("a wait dropped in the device", "src/cuda/submit.rs", "self.streams.wait(op.stream, ticket)?;", "let _ = ticket;",
     "cuda::bitexact", "software gpu: race: "),
    ("collectives that do not wait for another communicator's", "src/cuda/order.rs", "last.event.hold(stream)?;",
     "let _ = stream;", "cuda::gpu::calls::events_order", "must wait for the collective on"),
    ("a replay that does not wait for collectives", "src/cuda/graph.rs", "if captured.holds.is_empty() {", "if captured.holds.len() < 9 {",
     "cuda::gpu::calls::events_order", "cuGraphLaunch must wait for the collective on"),
    ("an exit that waits for no ending communicator", "src/cuda/nccl/ending.rs", "unsafe { atexit(await_detached) };",
     "let _: (unsafe extern \"C\" fn(_) -> _, extern \"C\" fn()) = (atexit, await_detached);",
     "one_rank_may_drop_what_the_other_closes", "of dropping"),
]


def environment(folder, variable=None, value=None):
    """The tests' environment variables, with a mistake."""
    extra = {"INSTEP_CUDA": f"{folder}/libcuda.so", "INSTEP_NCCL": f"{folder}/libnccl.so.2",
             "INSTEP_REQUIRE_GPU": "1", "INSTEP_REQUIRE_NCCL": "1", "RUST_BACKTRACE": "0"}
    return dict(os.environ, **extra, **({variable: value} if variable else {}))


def run(tests, test, variables):
    """The output of a test, and whether the test passes. It runs on one thread, so that a number means one call."""
    command = [tests, "-q", "--nocapture", "--test-threads", "1", "--include-ignored", test]
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired as waited:
        return False, str(waited)
    if not done.returncode and "ok. 0 passed" in done.stdout:
        sys.exit(f"no test is called {test}")
    return done.returncode == 0, done.stdout + done.stderr


def built(*tree_and_target, **variables):
    """The folder of the software GPU, the tests of a GPU, built from this tree or a copy, and the kernels in them."""
    command = [ROOT / "scripts/software-gpu.sh", "--tests", *tree_and_target]
    made = subprocess.run(command, env=dict(os.environ, **variables), stdout=subprocess.PIPE, text=True, check=True)
    return made.stdout.split()


def planted(kernels, file, old, new):
    """The tests, built from a copy of the tree with a mistake, around kernels that are there. The copy stays in place, so
    that only changed files are compiled again.
    """
    spec = importlib.util.spec_from_file_location("mutate_sources", ROOT / "scripts/mutate-sources.py")
    sources = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sources)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve() / "planted-calls"
    tree = sources.copied(target)
    assert file.startswith("src/"), f"{file}: the kernels would stay as they are"
    sources.plant(tree / file, file, old, new)
    return built(tree, target, INSTEP_FATBIN=kernels)[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", default="0/1", metavar="K/N", help="every N-th mistake, from the K-th on, counted from 0")
    parser.add_argument("--sources", action="store_true", help="those of the source, which takes builds")
    parser.add_argument("names", nargs="*", help="only mistakes whose names contain one of these")
    arguments = parser.parse_args()
    first, every = map(int, arguments.share.split("/"))
    rows = (SOURCES if arguments.sources else FAULTS)[first::every]
    rows = [row for row in rows if not arguments.names or any(part in row[0] for part in arguments.names)]
    missed = 0
    folder, right, kernels = built()
    for name, *row, test, phrases in rows:
        phrases = (phrases,) if isinstance(phrases, str) else phrases
        fine, said = run(right, test, environment(folder))
        if not fine:
            sys.exit(f"{test} fails without a mistake:\n{said}")
        if arguments.sources:
            tests, tries = planted(kernels, *row), [(None, None)]
        else:
            tests, (variable, value, numbers) = right, row
            tries = [(variable, value.format(n=n)) for n in numbers]
        for variable, value in tries:
            fine, said = run(tests, test, environment(folder, variable, value))
            report = re.search(f".*({'|'.join(map(re.escape, phrases))}).*", said)
            if not fine and report:
                report = report[0]
                print(f"caught: {name} ({variable}={value}): {report[:300]}" if variable else f"caught: {name}: {report[:300]}", flush=True)
                break
        else:
            missed += 1
            print(f"MISSED: {name}", flush=True)
            print(said, file=sys.stderr)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
