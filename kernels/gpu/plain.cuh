/* The step of a full tile whose streams are all f32 and aligned: the case that most buckets consist of.
 *
 * It makes no choice inside the loop: addresses, scalars and formats are settled before it. The arithmetic is the
 * rule's, as everywhere, with as many states as the launch has; so the bits are those of `step_tile`. */
#ifndef INSTEP_GPU_PLAIN_CUH
#define INSTEP_GPU_PLAIN_CUH

#include "gpu/streams.cuh"

namespace {

/* Whether every stream of a launch is f32, and none is there besides parameters, gradients and states. */
INSTEP_DEVICE bool is_plain(const InstepStepArgs& args) {
    return args.param_dtype == INSTEP_DTYPE_F32 && args.grad_dtype == INSTEP_DTYPE_F32 &&
           args.moments == INSTEP_MOMENTS_F32 && !args.copy && !args.ema;
}

/* The addresses of more states would not fit in the registers. */
constexpr int MOST_PLAIN_STATES = 2;

/* The tile is full and plain, and the launch has as many states as the rule. Returns whether a gradient was not
 * finite. */
template <class Rule>
INSTEP_DEVICE uint32_t step_plain_tile(const Place& place, float multiplier) {
    float* run[2 + Rule::STATES] = {place.params<float>(), place.gradients().floats()};
#pragma unroll
    for (int k = 0; k < Rule::STATES; ++k) run[2 + k] = place.of<float>(place.args.states[k]);
    const typename Rule::Scalars s = scalars_of<Rule>(place.record());
    const float factor = Rule::factor(s, multiplier);
    const uint32_t flags = Rule::flags(s);
    uint32_t nonfinite = 0;
#pragma unroll 1
    for (uint32_t at = 4 * threadIdx.x; at < INSTEP_TILE_ELEMENTS; at += ELEMENTS_PER_ROUND) {
        Four of[2 + Rule::STATES];
#pragma unroll
        for (int k = 0; k < 2 + Rule::STATES; ++k) of[k] = as_floats(words_at(run[k] + at));
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            float state[INSTEP_MAX_STATES] = {};
#pragma unroll
            for (int k = 0; k < Rule::STATES; ++k) state[k] = of[2 + k].x[i];
            nonfinite |= is_nonfinite(of[1].x[i]);
            of[0].x[i] = canonical(Rule::update(s, flags, of[0].x[i], of[1].x[i] * factor, state));
#pragma unroll
            for (int k = 0; k < Rule::STATES; ++k) of[2 + k].x[i] = canonical(state[k]);
        }
#pragma unroll
        for (int k = 0; k < 2 + Rule::STATES; ++k) {
            if (k != 1) put_words(run[k] + at, as_words(of[k]));
        }
    }
    return nonfinite;
}

}  // namespace

#endif
