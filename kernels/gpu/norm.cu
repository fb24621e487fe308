/* The norm of a bucket on the GPU. A warp takes four leaves of 256 elements at a time, or eight leaves of 16-bit
 * elements. In partial or misaligned tiles it takes one leaf.
 *
 * The grid is limited, so that there are few atomic additions. This kernel never touches parameters and states, because
 * the arguments may have none of them. */
#include "numeric/control.h"
#include "gpu/leaves.cuh"

namespace {

constexpr uint32_t LOADS = 8; /* loads of a lane in a round, 16 bytes each */

/* Reads a lane's elements of a leaf, if the aligned words around the elements are inside the run. All loads
 * come first, then all shifts. */
template <class T>
INSTEP_DEVICE void load_inside(const Run& gradients, const T* run, uint32_t at, Words<4>& first, Words<4>& second) {
    const uint32_t shift = misalignment<4>(run);
    const T* const aligned = run + (at - shift);
    constexpr auto words = words_at<4, T>;
    ShiftedWords<4> a = {words(aligned), words(aligned + 4), shift};
    ShiftedWords<4> b = {words(aligned + LEAF_HALF), words(aligned + LEAF_HALF + 4), shift};
    hold_back(a.low);
    hold_back(a.high);
    hold_back(b.low);
    hold_back(b.high);
    first = gradients.shifted(a);
    second = gradients.shifted(b);
}

/* Adds a leaf of any run. */
INSTEP_DEVICE void add_leaf(LeafSums& sums, const Run& gradients, uint32_t start) {
    const uint32_t at = start + 4 * (threadIdx.x % 32);
    const bool is_inside = start >= 4 && start + INSTEP_QUANTUM + 4 <= gradients.extent.count;
    Words<4> first, second;
    if (!is_inside) {
        first = gradients.load_at<4>(at);
        second = gradients.load_at<4>(at + LEAF_HALF);
    } else if (gradients.is_f32()) {
        load_inside(gradients, gradients.floats(), at, first, second);
    } else {
        load_inside(gradients, gradients.halves(), at, first, second);
    }
    sums.add(sums.of_lane(gradients.values_of(first), gradients.values_of(second)));
}

/* Adds full leaves of an aligned run; `dtype` is a constant at each inlined call. A lane loads pairs of parts. The two
 * parts have the same place in the two halves of a leaf. */
template <class T>
INSTEP_DEVICE void add_leaves(LeafSums& sums, const T* run, uint32_t count, uint32_t dtype) {
    constexpr uint32_t N = WIDEST / sizeof(T), PARTS = N / 4, LANES = LEAF_HALF / N; /* lanes that share a leaf */
    constexpr uint32_t OF_WARP = LOADS * N * 32, OF_PAIR = 2 * N * 32, TOGETHER = 4 / PARTS;
    static_assert(INSTEP_TILE_ELEMENTS % OF_WARP == 0, "full tiles are full rounds of a warp");
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const T* const first = run + lane / LANES * INSTEP_QUANTUM + lane % LANES * N;
#pragma unroll 1
    for (uint32_t start = OF_WARP * warp; start < count; start += OF_WARP * WARPS) {
        Words<N> words[LOADS];
#pragma unroll
        for (uint32_t i = 0; i < LOADS; ++i) {
            words[i] = words_at<N>(first + start + OF_PAIR * (i / 2) + LEAF_HALF * (i % 2));
        }
#pragma unroll
        for (uint32_t i = 0; i < LOADS; ++i) hold_back(words[i]);
        __syncwarp(); /* no load moves past this call */
        const Run typed = {nullptr, 0, dtype, {0, true}};
#pragma unroll
        for (uint32_t pair = 0; pair < LOADS / 2; pair += TOGETHER) {
            double of_lane[4];
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                const uint32_t k = 2 * (pair + i % TOGETHER);
                of_lane[i] = sums.of_lane(typed.values_of(words[k]), typed.values_of(words[k + 1]), 4 * (i / TOGETHER));
            }
            sums.add<N>(of_lane);
        }
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
            done = count;
            if (gradients.is_f32()) {
                add_leaves(sums, gradients.floats(), count, INSTEP_DTYPE_F32);
            } else if (args.grad_dtype == INSTEP_DTYPE_BF16) {
                add_leaves(sums, gradients.halves(), count, INSTEP_DTYPE_BF16);
            } else {
                add_leaves(sums, gradients.halves(), count, INSTEP_DTYPE_F16);
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
