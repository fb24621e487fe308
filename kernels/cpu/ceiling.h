/* The memory traffic of a step with almost no arithmetic. The benches compare the speed of a step with this limit.
 *
 * arrays[0] is read like a gradient. Every other array is read and written in place, like parameters and states. The
 * comparison is fair, because build, vector widths, memory, and order of loads and stores are those of a step. */
#ifndef INSTEP_CPU_CEILING_H
#define INSTEP_CPU_CEILING_H

#include "cpu/loops.h"

namespace {

/* Runs one round. All loads come before the first store, because a store delays later loads from addresses
 * with the same low 12 bits. */
template <int UPDATED>
INSTEP_INLINE void ceiling_round(uint64_t count, float factor, const float* __restrict source, float* __restrict a,
                                 float* __restrict b, float* __restrict c, float* __restrict d) {
#pragma GCC unroll 1 /* compilers do not vectorise sixteen copies of a short body */
    for (uint64_t i = 0; i < count; ++i) {
        const float add = source[i] * factor, first = a[i] + add;
        const float second = UPDATED > 1 ? b[i] + add : 0.0f;
        const float third = UPDATED > 2 ? c[i] + add : 0.0f;
        const float fourth = UPDATED > 3 ? d[i] + add : 0.0f;
        a[i] = first;
        if constexpr (UPDATED > 1) b[i] = second;
        if constexpr (UPDATED > 2) c[i] = third;
        if constexpr (UPDATED > 3) d[i] = fourth;
    }
}

/* With a factor of 0, every array keeps its values if they are finite. The loop can then run between steps. */
template <int UPDATED>
__attribute__((noinline)) void ceiling_run(float* const* arrays, float factor, uint64_t first, uint64_t last,
                                           uint64_t ahead_bytes) {
    const float* const source = arrays[0];
    float* const a = arrays[1];
    float* const b = UPDATED > 1 ? arrays[2] : nullptr;
    float* const c = UPDATED > 2 ? arrays[3] : nullptr;
    float* const d = UPDATED > 3 ? arrays[4] : nullptr;
    uint64_t i = first;
    for (; i + LANES <= last; i += LANES) {
        if (ahead_bytes) {
            prefetch(source + i, ahead_bytes);
            prefetch(a + i, ahead_bytes);
            if constexpr (UPDATED > 1) prefetch(b + i, ahead_bytes);
            if constexpr (UPDATED > 2) prefetch(c + i, ahead_bytes);
            if constexpr (UPDATED > 3) prefetch(d + i, ahead_bytes);
        }
        ceiling_round<UPDATED>(LANES, factor, source + i, a + i, from(b, i), from(c, i), from(d, i));
    }
    for (; i < last; ++i) ceiling_round<UPDATED>(1, factor, source + i, a + i, from(b, i), from(c, i), from(d, i));
}

INSTEP_INLINE void in_place_ceiling(float* const* arrays, uint64_t array_count, float factor, uint64_t first,
                                    uint64_t last, uint64_t ahead_bytes) {
    switch (array_count) {
        case 2: return ceiling_run<1>(arrays, factor, first, last, ahead_bytes);
        case 3: return ceiling_run<2>(arrays, factor, first, last, ahead_bytes);
        case 4: return ceiling_run<3>(arrays, factor, first, last, ahead_bytes);
        case 5: return ceiling_run<4>(arrays, factor, first, last, ahead_bytes);
    }
}

}  // namespace

#endif
