/* Sums the leaves of an exact norm on the GPU, in the order of norm.h. A warp takes one or four leaves at a time.
 *
 * Lanes keep the limbs of their warp's sum in registers, so a block adds only one value per limb atomically. Integer
 * sums have no order, so no launch shape changes a bit. Whole warps call these functions. */
#ifndef INSTEP_GPU_LEAVES_CUH
#define INSTEP_GPU_LEAVES_CUH

#include "numeric/norm.h"
#include "gpu/prefetch.cuh"

namespace {

constexpr uint32_t LEAF_HALF = INSTEP_QUANTUM / 2; /* elements */

/* Adds up pairs of lanes that differ in the bit `half`. Lanes without the bit sum `a`, all other lanes sum `b`. */
INSTEP_DEVICE double halves_sum(double a, double b, uint32_t half) {
    const bool is_upper = threadIdx.x & half;
    const double kept = is_upper ? b : a, given = is_upper ? a : b;
    return kept + __shfl_xor_sync(0xffffffffu, given, half);
}

/* Returns the sum over each group of 2 * `half` lanes. */
INSTEP_DEVICE double lanes_sum(double sum, uint32_t half) {
#pragma unroll
    for (; half >= 1; half /= 2) sum = sum + __shfl_xor_sync(0xffffffffu, sum, half);
    return sum;
}

constexpr uint32_t LEAF_LANES = 8; /* lanes that keep a leaf's limbs while a warp sums four leaves */
constexpr uint32_t LIMBS_PER_LANE = (INSTEP_NORM_LIMBS + LEAF_LANES - 1) / LEAF_LANES;
static_assert(LEAF_LANES >= 3, "a limb of a leaf per lane");

/* The sums of a warp. */
struct LeafSums {
    uint64_t limb[LIMBS_PER_LANE]; /* lane % 8, lane % 8 + 8 and so on, of the sum of the lane's group of eight */
    float worst;                   /* the largest magnitude of a lane's elements */

    /* Returns the sum of the squares of four pairs, from element `first` on. `a` and `b` are a lane's elements in
     * the two halves of a leaf. */
    template <uint32_t N>
    INSTEP_DEVICE double of_lane(const Lane<N>& a, const Lane<N>& b, uint32_t first = 0) {
        double pair[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            worst = larger_magnitude(larger_magnitude(worst, a.x[first + i]), b.x[first + i]);
            pair[i] = pair_of(a.x[first + i], b.x[first + i]);
        }
        return lane_of(pair[0], pair[1], pair[2], pair[3]);
    }

    /* Adds one leaf. The first eight lanes keep its limbs. */
    INSTEP_DEVICE void add(double of_lane) { keep(lanes_sum(of_lane, 16), threadIdx.x % 32 < LEAF_LANES); }

    /* Adds four leaves, from four sums per lane. A lane passes on three sums, so a group of eight lanes ends with the
     * sum of one leaf. With N = 4 elements, a lane has one sum of each leaf. With N = 8, lanes 0-15 have two sums of
     * each of two leaves, ordered by leaf and then by part. The other lanes have sums of the other two leaves. */
    template <uint32_t N>
    INSTEP_DEVICE void add(const double (&of_lane)[4]) {
        constexpr uint32_t HALF = LEAF_HALF / N / 2; /* half the lanes that share a leaf */
        const double a = halves_sum(of_lane[0], of_lane[1], HALF), b = halves_sum(of_lane[2], of_lane[3], HALF);
        const double sum = lanes_sum(halves_sum(a, b, HALF / 2), HALF / 4);
        keep(N == 4 ? sum : sum + __shfl_xor_sync(0xffffffffu, sum, HALF / 2), true);
    }

    /* Adds up the limbs of the warp's four groups of eight lanes. Every group then has the sum. */
    INSTEP_DEVICE void join() {
#pragma unroll
        for (uint32_t k = 0; k < LIMBS_PER_LANE; ++k) {
            limb[k] += __shfl_xor_sync(0xffffffffu, limb[k], 8);
            limb[k] += __shfl_xor_sync(0xffffffffu, limb[k], 16);
        }
    }

    /* Writes the limbs; called after `join`. */
    INSTEP_DEVICE void put(uint64_t* limbs) const {
#pragma unroll
        for (uint32_t k = 0; k < LIMBS_PER_LANE; ++k) {
            const uint32_t number = threadIdx.x % 32 + LEAF_LANES * k;
            if (threadIdx.x % 32 < LEAF_LANES && number < INSTEP_NORM_LIMBS) limbs[number] = limb[k];
        }
    }

    INSTEP_DEVICE uint32_t largest_magnitude() const { return __reduce_max_sync(0xffffffffu, bits_of(worst)); }

  private:
    /* Adds only positive finite sums. A sum is zero only if all elements are zeros, because no square underflows. */
    INSTEP_DEVICE void keep(double sum, bool takes) {
        const bool is_added = takes & (sum > 0.0) & (sum < double_of(0x7ff0000000000000ull));
        const LeafLimbs leaf = leaf_limbs(sum);
        const uint32_t part = (threadIdx.x - leaf.index) % LEAF_LANES;
        const uint64_t mine = part == 0 ? leaf.part[0] : part == 1 ? leaf.part[1] : part == 2 ? leaf.part[2] : 0;
        const uint32_t turn = (leaf.index + part) / LEAF_LANES;
#pragma unroll
        for (uint32_t k = 0; k < LIMBS_PER_LANE; ++k) limb[k] += is_added && turn == k ? mine : 0;
    }
};

INSTEP_DEVICE void add_limb(uint64_t* target, uint64_t total) {
    if (total == 0) return;
    atomicAdd(reinterpret_cast<unsigned long long*>(target), static_cast<unsigned long long>(total));
}

}  // namespace

#endif
