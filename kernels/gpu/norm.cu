/* The norm of a bucket on the GPU: a warp takes four leaves of 256 elements at a time, or one.
 *
 * A capped grid keeps the atomic additions few. This kernel never touches parameters and states, since the arguments
 * may hold none. */
#include "numeric/control.h"
#include "gpu/leaves.cuh"

namespace {

static_assert(INSTEP_TILE_ELEMENTS % 1024 == 0, "full tiles are full rounds of a warp");

constexpr uint32_t LEAVES = 4; /* of a warp in a round */

/* What a lane has of a leaf that whole aligned words around it keep inside the run: all loads, then all shifts. */
template <class T>
INSTEP_DEVICE void load_inside(const Run& gradients, const T* run, uint32_t at, Words& first, Words& second) {
    const uint32_t shift = misalignment(run, sizeof(T));
    const T* const aligned = run + (at - shift);
    ShiftedWords a = {words_at(aligned), words_at(aligned + 4), shift};
    ShiftedWords b = {words_at(aligned + 128), words_at(aligned + 132), shift};
    hold_back(a.low);
    hold_back(a.high);
    hold_back(b.low);
    hold_back(b.high);
    first = gradients.shifted(a);
    second = gradients.shifted(b);
}

/* A leaf of any run. */
INSTEP_DEVICE void add_leaf(LeafSums& sums, const Run& gradients, uint32_t start) {
    const uint32_t at = start + 4 * (threadIdx.x % 32);
    const bool is_inside = start >= 4 && start + INSTEP_QUANTUM + 4 <= gradients.extent.count;
    Words first, second;
    if (!is_inside) {
        first = gradients.load_at(at);
        second = gradients.load_at(at + 128);
    } else if (gradients.is_f32()) {
        load_inside(gradients, gradients.floats(), at, first, second);
    } else {
        load_inside(gradients, gradients.halves(), at, first, second);
    }
    sums.add(sums.of_lane(gradients.values_of(first), gradients.values_of(second)));
}

/* Full leaves of an aligned run; `dtype` is a constant where this is inlined. */
template <class T>
INSTEP_DEVICE void add_leaves(LeafSums& sums, const T* run, uint32_t count, uint32_t dtype) {
    constexpr uint32_t PER_ROUND = LEAVES * INSTEP_QUANTUM;
    const uint32_t first = PER_ROUND * (threadIdx.x / 32), lane = 4 * (threadIdx.x % 32);
#pragma unroll 1
    for (uint32_t start = first; start + PER_ROUND <= count; start += PER_ROUND * WARPS) {
        Words words[2 * LEAVES];
#pragma unroll
        for (uint32_t i = 0; i < 2 * LEAVES; ++i) words[i] = words_at(run + (start + lane) + 128 * i);
#pragma unroll
        for (uint32_t i = 0; i < 2 * LEAVES; ++i) hold_back(words[i]);
        __syncwarp(); /* no load moves past it */
        double of_lane[LEAVES];
#pragma unroll
        for (uint32_t i = 0; i < LEAVES; ++i) {
            const Run typed = {nullptr, 0, dtype, {0, true}};
            of_lane[i] = sums.of_lane(typed.values_of(words[2 * i]), typed.values_of(words[2 * i + 1]));
        }
        sums.add(of_lane);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(INSTEP_GPU_THREADS, 4)
    instep_norm(const __grid_constant__ InstepStepArgs args) {
    __shared__ uint64_t limbs[WARPS][INSTEP_NORM_LIMBS];
    __shared__ uint32_t magnitudes[WARPS];
    __shared__ TileSlots tiles[WARPS];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    LeafSums sums = {};
    TilePrefetch next = {args, nullptr, tiles[warp]};
    next.ask();
#pragma unroll 1
    for (bool has_run = next.open(); has_run; has_run = next.advance()) {
        next.look_ahead();
        const TileSlot& slot = next.current();
        if (record_action(args, slot.record()) != INSTEP_ACTION_STEP) continue;
        const uint32_t count = slot.count;
        Run gradients = {args.grads, slot.tile().grad_offset, args.grad_dtype, {count, false}};
        uint32_t done = 0;
        if (slot.tile().count == INSTEP_TILE_ELEMENTS && gradients.is_aligned()) {
            if (gradients.is_f32()) {
                add_leaves(sums, gradients.floats(), count, INSTEP_DTYPE_F32);
                done = count;
            } else if (args.grad_dtype == INSTEP_DTYPE_BF16) {
                add_leaves(sums, gradients.halves(), count, INSTEP_DTYPE_BF16);
                done = count;
            }
        }
#pragma unroll 1
        for (uint32_t start = done + INSTEP_QUANTUM * warp; start < count; start += INSTEP_QUANTUM * WARPS) {
            add_leaf(sums, gradients, start);
        }
    }
    sums.join();
    sums.put(limbs[warp]);
    const uint32_t magnitude = sums.largest_magnitude();
    if (lane == 0) magnitudes[warp] = magnitude;
    __syncthreads();
    if (threadIdx.x < INSTEP_NORM_LIMBS) {
        uint64_t total = 0;
        for (uint32_t w = 0; w < WARPS; ++w) total += limbs[w][threadIdx.x];
        add_limb(&args.control->limbs[threadIdx.x], total);
    } else if (threadIdx.x == INSTEP_NORM_LIMBS) {
        uint32_t worst = 0;
        for (uint32_t w = 0; w < WARPS; ++w) worst = magnitudes[w] > worst ? magnitudes[w] : worst;
        atomicMax(&args.control->max_abs_bits, stored_magnitude(worst));
        if (has_nonfinite_mean(args, args.tiles[0], worst)) atomicMin(&args.control->first_nonfinite_bucket, args.bucket);
    }
}
