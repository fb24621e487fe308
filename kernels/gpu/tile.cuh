/* The element loops of a run of tiles: step, average, zero.
 *
 * A round issues all its loads, except that of the moving average, before it waits for one. The loop is inlined once
 * for any run, once for full aligned runs, and once per known format and number of states (place.cuh). The bits
 * equal those of cpu/step.h. */
#ifndef INSTEP_GPU_TILE_CUH
#define INSTEP_GPU_TILE_CUH

#include "gpu/maximum.cuh"
#include "gpu/streams.cuh"

namespace {

/* A state that the launch does not have reads as zero and is never written, and the rule's scalars exclude it. With
 * CODED states every thread takes part in every round, because each round has a barrier. */
template <class Rule, bool CODED, uint32_t N = 4>
INSTEP_DEVICE uint32_t step_tile(const Place& place, float multiplier, BlockMaximum& maximum) {
    static_assert(!CODED || N == 4, "a block of codes is two warps'");
    const Weights weights = {place};
    float worst = 0.0f;
#pragma unroll 1
    for (uint32_t at = N * threadIdx.x; at < (CODED ? whole_rounds<N>(place) : place.count()); at += PER_ROUND<N>) {
        /* All loads of the round are issued before the first conversion waits for one. */
        StoredWeights<N> stored = weights.load_at<N>(at);
        Words<N> words[INSTEP_MAX_STATES] = {};
        load_states<Rule, CODED>(place, at, words);
        Words<N> sums = load_gradients<N>(place, at); /* last: shifting misaligned gradients waits for loads */
        hold_back(stored, words, &sums);
        if (CODED || N > 4) __syncwarp(); /* no load moves past this call; every lane is in every round */
        Lane<N> p = weights.values_of(stored), states[INSTEP_MAX_STATES] = {};
        state_values<Rule, CODED>(place, words, states);
        const Lane<N> sum = place.gradients().values_of(sums);
        /* The scalars are read from shared memory in each round, to save registers. For a known
         * format they are read once. */
        const typename Rule::Scalars s = scalars_of<Rule>(place.record());
        const float factor = Rule::factor(s, multiplier);
        const uint32_t flags = Rule::flags(s);
#pragma unroll
        for (uint32_t i = 0; i < N; ++i) {
            worst = larger_magnitude(worst, sum.x[i]);
            float state[INSTEP_MAX_STATES] = {states[0].x[i], states[1].x[i], states[2].x[i]};
            p.x[i] = canonical(Rule::update(s, flags, p.x[i], sum.x[i] * factor, state));
#pragma unroll
            for (int k = 0; k < Rule::STATES; ++k) states[k].x[i] = canonical(state[k]);
        }
#pragma unroll
        for (int k = 0; k < Rule::STATES; ++k) { /* before the parameters: this frees registers */
            if (CODED) {
                maximum.offer(k, largest_magnitude(place, at, states[k]));
            } else if (static_cast<uint32_t>(k) < place.state_count()) {
                write_state(place, k, at, states[k]);
            }
        }
        const Words<N> params = weights.write(at, p);
        if (place.has_copy()) write_copy(place, at, p, params);
        if (place.has_ema()) write_ema(place, at, p);
        if (!CODED) continue;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < Rule::STATES; ++k) {
            if (static_cast<uint32_t>(k) < place.state_count()) {
                write_codes(place, k, Rule::SIGNED >> k & 1, at, states[k], maximum.largest(k));
            }
        }
        maximum.turn ^= 1;
    }
    return is_nonfinite(worst);
}

INSTEP_DEVICE void average_tile(const Place& place, float multiplier) {
#pragma unroll 1
    for (uint32_t at = 4 * threadIdx.x; at < place.count(); at += PER_ROUND<4>) {
        Four sum = place.gradients().read(at);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) sum.x[i] = canonical(sum.x[i] * multiplier);
        place.gradients().write(at, sum);
    }
}

/* Runs after all reads of the tile. Only this block reads the tile. */
INSTEP_DEVICE void zero_tile(const Place& place) {
    __syncthreads();
#pragma unroll 1
    for (uint32_t at = 4 * threadIdx.x; at < place.count(); at += PER_ROUND<4>) place.gradients().clear(at);
}

}  // namespace

#endif
