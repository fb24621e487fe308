/* Leaves of an exact norm on the GPU, one or four per warp at a time, in the order that norm.h defines.
 *
 * Lanes keep the limbs of their warp's sum in registers, so only one value per limb is added atomically at the end.
 * Integer sums have no order, so no launch shape changes a bit. Whole warps call these functions. */
#ifndef INSTEP_GPU_LEAVES_CUH
#define INSTEP_GPU_LEAVES_CUH

#include "numeric/norm.h"
#include "gpu/prefetch.cuh"

namespace {

static_assert(INSTEP_QUANTUM == 256, "a leaf is two fours per lane");

/* The larger of a magnitude and that of `y`; a NaN if one of them is. */
INSTEP_DEVICE float larger_magnitude(float magnitude, float y) {
#if defined(__CUDA_ARCH__)
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(magnitude), "f"(fabsf(y)));
    return larger;
#else
    const uint32_t a = bits_of(magnitude), b = static_cast<uint32_t>(magnitude_bits(y));
    return float_of(a > b ? a : b);
#endif
}

/* Adds what the other half of the lanes has of this lane's leaf: `a` is summed in lanes without the bit `half`, `b` in
 * the others. */
INSTEP_DEVICE double halves_sum(double a, double b, uint32_t half) {
    const bool is_upper = threadIdx.x & half;
    const double kept = is_upper ? b : a, given = is_upper ? a : b;
    return kept + __shfl_xor_sync(0xffffffffu, given, half);
}

/* Adds up over groups of 2 * `half` lanes. */
INSTEP_DEVICE double lanes_sum(double sum, uint32_t half) {
#pragma unroll
    for (; half >= 1; half /= 2) sum = sum + __shfl_xor_sync(0xffffffffu, sum, half);
    return sum;
}

constexpr uint32_t LEAF_LANES = 8; /* that keep a leaf's limbs, while a warp sums four leaves */
constexpr uint32_t LIMBS_PER_LANE = (INSTEP_NORM_LIMBS + LEAF_LANES - 1) / LEAF_LANES;
static_assert(LEAF_LANES >= 3, "a limb of a leaf per lane");

/* Sums of a warp. */
struct LeafSums {
    uint64_t limb[LIMBS_PER_LANE]; /* every eighth, from lane % 8 on; each eight lanes have their own */
    float worst;                   /* the largest magnitude of a lane's elements */

    /* This lane's sum of squares of a leaf. `a` and `b` are elements 4 * lane to 4 * lane + 3 of its two halves. */
    INSTEP_DEVICE double of_lane(const Four& a, const Four& b) {
        double pair[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            worst = larger_magnitude(larger_magnitude(worst, a.x[i]), b.x[i]);
            pair[i] = pair_of(a.x[i], b.x[i]);
        }
        return lane_of(pair[0], pair[1], pair[2], pair[3]);
    }

    /* One leaf, kept by the first eight lanes. */
    INSTEP_DEVICE void add(double of_lane) { keep(lanes_sum(of_lane, 16), threadIdx.x % 32 < LEAF_LANES); }

    /* Four leaves. A lane gives away three of its parts, so that each eight lanes end with one leaf. */
    INSTEP_DEVICE void add(const double (&of_lane)[4]) {
        const double a = halves_sum(of_lane[0], of_lane[1], 16), b = halves_sum(of_lane[2], of_lane[3], 16);
        keep(lanes_sum(halves_sum(a, b, 8), 4), true);
    }

    /* Limbs lane, lane + 8.. of the whole warp's sum. */
    INSTEP_DEVICE void join() {
#pragma unroll
        for (uint32_t k = 0; k < LIMBS_PER_LANE; ++k) {
            limb[k] += __shfl_xor_sync(0xffffffffu, limb[k], 8);
            limb[k] += __shfl_xor_sync(0xffffffffu, limb[k], 16);
        }
    }

    /* After `join`. */
    INSTEP_DEVICE void put(uint64_t* limbs) const {
#pragma unroll
        for (uint32_t k = 0; k < LIMBS_PER_LANE; ++k) {
            const uint32_t number = threadIdx.x % 32 + LEAF_LANES * k;
            if (threadIdx.x % 32 < LEAF_LANES && number < INSTEP_NORM_LIMBS) limbs[number] = limb[k];
        }
    }

    INSTEP_DEVICE uint32_t largest_magnitude() const { return __reduce_max_sync(0xffffffffu, bits_of(worst)); }

  private:
    /* The square of any element above zero is above zero, so a sum of zero or one that is not finite adds nothing. */
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
