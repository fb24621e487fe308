/* On a GPU, the two launches of a rule that is scaled by norms, for one tile; numeric/scaled.h describes them.
 *
 * A thread's four elements are in one half of a leaf, so two warps share a leaf. The warps exchange halves.
 * Then one sums parameters and the other sums changes. Every thread takes part in every round. The bits
 * equal those of cpu/scaled.h. */
#ifndef INSTEP_GPU_SCALED_CUH
#define INSTEP_GPU_SCALED_CUH

#include "gpu/leaves.cuh"
#include "gpu/maximum.cuh"
#include "numeric/control.h"
#include "numeric/scaled.h"
#include "gpu/streams.cuh"

namespace {

/* Shared memory. Two sets alternate, for the reason given at MaximumSlots. */
struct Exchange {
    float4 of_lane[2][WARPS][32];
    uint64_t limbs[WARPS][INSTEP_NORM_LIMBS];
    double norms[2][2];
};

/* The scale of the last parameter that a block stepped. The block's next tile usually belongs to the same parameter. */
struct LastScale {
    uint32_t record;
    float scale;
};

constexpr LastScale NO_SCALE = {0xffffffffu, 0.0f};

/* The values that a block keeps from tile to tile. */
struct SharedByTile {
    BlockMaximum maximum;
    Exchange* exchange; /* null unless norms scale the rule */
    LastScale last;
};

struct ScaledTile {
    const Place& place;
    Weights weights;
    SharedByTile& shared;

    INSTEP_DEVICE InstepNorms& norms() const { return place.args.norms[place.tile().record]; }
};

/* Stores the states. Afterwards `states` has the stored values. */
template <class Rule, bool CODED>
INSTEP_DEVICE void write_states(const Place& place, uint32_t at, Four* states, BlockMaximum& maximum) {
#pragma unroll
    for (uint32_t k = 0; k < Rule::STATES; ++k) {
        if (CODED) {
            maximum.offer(k, largest_magnitude(place, at, states[k]));
        } else {
            states[k] = write_state(place, k, at, states[k]);
        }
    }
    if (!CODED) return;
    __syncthreads();
#pragma unroll
    for (uint32_t k = 0; k < Rule::STATES; ++k) {
        states[k] = write_codes(place, k, Rule::SIGNED >> k & 1, at, states[k], maximum.largest(k));
    }
}

template <class Rule>
INSTEP_DEVICE float change_at(const typename Rule::Scalars& s, uint32_t flags, uint32_t i, const Four& p, const Four* states) {
    const float state[INSTEP_MAX_STATES] = {states[0].x[i], states[1].x[i], states[2].x[i]};
    return Rule::change(s, flags, p.x[i], state);
}

/* The whole block calls this. It sums the limbs of its warps and adds the totals to the norms. */
INSTEP_DEVICE void add_sums(LeafSums& sums, Exchange& exchange, InstepNorms& norms) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    sums.join();
    sums.put(exchange.limbs[warp]);
    const uint32_t worst = sums.largest_magnitude();
    __syncthreads();
    if (threadIdx.x < 2 * INSTEP_NORM_LIMBS) {
        const uint32_t which = threadIdx.x / INSTEP_NORM_LIMBS, limb = threadIdx.x % INSTEP_NORM_LIMBS;
        uint64_t total = 0;
        for (uint32_t w = which; w < WARPS; w += 2) total += exchange.limbs[w][limb];
        add_limb(&norms.limbs[which][limb], total);
    }
    if (lane == 0 && worst >= INSTEP_F32_INFINITY_BITS) {
        atomicMax(&norms.nonfinite[warp % 2], 1u);
    }
}

template <class Rule, bool CODED>
INSTEP_DEVICE uint32_t measure_tile(const ScaledTile& tile, float multiplier) {
    const Place& place = tile.place;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool sums_changes = warp % 2 == OF_CHANGE; /* and its elements are in the second half of the leaf */
    LeafSums sums = {};
    float worst = 0.0f;
    if (place.count() == 0) return 0; /* other warps may still read the last tile's limbs */
#pragma unroll 1
    for (uint32_t at = 4 * threadIdx.x; at < whole_rounds<4>(place); at += PER_ROUND<4>) {
        StoredWeights<4> stored = tile.weights.load_at<4>(at);
        Words<4> words[INSTEP_MAX_STATES] = {};
        load_states<Rule, CODED>(place, at, words);
        Words<4> gradients = load_gradients<4>(place, at); /* last: shifting misaligned gradients waits for loads */
        hold_back(stored, words, &gradients);
        const Four p = tile.weights.values_of(stored);
        Four states[INSTEP_MAX_STATES] = {}, change = {};
        state_values<Rule, CODED>(place, words, states);
        const Four sum = place.gradients().values_of(gradients);
        /* The scalars are read from shared memory in each round, to save registers. */
        const typename Rule::Scalars s = scalars_of<Rule>(place.record());
        const float factor = Rule::factor(s, multiplier);
        const uint32_t flags = Rule::flags(s);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            worst = larger_magnitude(worst, sum.x[i]);
            float state[INSTEP_MAX_STATES] = {states[0].x[i], states[1].x[i], states[2].x[i]};
            Rule::update(s, flags, p.x[i], sum.x[i] * factor, state);
#pragma unroll
            for (uint32_t k = 0; k < Rule::STATES; ++k) states[k].x[i] = canonical(state[k]);
        }
        write_states<Rule, CODED>(place, at, states, tile.shared.maximum);
        const typename Rule::Scalars again = scalars_of<Rule>(place.record());
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            if (place.has(at + i)) change.x[i] = change_at<Rule>(again, Rule::flags(again), i, p, states);
        }
        const Four given = sums_changes ? p : change, kept = sums_changes ? change : p;
        float4(&of_lane)[WARPS][32] = tile.shared.exchange->of_lane[tile.shared.maximum.turn];
        of_lane[warp][lane] = make_float4(given.x[0], given.x[1], given.x[2], given.x[3]);
        __syncthreads();
        const float4 got = of_lane[warp ^ 1][lane];
        sums.add(sums.of_lane(kept, Four{{got.x, got.y, got.z, got.w}})); /* a pair has the same sum in either order */
        tile.shared.maximum.turn ^= 1;
    }
    add_sums(sums, *tile.shared.exchange, tile.norms());
    return is_nonfinite(worst);
}

/* Returns the scale of a parameter. The whole block calls this. One warp reads each norm, one limb per lane. */
template <class Rule>
INSTEP_DEVICE float scale_of_tile(const ScaledTile& tile) {
    Exchange& exchange = *tile.shared.exchange;
    double* const norms = exchange.norms[tile.shared.maximum.turn];
    tile.shared.maximum.turn ^= 1;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < 2) {
        if (lane < INSTEP_NORM_LIMBS) exchange.limbs[warp][lane] = tile.norms().limbs[warp][lane];
        __syncwarp();
        if (lane == 0) norms[warp] = norm_of(exchange.limbs[warp], tile.norms().nonfinite[warp]);
    }
    __syncthreads();
    return step_scale<Rule>(scalars_of<Rule>(tile.place.record()), norms[OF_PARAM], norms[OF_CHANGE]);
}

template <class Rule, bool CODED>
INSTEP_DEVICE void apply_tile(const ScaledTile& tile) {
    const Place& place = tile.place;
    if (tile.shared.last.record != place.tile().record) {
        tile.shared.last = {place.tile().record, scale_of_tile<Rule>(tile)};
    }
    const float scale = tile.shared.last.scale;
#pragma unroll 1
    for (uint32_t at = 4 * threadIdx.x; at < place.count(); at += PER_ROUND<4>) {
        StoredWeights<4> stored = tile.weights.load_at<4>(at);
        Words<4> words[INSTEP_MAX_STATES] = {};
        load_states<Rule, CODED>(place, at, words);
        hold_back<4>(stored, words, nullptr);
        Four p = tile.weights.values_of(stored), states[INSTEP_MAX_STATES] = {};
        state_values<Rule, CODED>(place, words, states);
        const typename Rule::Scalars s = scalars_of<Rule>(place.record());
        const uint32_t flags = Rule::flags(s);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            p.x[i] = canonical(p.x[i] - scale * change_at<Rule>(s, flags, i, p, states));
        }
        const Words<4> params = tile.weights.write(at, p);
        if (place.has_copy()) write_copy(place, at, p, params);
        if (place.has_ema()) write_ema(place, at, p);
    }
}

}  // namespace

#endif
