/* The norm of a bucket on the GPU: a warp per leaf of 256 elements, in norm.h's order.
 *
 * Each lane keeps one limb of the exact sum in a register, so that nothing is added atomically but one value per limb
 * and block at the end; integers have no order, so no launch shape changes a bit. Capping the grid keeps those few.
 * Must leave parameters and states alone: the arguments may name none. */
#include "control.h"
#include "vector.cuh"

namespace {

constexpr uint32_t WARPS = INSTEP_GPU_THREADS / 32;
static_assert(INSTEP_NORM_LIMBS < 32, "a lane per limb, and one more thread for the magnitude");
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

}  // namespace

extern "C" __global__ void __launch_bounds__(INSTEP_GPU_THREADS, 4)
    instep_norm(const __grid_constant__ InstepStepArgs args) {
    __shared__ uint64_t limbs[WARPS][INSTEP_NORM_LIMBS];
    __shared__ uint32_t magnitudes[WARPS];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint64_t limb = 0;
    uint32_t worst = 0;
#pragma unroll 1
    for (uint64_t t = blockIdx.x; t < args.tile_count; t += gridDim.x) {
        const InstepTile& tile = args.tiles[t];
        if (segment_action(args, args.segments[tile.segment]) != INSTEP_ACTION_STEP) continue;
        const Run gradients = {args.grads, tile.grad_offset, args.grad_dtype, tile.count};
#pragma unroll 1
        for (uint32_t start = INSTEP_QUANTUM * warp; start < tile.count; start += INSTEP_QUANTUM * WARPS) {
            const Four a = gradients.read_shifted(start + 4 * lane),
                       b = gradients.read_shifted(start + 128 + 4 * lane);
            const uint32_t magnitude = largest_magnitude(a, b);
            const double sum = warp_leaf_sum(a, b);
            worst = magnitude > worst ? magnitude : worst;
            if (magnitude == 0 || magnitude >= INSTEP_F32_INFINITY_BITS) continue; /* the same in every lane */
            const LeafLimbs add = leaf_limbs(sum);
            const uint32_t part = lane - add.index; /* wraps to no part in lower lanes */
            limb += part == 0 ? add.part[0] : part == 1 ? add.part[1] : part == 2 ? add.part[2] : 0;
        }
    }
    if (lane < INSTEP_NORM_LIMBS) limbs[warp][lane] = limb;
    if (lane == 0) magnitudes[warp] = worst;
    __syncthreads();
    if (threadIdx.x < INSTEP_NORM_LIMBS) {
        uint64_t total = 0;
        for (uint32_t w = 0; w < WARPS; ++w) total += limbs[w][threadIdx.x];
        unsigned long long* target = reinterpret_cast<unsigned long long*>(&args.control->limbs[threadIdx.x]);
        if (total != 0) atomicAdd(target, static_cast<unsigned long long>(total));
    } else if (threadIdx.x == INSTEP_NORM_LIMBS) {
        for (uint32_t w = 0; w < WARPS; ++w) worst = magnitudes[w] > worst ? magnitudes[w] : worst;
        atomicMax(&args.control->max_abs_bits, stored_magnitude(worst));
        if (worst >= INSTEP_F32_INFINITY_BITS) atomicMin(&args.control->first_nonfinite_bucket, args.bucket);
    }
}
