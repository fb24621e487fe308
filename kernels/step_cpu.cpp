/* The CPU's loops around the shared rules: one C entry table per instruction set.
 *
 * Compiled once per instruction set with INSTEP_KERNELS naming the exported symbol; all else has internal
 * linkage. Callers split the work into runs of tiles on any number of threads; the only shared writes are integer
 * atomics whose order does not matter. No C++ runtime, no allocation, no state of its own. */
#include "ceiling.h"
#include "control.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

/* Threads inherit flush-to-zero and rounding modes from whoever set them (a library linked with -ffast-math is
 * enough), so each entry runs in the IEEE default environment and restores the caller's. */
class IeeeEnvironment {
  public:
#if defined(__x86_64__)
    IeeeEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~IeeeEnvironment() { _mm_setcsr(saved_); }

  private:
    uint32_t saved_;
#elif defined(__aarch64__)
    IeeeEnvironment() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
        __asm__ volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
    }
    ~IeeeEnvironment() { __asm__ volatile("msr fpcr, %0" ::"r"(saved_)); }

  private:
    uint64_t saved_;
#else
#error "instep: say here how this architecture selects the IEEE environment"
#endif
};

void atomic_maximum(uint32_t* target, uint32_t value) {
    uint32_t seen = __atomic_load_n(target, __ATOMIC_RELAXED);
    while (value > seen &&
           !__atomic_compare_exchange_n(target, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

void atomic_minimum(uint32_t* target, uint32_t value) {
    uint32_t seen = __atomic_load_n(target, __ATOMIC_RELAXED);
    while (value < seen &&
           !__atomic_compare_exchange_n(target, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

/* Elements between prefetches, and how far ahead they reach. The hardware's own prefetchers stop at every 4 KiB page of
 * every stream; this keeps the next page's lines coming. Past the end of an array a prefetch does nothing. */
constexpr uint32_t BLOCK = 64;
constexpr uint64_t AHEAD_BYTES = 2048;

INSTEP_INLINE void prefetch_block(const float* x) {
    for (uint64_t line = 0; line < BLOCK * sizeof(float); line += 64) {
        __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(x) + AHEAD_BYTES + line));
    }
}

/* What a stretch of elements contained, gathered without a branch. */
struct Seen {
    uint32_t overflow = 0; /* top bit: a gradient is infinite or NaN */
    uint32_t nan = 0;      /* a value was stored that may be a NaN with a payload */
};

template <class Rule, class Scalars>
INSTEP_INLINE void step_elements(const Scalars& s, uint32_t flags, float factor, uint32_t count, float* __restrict p,
                                 const float* __restrict g, float* __restrict state0, float* __restrict state1,
                                 float* __restrict state2, Seen& seen) {
    uint32_t overflow = 0, nan = 0;
    for (uint32_t i = 0; i < count; ++i) {
        const float sum = g[i];
        /* Only an exponent of all ones carries into the sign: an add where a comparison would need a select. */
        overflow |= static_cast<uint32_t>(magnitude_bits(sum)) + 0x00800000u;
        float state[INSTEP_MAX_STATES] = {};
        if constexpr (Rule::STATES > 0) state[0] = state0[i];
        if constexpr (Rule::STATES > 1) state[1] = state1[i];
        if constexpr (Rule::STATES > 2) state[2] = state2[i];
        const float param = Rule::update(s, flags, p[i], sum * factor, state);
        p[i] = param;
        if constexpr (Rule::STATES > 0) state0[i] = state[0];
        if constexpr (Rule::STATES > 1) state1[i] = state[1];
        if constexpr (Rule::STATES > 2) state2[i] = state[2];
        nan |= __builtin_isunordered(param, Rule::STATES > 0 ? state[0] : param);
        if constexpr (Rule::STATES > 1) nan |= __builtin_isunordered(state[1], state[Rule::STATES > 2 ? 2 : 1]);
    }
    seen.overflow |= overflow;
    seen.nan |= nan;
}

/* A state that the rule does not keep has no address to count from. */
INSTEP_INLINE float* from(float* state, uint32_t i) { return state ? state + i : nullptr; }

template <class Rule, class Scalars>
INSTEP_INLINE Seen step_blocks(const Scalars& s, uint32_t flags, float factor, uint32_t count, float* p,
                               const float* g, float* state0, float* state1, float* state2) {
    Seen seen;
    uint32_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) {
        prefetch_block(p + i);
        prefetch_block(g + i);
        if constexpr (Rule::STATES > 0) prefetch_block(state0 + i);
        if constexpr (Rule::STATES > 1) prefetch_block(state1 + i);
        if constexpr (Rule::STATES > 2) prefetch_block(state2 + i);
        step_elements<Rule>(s, flags, factor, BLOCK, p + i, g + i, from(state0, i), from(state1, i), from(state2, i),
                            seen);
    }
    step_elements<Rule>(s, flags, factor, count - i, p + i, g + i, from(state0, i), from(state1, i), from(state2, i),
                        seen);
    return seen;
}

__attribute__((noinline)) void make_canonical(float* x, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) x[i] = canonical(x[i]);
}

/* One run of one segment. The streams never overlap: they are different memories. The two commonest sets of flags get
 * loops of their own, in which they are constants: a select that never changes is three instructions per vector on
 * SSE2. NaNs are rare, so they are made canonical afterwards. Noinline keeps the register pressure of the dispatch out
 * of the loop, and the IEEE environment from being reordered into it. */
template <class Rule, class Scalars>
__attribute__((noinline)) uint32_t step_run(const Scalars& scalars, float multiplier, uint32_t count, float* p,
                                            const float* g, float* state0, float* state1, float* state2) {
    const Scalars s = scalars;
    const float factor = Rule::factor(s, multiplier);
    const uint32_t flags = Rule::flags(s);
    Seen seen;
    if (flags == Rule::COMMON[0]) {
        seen = step_blocks<Rule>(s, Rule::COMMON[0], factor, count, p, g, state0, state1, state2);
    } else if (flags == Rule::COMMON[1]) {
        seen = step_blocks<Rule>(s, Rule::COMMON[1], factor, count, p, g, state0, state1, state2);
    } else {
        seen = step_blocks<Rule>(s, flags, factor, count, p, g, state0, state1, state2);
    }
    if (seen.nan) {
        float* const stored[] = {p, state0, state1, state2};
        for (int k = 0; k <= Rule::STATES; ++k) make_canonical(stored[k], count);
    }
    return seen.overflow >> 31;
}

__attribute__((noinline)) void average_run(float multiplier, uint32_t count, float* g) {
    for (uint32_t i = 0; i < count; ++i) g[i] = canonical(g[i] * multiplier);
}

/* 16-bit streams pass through a tile's worth of f32 in the first-level cache, so that the rules' loops stay the f32
 * ones, whatever the dtypes. */
__attribute__((noinline)) void widen_run(uint32_t dtype, uint32_t count, const uint16_t* __restrict from,
                                         float* __restrict to) {
    if (dtype == INSTEP_DTYPE_BF16) {
        for (uint32_t i = 0; i < count; ++i) to[i] = from_bfloat16(from[i]);
    } else {
        for (uint32_t i = 0; i < count; ++i) to[i] = from_half(from[i]);
    }
}

__attribute__((noinline)) void narrow_run(uint32_t dtype, uint32_t count, const float* __restrict from,
                                          uint16_t* __restrict to) {
    if (dtype == INSTEP_DTYPE_BF16) {
        for (uint32_t i = 0; i < count; ++i) to[i] = bfloat16_of(from[i]);
    } else {
        for (uint32_t i = 0; i < count; ++i) to[i] = half_of(from[i]);
    }
}

/* A run of a bucket's gradients as f32: in place, or widened into `buffer`. */
const float* gradients(const InstepStepArgs& args, uint64_t offset, uint32_t count, float* buffer) {
    if (args.grad_dtype == INSTEP_DTYPE_F32) return static_cast<const float*>(args.grads) + offset;
    widen_run(args.grad_dtype, count, static_cast<const uint16_t*>(args.grads) + offset, buffer);
    return buffer;
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

/* The stepped parameters once more, while they are in the cache. */
void copy_tile(const InstepStepArgs& args, const InstepTile& tile, const float* params) {
    if (args.copy_dtype != INSTEP_DTYPE_F32) {
        return narrow_run(args.copy_dtype, tile.count, params, static_cast<uint16_t*>(args.copy) + tile.state_offset);
    }
    __builtin_memcpy(static_cast<float*>(args.copy) + tile.state_offset, params, tile.count * sizeof(float));
}

/* +0 is no bits in every dtype. */
void zero_tile(const InstepStepArgs& args, const InstepTile& tile) {
    const uint64_t bytes = args.grad_dtype == INSTEP_DTYPE_F32 ? 4 : 2;
    __builtin_memset(static_cast<char*>(args.grads) + tile.grad_offset * bytes, 0, tile.count * bytes);
}

/* Picks the instantiation with as many states as this run has. */
template <template <int> class Rule, int MIN, int MAX, class Scalars>
uint32_t step_with_states(const InstepStepArgs& args, const InstepTile& tile, const Scalars& scalars,
                          float multiplier) {
    if constexpr (MIN < MAX) {
        if (args.state_count < MAX) return step_with_states<Rule, MIN, MAX - 1>(args, tile, scalars, multiplier);
    }
    float* states[INSTEP_MAX_STATES];
    for (int k = 0; k < INSTEP_MAX_STATES; ++k) states[k] = k < MAX ? args.states[k] + tile.state_offset : nullptr;
    const bool narrow = args.param_dtype != INSTEP_DTYPE_F32;
    void* param = param_of(args, tile);
    float* params = narrow ? args.master + tile.state_offset : static_cast<float*>(param);
    float wide[INSTEP_TILE_ELEMENTS];
    const float* grads = gradients(args, tile.grad_offset, tile.count, wide);
    const uint32_t nonfinite =
        step_run<Rule<MAX>>(scalars, multiplier, tile.count, params, grads, states[0], states[1], states[2]);
    if (narrow) narrow_run(args.param_dtype, tile.count, params, static_cast<uint16_t*>(param));
    if (args.copy) copy_tile(args, tile, params);
    return nonfinite;
}

uint32_t step_segment(const InstepStepArgs& args, const InstepTile& tile, const InstepSegment& segment) {
    const float multiplier = step_multiplier(args, segment);
    switch (args.optimizer) {
#define OPTIMIZER(name, Rule, min_states, max_states) \
    case INSTEP_OPTIMIZER_##name:                     \
        return step_with_states<Rule, min_states, max_states>(args, tile, segment.scalars.name, multiplier);
#include "optimizers.def"
#undef OPTIMIZER
    }
    return 0;
}

__attribute__((noinline)) void step_tiles(const InstepStepArgs* args, uint64_t first, uint64_t last) {
    uint32_t nonfinite = 0;
    for (uint64_t t = first; t < last; ++t) {
        const InstepTile& tile = args->tiles[t];
        InstepSegment& segment = args->segments[tile.segment];
        const uint32_t action = segment_action(segment);
        if (action == INSTEP_ACTION_AVERAGE) {
            average_tile(*args, tile, average_multiplier(*args, segment));
        } else if (action == INSTEP_ACTION_STEP) {
            if (!args->control->skip) {
                nonfinite |= step_segment(*args, tile, segment);
                if (tile.first) segment.stepped = 1;
            }
            if (args->zero_grads) zero_tile(*args, tile);
        }
    }
    if (nonfinite) atomic_minimum(&args->control->first_nonfinite_bucket, args->bucket);
}

__attribute__((noinline)) void norm_tiles(const InstepStepArgs* args, uint64_t first, uint64_t last) {
    uint64_t limbs[INSTEP_NORM_LIMBS] = {};
    int32_t worst = 0;
    for (uint64_t t = first; t < last; ++t) {
        const InstepTile& tile = args->tiles[t];
        if (segment_action(args->segments[tile.segment]) != INSTEP_ACTION_STEP) continue;
        float wide[INSTEP_TILE_ELEMENTS];
        const float* grads = gradients(*args, tile.grad_offset, tile.count, wide);
        for (uint32_t start = 0; start < tile.count; start += INSTEP_QUANTUM) {
            const float* leaf = grads + start;
            float padded[INSTEP_QUANTUM];
            const uint32_t count = tile.count - start;
            if (count < INSTEP_QUANTUM) {
                for (uint32_t i = 0; i < INSTEP_QUANTUM; ++i) padded[i] = i < count ? leaf[i] : 0.0f;
                leaf = padded;
            }
            int32_t magnitude = 0;
            const double sum = leaf_sum(leaf, &magnitude);
            worst = magnitude > worst ? magnitude : worst;
            if (magnitude == 0 || magnitude >= static_cast<int32_t>(INSTEP_F32_INFINITY_BITS)) continue;
            const LeafLimbs add = leaf_limbs(sum);
            for (uint32_t k = 0; k < 3 && add.index + k < INSTEP_NORM_LIMBS; ++k) limbs[add.index + k] += add.part[k];
        }
    }
    for (int k = 0; k < INSTEP_NORM_LIMBS; ++k) {
        if (limbs[k] != 0) __atomic_fetch_add(&args->control->limbs[k], limbs[k], __ATOMIC_RELAXED);
    }
    atomic_maximum(&args->control->max_abs_bits, stored_magnitude(static_cast<uint32_t>(worst)));
    if (worst >= static_cast<int32_t>(INSTEP_F32_INFINITY_BITS)) {
        atomic_minimum(&args->control->first_nonfinite_bucket, args->bucket);
    }
}

__attribute__((noinline)) void begin_all(const InstepBeginArgs* args) {
    begin_pass(*args, args->control);
    for (uint64_t b = 0; b < args->bucket_count; ++b) begin_pass(*args, &args->bucket_controls[b]);
    for (uint64_t k = 0; k < args->segment_count; ++k) {
        begin_segment(&args->segments[k], args->groups, args->actions[k]);
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

void entry_ceiling(float* const* arrays, uint64_t array_count, float factor, uint64_t first, uint64_t last) {
    IeeeEnvironment environment;
    in_place_ceiling(arrays, array_count, factor, first, last);
}

}  // namespace

extern "C" const InstepKernels INSTEP_KERNELS = {
    entry_self_test, entry_begin, entry_decide, entry_norm,  entry_step,
    entry_custom,    entry_sum,   entry_narrow, entry_widen, entry_ceiling,
};
