#!/usr/bin/env python3
"""Runs the GPU's kernels on the CPU. g++ compiles them with a shim, each thread is a fiber, and every bit is compared
with the CPU's kernels.

A fault in an index, a tail, a vote or the order of a sum shows here without a GPU. The tests are in
tests/host_run/mod.rs. They open the compiled kernels, and complete steppers on a stand-in driver that launches the
kernels. `--sanitize` runs them under AddressSanitizer and UndefinedBehaviorSanitizer, which also detect a read beside a
tensor that changes no bit. `--races` finds data races, and takes ten times as long. `--races precisions` runs only the
tests of host_run::precisions; `add`, `cast` and `naive` run those of host_run::add, host_run::cast and host_run::naive.
The kernels are compiled unchanged, with the CPU's rules for floating point.
"""

import argparse, json, os, shlex, shutil, signal, subprocess, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["-std=c++17", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
         "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-ffp-contract=off", "-fno-math-errno"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# Calls into tests/host_run/races.h. A memset in place of a loop would be invisible to it.
RACES = ["-fsanitize=thread", "-fno-tree-loop-distribute-patterns"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--sanitize", action="store_true", help="under AddressSanitizer and UndefinedBehaviorSanitizer")
    mode.add_argument("--races", action="store_true", help="with every access watched by tests/host_run/races.h")
    mode.add_argument("--watched", type=Path, metavar="FILE", help="only compile, as for --races, for the software GPU")
    parser.add_argument("--until", metavar="PHRASE", help="one test after the other, up to the first that fails with this phrase")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree whose kernels to run; the tests are this one's")
    parser.add_argument("tests", nargs="*", help="only tests whose names contain one of these")
    arguments = parser.parse_args()
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        shim = ROOT / "tests/host_run"
        # A planted fault may leave a name unused.
        strict = ["-Werror"] if arguments.root == ROOT else []
        kernels, made = library.with_suffix(".o"), SANITIZERS * arguments.sanitize
        hooks = RACES * (arguments.races or arguments.watched is not None)
        compiled = subprocess.run([*compiler, *FLAGS, *strict, *made, *hooks, "-I", arguments.root / "kernels",
                                   "-I", shim, "-c", shim / "launch.cpp", "-o", kernels])
        if compiled.returncode:
            sys.exit(f"host-run lane: {' '.join(compiler)} does not compile the kernels")
        # Without -fsanitize=thread the linker adds no runtime: races.h replaces it.
        subprocess.run([*compiler, "-shared", *made, kernels, "-o", library], check=True)
        if arguments.watched:
            arguments.watched.unlink(missing_ok=True)
            shutil.move(library, arguments.watched)
            return
        environment = dict(os.environ, INSTEP_HOST_RUN=str(library))
        command = [os.environ.get("INSTEP_TESTS") or build_tests()]
        if arguments.sanitize:
            runtime = subprocess.check_output([*compiler, "-print-file-name=libasan.so"], text=True).strip()
            # The program leaks by design.
            environment.update(LD_PRELOAD=runtime, ASAN_OPTIONS="detect_leaks=0", UBSAN_OPTIONS="print_stacktrace=1")
        names = [f"host_run::{name}" for name in arguments.tests] or ["host_run::", "cuda::bitexact::", "bucket_step::one_launch::",
                                                                   "kernels::shared_launches::", "cuda::training::digits"]
        listed = subprocess.run([*command, "--include-ignored", "--list", *names], cwd=ROOT, env=environment,
                                stdout=subprocess.PIPE, text=True)
        if listed.returncode == 0 and ": test" not in listed.stdout:
            sys.exit(f"host-run lane: no test of tests/host_run/mod.rs is called {' or '.join(arguments.tests)}")
        if listed.returncode:
            sys.exit("host-run lane: the tests cannot be listed")
        tests = [line.removesuffix(": test") for line in listed.stdout.splitlines() if line.endswith(": test")]
        if arguments.until:
            sys.exit(run_until(arguments.until, command, tests, names, environment))
        # Fibers are one thread's, so the tests of a process run one after the other.
        shares = [tests[k :: os.cpu_count() or 1] for k in range(os.cpu_count() or 1)]
        processes = [subprocess.Popen([*command, "-q", "--include-ignored", "--exact", *share], cwd=ROOT, env=environment)
                     for share in shares if share]
        statuses = [process.wait() for process in processes]
    for status in filter(None, statuses):
        # A signal's number is negative here, as a shell's status it is above 128.
        if status < 0:
            sys.exit(f"host-run lane: {signal.Signals(-status).name}")
        sys.exit(status)


def run_until(phrase, command, tests, names, environment):
    """Runs tests one by one up to the first that fails with the phrase, and returns whether any failed.

    A test that the phrase names comes first. The others follow in the order of the names that select them.
    """
    status = 0
    for test in sorted(tests, key=lambda test: (phrase not in test, [name not in test for name in names].index(False))):
        done = subprocess.run([*command, "-q", "--include-ignored", "--exact", test], cwd=ROOT, env=environment,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        status = status or done.returncode
        said = done.stdout
        if done.returncode < 0:
            said += f"\nhost-run lane: {signal.Signals(-done.returncode).name}"
        if done.returncode:
            print(said)
        if done.returncode and phrase in said:
            break
    return abs(status)


def build_tests():
    """Builds the binary of tests/main.rs and returns its path."""
    made = subprocess.run(["cargo", "test", "-q", "-p", "instep", "--test", "main", "--no-run",
                           "--message-format=json-render-diagnostics"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return next(m["executable"] for m in map(json.loads, made.stdout.splitlines()) if m.get("executable"))


main()
