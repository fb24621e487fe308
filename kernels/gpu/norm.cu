/* The norm of a bucket on the GPU: a warp per leaf of 256 elements.
 *
 * A capped grid keeps the atomic additions few. This kernel never touches parameters and states, since the arguments
 * may hold none. */
#include "numeric/control.h"
#include "gpu/leaves.cuh"

namespace {

static_assert(INSTEP_QUANTUM * WARPS == INSTEP_TILE_ELEMENTS, "a full tile is one leaf per warp");

/* Both loads of a leaf come before the first conversion or shift. */
INSTEP_DEVICE void add_leaf(LeafSums& sums, const Run& gradients, uint32_t start) {
    const uint32_t at = start + 4 * (threadIdx.x % 32);
    const ShiftedWords a = gradients.load_shifted_at(at), b = gradients.load_shifted_at(at + 128);
    sums.add(gradients.values_of(gradients.shifted(a)), gradients.values_of(gradients.shifted(b)));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(INSTEP_GPU_THREADS, 4)
    instep_norm(const __grid_constant__ InstepStepArgs args) {
    __shared__ uint64_t limbs[WARPS][INSTEP_NORM_LIMBS];
    __shared__ uint32_t magnitudes[WARPS];
    __shared__ TileSlots tiles;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    LeafSums sums = {};
    TilePrefetch next = {args, tiles, blockIdx.x, 0};
#pragma unroll 1
    for (next.open(); next.has_tile(); next.advance()) {
        next.look_ahead();
        const TileSlot& slot = next.current();
        if (record_action(args, slot.record()) != INSTEP_ACTION_STEP) continue;
        const uint32_t count = slot.tile().count;
        Run gradients = {args.grads, slot.tile().grad_offset, args.grad_dtype, {count, false}};
        const bool is_full = count == INSTEP_TILE_ELEMENTS && gradients.is_aligned();
        if (is_full) {
            gradients.extent.is_full = true;
            add_leaf(sums, gradients, INSTEP_QUANTUM * warp);
        } else {
#pragma unroll 1
            for (uint32_t start = INSTEP_QUANTUM * warp; start < count; start += INSTEP_QUANTUM * WARPS) {
                add_leaf(sums, gradients, start);
            }
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
