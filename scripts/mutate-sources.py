#!/usr/bin/env python3
"""Plants one fault at a time into a copy of the tree. A lane must fail and name the fault.

A row of FAULTS has the fault, the lane that must catch it, the file (from kernels/ on, or src/... or python/...), the
text to replace (which occurs once), its replacement, and a phrase of the report. A lane that fails for another reason
has caught nothing. The tree itself is never written to.
"""

import argparse, fcntl, filecmp, os, re, shutil, signal, subprocess, sys, tempfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# One architecture is enough: a fault is planted in the source.
# So are few optimizers for the compiler: what their kernels share is what faults are planted in.
COMPILED = ("sgd", "adam")
LANES = {
    "compiler": ["scripts/compiler-lane.py", "--architectures", "90"],
    "host-run": ["scripts/host-run-lane.py"],
    "host-run, precisions": ["scripts/host-run-lane.py", "precisions"],
    "host-run, naive": ["scripts/host-run-lane.py", "naive"],
    "host-run, sanitized": ["scripts/host-run-lane.py", "--sanitize"],
    "host-run, races": ["scripts/host-run-lane.py", "--races", "segments_are_stepped", "many_segments", "segments_are_clipped"],
    "host-run, races of precisions": ["scripts/host-run-lane.py", "--races", "precisions::what_is"],
}
# In a copy of the whole tree: the kernels and the threads of the CPU, and the small binary of tests/faults for all other Rust.
TESTS = {
    "cpu": ["--test", "main", "kernels::special"],
    "cpu, codes": ["--test", "main", "precision::eight_bit"],
    "cpu, numbers": ["--test", "main", "kernels::element_numbers"],
    "cpu, threads": ["--lib", "pool::"],
    "cpu, neighbours": ["--test", "main", "bucket_step::neighbours"],
    "launches": ["--test", "main", "kernels::shared_launches"],
    "shares": ["--lib", "cuda::launches::"],
    "rust": ["--test", "faults"],
}
# By an interpreter that has the package and its tests' needs, with a copy of the package in front of it.
PYTHON = {"python": [f"python/tests/test_{name}.py" for name in
                     ("listed", "manners", "memory", "optimizer", "optimizer_changes", "states")],
          "python, wrappers": [f"python/tests/test_{name}.py" for name in
                              ("distributed_states", "first_steps", "groups", "mesh", "mistakes")],
          "python, offload": ["python/tests/test_offload.py"]}
# A fault may make a test wait for ever. No build with its tests takes so long.
LONGEST_S = 1200
DIFFERS = "differs from the CPU's"
FROM_NAIVE = "differs from the naive kernel's"
RACE = "a race: two threads"
ZEROS = "before backward "
FORGET = "self.agreement.forget();"

FAULTS = [
    ("a shared launch that leaves out its last tile", "launches", "src/cuda/launches.rs", "together.args.tile_count = tiles;",
     "together.args.tile_count = tiles - 1;", "a_shared_launch_gives_the_bits"),
    ("a shared launch with each bucket's own place of its states", "launches", "src/launch/step.rs", "tile.state_offset += states;",
     "tile.state_offset += 0 * states;", "a_shared_launch_gives_the_bits"),
    ("a shared launch that names its first bucket", "launches", "cpu/step.h", "args->bucket + tile.bucket);", "args->bucket);",
     "a_shared_launch_names_the_first_bucket"),
    ("a shared launch on a GPU that names its first bucket", "host-run", "gpu/step.cu", "args.bucket + place.tile().bucket);",
     "args.bucket);", "a_shared_launch_names_the_first_bucket"),
    ("blocks that leave out the last tiles", "shares", "src/cuda/launches.rs", "tiles.div_ceil(u64::from(blocks).max(1))",
     "tiles / u64::from(blocks).max(1)", "short_shares_move_no_more"),
    ("a share of one tile, however small", "shares", "src/cuda/launches.rs", "moved_bytes >= LARGE_TILE_BYTES * tiles",
     "moved_bytes > 0", "a_large_tile_is_a_share"),
    ("shares that give a resident block one turn", "shares", "src/cuda/launches.rs", "tiles / (LEAST_TURNS * u64::from(resident))",
     "tiles / u64::from(resident)", "short_shares_move_no_more"),
    ("contraction by flag", "compiler", "nvcc.flags", "-fmad=false", "-fmad=true", "fused or called"),
    ("a fused multiply-add by hand", "compiler", "gpu/tile.cuh", "sum.x[i] * factor, state)",
     "__fmaf_rn(sum.x[i], factor, p.x[i]), state)", "fused or called"),
    ("subnormals flushed", "compiler", "nvcc.flags", "-ftz=false", "-ftz=true", "not IEEE arithmetic"),
    ("approximate division", "compiler", "nvcc.flags", "-prec-div=true", "-prec-div=false",
     "not rounded to nearest"),
    ("a maximum that drops NaN", "compiler", "numeric/math.h", "return x > y ? x : y;", "return fmaxf(x, y);",
     "not in the contract"),
    ("f64 per element", "compiler", "gpu/tile.cuh", "sum.x[i] * factor, state", "float(sum.x[i] * place.args.control->clip), state",
     "f64 in the element loop"),
    ("a spill", "compiler", "gpu/step.cu",
     "__launch_bounds__(INSTEP_GPU_THREADS, 4)            \\\n        instep_step_##name(",
     "__launch_bounds__(INSTEP_GPU_THREADS, 6)            \\\n        instep_step_##name(", "spilled registers"),
    ("an 8-byte access to f32", "compiler", "gpu/vector.cuh",
     "const uint4 four = *(reinterpret_cast<const uint4*>(first) + i);",
     "const volatile uint2* half = reinterpret_cast<const volatile uint2*>(first) + 2 * i;\n"
     "    const uint4 four = make_uint4(half[0].x, half[0].y, half[1].x, half[1].y);", "16 bytes per lane"),
    ("four elements of 16 bits a lane", "compiler", "gpu/place.cuh", "&& !IS_CODED ? 8 : 4;", "&& !IS_CODED ? 4 : 4;",
     "bf16: loads of 8 bytes a lane, expected 16"),
    ("a range check that drops NaN", "compiler", "gpu/vector.cuh", "max.NaN.f32 %0", "max.f32 %0", "not in the contract"),
    ("twice the work", "compiler", "gpu/tile.cuh", "p.x[i] = canonical(", "Rule::update(s, flags, sum.x[i], p.x[i], state);\n"
     "            p.x[i] = canonical(", "instep_step_sgd, f32: instructions"),
    ("a vote on one load before the others", "compiler", "gpu/tile.cuh",
     "        Words<N> words[INSTEP_MAX_STATES] = {};\n        load_states<Rule, CODED>(place, at, words);\n        Words<N> sums = load_gradients",
     "        if (__any_sync(0xffffffffu, stored.params.word[0] == 0x7fc12345u)) worst = -1.0f;\n        __syncwarp();\n"
     "        Words<N> words[INSTEP_MAX_STATES] = {};\n        load_states<Rule, CODED>(place, at, words);\n        Words<N> sums = load_gradients",
     "are issued before the first wait"),
    ("an addition that rounds twice", "host-run", "gpu/add.cu", "sum.x[i] + added.x[i]",
     "float_of(bits_of(sum.x[i] + added.x[i]) & ~1u)", DIFFERS),
    ("a GPU's window too small for the roots", "host-run, precisions", "gpu/codes.cuh", "if (closest < FIRST_CLOSE)",
     "if (closest < FIRST_CLOSE + 4)", DIFFERS),
    ("a GPU's threshold a quarter of a code off", "host-run, precisions", "gpu/codes.cuh", "+ 0.5f), power)", "+ 0.75f), power)", DIFFERS),
    ("a cast of more than there is", "host-run", "gpu/cast.cu", "left < 4 ? left : 4", "4", DIFFERS),
    ("a tail one element short", "host-run", "gpu/vector.cuh", "if (at + i < extent.count) put_bits(",
     "if (at + i + 1 < extent.count) put_bits(", DIFFERS),
    ("a tail one element long", "host-run", "gpu/vector.cuh", "if (at + i < extent.count) put_bits(",
     "if (at + i <= extent.count) put_bits(", "written outside its runs"),
    ("no skip test", "host-run", "gpu/step.cu", "if (!common.skips) {", "if (true) {", DIFFERS),
    ("every block at the first tile", "host-run", "gpu/prefetch.cuh", "return blockIdx.x * share();", "return 0;", DIFFERS),
    ("the first given record for all", "host-run", "gpu/prefetch.cuh", "given->records[given->record_of[record]]",
     "given->records[0]", "random_programs_give_the_cpus_bits_and_counts"),
    ("a multiplier that is not given", "host-run", "gpu/step.cu", "format_of(args, is_coded), given.multiplier}",
     "format_of(args, is_coded), 1.0f}", "random_programs_give_the_cpus_bits_and_counts"),
    ("a run that leaves its block's share", "host-run", "gpu/prefetch.cuh", "return first + (run < most ? run : most);",
     "return first + (most ? run : most);", DIFFERS),
    ("a gradient without the rule's sign", "host-run, naive", "gpu/tile.cuh", "= Rule::factor(s, multiplier)", "= multiplier", FROM_NAIVE),
    ("a naive kernel that steps in a skipped pass", "host-run, naive", "gpu/naive.cu", " && !steps_nothing(args)", "", FROM_NAIVE),
    ("a naive kernel that goes past a tile", "host-run, naive", "gpu/naive.cu", "at >= tile.count", "at > tile.count", FROM_NAIVE),
    ("a naive kernel that scales by no norm", "host-run, naive", "gpu/naive.cu", "change = scale * Rule", "change = Rule", FROM_NAIVE),
    ("a record used before it arrived", "host-run", "gpu/prefetch.cuh", "        __pipeline_wait_prior(0);\n", "",
     "SIGSEGV"),
    ("a record that other lanes have not waited for", "host-run", "gpu/prefetch.cuh", "wait_prior(0);\n        __syncwarp();\n",
     "wait_prior(0);\n", "SIGSEGV"),
    ("a fast path taken on a partial tile", "host-run, precisions", "gpu/step.cu", "tile.count == INSTEP_TILE_ELEMENTS &&", "",
     DIFFERS),
    ("the norm's lanes folded from the other end", "host-run", "gpu/leaves.cuh",
     "for (; half >= 1; half /= 2) sum = sum + __shfl_xor_sync(0xffffffffu, sum, half);",
     "for (uint32_t h = 1; h <= half; h *= 2) sum = sum + __shfl_xor_sync(0xffffffffu, sum, h);", DIFFERS),
    ("a part of a leaf given twice", "host-run", "gpu/leaves.cuh", "given = is_upper ? a : b;", "given = is_upper ? b : a;",
     DIFFERS),
    ("leaves beside a warp's four", "host-run", "gpu/norm.cu", "start += OF_WARP * WARPS", "start += OF_WARP * WARPS * 2",
     DIFFERS),
    ("a barrier too few", "host-run", "gpu/norm.cu", "    __syncthreads();\n", "", DIFFERS),
    ("a shift off by one", "host-run", "gpu/vector.cuh", "? word[i + by] : word[i];",
     "? word[i + (by + 1) / 2] : word[i];", DIFFERS),
    ("a 32-bit offset", "host-run", "gpu/vector.cuh", "return static_cast<float*>(base) + offset;",
     "return static_cast<float*>(base) + static_cast<uint32_t>(offset);", "SIGSEGV"),
    ("a lane that leaves before the vote", "host-run", "gpu/step.cu", "    if (__any_sync(",
     "    if (threadIdx.x == 77) return;\n    if (__any_sync(", "threads wait for others"),
    ("a read beside the gradient that changes no bit", "host-run, sanitized", "gpu/vector.cuh",
     "if (shift == 0 || at < shift || at - shift + 2 * N > extent.count) return", "if (shift == 0 || at < shift) return", "ERROR: AddressSanitizer: "),
    ("a wide access where it is misaligned", "host-run, sanitized", "gpu/vector.cuh",
     "(is_aligned(first, bytes) && at + N <= count)", "(first && bytes && at + N <= count)",
     "misaligned address"),
    ("a wide store that asks for half the alignment", "host-run, sanitized", "gpu/vector.cuh",
     "if (extent.has_whole<N>(run + at, ACCESS_BYTES<N, T>, at)) return put_words",
     "if (extent.has_whole<N>(run + at, ACCESS_BYTES<N, T> / 2, at)) return put_words",
     "misaligned address"),
    ("a 16-bit shift by three that forgets its last word", "host-run", "gpu/vector.cuh", "i < 2 * COUNT - by; ++i) word",
     "i < COUNT; ++i) word", DIFFERS),
    ("a limb too far", "host-run", "gpu/leaves.cuh", "(threadIdx.x - leaf.index) %", "(threadIdx.x - leaf.index - 1) %", DIFFERS),
    ("a warp's limbs left out", "host-run", "gpu/norm.cu", "w < WARPS; ++w) total", "w < WARPS - 1; ++w) total", DIFFERS),
    ("the second part of a leaf left out", "host-run", "gpu/leaves.cuh", "N == 4 ? sum : sum +", "N >= 4 ? sum : sum +", DIFFERS),
    ("a leaf of 16-bit elements taken for its neighbour", "host-run", "gpu/norm.cu", "lane / LANES * INSTEP_QUANTUM",
     "lane / LANES * 0 * INSTEP_QUANTUM", DIFFERS),
    ("16 bytes from where 8 are aligned", "host-run, sanitized", "gpu/vector.cuh", "Extent::is_aligned(halves(), WIDEST)",
     "Extent::is_aligned(halves(), WIDEST / 2)", "misaligned address"),
    ("averaged gradients in the norm", "host-run", "gpu/norm.cu", "!= INSTEP_ACTION_STEP", "== INSTEP_ACTION_LEAVE",
     DIFFERS),
    ("an average by the step's multiplier", "host-run", "gpu/step.cu", "multiplier_of(args, given, place.record(), action)",
     "multiplier_of(args, given, place.record(), INSTEP_ACTION_STEP)", DIFFERS),
    ("a mean by the factor of no run", "host-run", "gpu/step.cu", "average_tile(place, place.slot.multiplier)",
     "average_tile(place, common.multiplier)", DIFFERS),
    ("sums kept in a skipped pass", "host-run", "gpu/step.cu", "args.part == INSTEP_PART_APPLY) continue;",
     "args.part == INSTEP_PART_APPLY || common.skips) continue;", DIFFERS),
    ("tiles left out under a cap", "host-run", "gpu/prefetch.cuh", "return end < tiles ? end : tiles;",
     "return end < tiles ? end : tiles - 1;", DIFFERS),
    ("a vote in two places", "host-run", "gpu/step.cu", "    if (__any_sync(0xffffffffu, nonfinite) &&",
     "    const bool any = threadIdx.x % 2 ? __any_sync(0xffffffffu, nonfinite)\n"
     "                                     : __any_sync(0xffffffffu, nonfinite);\n    if (any &&", "meet in different"),
    ("a copy placed like the gradients", "host-run", "gpu/streams.cuh", "Run{args.copy, place.tile().state_offset,",
     "Run{args.copy, place.tile().grad_offset,", DIFFERS),
    ("a copy in f32 that takes the parameters' dtype", "host-run, precisions", "gpu/streams.cuh", "args.copy_dtype, place",
     "args.copy_dtype ? args.copy_dtype : args.param_dtype, place", "written outside its runs"),
    ("gradients kept in a skipped pass", "host-run", "gpu/step.cu", "INSTEP_GRADIENTS_ZERO && is_last",
     "INSTEP_GRADIENTS_ZERO && is_last && !args.control->skip", DIFFERS),
    ("averaged gradients zeroed", "host-run", "gpu/step.cu",
     "        average_tile(place, place", "        if (args.gradients == INSTEP_GRADIENTS_ZERO) zero_tile(place);\n"
     "        average_tile(place, place", DIFFERS),
    ("a zero too few", "host-run", "gpu/vector.cuh", "store(halves(), at, extent, Words<4>{});",
     "store(halves(), at, {extent.count - 1, false}, Words<4>{});", DIFFERS),
    ("the GPU's own conversion truncates", "compiler", "numeric/math.h", "cvt.rn.bf16.f32", "cvt.rz.bf16.f32",
     "not IEEE arithmetic"),
    ("a read by the read-only cache", "compiler", "gpu/vector.cuh",
     "const uint4 four = *(reinterpret_cast<const uint4*>(first) + i);",
     "const uint4 four = __ldg(reinterpret_cast<const uint4*>(first) + i);", "does not see this launch's writes"),
    ("an addition that is not atomic", "compiler", "gpu/leaves.cuh",
     "atomicAdd(reinterpret_cast<unsigned long long*>(target), static_cast<unsigned long long>(total))",
     "*target += total", "atomics ["),
    ("a status without its second fence", "compiler", "gpu/control.cu",
     "    __threadfence_system();\n    slot->sequence = control.passes;", "    slot->sequence = control.passes;",
     "no seqlock"),
    ("an argument that Rust does not know", "compiler", "abi.h", "    uint32_t gradients; ",
     "    uint64_t more;\n    uint32_t gradients; ", "differs from src/abi.rs"),
    ("the same addition, blocks in each other's way", "host-run, races", "gpu/leaves.cuh",
     "atomicAdd(reinterpret_cast<unsigned long long*>(target), static_cast<unsigned long long>(total))",
     "*target += total", RACE),
    ("zeros before a neighbour has read", "host-run, races", "gpu/tile.cuh", "    __syncthreads();\n#pragma unroll 1\n",
     "#pragma unroll 1\n", RACE),
    ("a mean before a neighbour has read", "host-run, races", "gpu/step.cu",
     "            __syncthreads(); /* all reads of the tile are made", "            /* all reads of the tile are made", RACE),
    ("an average that reads what its neighbours write", "host-run, races", "gpu/tile.cuh", "place.gradients().read(at)",
     "place.gradients().values_of(load_gradients<4>(place, at))", RACE),
    ("every block opens every segment", "host-run, races", "gpu/control.cu", "    if (blockIdx.x != 0) return;\n    if (args.ring)",
     "    if (args.ring)", RACE),
    ("a block's largest by one of its warps", "host-run, precisions", "gpu/maximum.cuh", "b = slots->sets[turn][k][pair + 1];",
     "b = slots->sets[turn][k][pair];", DIFFERS),
    ("a scale before all warps have told theirs", "host-run, precisions", "gpu/tile.cuh",
     "        __syncthreads();\n#pragma unroll\n", "#pragma unroll\n", DIFFERS),
    ("the same, by the threads in each other's way", "host-run, races of precisions", "gpu/tile.cuh",
     "        __syncthreads();\n#pragma unroll\n", "#pragma unroll\n", RACE),
    ("one set of slots for all rounds", "host-run, races of precisions", "gpu/tile.cuh", "        maximum.turn ^= 1;\n", "",
     RACE),
    ("a scale by a thread that short blocks lack", "host-run, precisions", "gpu/codes.cuh",
     "if (at % INSTEP_QUANTUM == 0)", "if (at % INSTEP_QUANTUM == 4)", DIFFERS),
    ("codes of a block without a scale", "host-run, precisions", "gpu/codes.cuh", "    }\n    return is_coded(scale) ? codes : Words<N>{};",
     "    }\n    return codes;", DIFFERS),
    ("signed codes truncated", "host-run, precisions", "numeric/codes.h",
     "random) : root);", "random) : is_signed ? whole_below(root) : root);", DIFFERS),
    ("unsigned codes truncated", "host-run, precisions", "numeric/codes.h",
     "random) : root);", "random) : is_signed ? root : whole_below(root));", DIFFERS),
    ("a small second moment that becomes zero", "host-run, precisions", "numeric/codes.h",
     "? U{} + 1u : code;", "? code : code;", DIFFERS),
    ("a state that may be negative in unsigned codes", "host-run, precisions", "gpu/tile.cuh",
     "write_codes(place, k, Rule::SIGNED >> k & 1,", "write_codes(place, k, false,", DIFFERS),
    ("a 16-bit remainder without its sign", "host-run, precisions", "numeric/remainder.h", "+ sign_extended(remainder, 16)",
     "+ remainder", DIFFERS),
    ("an 8-bit remainder without its sign", "host-run, precisions", "numeric/remainder.h", "(sign_extended(remainder, 8) << 8)",
     "(static_cast<uint32_t>(remainder) << 8)", DIFFERS),
    ("a split NaN that becomes -0", "host-run, precisions", "numeric/remainder.h",
     "master == master ? (bits + 0x8000u) >> 16 : 0x7fffu", "(bits + 0x8000u) >> 16", DIFFERS),
    ("24-bit ties away from zero", "host-run, precisions", "numeric/remainder.h", "bits + 0x7fu + (bits >> 8 & 1u)",
     "bits + 0x80u", DIFFERS),
    ("a draw for another element", "host-run, precisions", "gpu/streams.cuh", "place.random(at + i, stream)",
     "place.random(at, stream)", DIFFERS),
    ("a draw of another stream", "host-run, precisions", "gpu/codes.cuh", "place.random(at + i, FIRST_STATE_STREAM + k)",
     "place.random(at + i, FIRST_STATE_STREAM)", DIFFERS),
    ("the same draw in every update", "host-run, precisions", "gpu/step.cu", "place.record().steps + 1", "1", DIFFERS),
    ("a key that only a block's first run gets", "host-run, precisions", "gpu/step.cu", "if (args.stochastic) runs",
     "if (args.stochastic && place.slot.place == 0) runs", DIFFERS),
    ("a draw of the element 2^32 before", "cpu, numbers", "numeric/random.h", "later.high += later.low < elements;", "",
     "elements_past_number_four_billion"),
    ("numbers of a run that lose their carry", "cpu, numbers", "numeric/random.h",
     "low != 0 && 0u - low < count ? 0u - low : count", "count", "elements_past_number_four_billion"),
    ("a parameter without its master rounded to the nearest", "host-run, precisions", "gpu/streams.cuh",
     "params = place.is_stochastic() ?", "params = false ?", DIFFERS),
    ("a copy in f16 taken for one in bf16", "host-run, precisions", "gpu/streams.cuh", "args.copy_dtype, place",
     "args.copy_dtype ? INSTEP_DTYPE_BF16 : INSTEP_DTYPE_F32, place", DIFFERS),
    ("a copy of what was not rounded", "host-run, precisions", "gpu/streams.cuh",
     "            lane = widened(params, place.param_dtype());\n", "", DIFFERS),
    ("an average that does not start at the parameter", "host-run, precisions", "gpu/streams.cuh",
     "is_first ? lane.x[i] : moved", "moved", DIFFERS),
    ("an average counted from the wrong end", "host-run, precisions", "gpu/streams.cuh",
     "args.ema_weight, args.ema_from_sample", "args.ema_weight, 0", DIFFERS),
    ("a rate without its multiplier", "host-run, precisions", "numeric/control.h",
     "    hyper.words[0] *= args.lr_multipliers[index];", "   ", DIFFERS),
    ("a leaf of one half twice", "host-run", "gpu/scaled.cuh", "of_lane[warp ^ 1][lane]", "of_lane[warp][lane]", DIFFERS),
    ("a half that is fetched too early", "host-run", "gpu/scaled.cuh", "        __syncthreads();\n        const float4 got", "        const float4 got", DIFFERS),
    ("one place for the halves of all rounds", "host-run, races of precisions", "gpu/scaled.cuh",
     "        tile.shared.maximum.turn ^= 1;\n    }", "    }", RACE),
    ("limbs of a warp that are not added", "host-run", "gpu/scaled.cuh", "w < WARPS; w += 2", "w < WARPS - 2; w += 2", DIFFERS),
    ("norms of the other kind", "host-run", "gpu/scaled.cuh", "tile.norms().limbs[warp][lane]", "tile.norms().limbs[1 - warp][lane]",
     DIFFERS),
    ("norms that nobody empties", "host-run", "numeric/control.h", "    if (args.norms) empty(&args.norms[index]);\n", "", DIFFERS),
    ("a change made of states that were not rounded", "host-run, precisions", "gpu/scaled.cuh",
     "states[k] = write_state(place, k, at, states[k]);", "write_state(place, k, at, states[k]);", DIFFERS),
    ("a change made of states in front of their codes", "host-run, precisions", "gpu/scaled.cuh",
     "states[k] = write_codes(place", "write_codes(place", DIFFERS),
    ("a shifted gradient read as an aligned one", "host-run, sanitized", "gpu/place.cuh",
     "is_full && format != Format::F32_SHIFTED;", "is_full;", "misaligned address"),
    ("a known format for a launch with a copy", "host-run, precisions", "gpu/place.cuh", "if (args.copy || args.ema ||",
     "if (args.ema ||", DIFFERS),
    ("a known format for a launch with an average", "host-run, precisions", "gpu/place.cuh", "if (args.copy || args.ema ||",
     "if (args.copy ||", DIFFERS),
    ("a known format that forgets stochastic rounding", "host-run, precisions", "gpu/place.cuh",
     "args.stochastic ? Format::BF16_STOCHASTIC : Format::BF16;", "Format::BF16;", DIFFERS),
    ("codes of a known format that forget stochastic rounding", "host-run, precisions", "gpu/place.cuh",
     "(args.stochastic || args.master_kind", "(args.master_kind", DIFFERS),
    ("a known format that drops its remainders", "host-run, precisions", "gpu/place.cuh",
     "case Format::REMAINDER16: return INSTEP_MASTER_REMAINDER16;", "case Format::REMAINDER16: return INSTEP_MASTER_NONE;", DIFFERS),
    ("an average in both launches", "host-run", "gpu/step.cu", "action != INSTEP_ACTION_AVERAGE || !is_last",
     "action != INSTEP_ACTION_AVERAGE", DIFFERS),
    ("a NaN that no norm shows", "host-run", "gpu/scaled.cuh", "worst >= INSTEP_F32_INFINITY_BITS",
     "worst == INSTEP_F32_INFINITY_BITS", DIFFERS),
    ("a short run with its neighbour's scalars", "cpu, neighbours", "cpu/step.h", " || !have_equal_scalars(record, other)) break", ") break",
     "differs from alone"),
    ("a short run that is left as it is, stepped with its neighbours", "cpu, neighbours", "cpu/step.h",
     "record_action(args, other) != INSTEP_ACTION_STEP || ", "", "differs from alone"),
    ("special values found and forgotten", "cpu", "cpu/loops.h", "*run)) nonfinite |=", "*run) && !run) nonfinite |=",
     "a NaN with a payload is stored"),
    ("a lane that nobody looks at", "cpu", "cpu/loops.h", "uint32_t lane = 0; lane < LANES; lane += WIDTH", "uint32_t lane = WIDTH; lane < LANES; lane += WIDTH",
     "a NaN with a payload is stored"),
    ("an element after the last vector that nobody looks at", "cpu", "cpu/loops.h", "alarmed |= special(alarm) >> 31 != 0;", "", "at 66"),
    ("a state said to show in the parameter", "cpu", "rules/lamb.h", "hidden_state(0) | hidden_state(1)", "hidden_state(0)",
     "a NaN with a payload is stored"),
    ("a parameter that is not looked at", "cpu", "cpu/loops.h", "alarm = param", "alarm = F{}", "7f800000 at 0"),
    ("states of bf16 that keep their payloads", "cpu", "cpu/bfloat16.h",
     "k < Rule::STATES; ++k) make_canonical(states[k], count)", "k < 0; ++k) make_canonical(states[k], count)",
     "a NaN with a payload is stored"),
    ("a window too small for the roots", "cpu, codes", "numeric/codes.h", "BELOW = 9, ABOVE = 5;", "BELOW = 9, ABOVE = 4;",
     "codes_next_to_every_threshold"),
    ("a threshold one place off", "cpu, codes", "numeric/codes.h", "- (bits_of(power) + (BELOW + 1))", "- (bits_of(power) + BELOW)",
     "property: 5"),
    ("a close value coded as the next lane's", "cpu, codes", "cpu/coding.h", "unsigned_code(load_floats(c.values + i), c.scale",
     "unsigned_code(load_floats(c.values + (i ^ 1)), c.scale", "codes_next_to_every_threshold"),
    ("a second moment coded by the first one's map", "cpu, codes", "cpu/eight_bit.h",
     "constexpr bool SIGNED = (Rule::SIGNED >> k & 1) != 0;\n            end", "constexpr bool SIGNED = true;\n            end",
     "whole_blocks_are_stepped"),
    ("a parameter rounded with its first state's bits", "cpu, codes", "cpu/eight_bit.h", "at.word(mixed, PARAM_STREAM)",
     "at.word(mixed, FIRST_STATE_STREAM)", "whole_blocks_are_stepped"),
    ("a NaN that a random carry made finite", "cpu, codes", "cpu/eight_bit.h", "if (IS_DRAWN && params.alarmed) {",
     "if (IS_DRAWN && !params.to) {", "whole_blocks_are_stepped"),
    ("a NaN beside a remainder that is stored as -0", "cpu, codes", "cpu/tensors.h", "params[i] = split.param;", "",
     "whole_blocks_are_stepped"),
    ("a chunk taken twice", "cpu, threads", "src/pool/job.rs", "end as usize - 1", "start as usize", "c.load(Ordering::Relaxed) == launch"),
    ("a launch that does not wait for its helpers", "cpu, threads", "src/pool/mod.rs",
     "while job.helpers.load(Ordering::Relaxed) > 0 {\n            state = shared.left", "while false {\n            state = shared.left",
     "a launch ended before its chunks"),
    ("no zeros between the sums of micro-batches", "rust", "src/schedule/micro_batches.rs",
     "Gradients::Zero => self.emitter.emit(Stream::Reduce, Action::Zero(whole)),", "Gradients::Zero => {}", ZEROS),
    ("no zeros in what other ranks step", "rust", "src/schedule/gather.rs", "Gradients::Zero => Action::Zero,",
     "Gradients::Zero => return,", ZEROS),
    ("a schedule that stands still in a rank without data", "rust", "src/stepper/taking_part.rs", "        self.rates.step += 1;\n", "",
     "learning rates or other hyperparameters [rank"),
    ("a local parameter's unused gradient that ranks compare", "rust", "src/schedule/unused.rs",
     " && !self.plan.buckets()[bucket].is_local", "", "UnusedAfter: "),
    ("a late decision that does not wait for the count of ranks", "rust", "src/schedule/mod.rs",
     "                self.emitter.after(Stream::Optim, &[self.reduced]);\n", "", "Race { first: "),
    *[(f"{setter} that tells the agreement nothing", "rust", f"src/stepper/{file}.rs", f"{before}{FORGET}", before,
       f"{setter} on rank 0")
      for setter, file, before in (
          ("set_lr", "learning_rates", "change(&mut self.optimizers, &self.plan)?;\n        "),
          ("set_lr_multiplier", "learning_rates", "multiplier)?;\n        "),
          ("set_scaler_state", "scaling", "self.loaded.scaler = Some(state);\n        "),
          ("set_previous_norm", "scaling", "self.loaded.previous_norm = Some(norm);\n        "),
          ("set_frozen", "taking_part", "touch_frozen(param, frozen))?;\n        "),
          ("set_step_count", "claims", "self.loaded.note(param, number));\n        "),
          ("write of a parameter", "claims", "note(param, &self.plan);\n                "),
      )],
    ("a clip set that is stepped by the block of the pass", "rust", "src/launch/region.rs", "else { of_set };", "else { None };",
     "a set that is clipped by another norm"),
    ("a clip set whose norm ranks do not add up", "rust", "src/schedule/gather.rs", "chain((0..sets).map(Some))",
     "chain((0..0 * sets).map(Some))", "a set that is clipped by another norm"),
    ("a parameter once written that is compared for ever", "rust", "src/stepper/open_pass.rs", f"            {FORGET}\n", "",
     "a rank that sets what it has"),
    *[(fault, "python", f"python/instep/torch/{file}.py", old, new, test)
      for fault, file, old, new, test in (
          ("a sum of Adagrad that starts at zero", "_kinds", "torch.full_like(param, float(group[source]),",
           "torch.full_like(param, 0.0,", "test_adagrad_has_torchs_states"),
          ("a parameter that is listed twice", "_listed", "if len(set(map(id, params))) < len(params):", "if False:",
           "test_a_parameter_that_is_listed_twice"),
          ("memory that two parameters share", "_listed", "if own.any():", "if False:", "test_parameters_over_the_same_memory"),
          ("neighbours that are taken for one", "_listed", "own.fill_(True)", "taken.fill_(True)", "test_parameters_between"),
          ("a scale that stays in gradients", "optimizer", 'self._after() if scale is None else "average"', "self._after()",
           "test_a_scaler_leaves_its_scale"),
          ("a scale that stays in gradients of another form", "_engine", "copies.append((given, grad))", "pass",
           "test_a_fused_step_takes_the_scale_out"),
      )],
    ("a sum of Adagrad that starts as another group's", "python", "python/instep/torch/optimizer.py",
     "adagrads_first_state(self._formats, param, param_group)", "adagrads_first_state(self._formats, param, self.param_groups[0])",
     "test_a_sum_of_adagrad_that_had_no_update"),
    ("a number that is not written", "python", "python/instep/torch/_engine.py",
     "\"counts\": arena.count_address,", "\"counts\": 0,", "test_state_dicts_go_both_ways"),
    *[(f"a user's {what} that is not noticed", "python", "python/instep/torch/_state.py", old, "True", test)
      for what, old, test in (
          ("tensor", "_native.has_objects(_as_dict(state), self.objects)", "test_what_a_user_writes_counts_as_in_torch"),
          ("dict", "_native.has_objects(_as_dict(state), self.objects)", "test_a_state_or_a_count_that_the_user_replaces"),
          ("memory", "self.addresses == self._addresses()", "test_what_a_user_writes_counts_as_in_torch"),
          ("write to a count", "self.versions == self._versions()", "test_what_a_user_writes_counts_as_in_torch"),
      )],
    ("memory of a parameter that is gone", "python", "python/instep/torch/optimizer.py",
     "self._take_groups(groups), self._gone(own)", "self._take_groups(groups), []", "test_replaced_parameters_are_freed"),
    ("states that change places one after the other", "python", "python/instep/torch/optimizer.py",
     "value.clone() if isinstance(value, Tensor) else value for", "value for", "test_two_states_that_change_places"),
    *[(f"a native step that goes on {when}", "python", f"python/instep/torch/{file}.py", old, new, test)
      for when, file, old, new, test in (
          ("after a state was replaced", "optimizer", "            arena.retire_all()\n", "",
           "test_a_state_or_a_count_that_the_user_replaces"),
          ("after a group was replaced", "_arena", "            self.retire_all()\n            for index, (group",
           "            for index, (group", "test_param_groups_that_the_user_replaces"),
          ("with as many threads", "_arena", "self.retire_all()\n            self.threads", "self.threads",
           "test_a_step_runs_on_torchs_threads"),
          ("with other states", "optimizer", "for _, hyper in members.values()):\n            return True\n", "for _, hyper in members.values()):\n            pass\n", "test_momentum_may_cycle"),
          ("beside one over other parameters", "_arena", "self._retire(other)", "self.live.pop(other)",
           "test_counts_go_on_where_a_parameter_leaves"),
      )],
    *[(fault, "python, offload", f"python/instep/torch/{file}.py", old, new, test)
      for fault, file, old, new, test in (
          ("a mirror that does not follow a write", "_offload_engine", "                    mirror.copy_(param.detach())\n", "",
           "test_random_programs"),
          ("a loss scale that is not waited for", "_offload_engine", "for event in current.scaled:", "for event in ():",
           "test_random_programs"),
          ("a loss scale that is freed before it is down", "_offload_engine", "            current.keeps.append(source)\n", "",
           "test_random_programs"),
          ("sums that zero_grad does not drop", "_offload_waiting", "            self._offload.abandon()", "            pass",
           "test_zero_grad_drops"),
          ("a pass that goes on after an error", "offload", "            core.abandon()", "            pass",
           "test_a_backward_that_raises_leaves_nothing"),
          ("a ring that stays page-locked", "_offload_engine", "if old.size:", "if False:",
           "test_parameters_that_come_late"),
          ("sums that keep the last gradient alone", "_offload_engine", "add_(grad) if k in bucket.summed",
           "copy_(grad) if k in bucket.summed", "test_random_programs"),
          ("steps in the order of backward", "_offload_engine", "for bucket in measured:", "for bucket in current.measured:",
           "test_random_programs"),
          ("a gradient that is read before its copy has ended", "_offload_engine",
           "        for event in arrival.copied:\n            event.wait()", "        pass", "test_random_programs"),
          ("a step that does not let arrivals pass", "_offload_engine", "        if self._coming:", "        if False:",
           "test_what_is_sent_while_steps_wait"),
          ("gradients of an earlier backward that stay", "offload",
           "                if param.grad is not None:\n                    self._hand_over(param)", "                pass",
           "test_random_programs"),
          ("a weight that another module reads", "_offload_gates", "            self.everywhere.append(bucket)", "            pass",
           "test_random_programs"),
          ("a run of the ring that is still taken", "_offload_ring", "return last if last + size <= first else None", "return last",
           "test_random_programs"),
          ("a model that is loaded before its states", "_offload_waiting", "            self._offload.follow()", "            pass",
           "test_random_programs"),
          ("mirrors that share a version", "offload", "view.data for view in views", "view for view in views",
           "test_random_programs"),
          ("a failed pass that nobody names", "_offload_engine", "        if current.stepped:\n            raise",
           "        if False:\n            raise", "test_a_backward_that_raises_names_what_was_stepped"),
          ("a step that fails without a word", "_offload_engine",
           "        except BaseException as error:\n            self._failure = error\n        if bucket",
           "        except BaseException:\n            pass\n        if bucket",
           "test_what_the_worker_raises_is_raised_until_states_are_loaded"),
      )],
    *[(fault, "python, wrappers", f"python/instep/torch/{file}.py", old, new, test)
      for fault, file, old, new, test in (
          ("a cut placement that the norm leaves out", "_sharded", "if not placement.is_replicate():", "if placement.is_shard():",
           "test_every_dimension_of_a_mesh_counts"),
          ("a state that is shown before its first update", "_arena",
           "if progress[0] == 0 and values.keys().isdisjoint(self.shown[index]):", "if False:",
           "test_a_parameter_without_an_update_has_no_state"),
          ("a buffer that is taken for one of an update", "_kinds", "NO_UPDATE = -0.0", "NO_UPDATE = 0.0",
           "test_a_checkpoint_before_the_first_step"),
          ("a loaded buffer that is not noticed", "_arena", "*(self.numbers or self.states)", "*self.numbers",
           "test_a_checkpoint_before_the_first_step"),
          ("a state that nothing shows to a checkpoint", "_backward", "            self._show_all()\n", "",
           "test_a_checkpoint_before_the_first_step"),
          ("a size of 0 that a first step goes on from", "_kinds", 'key == "rprop" and', "False and",
           "test_a_checkpoint_before_the_first_step"),
          ("another memory format", "_wrapped", "if strides != self._strides:", "if False:",
           "test_a_model_that_gets_another_memory_format"),
          ("a trust ratio of a shard that a group gets later", "_kinds",
           "    refuse_unsteppable(key, formats, param, holders)\n", "", "test_what_a_shard_cannot_step"),
          ("a trust ratio of a shard", "_sharded", "if OPTIMIZERS[key].scales_by_norms:", "if False:", "test_what_a_shard_cannot_step"),
          ("masters of other weights", "_arena", "self.seen[index] = UNSEEN", "self.note([index])", "test_weights_that_a_user_writes"),
          ("a write to a DTensor", "_arena", "param._version if self.has_dtensors and is_distributed(param) else 0", "0",
           "test_weights_that_a_user_writes"),
          ("a write to a state that is a DTensor", "_arena", "[local] if shown is local else [local, shown]", "[local]",
           "test_a_sum_of_adagrad_that_is_written"),
          ("a clip that comes too late, in a loop without step()", "_backward", "        self._stepped.warn_if_changed()\n", "",
           "test_a_clip_in_a_loop_without_step"),
          ("ranks that always agree", "_later", "most != -least", "False", "test_a_rank_with_another_rate"),
          ("a conversion before registration that is not seen", "_wrapped", "if _metadata_of(param).pop(_SEEN, None) is None:", "if False:",
           "test_a_model_that_was_converted_between"),
          ("a conversion and back that is not seen", "_wrapped", "_node_of(param) is not node:", "False:",
           "test_a_model_that_is_converted_and_back"),
          ("parameters in the order of units", "fsdp", "[p for p in module.parameters() if p in self._unit_of]",
           "list(self._unit_of)", "test_states_have_torchs_numbers"),
          ("a hook that keeps its optimizer", "fsdp", "of_one_that_lives(arrive)", "arrive", "test_a_model_keeps_its_optimizer"),
          ("a pass inside another one that ends the step", "_outermost", "if not self.is_open:", "if True:",
           "test_passes_of_checkpoints"),
          ("a conversion that is not seen", "_wrapped", "if forms == self._forms:", "if True:", "test_a_model_that_is_converted"),
          ("hooks that stay behind", "fsdp", "            self._hooks[param] = watch(param, self._arrive)\n", "",
           "test_shards_are_stepped_where_torch_has_moved_them"),
          ("a parameter that takes a gradient too late", "_wrapped", "            if param.requires_grad:", "            if False:",
           "test_a_parameter_that_takes_a_gradient_too_late"),
          ("a gradient that is changed", "_stepped", "if self._now() != self._then:", "if False:", "test_a_gradient_that_is_changed"),
          ("a clip over a list of DTensors", "_stepped", "Later(sample != self._sample)", "Later(sample != sample)",
           "test_a_gradient_that_is_changed"),
          ("gradients that are kept", "_stepped", "        warnings.warn(_KEPT, stacklevel=2)\n", "", "test_gradients_that_are_added"),
          ("zeros that are kept", "_stepped", "not (torch.equal(sample, self._sample) and sample.any())", "False",
           "test_zeros_and_passes_without_sync"),
          ("a second division by the scale", "_stepped", "if own is not None and not is_unscaled:", "if own is not None:",
           "test_a_second_division_by_the_scale"),
          ("a second optimizer", "_running", "if owner is None or any(", "if True or any(", "test_another_optimizer_over"),
          ("a slip in a key", "_groups", "(1 if len(meant) < 6 else 2)", "0", "test_a_slip_in_a_key"),
          ("elements that each rank counts from 0", "_sharded", "offset[0] * row if offset else 0", "0",
           "test_states_saved_without_a_mesh"),
          ("elements of a shard taken for those of its parameter", "_sharded", "else param.numel()\n\n\nclass Rows",
           "else shard_of(param).numel()\n\n\nclass Rows", "test_states_saved_without_a_mesh"),
          ("rows without room for their last block", "_arena", "return length // row * padded(row) or QUANTUM",
           "return padded(length)", "test_rows_of_tensor_parallelism"),
          ("scales without a row's last block", "_sharded", "padded(row_of(param)) // QUANTUM", "row_of(param) // QUANTUM",
           "test_states_saved_without_a_mesh"),
          ("rows that are not neighbours, counted as if they were", "_sharded", "not in (1, shards)", "is None",
           "test_cuts_that_would_change_the_bits"),
      )],
]


def place(file):
    """The path of a row's file, from the tree's root."""
    return file if file.startswith(("src/", "python/")) else f"kernels/{file}"


def plant(path, name, old, new):
    text = path.read_text()
    if text.count(old) != 1:
        sys.exit(f"{name}: {path.name} has {text.count(old)} times: {old}")
    path.write_text(text.replace(old, new))


def ended(command, **options):
    """Runs a command. If it takes too long, ends it with all that it has started, so that nothing runs beside the next one."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            return subprocess.CompletedProcess(command, 0, stdout, f"{stderr}\nended after {LONGEST_S} s")
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def judged(name, lane, file, old, new, phrase):
    """Runs a lane's script on a copy of the kernels."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "kernels", Path(folder) / "kernels")
        plant(Path(folder) / place(file), name, old, new)
        if lane == "compiler" and file != "abi.h":
            rows = Path(folder) / "kernels/optimizers.def"
            rows.write_text(re.sub(rf"^OPTIMIZER\((?!(?:{'|'.join(COMPILED)}),)\w.*\n", "", rows.read_text(), flags=re.M))
            layout = Path(folder) / "kernels/gpu/kernels.cu"  # the layout is of all optimizers
            layout.write_text(layout.read_text().replace('#include "abi_layout.h"\n', ""))
        script, *options = LANES[lane]
        until = ["--until", phrase] if lane != "compiler" else []
        command = [sys.executable, ROOT / script, "--root", folder, *until, *options]
        return ended(command)


def copied(target):
    """Updates a folder's copy of the tree. The copy stays in place, so that only changed files are compiled again."""
    tree = target / "tree"
    target.mkdir(parents=True, exist_ok=True)
    tracked = set(filter(None, subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")))
    for old_copy in [path for path in tree.rglob("*") if path.is_file() and str(path.relative_to(tree)) not in tracked]:
        old_copy.unlink()
    for path in tracked:
        copy = tree / path
        if not (copy.exists() and filecmp.cmp(ROOT / path, copy, shallow=False)):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, copy)
    return tree


def built(name, lane, file, old, new, phrase):
    """Runs tests of a copy of the tree."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve() / "planted"
    target.mkdir(parents=True, exist_ok=True)
    lock = (target / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # until this function returns: there is one copy
    tree = copied(target)
    if file:
        plant(tree / place(file), name, old, new)
    # The build takes longer than the tests.
    environment = dict(os.environ, CARGO_TARGET_DIR=str(target), CARGO_PROFILE_DEV_OPT_LEVEL="0",
                       CARGO_PROFILE_TEST_OPT_LEVEL="0", RUSTFLAGS="--cfg kernels_only", CXXFLAGS="-O1")
    return ended(["cargo", "test", "-q", "-p", "instep", *TESTS[lane]], cwd=tree, env=environment)


def interpreted(python, name, lane, file, old, new, phrase):
    """Runs tests of the Python package with a copy of the package: the installed native half, and the tree's sources.

    With a fault, only the tests of the report's phrase run, because other tests could only fail for another reason. The
    first failure ends them, because a later test might wait for ever.
    """
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "python/instep"
        find = [python, "-c", "import instep; print(instep.__path__[0])"]
        installed = subprocess.check_output(find, cwd=folder, text=True).strip()
        shutil.copytree(installed, package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "python/instep", package, dirs_exist_ok=True)
        if file:
            plant(Path(folder) / place(file), name, old, new)
        environment = dict(os.environ, PYTHONPATH=str(package.parent), OMP_NUM_THREADS="1", INSTEP_CI_TURN="0")
        files = [path for path in PYTHON[lane] if phrase is None or phrase in (ROOT / path).read_text()]
        if not files:
            sys.exit(f"{name}: no test of the {lane} lane is called {phrase}")
        command = [python, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *(["-x", "-k", phrase] if phrase else [])]
        return ended(command, cwd=ROOT, env=environment)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lane", choices=[*LANES, *TESTS, *PYTHON], help="only this lane's faults")
    parser.add_argument("--share", default="0/1", metavar="K/N", help="every N-th of the faults, from the K-th on, counted from 0")
    parser.add_argument("--python", metavar="PATH", type=os.path.abspath,
                        help="an interpreter that has the package, torch and pytest; without it, faults in Python are left out")
    parser.add_argument("names", nargs="*", help="only faults whose names contain one of these")
    arguments = parser.parse_args()
    if arguments.lane in PYTHON and not arguments.python:
        parser.error("the python lane needs --python")
    missed, sound = 0, set()
    first, every = map(int, arguments.share.split("/"))
    run = {lane: built for lane in TESTS} | {lane: partial(interpreted, arguments.python) for lane in PYTHON}
    for name, lane, file, old, new, phrase in FAULTS[first::every]:
        chosen = not arguments.names or any(part in name for part in arguments.names)
        if arguments.lane not in (None, lane) or not chosen or lane in PYTHON and not arguments.python:
            continue
        if lane in run and lane not in sound and every == 1:
            # Where the lane fails without a fault, it would seem to catch each. CI runs all tests in another lane.
            plain = run[lane](None, lane, None, None, None, None)
            if plain.returncode:
                sys.exit(f"the {lane} lane fails without a fault:\n{plain.stdout}{plain.stderr}")
            sound.add(lane)
        done = run.get(lane, judged)(name, lane, file, old, new, phrase)
        said = done.stdout + done.stderr
        caught = done.returncode != 0 and phrase in said
        missed += not caught
        print(f"{'caught' if caught else 'MISSED'} by the {lane} lane: {name}", flush=True)
        if not caught:
            print(said, file=sys.stderr)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
