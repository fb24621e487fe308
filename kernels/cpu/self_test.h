/* Checks of a build's arithmetic, run before its first use.
 *
 * The checks are compiled with the flags of the build that they test, and depend only on the kernels' arithmetic. */
#ifndef INSTEP_CPU_SELF_TEST_H
#define INSTEP_CPU_SELF_TEST_H

#include "cpu/coding.h"

namespace {

INSTEP_INLINE bool has_thresholds() {
#if INSTEP_HAS_VECTORS
    return has_thresholds_of_the_roots();
#else
    return true;
#endif
}

/* Flags can turn on contraction, flush subnormals or change rounding, and no macro reports it. The last property
 * depends on the processor: codes from its rough roots must equal codes from exact roots. */
__attribute__((noinline)) uint32_t broken_property() {
    volatile float a = 1.0f + 0x1p-12f, negative_square = -(1.0f + 0x1p-11f);
    if (a * a + negative_square != 0.0f) return 1; /* a fused multiply-add would give 2^-24 */
    volatile float tiny = 0x1p-126f, half = 0.5f;
    if (tiny * half != 0x1p-127f) return 2;
    volatile float one = 1.0f, tie = 0x1p-24f;
    if (one + tie != 1.0f || (one + 0x1p-23f) + tie != 1.0f + 0x1p-22f) return 3;
    volatile float two = 2.0f, three = 3.0f;
    if (bits_of(square_root(two)) != 0x3fb504f3u || bits_of(one / three) != 0x3eaaaaabu) return 4;
    if (!has_thresholds()) return 5;
    return 0;
}

}  // namespace

#endif
