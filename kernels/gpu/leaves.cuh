/* Leaves of an exact norm on the GPU, one warp per leaf, in the order that norm.h defines.
 *
 * Each lane keeps one limb of its warp's sum in a register, so only one value per limb is added atomically at the end.
 * Integer sums have no order, so no launch shape changes a bit. Whole warps call these functions. */
#ifndef INSTEP_GPU_LEAVES_CUH
#define INSTEP_GPU_LEAVES_CUH

#include "numeric/norm.h"
#include "gpu/prefetch.cuh"

namespace {

static_assert(INSTEP_NORM_LIMBS < 32, "a lane per limb");
static_assert(INSTEP_QUANTUM == 256, "a leaf is two fours per lane");

/* The sum of a leaf, in every lane. */
INSTEP_DEVICE double warp_leaf_sum(const Four& a, const Four& b) {
    double pair[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) pair[i] = pair_of(a.x[i], b.x[i]);
    double sum = lane_of(pair[0], pair[1], pair[2], pair[3]);
#pragma unroll
    for (uint32_t half = 16; half >= 1; half /= 2) sum = sum + __shfl_xor_sync(0xffffffffu, sum, half);
    return sum;
}

INSTEP_DEVICE uint32_t largest_magnitude(const Four& a, const Four& b) {
    int32_t worst = 0;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
        const int32_t bits = magnitude_bits(i < 4 ? a.x[i] : b.x[i - 4]);
        worst = bits > worst ? bits : worst;
    }
    return __reduce_max_sync(0xffffffffu, static_cast<uint32_t>(worst));
}

/* Sums of a warp: this lane's limb, and in every lane the largest magnitude. */
struct LeafSums {
    uint64_t limb;
    uint32_t worst;

    /* Elements 4 * lane.. of the first half of a leaf, and of the second. */
    INSTEP_DEVICE void add(const Four& a, const Four& b) {
        const uint32_t magnitude = largest_magnitude(a, b);
        const double sum = warp_leaf_sum(a, b);
        worst = magnitude > worst ? magnitude : worst;
        if (magnitude == 0 || magnitude >= INSTEP_F32_INFINITY_BITS) return; /* the same in every lane */
        const LeafLimbs leaf = leaf_limbs(sum);
        const uint32_t part = threadIdx.x % 32 - leaf.index; /* wraps to no part in lower lanes */
        limb += part == 0 ? leaf.part[0] : part == 1 ? leaf.part[1] : part == 2 ? leaf.part[2] : 0;
    }
};

INSTEP_DEVICE void add_limb(uint64_t* target, uint64_t total) {
    if (total == 0) return;
    atomicAdd(reinterpret_cast<unsigned long long*>(target), static_cast<unsigned long long>(total));
}

}  // namespace

#endif
