/* The CPU's loops around a rule: f32 in, f32 out, a vector at a time.
 *
 * A loop knows nothing of tiles, dtypes or its callers. It has no branch on data, which would keep some instruction
 * set from vectorising it. */
#ifndef INSTEP_CPU_LOOPS_H
#define INSTEP_CPU_LOOPS_H

#include "numeric/scaled.h"
#include "cpu/streams.h"

namespace {

/* Elements between prefetches, and how far ahead they reach. The hardware's own prefetchers stop at every 4 KiB page of
 * every stream; this keeps the next page's lines coming. Past the end of an array a prefetch does nothing. */
constexpr uint32_t BLOCK = 64;
constexpr uint64_t AHEAD_BYTES = 2048;

template <class Element>
INSTEP_INLINE void prefetch_block(const Element* x) {
    for (uint64_t line = 0; line < BLOCK * sizeof(Element); line += 64) {
        __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(x) + AHEAD_BYTES + line));
    }
}

/* Special values among the elements of a loop, found without a branch. */
struct Seen {
    uint32_t overflow = 0; /* top bit: a gradient is infinite or NaN */
    uint32_t nan = 0;      /* a value was stored that may be a NaN with a payload */
};

template <class Rule>
INSTEP_INLINE void step_elements(const typename Rule::Scalars& s, uint32_t flags, float factor, uint32_t count, float* __restrict p,
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
        if constexpr (!IsScaled<Rule>::value) p[i] = param;
        if constexpr (Rule::STATES > 0) state0[i] = state[0];
        if constexpr (Rule::STATES > 1) state1[i] = state[1];
        if constexpr (Rule::STATES > 2) state2[i] = state[2];
        nan |= __builtin_isunordered(param, Rule::STATES > 0 ? state[0] : param);
        if constexpr (Rule::STATES > 1) nan |= __builtin_isunordered(state[1], state[Rule::STATES > 2 ? 2 : 1]);
    }
    seen.overflow |= overflow;
    seen.nan |= nan;
}

/* A state that the rule does not keep has a null address. */
INSTEP_INLINE float* from(float* state, uint32_t i) { return state ? state + i : nullptr; }

template <class Rule>
INSTEP_INLINE Seen step_blocks(const typename Rule::Scalars& s, uint32_t flags, float factor, uint32_t count, float* p,
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

/* One run of one segment. The streams never overlap: they are different memories. The two commonest sets of flags have
 * loops of their own, in which the flags are constants: a select that never changes costs three instructions per vector
 * on SSE2. NaNs are rare, so they are made canonical afterwards. `noinline` keeps the register pressure of the dispatch
 * out of the loop, and keeps the loop inside the IEEE environment. */
template <class Rule>
__attribute__((noinline)) uint32_t step_run(const typename Rule::Scalars& scalars, float multiplier, uint32_t count, float* p,
                                            const float* g, float* state0, float* state1, float* state2) {
    const typename Rule::Scalars s = scalars;
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
        for (int k = IsScaled<Rule>::value; k <= Rule::STATES; ++k) make_canonical(stored[k], count);
    }
    return seen.overflow >> 31;
}

}  // namespace

#endif
