/* The memory traffic of a step with almost no arithmetic: the bandwidth limit that the benches compare a step with.
 *
 * arrays[0] is read, as a gradient is. Every other array is read and written in place, as parameters and states are.
 * It uses the same build, the same widths and the same memory as a step, so that the comparison is fair. */
#ifndef INSTEP_CPU_CEILING_H
#define INSTEP_CPU_CEILING_H

#include "numeric/math.h"

namespace {

/* With a factor of 0 and finite values every array keeps its values, so it can run between steps. */
template <int UPDATED>
__attribute__((noinline)) void ceiling_run(float* const* arrays, float factor, uint64_t first, uint64_t last) {
    const float* __restrict source = arrays[0];
    float* __restrict a = arrays[1];
    float* __restrict b = arrays[UPDATED > 1 ? 2 : 1];
    float* __restrict c = arrays[UPDATED > 2 ? 3 : 1];
    float* __restrict d = arrays[UPDATED > 3 ? 4 : 1];
    for (uint64_t i = first; i < last; ++i) {
        const float add = source[i] * factor;
        a[i] = a[i] + add;
        if constexpr (UPDATED > 1) b[i] = b[i] + add;
        if constexpr (UPDATED > 2) c[i] = c[i] + add;
        if constexpr (UPDATED > 3) d[i] = d[i] + add;
    }
}

INSTEP_INLINE void in_place_ceiling(float* const* arrays, uint64_t array_count, float factor, uint64_t first,
                                    uint64_t last) {
    switch (array_count) {
        case 2: return ceiling_run<1>(arrays, factor, first, last);
        case 3: return ceiling_run<2>(arrays, factor, first, last);
        case 4: return ceiling_run<3>(arrays, factor, first, last);
        case 5: return ceiling_run<4>(arrays, factor, first, last);
    }
}

}  // namespace

#endif
