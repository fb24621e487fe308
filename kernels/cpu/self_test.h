/* What a build must do, tried before its first use.
 *
 * Compiled with the flags of the build that it tests; must need nothing of the kernels but their arithmetic. */
#ifndef INSTEP_CPU_SELF_TEST_H
#define INSTEP_CPU_SELF_TEST_H

#include "numeric/math.h"

namespace {

/* Properties that flags can break without a macro to tell: contraction, subnormals, rounding to even. */
__attribute__((noinline)) uint32_t broken_property() {
    volatile float a = 1.0f + 0x1p-12f, negative_square = -(1.0f + 0x1p-11f);
    if (a * a + negative_square != 0.0f) return 1; /* a fused multiply-add would leave 2^-24 */
    volatile float tiny = 0x1p-126f, half = 0.5f;
    if (tiny * half != 0x1p-127f) return 2;
    volatile float one = 1.0f, tie = 0x1p-24f;
    if (one + tie != 1.0f || (one + 0x1p-23f) + tie != 1.0f + 0x1p-22f) return 3;
    volatile float two = 2.0f, three = 3.0f;
    if (bits_of(square_root(two)) != 0x3fb504f3u || bits_of(one / three) != 0x3eaaaaabu) return 4;
    return 0;
}

}  // namespace

#endif
