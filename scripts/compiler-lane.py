#!/usr/bin/env python3
"""Checks the GPU kernels as nvcc compiles them, without a GPU: PTX, resources and machine code of each kernel.

A contraction, a spill or a narrow access changes bits or speed. On a machine without a GPU no other test would notice.
A wait between two loads does so too: sass/ traces a warp of each kernel and precision, and reads how it waits. The
script needs nvcc and cuobjdump from the directory of NVCC (scripts/cuda-toolchain.sh prints one). It compiles as
build/cuda.rs does, or checks the binary that the crate has embedded (`--fatbin`). `--bless` writes kernels/record:
instructions (sass.csv), and stalls, loads in flight and dependent loads of a round (latency.csv). Otherwise all figures
must equal the recorded ones within TOLERANCE, if the record was made with this nvcc. Flags and architectures come from
the files that build/cuda.rs reads.
"""

import argparse, csv, os, re, resource, shutil, subprocess, sys, tempfile, time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sass import record as latency, self_test
from sass.abi import Abi
from sass.elf import banks_of_binary
from sass.kernel import read_binary
from sass.loops import innermost

HERE = Path(__file__).resolve().parent.parent
COMMON = ["instep_begin", "instep_decide", "instep_publish", "instep_norm", "instep_custom", "instep_add",
          "instep_cast"]
REGISTERS = 64
MORE_REGISTERS = {}  # (kernel, architecture): limit, with the reason beside it
CODED_FORMATS = 2  # that kernels of states in codes have loops for
TOLERANCE = 0.02  # of the recorded instruction count, either way: a gain is to be recorded, too
BUILD_SECONDS = 180  # on two cores, where this script compiles; a format with a loop of its own costs time
BYTES_PER_ARCHITECTURE = 1_000_000
# Any other float instruction rounds differently on some machine, or drops a NaN.
FLOAT_ARITHMETIC = {"add", "sub", "mul", "div", "rcp", "sqrt"}
FLOAT_MOVES = {"ld", "st", "mov", "selp", "setp", "neg", "abs", "cvt", "shfl"}
EXACT_FUSED = "fma.rn.f64"
ROUGH_ROOT = "sqrt.approx.ftz.f32"
NOT_IEEE = {"ftz", "approx", "rz", "rm", "rp", "sat", "relu"}
# Atomic additions of all blocks to the control block; plain additions would lose some.
ATOMICS = {"norm": {"add.u64", "max.u32", "min.u32"}, "step": {"min.u32"}}


def innermost_loops(lines):
    """The lines of each loop that contains no other loop, found by the graph of jumps, because the order of the text
    says nothing.
    """
    blocks = [[]]
    for line in lines:
        if line.endswith(":") and blocks[-1]:
            blocks.append([])
        blocks[-1].append(line)
        if re.match(r"(@\S+ )?(bra|ret)\b", line):
            blocks.append([])
    labels = {block[0].rstrip(":"): at for at, block in enumerate(blocks) if block and block[0].endswith(":")}
    successors = {}
    for at, block in enumerate(blocks):
        last = block[-1] if block else ""
        target = labels.get(last.split()[-1].rstrip(";")) if "bra" in last else None
        falls = not last.startswith(("bra", "ret")) and at + 1 < len(blocks)
        successors[at] = {step for step in (at + 1 if falls else None, target) if step is not None}
    return [[line for at in sorted(loop) for line in blocks[at]] for loop in innermost(set(successors), successors)]


class Lane:
    def __init__(self, root, nvcc, architectures):
        self.kernels, self.nvcc, self.faults = root / "kernels", nvcc, []
        rows = re.findall(r"^OPTIMIZER\((\w+), \w+, (\d+), (\d+)\)", (self.kernels / "optimizers.def").read_text(), re.M)
        classes = ("", "_8bit")
        self.states = {f"instep_step_{name}{moments}": int(most) for name, _, most in rows for moments in classes}
        self.names = {*COMMON, *self.states}
        formats = re.search(r"enum class Format[^{]*{(.*?)};", (self.kernels / "gpu/place.cuh").read_text(), re.S)[1]
        formats = len(re.findall(r"^ +(?!ANY)\w+,", formats, re.M))
        most_known = int(re.search(r"MOST_KNOWN_STATES = (\d)", (self.kernels / "gpu/step.cu").read_text())[1])
        self.known = {}  # loops for known formats: see struct Known in gpu/step.cu
        for name, fewest, most in ((name, int(fewest), int(most)) for name, fewest, most in rows):
            self.known[f"instep_step_{name}"] = formats * (max(fewest, min(most, most_known)) - fewest + 1)
            self.known[f"instep_step_{name}_8bit"] = CODED_FORMATS * (max(fewest, 1) <= most_known)
        self.abi = Abi(self.kernels)
        self.scaled = {f"instep_step_{name}{moments}" for name, *_ in rows if self.abi.is_scaled(name) for moments in classes}
        known = self.run(nvcc, "--list-gpu-code").split()
        wanted = architectures or (self.kernels / "architectures.txt").read_text().split()
        self.architectures = [code for code in wanted if f"sm_{code}" in known]
        if not self.architectures or architectures and self.architectures != architectures:
            sys.exit(f"compiler lane: {nvcc} does not know all of {' '.join(wanted)}; --list-gpu-code names what it does")
        self.release = re.search(r"release ([\d.]+)", self.run(nvcc, "--version"))[1]

    def run(self, *command):
        clean = {k: v for k, v in os.environ.items() if k not in ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS")}
        done = subprocess.run(list(map(str, command)), env=clean, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"compiler lane: {Path(command[0]).name} failed\n{done.stdout}{done.stderr}")
        return done.stdout

    def compile(self, *arguments):
        flags = ["-optf", self.kernels / "nvcc.flags"]
        return self.run(self.nvcc, *flags, *arguments, "-I", self.kernels, self.kernels / "gpu/kernels.cu")

    def check(self, fine, fault):
        if not fine:
            self.faults.append(fault)

    def build(self, fatbin):
        """The binary that the crate would embed."""
        # One PTX for all architectures, as build/cuda.rs asks for it.
        oldest = self.architectures[0]
        codes = ",".join([f"compute_{oldest}", *(f"sm_{code}" for code in self.architectures)])
        start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        self.compile("-fatbin", "-Xfatbin", "-compress-all", "--threads", "2",
                     f"-gencode=arch=compute_{oldest},code=[{codes}]", "-o", fatbin)
        wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"built in {wall:.1f} s ({cpu:.1f} s of processor time)")
        # Processor time, since the wall clock also counts other work of this machine.
        self.check(cpu / 2 <= BUILD_SECONDS, f"the build takes {cpu / 2:.0f} s on two cores")

    def judge_size(self, fatbin):
        size = fatbin.stat().st_size // (len(self.architectures) + 1)
        print(f"nvcc {self.release}: {len(self.names)} kernels for {' '.join(self.architectures)} and PTX,"
              f" {size / 1000:.0f} KB each")
        self.check(size <= BYTES_PER_ARCHITECTURE, f"{size} bytes per architecture")

    def judge_ptx(self, text):
        """Contraction must be looked for in PTX, because machine code spells IEEE division and root with fused
        instructions.
        """
        bodies = dict(re.findall(r"\.visible \.entry (\w+)\(.*?\n\{\n(.*?)\n\}\n", text, re.S))
        self.check(set(bodies) == self.names, f"PTX: entries {sorted(bodies)}, expected {sorted(self.names)}")
        for name, body in bodies.items():
            lines = [line.strip() for line in body.splitlines() if line.strip()]
            for line in lines:
                opcode = re.sub(r"^@!?%p\d+\s+", "", line).split()[0].rstrip(";")
                base, *parts = opcode.split(".")
                where = f"{name}: {opcode}"
                # A sum with the square of an f32, which is exact: norm.h.
                is_exact = opcode == EXACT_FUSED and (name == "instep_norm" or name in self.scaled)
                self.check(base not in ("fma", "call") or is_exact, f"{where} is a fused or called instruction")
                vector = base in ("ld", "st") and {"v2", "v4"} & set(parts)
                self.check(not vector or {"global", "param", "shared"} & set(parts), f"{where} is a generic access")
                # It says next to which threshold a code lies, and no more: gpu/codes.cuh.
                is_rough = opcode == ROUGH_ROOT and name.endswith("_8bit")
                self.check(is_rough or not NOT_IEEE & set(parts), f"{where} is not IEEE arithmetic")
                self.check("nc" not in parts, f"{where} reads by a cache that does not see this launch's writes")
                if base.startswith(".") or base.endswith(":") or not {"f32", "f64"} & set(parts):
                    continue
                keeps_nan = base == "max" and "NaN" in parts
                self.check(keeps_nan or is_exact or base in FLOAT_ARITHMETIC | FLOAT_MOVES, f"{where} is not in the contract")
                # Without .rn the assembler may still contract it.
                self.check(is_rough or base not in FLOAT_ARITHMETIC or "rn" in parts, f"{where} is not rounded to nearest")
            found = set(re.findall(r"(?:atom|red)\.global\.(\S+)", body))
            measures = name == "instep_norm" or name in self.scaled
            expected = ATOMICS["norm"] if measures else ATOMICS["step"] if name in self.states else set()
            self.check(found == expected, f"{name}: atomics {sorted(found)}, expected {sorted(expected)}")
            if name in self.states:
                self.judge_loops(name, lines, name in self.scaled)
            if name == "instep_publish":
                self.judge_seqlock(name, lines)

    def judge_seqlock(self, where, lines):
        """Looks for the pattern of a seqlock: the sequence, a fence, what it guards at higher addresses, a fence, the
        sequence.
        """
        kinds = {"st.volatile": "s", "membar.sys": "|"}
        writes = [("".join(kinds[k] for k in kinds if line.startswith(k)), "+" in line) for line in lines]
        order = "".join("p" if kind == "s" and later else kind for kind, later in writes)
        self.check(re.fullmatch(r"s\|p+\|s", order), f"{where}: stores and fences in the order {order} are no seqlock")

    def judge_loops(self, where, lines, is_scaled):
        """Loops over elements must have no f64; scalars are prepared outside these loops. Only squares are summed in
        f64.
        """
        bodies = innermost_loops(lines)
        storing = [body for body in bodies if any(re.search(r"st\.global(?:\.cs)?\.v[24]", line) for line in body)]
        is_coded = where.endswith("_8bit")
        # Of full tiles and of others; one that measures stores states, and codes are narrow.
        stepping = 2 * (1 + (is_scaled and not is_coded))
        known = 0 if is_scaled else self.known[where]
        self.check(len(storing) == stepping + known + 2,
                   f"{where}: {len(storing)} element loops found, expected {stepping} that step (or measure and apply),"
                   f" {known} that step tiles of a known format, one that averages, one that zeroes")
        summing = [body for body in bodies if any(".f64" in line for line in body)]
        self.check(len(summing) == 2 * is_scaled, f"{where}: f64 in the element loop")

    def judge_resources(self, text):
        rows = {}
        for image in text.split("Fatbin elf code:")[1:]:
            code = re.search(r"arch = sm_(\d+)", image)[1]
            for name, usage in re.findall(r"Function (\w+):\n\s*(REG:.*)", image):
                used = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", usage)}
                where = f"sm_{code} {name}"
                self.check(used["STACK"] == 0 and used["LOCAL"] == 0, f"{where}: a stack or spilled registers, {usage}")
                limit = MORE_REGISTERS.get((name, code), REGISTERS)
                self.check(used["REG"] <= limit, f"{where}: {used['REG']} registers, at most {limit}")
                rows[name, code] = used["REG"]
        expected = {(name, code) for name in self.names for code in self.architectures}
        self.check(set(rows) == expected, f"resources of {len(rows)} kernels, expected {len(expected)}")
        return rows

    def judge_sass(self, text):
        counts = defaultdict(Counter)
        for image in text.split("Fatbin elf code:")[1:]:
            code = re.search(r"arch = sm_(\d+)", image)[1]
            for function in image.split("Function : ")[1:]:
                name = function.split()[0]
                for opcode in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", function):
                    base, *parts = opcode.split(".")
                    counts[name, code]["all"] += base != "NOP"
                    if base in ("LDG", "STG"):
                        width = "128" if "128" in parts else "64" if "64" in parts else "32"
                        counts[name, code][base, width] += 1
                    self.check(base not in ("LDL", "STL"), f"sm_{code} {name}: {opcode} is local memory")
        for (name, code), count in counts.items():
            # Gradients: whole, or two words around a shift unless averaged, in the norm for both fours of a lane.
            if name in self.states:
                # Parameter, master, moving average, and the states unless they are codes.
                streams = 3 + (0 if name.endswith("_8bit") else self.states[name])
                # Gradients stepped and averaged; gradients averaged and zeroed, and the copy.
                loads, stores, halves = streams + 4, streams + 3, 4
                # Parameter, master and states once more, to be measured.
                loads += streams - 1 if name in self.scaled else 0
            elif name == "instep_norm":
                loads, stores, halves = 4, 0, 0
            elif name == "instep_add":
                loads, stores, halves = 2, 1, 1
            elif name == "instep_cast":
                loads, stores, halves = 1, 1, 1
            else:
                continue
            where, wide = f"sm_{code} {name}", (count["LDG", "128"], count["STG", "128"])
            self.check(wide[0] >= loads and wide[1] >= stores,
                       f"{where}: f32 streams need 16 bytes per lane: {loads} loads and {stores} stores, found {wide}")
            self.check(count["STG", "64"] >= halves, f"{where}: 16-bit streams need 8 bytes per lane")
        return counts

    def judge_latency(self, sass, banks, path, is_whole, bless):
        """Reads how a warp waits, by scripts/sass/. A kernel that cannot be followed is a fault."""
        self_test.run(self.abi)
        start, found = time.monotonic(), {}
        for (name, part, code), figures in read_binary(self.abi, sass, banks).items():
            self.check(not isinstance(figures, str), f"sm_{code} {name}, {part}: {figures}")
            if not isinstance(figures, str):
                found[name, part, code] = figures
        print(f"latency of {len(found)} kernels, paths and architectures read in {time.monotonic() - start:.1f} s")
        latency.judge_together(found, self.check, is_whole)
        latency.judge_width(found, self.abi, self.check)
        if bless:
            return latency.write(path, self.release, found)
        if other := latency.compare(path, self.release, found, TOLERANCE, self.check):
            print(f"SKIPPED: {path.name} is of nvcc {other}, latencies are not compared", file=sys.stderr)

    def judge_record(self, registers, counts, path, bless):
        columns = ["nvcc", "kernel", "architecture", "registers", "instructions", "loads_16_bytes", "stores_16_bytes"]
        rows = [[self.release, name, f"sm_{code}", registers.get((name, code)), count["all"],
                 *(count[base, "128"] for base in ("LDG", "STG"))]
                for (name, code), count in sorted(counts.items())]
        if bless:
            path.parent.mkdir(exist_ok=True)
            with path.open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([columns, *rows])
            return
        with path.open() as file:
            record = {(row["kernel"], row["architecture"]): row for row in csv.DictReader(file)}
        releases = {row["nvcc"] for row in record.values()}
        if releases != {self.release}:
            print(f"SKIPPED: the record is of nvcc {releases}, instruction counts are not compared", file=sys.stderr)
            return
        for _, name, architecture, _, instructions, *_ in rows:
            row = record.get((name, architecture))
            if row is None:
                self.check(False, f"{architecture} {name} is not in {path.name}: run with --bless")
                continue
            recorded = int(row["instructions"])
            self.check(abs(instructions - recorded) <= TOLERANCE * recorded,
                       f"{architecture} {name}: {instructions} instructions, recorded {recorded}; --bless if meant")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bless", action="store_true", help="write the record")
    parser.add_argument("--root", type=Path, default=HERE, help="the tree to judge")
    parser.add_argument("--architectures", nargs="+", help="like 90; all of kernels/architectures.txt otherwise")
    parser.add_argument("--fatbin", type=Path, help="a binary of these kernels and architectures, to judge instead of building")
    arguments = parser.parse_args()
    if arguments.bless and arguments.architectures:
        parser.error("--bless writes the record of all architectures; leave --architectures out")
    nvcc = Path(os.environ.get("NVCC", "nvcc"))
    tool = nvcc.parent / "cuobjdump" if nvcc.parent != Path(".") else "cuobjdump"
    for program in (nvcc, tool):
        if shutil.which(program) is None:
            sys.exit(f"compiler lane: no {program}; NVCC=$(scripts/cuda-toolchain.sh) names one that has all it takes")
    lane = Lane(arguments.root, nvcc, arguments.architectures)
    with tempfile.TemporaryDirectory() as folder:
        fatbin = arguments.fatbin or Path(folder) / "kernels.fatbin"
        if not arguments.fatbin:
            lane.build(fatbin)
        lane.judge_size(fatbin)
        lane.judge_ptx(lane.run(tool, "--dump-ptx", fatbin))
        usage = lane.run(tool, "--dump-resource-usage", fatbin)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            sass = "".join(pool.map(lambda code: lane.run(tool, "--dump-sass", "-arch", f"sm_{code}", fatbin), lane.architectures))
        unpacked = Path(folder) / "unpacked"
        unpacked.mkdir()
        banks = banks_of_binary(tool, fatbin, unpacked, lane.abi.argument_bytes)
    registers, counts = lane.judge_resources(usage), lane.judge_sass(sass)
    record = arguments.root / "kernels/record"
    lane.judge_record(registers, counts, record / "sass.csv", arguments.bless)
    lane.judge_latency(sass, banks, record / "latency.csv", arguments.architectures is None, arguments.bless)
    for (name, code), count in sorted(counts.items()):
        print(f"  {name:20} sm_{code:4} {registers[name, code]:3} registers {count['all']:5} instructions")
    for fault in dict.fromkeys(lane.faults):
        print(f"FAULT: {fault}", file=sys.stderr)
    sys.exit(1 if lane.faults else 0)


main()
