/* The CPU's loops around the shared rules: one C entry table per instruction set.
 *
 * Compiled once per instruction set with INSTEP_KERNELS naming the exported symbol; all else has internal
 * linkage. Callers split the work into runs of tiles on any number of threads; the only shared writes are integer
 * atomics whose order does not matter. No C++ runtime, no allocation, no state of its own. */
#include "bfloat16_cpu.h"
#include "ceiling.h"
#include "control.h"
#include "environment_cpu.h"
#include "scaled_cpu.h"

namespace {

__attribute__((noinline)) void average_run(float multiplier, uint32_t count, float* g) {
    for (uint32_t i = 0; i < count; ++i) g[i] = canonical(g[i] * multiplier);
}

void average_tile(const InstepStepArgs& args, const InstepTile& tile, float multiplier) {
    if (args.grad_dtype == INSTEP_DTYPE_F32) {
        return average_run(multiplier, tile.count, static_cast<float*>(args.grads) + tile.grad_offset);
    }
    uint16_t* narrow = static_cast<uint16_t*>(args.grads) + tile.grad_offset;
    float wide[INSTEP_TILE_ELEMENTS];
    widen_run(args.grad_dtype, tile.count, narrow, wide);
    average_run(multiplier, tile.count, wide);
    narrow_run(args.grad_dtype, tile.count, wide, narrow);
}

/* +0 is no bits in every dtype. */
void zero_tile(const InstepStepArgs& args, const InstepTile& tile) {
    const uint64_t bytes = args.grad_dtype == INSTEP_DTYPE_F32 ? 4 : 2;
    __builtin_memset(static_cast<char*>(args.grads) + tile.grad_offset * bytes, 0, tile.count * bytes);
}

/* Whether one loop does it all. */
bool is_bfloat16_throughout(const InstepStepArgs& args) {
    const bool is_plain = args.master_kind == INSTEP_MASTER_NONE && !args.copy && !args.ema;
    const bool has_states = args.state_count == 0 || args.moments == INSTEP_MOMENTS_BF16;
    return is_plain && has_states && args.param_dtype == INSTEP_DTYPE_BF16 && args.grad_dtype == INSTEP_DTYPE_BF16;
}

/* All of it in one loop, from bf16 to bf16. */
template <class Rule, class Scalars>
uint32_t step_bfloat16_tile(const InstepStepArgs& args, const InstepTile& tile, const Scalars& scalars,
                            float multiplier, RandomKey key) {
    uint16_t* states[INSTEP_MAX_STATES] = {};
    for (int k = 0; k < Rule::STATES; ++k) states[k] = static_cast<uint16_t*>(args.states[k]) + tile.state_offset;
    uint16_t* params = static_cast<uint16_t*>(param_of(args, tile));
    const uint16_t* grads = static_cast<const uint16_t*>(args.grads) + tile.grad_offset;
    const RandomPosition position = {key, tile.element};
    const auto run =
        args.stochastic ? step_bfloat16_run<Rule, true, Scalars> : step_bfloat16_run<Rule, false, Scalars>;
    return run(scalars, multiplier, position, tile.count, params, grads, states);
}

template <class Rule, class Scalars>
uint32_t step_tile(const InstepStepArgs& args, const InstepTile& tile, const InstepSegment& segment,
                   const Scalars& scalars) {
    const float multiplier = step_multiplier(args, segment);
    const RandomKey key = random_key(args.seed, segment.steps + 1);
    const bool narrow_param = args.param_dtype != INSTEP_DTYPE_F32;
    const bool in_place = args.grad_dtype == INSTEP_DTYPE_F32 && args.moments == INSTEP_MOMENTS_F32 &&
                          (!narrow_param || args.master_kind == INSTEP_MASTER_F32);
    const uint32_t longest = in_place && !IsScaled<Rule>::value ? INSTEP_TILE_ELEMENTS : CHUNK;
    char* const param = static_cast<char*>(param_of(args, tile));
    const auto each_part = [&](auto step) {
        for (uint32_t at = 0; at < tile.count; at += longest) {
            const uint32_t count = tile.count - at < longest ? tile.count - at : longest;
            const Rounding rounding = {{key, tile.element + at}, args.stochastic != 0};
            step(Part{args, tile.state_offset + at, count, param + at * (narrow_param ? 2 : 4), rounding},
                 tile.grad_offset + at);
        }
    };
    const bool is_first = args.segments[tile.first_record].steps == 0;
    uint32_t nonfinite = 0;
    if constexpr (IsScaled<Rule>::value) {
        InstepNorms* const norms = &args.norms[tile.segment];
        if (args.part == INSTEP_PART_MEASURE) {
            Squares squares[2];
            each_part([&](const Part& part, uint64_t grad_offset) {
                nonfinite |= measure_part<Rule>(part, scalars, multiplier, grad_offset, squares);
            });
            add_squares(squares, norms);
        } else {
            const float scale = step_scale<Rule>(scalars, norm_of(*norms, OF_PARAM), norm_of(*norms, OF_CHANGE));
            each_part([&](const Part& part, uint64_t) { apply_part<Rule>(part, scalars, scale, is_first); });
        }
    } else {
        if (is_bfloat16_throughout(args) && has_bfloat16_loop<Rule>(scalars, multiplier)) {
            return step_bfloat16_tile<Rule>(args, tile, scalars, multiplier, key);
        }
        each_part([&](const Part& part, uint64_t grad_offset) {
            nonfinite |= step_part<Rule>(part, scalars, multiplier, grad_offset, is_first);
        });
    }
    return nonfinite;
}

/* Picks the instantiation with as many states as this run has. */
template <template <int> class Rule, int MIN, int MAX, class Scalars>
uint32_t step_with_states(const InstepStepArgs& args, const InstepTile& tile, const InstepSegment& segment,
                          const Scalars& scalars) {
    if constexpr (MIN < MAX) {
        if (args.state_count < MAX) return step_with_states<Rule, MIN, MAX - 1>(args, tile, segment, scalars);
    }
    return step_tile<Rule<MAX>>(args, tile, segment, scalars);
}

uint32_t step_segment(const InstepStepArgs& args, const InstepTile& tile, const InstepSegment& segment) {
    switch (args.optimizer) {
#define OPTIMIZER(name, Rule, min_states, max_states) \
    case INSTEP_OPTIMIZER_##name:                     \
        return step_with_states<Rule, min_states, max_states>(args, tile, segment, segment.scalars.name);
#include "optimizers.def"
#undef OPTIMIZER
    }
    return 0;
}

__attribute__((noinline)) void step_tiles(const InstepStepArgs* args, uint64_t first, uint64_t last) {
    const bool is_last = args->part != INSTEP_PART_MEASURE;
    uint32_t nonfinite = 0;
    for (uint64_t t = first; t < last; ++t) {
        const InstepTile& tile = args->tiles[t];
        InstepSegment& segment = args->segments[tile.segment];
        const uint32_t action = segment_action(*args, segment);
        if (action == INSTEP_ACTION_STEP && !args->control->skip) {
            nonfinite |= step_segment(*args, tile, segment);
            if (tile.first && is_last) segment.stepped = 1;
        }
        if (!is_last) continue;
        if (action == INSTEP_ACTION_AVERAGE) average_tile(*args, tile, average_multiplier(*args, segment));
        if (action == INSTEP_ACTION_STEP && args->zero_grads) zero_tile(*args, tile);
    }
    if (nonfinite) atomic_minimum(&args->control->first_nonfinite_bucket, args->bucket);
}

__attribute__((noinline)) void norm_tiles(const InstepStepArgs* args, uint64_t first, uint64_t last) {
    Squares squares;
    for (uint64_t t = first; t < last; ++t) {
        const InstepTile& tile = args->tiles[t];
        if (segment_action(*args, args->segments[tile.segment]) != INSTEP_ACTION_STEP) continue;
        float wide[INSTEP_TILE_ELEMENTS];
        squares.add(gradients(*args, tile.grad_offset, tile.count, wide), tile.count);
    }
    squares.add_to(args->control->limbs);
    atomic_maximum(&args->control->max_abs_bits, squares.magnitude());
    if (squares.is_nonfinite()) atomic_minimum(&args->control->first_nonfinite_bucket, args->bucket);
}

__attribute__((noinline)) void begin_all(const InstepBeginArgs* args) {
    begin_pass(*args, args->control);
    for (uint64_t b = 0; b < args->bucket_count; ++b) begin_pass(*args, &args->bucket_controls[b]);
    for (uint64_t k = 0; k < args->segment_count; ++k) {
        begin_segment(*args, k);
    }
}

__attribute__((noinline)) void instruct_all(const InstepStepArgs* args) {
    for (uint64_t t = 0; t < args->tile_count; ++t) instruct(*args, args->tiles[t]);
}

__attribute__((noinline)) void decide_all(const InstepDecideArgs* args) { decide(*args); }

/* Elements that the work on whole buffers takes at a time, so that what lies between two loops stays in the first-level
 * cache. */
constexpr uint64_t RUN = 1024;

INSTEP_INLINE uint32_t run_length(uint64_t start, uint64_t last) {
    return static_cast<uint32_t>(last - start < RUN ? last - start : RUN);
}

/* Rank 0 first, whatever arrives first. 16-bit elements are added as f32 and rounded once, where a ring would round at
 * every hop. */
__attribute__((noinline)) void sum_range(void* const* ranks, uint64_t rank_count, uint32_t dtype, uint64_t first,
                                         uint64_t last) {
    const bool wide = dtype == INSTEP_DTYPE_F32;
    const uint64_t bytes = wide ? 4 : 2;
    float total[RUN], widened[RUN];
    uint16_t narrowed[RUN];
    for (uint64_t start = first; start < last; start += RUN) {
        const uint32_t count = run_length(start, last);
        for (uint64_t r = 0; r < rank_count; ++r) {
            if (!wide) widen_run(dtype, count, static_cast<const uint16_t*>(ranks[r]) + start, widened);
            const float* __restrict source = wide ? static_cast<const float*>(ranks[r]) + start : widened;
            if (r == 0) {
                for (uint32_t i = 0; i < count; ++i) total[i] = source[i];
            } else {
                for (uint32_t i = 0; i < count; ++i) total[i] = total[i] + source[i];
            }
        }
        if (wide) {
            make_canonical(total, count);
        } else {
            narrow_run(dtype, count, total, narrowed);
        }
        const void* const sum = wide ? static_cast<const void*>(total) : narrowed;
        for (uint64_t r = 0; r < rank_count; ++r) {
            __builtin_memcpy(static_cast<char*>(ranks[r]) + start * bytes, sum, count * bytes);
        }
    }
}

__attribute__((noinline)) void narrow_all(const float* from, uint16_t* to, uint32_t dtype, float factor,
                                          uint64_t count) {
    float scaled[RUN];
    for (uint64_t start = 0; start < count; start += RUN) {
        const uint32_t length = run_length(start, count);
        for (uint32_t i = 0; i < length; ++i) scaled[i] = from[start + i] * factor;
        narrow_run(dtype, length, scaled, to + start);
    }
}

__attribute__((noinline)) void widen_all(const uint16_t* from, float* to, uint32_t dtype, float factor,
                                         uint64_t count) {
    for (uint64_t start = 0; start < count; start += RUN) {
        const uint32_t length = run_length(start, count);
        widen_run(dtype, length, from + start, to + start);
        average_run(factor, length, to + start);
    }
}

__attribute__((noinline)) void decode_all(const InstepStored* from, float* to) {
    for (uint64_t start = 0; start < from->count; start += RUN) {
        const uint32_t count = run_length(start, from->count);
        const uint16_t* narrow = static_cast<const uint16_t*>(from->values) + start;
        if (from->format == INSTEP_MOMENTS_8BIT) {
            decode_run(from->is_signed, count, static_cast<const uint8_t*>(from->values) + start,
                       static_cast<const float*>(from->second) + start / INSTEP_QUANTUM, to + start);
            make_canonical(to + start, count);
        } else if (from->format == INSTEP_DTYPE_F32) {
            __builtin_memcpy(to + start, static_cast<const float*>(from->values) + start, count * sizeof(float));
        } else if (from->second) {
            const uint64_t bytes = from->master_kind == INSTEP_MASTER_REMAINDER16 ? 2 : 1;
            join_run(from->master_kind, count, narrow, static_cast<const char*>(from->second) + start * bytes,
                     to + start);
        } else {
            widen_run(from->format, count, narrow, to + start);
            make_canonical(to + start, count);
        }
    }
}

__attribute__((noinline)) void encode_all(const float* from, const InstepStored* to) {
    const Rounding nearest = {{{0, 0}, 0}, false};
    for (uint64_t start = 0; start < to->count; start += RUN) {
        const uint32_t count = run_length(start, to->count);
        uint16_t* narrow = static_cast<uint16_t*>(to->values) + start;
        float values[RUN];
        __builtin_memcpy(values, from + start, count * sizeof(float));
        if (to->format == INSTEP_MOMENTS_8BIT) {
            encode_run(to->is_signed, nearest, 0, count, values, static_cast<uint8_t*>(to->values) + start,
                       static_cast<float*>(to->second) + start / INSTEP_QUANTUM);
        } else if (to->format == INSTEP_DTYPE_F32) {
            __builtin_memcpy(static_cast<float*>(to->values) + start, values, count * sizeof(float));
        } else if (to->second) {
            const uint64_t bytes = to->master_kind == INSTEP_MASTER_REMAINDER16 ? 2 : 1;
            split_run(to->master_kind, nearest, count, values, narrow, static_cast<char*>(to->second) + start * bytes);
        } else {
            narrow_run(to->format, count, values, narrow);
        }
    }
}

/* Properties that flags can break without a macro to tell: contraction, subnormals, rounding to even. */
__attribute__((noinline)) uint32_t broken_property() {
    volatile float a = 1.0f + 0x1p-12f, negative_square = -(1.0f + 0x1p-11f);
    if (a * a + negative_square != 0.0f) return 1; /* a fused multiply-add would leave 2^-24 */
    volatile float tiny = 0x1p-126f, half = 0.5f;
    if (tiny * half != 0x1p-127f) return 2;
    volatile float one = 1.0f, tie = 0x1p-24f;
    if (one + tie != 1.0f || (one + 0x1p-23f) + tie != 1.0f + 0x1p-22f) return 3;
    volatile float two = 2.0f, three = 3.0f;
    if (bits_of(square_root(two)) != 0x3fb504f3u || bits_of(one / three) != 0x3eaaaaabu) return 4;
    return 0;
}

uint32_t entry_self_test() {
    IeeeEnvironment environment;
    return broken_property();
}
void entry_begin(const InstepBeginArgs* args) {
    IeeeEnvironment environment;
    begin_all(args);
}
void entry_decide(const InstepDecideArgs* args) {
    IeeeEnvironment environment;
    decide_all(args);
}
void entry_norm(const InstepStepArgs* args, uint64_t first_tile, uint64_t last_tile) {
    IeeeEnvironment environment;
    norm_tiles(args, first_tile, last_tile);
}
void entry_step(const InstepStepArgs* args, uint64_t first_tile, uint64_t last_tile) {
    IeeeEnvironment environment;
    step_tiles(args, first_tile, last_tile);
}
void entry_custom(const InstepStepArgs* args) {
    IeeeEnvironment environment;
    instruct_all(args);
}
void entry_sum(void* const* ranks, uint64_t rank_count, uint32_t dtype, uint64_t first, uint64_t last) {
    IeeeEnvironment environment;
    sum_range(ranks, rank_count, dtype, first, last);
}
void entry_narrow(const float* from, uint16_t* to, uint32_t dtype, float factor, uint64_t count) {
    IeeeEnvironment environment;
    narrow_all(from, to, dtype, factor, count);
}
void entry_widen(const uint16_t* from, float* to, uint32_t dtype, float factor, uint64_t count) {
    IeeeEnvironment environment;
    widen_all(from, to, dtype, factor, count);
}

void entry_decode(const InstepStored* from, float* to) {
    IeeeEnvironment environment;
    decode_all(from, to);
}
void entry_encode(const float* from, const InstepStored* to) {
    IeeeEnvironment environment;
    encode_all(from, to);
}
void entry_ceiling(float* const* arrays, uint64_t array_count, float factor, uint64_t first, uint64_t last) {
    IeeeEnvironment environment;
    in_place_ceiling(arrays, array_count, factor, first, last);
}

}  // namespace

extern "C" const InstepKernels INSTEP_KERNELS = {
    entry_self_test, entry_begin,  entry_decide, entry_norm,   entry_step,   entry_custom,
    entry_sum,       entry_narrow, entry_widen,  entry_decode, entry_encode, entry_ceiling,
    {
#define OPTIMIZER(name, Rule, min_states, max_states) Rule<max_states>::SIGNED,
#include "optimizers.def"
#undef OPTIMIZER
    },
};
