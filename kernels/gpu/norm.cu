/* The norm of a bucket on the GPU: a warp per leaf of 256 elements.
 *
 * A capped grid keeps the atomic additions few. This kernel never touches parameters and states, since the arguments
 * may hold none. */
#include "numeric/control.h"
#include "gpu/leaves.cuh"

extern "C" __global__ void __launch_bounds__(INSTEP_GPU_THREADS, 4)
    instep_norm(const __grid_constant__ InstepStepArgs args) {
    __shared__ uint64_t limbs[WARPS][INSTEP_NORM_LIMBS];
    __shared__ uint32_t magnitudes[WARPS];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    LeafSums sums = {};
#pragma unroll 1
    for (uint64_t t = blockIdx.x; t < args.tile_count; t += gridDim.x) {
        const InstepTile& tile = args.tiles[t];
        if (record_action(args, args.records[tile.record]) != INSTEP_ACTION_STEP) continue;
        const Run gradients = {args.grads, tile.grad_offset, args.grad_dtype, tile.count};
#pragma unroll 1
        for (uint32_t start = INSTEP_QUANTUM * warp; start < tile.count; start += INSTEP_QUANTUM * WARPS) {
            const Four a = gradients.read_shifted(start + 4 * lane),
                       b = gradients.read_shifted(start + 128 + 4 * lane);
            sums.add(a, b);
        }
    }
    if (lane < INSTEP_NORM_LIMBS) limbs[warp][lane] = sums.limb;
    if (lane == 0) magnitudes[warp] = sums.worst;
    __syncthreads();
    if (threadIdx.x < INSTEP_NORM_LIMBS) {
        uint64_t total = 0;
        for (uint32_t w = 0; w < WARPS; ++w) total += limbs[w][threadIdx.x];
        add_limb(&args.control->limbs[threadIdx.x], total);
    } else if (threadIdx.x == INSTEP_NORM_LIMBS) {
        uint32_t worst = 0;
        for (uint32_t w = 0; w < WARPS; ++w) worst = magnitudes[w] > worst ? magnitudes[w] : worst;
        atomicMax(&args.control->max_abs_bits, stored_magnitude(worst));
        if (worst >= INSTEP_F32_INFINITY_BITS) atomicMin(&args.control->first_nonfinite_bucket, args.bucket);
    }
}
