/* Finds the largest magnitude of each block of 256 elements, which is the scale of its 8-bit states. Two
 * warps share a block of elements.
 *
 * Every thread calls `offer` and then `largest`, with one barrier between the two calls. */
#ifndef INSTEP_GPU_MAXIMUM_CUH
#define INSTEP_GPU_MAXIMUM_CUH

#include "gpu/vector.cuh"

namespace {

/* The largest magnitude of each warp, per state. */
using Slots = uint32_t[INSTEP_MAX_STATES][INSTEP_GPU_THREADS / 32];

/* Shared memory. Two sets alternate, so one barrier per round is enough. A thread writes to a set again only after the
 * next round's barrier, and every thread has read the set before that barrier. */
struct MaximumSlots {
    Slots sets[2];
};

struct BlockMaximum {
    MaximumSlots* slots;
    uint32_t turn;

    INSTEP_DEVICE void offer(uint32_t k, uint32_t magnitude) const {
        const uint32_t of_warp = __reduce_max_sync(0xffffffffu, magnitude);
        if (threadIdx.x % 32 == 0) slots->sets[turn][k][threadIdx.x / 32] = of_warp;
    }

    INSTEP_DEVICE uint32_t largest(uint32_t k) const {
        const uint32_t pair = threadIdx.x / 64 * 2, a = slots->sets[turn][k][pair], b = slots->sets[turn][k][pair + 1];
        return a > b ? a : b;
    }
};

}  // namespace

#endif
