/* On a CPU, the two launches of a rule that is scaled by norms, over one run; numeric/scaled.h describes them.
 *
 * Both launches compute the change from stored values, so the norm is that of the change that is applied. */
#ifndef INSTEP_CPU_SCALED_H
#define INSTEP_CPU_SCALED_H

#include "cpu/part.h"
#include "cpu/squares.h"

namespace {

template <class Rule>
INSTEP_INLINE float change_at(const typename Rule::Scalars& s, uint32_t flags, uint32_t i, float p, const float* state0,
                              const float* state1, const float* state2) {
    float state[INSTEP_MAX_STATES] = {};
    if constexpr (Rule::STATES > 0) state[0] = state0[i];
    if constexpr (Rule::STATES > 1) state[1] = state1[i];
    if constexpr (Rule::STATES > 2) state[2] = state2[i];
    return Rule::change(s, flags, p, state);
}

template <class Rule>
__attribute__((noinline)) void change_run(const typename Rule::Scalars& scalars, uint32_t count, const float* __restrict p,
                                          const float* __restrict state0, const float* __restrict state1,
                                          const float* __restrict state2, float* __restrict change) {
    const typename Rule::Scalars s = scalars;
    const uint32_t flags = Rule::flags(s);
    for (uint32_t i = 0; i < count; ++i) change[i] = change_at<Rule>(s, flags, i, p[i], state0, state1, state2);
}

template <class Rule>
INSTEP_INLINE void apply_elements(const typename Rule::Scalars& s, uint32_t flags, float scale, uint32_t count, float* __restrict p,
                                  const float* __restrict state0, const float* __restrict state1,
                                  const float* __restrict state2) {
#pragma GCC unroll 1 /* compilers do not vectorise sixteen copies of a short body */
    for (uint32_t i = 0; i < count; ++i) {
        p[i] = canonical(p[i] - scale * change_at<Rule>(s, flags, i, p[i], state0, state1, state2));
    }
}

template <class Rule>
__attribute__((noinline)) void apply_run(const typename Rule::Scalars& scalars, float scale, uint64_t ahead_bytes, uint32_t count,
                                         float* p, float* state0, float* state1, float* state2) {
    const typename Rule::Scalars s = scalars;
    const uint32_t flags = Rule::flags(s);
    uint32_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        if (ahead_bytes) {
            prefetch(p + i, ahead_bytes);
            if constexpr (Rule::STATES > 0) prefetch(state0 + i, ahead_bytes);
            if constexpr (Rule::STATES > 1) prefetch(state1 + i, ahead_bytes);
            if constexpr (Rule::STATES > 2) prefetch(state2 + i, ahead_bytes);
        }
        apply_elements<Rule>(s, flags, scale, LANES, p + i, from(state0, i), from(state1, i), from(state2, i));
    }
    apply_elements<Rule>(s, flags, scale, count - i, p + i, from(state0, i), from(state1, i), from(state2, i));
}

template <class Rule>
uint32_t measure_part(const Part& part, const typename Rule::Scalars& scalars, float multiplier, uint64_t grad_offset,
                      Squares* squares) {
    const InstepStepArgs& args = part.args;
    float grad_buffer[CHUNK], param_buffer[CHUNK], state_buffers[Rule::STATES][CHUNK], change[CHUNK];
    const float* grads = gradients(args, grad_offset, part.count, grad_buffer);
    float* params = part.open_params(param_buffer);
    Run run = {part.count, params, grads, {}, change};
    float* (&states)[INSTEP_MAX_STATES] = run.states;
    for (uint32_t k = 0; k < Rule::STATES; ++k) {
        states[k] = part.open_state(k, Rule::SIGNED >> k & 1, state_buffers[k]);
    }
    /* f32 states are stored without rounding, so the same loop computes the change. */
    const bool is_exact = args.moments == INSTEP_MOMENTS_F32;
    const auto step = is_exact ? step_runs<Rule, true> : step_runs<Rule, false>;
    const uint32_t nonfinite = step(scalars, multiplier, part.ahead_bytes, &run, 1);
    if (!is_exact) {
        for (uint32_t k = 0; k < Rule::STATES; ++k) {
            part.close_state(k, Rule::SIGNED >> k & 1, states[k]);
            states[k] = part.open_state(k, Rule::SIGNED >> k & 1, state_buffers[k]);
        }
        change_run<Rule>(scalars, part.count, params, states[0], states[1], states[2], change);
    }
    squares[OF_PARAM].add(params, part.count);
    squares[OF_CHANGE].add(change, part.count);
    return nonfinite;
}

inline void add_squares(const Squares* squares, InstepNorms* norms) {
    for (uint32_t which = OF_PARAM; which <= OF_CHANGE; ++which) {
        squares[which].add_to(norms->limbs[which]);
        if (squares[which].is_nonfinite()) atomic_maximum(&norms->nonfinite[which], 1);
    }
}

template <class Rule>
void apply_part(const Part& part, const typename Rule::Scalars& scalars, float scale, bool is_first) {
    float param_buffer[CHUNK], state_buffers[Rule::STATES][CHUNK];
    float* params = part.open_params(param_buffer);
    float* states[INSTEP_MAX_STATES] = {};
    for (uint32_t k = 0; k < Rule::STATES; ++k) {
        states[k] = part.open_state(k, Rule::SIGNED >> k & 1, state_buffers[k]);
    }
    apply_run<Rule>(scalars, scale, part.ahead_bytes, part.count, params, states[0], states[1], states[2]);
    part.finish(params, is_first);
}

}  // namespace

#endif
