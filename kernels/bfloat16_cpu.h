/* The CPU's loop for bf16 throughout: parameter, gradient and states are widened, stepped and rounded in one go.
 *
 * At 14 bytes per element of AdamW the divide and the root take longer than memory does, and the conversions hide
 * behind them only inside the same loop. For the two commonest sets of flags; others take the long way, whose bits
 * these are. */
#ifndef INSTEP_BFLOAT16_CPU_H
#define INSTEP_BFLOAT16_CPU_H

#include "rules_cpu.h"

namespace {

template <bool STOCHASTIC>
INSTEP_INLINE uint16_t stored(float x, const RandomPosition& at, uint32_t i, uint32_t stream) {
    return STOCHASTIC ? bfloat16_by_chance(x, at.bits(i, stream)) : bfloat16_of(x);
}

template <class Rule, bool STOCHASTIC, class Scalars>
INSTEP_INLINE uint32_t step_bfloat16s(const Scalars& s, uint32_t flags, float factor, const RandomPosition& at,
                                      uint32_t first, uint32_t count, uint16_t* __restrict p,
                                      const uint16_t* __restrict g, uint16_t* __restrict state0,
                                      uint16_t* __restrict state1, uint16_t* __restrict state2) {
    uint32_t overflow = 0;
    for (uint32_t i = first; i < first + count; ++i) {
        const float sum = from_bfloat16(g[i]);
        overflow |= static_cast<uint32_t>(magnitude_bits(sum)) + 0x00800000u;
        float state[INSTEP_MAX_STATES] = {};
        if constexpr (Rule::STATES > 0) state[0] = from_bfloat16(state0[i]);
        if constexpr (Rule::STATES > 1) state[1] = from_bfloat16(state1[i]);
        if constexpr (Rule::STATES > 2) state[2] = from_bfloat16(state2[i]);
        const float param = Rule::update(s, flags, from_bfloat16(p[i]), sum * factor, state);
        p[i] = stored<STOCHASTIC>(param, at, i, PARAM_STREAM);
        if constexpr (Rule::STATES > 0) state0[i] = stored<STOCHASTIC>(state[0], at, i, FIRST_STATE_STREAM);
        if constexpr (Rule::STATES > 1) state1[i] = stored<STOCHASTIC>(state[1], at, i, FIRST_STATE_STREAM + 1);
        if constexpr (Rule::STATES > 2) state2[i] = stored<STOCHASTIC>(state[2], at, i, FIRST_STATE_STREAM + 2);
    }
    return overflow;
}

template <class Rule, bool STOCHASTIC, class Scalars>
INSTEP_INLINE uint32_t step_bfloat16_blocks(const Scalars& s, uint32_t flags, float factor, const RandomPosition& at,
                                            uint32_t count, uint16_t* p, const uint16_t* g,
                                            uint16_t* const* states) {
    uint16_t *const state0 = states[0], *const state1 = states[1], *const state2 = states[2];
    uint32_t overflow = 0, i = 0;
    for (; i < count; i += BLOCK) {
        const uint32_t length = count - i < BLOCK ? count - i : BLOCK;
        prefetch_block(p + i);
        prefetch_block(g + i);
        if constexpr (Rule::STATES > 0) prefetch_block(state0 + i);
        if constexpr (Rule::STATES > 1) prefetch_block(state1 + i);
        if constexpr (Rule::STATES > 2) prefetch_block(state2 + i);
        overflow |= step_bfloat16s<Rule, STOCHASTIC>(s, flags, factor, at, i, length, p, g, state0, state1, state2);
    }
    return overflow;
}

/* Whether there is a loop for these scalars. */
template <class Rule, class Scalars>
INSTEP_INLINE bool has_bfloat16_loop(const Scalars& s) {
    const uint32_t flags = Rule::flags(s);
    return (flags == Rule::COMMON[0]) | (flags == Rule::COMMON[1]);
}

/* One run of one segment, as step_run. */
template <class Rule, bool STOCHASTIC, class Scalars>
__attribute__((noinline)) uint32_t step_bfloat16_run(const Scalars& scalars, float multiplier,
                                                     const RandomPosition& position, uint32_t count, uint16_t* p,
                                                     const uint16_t* g, uint16_t* const* states) {
    const Scalars s = scalars;
    const RandomPosition at = position;
    const float factor = Rule::factor(s, multiplier);
    const uint32_t overflow =
        Rule::flags(s) == Rule::COMMON[0]
            ? step_bfloat16_blocks<Rule, STOCHASTIC>(s, Rule::COMMON[0], factor, at, count, p, g, states)
            : step_bfloat16_blocks<Rule, STOCHASTIC>(s, Rule::COMMON[1], factor, at, count, p, g, states);
    return overflow >> 31;
}

}  // namespace

#endif
