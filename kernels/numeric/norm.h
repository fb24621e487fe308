/* A sum of squares with bits that do not depend on how the work is divided.
 *
 * A leaf is 256 consecutive elements of one parameter. The first element's number in the parameter is a multiple of
 * 256. A leaf's squares are exact in f64, and are summed in one fixed order. Leaf sums are then added as integers.
 * Integer addition has no order, so the bits are the same for any bucket cap, launch shape, thread count, atomics order
 * or rank count. Limb k of the accumulator weighs 2^(32k - 352). The idea is Kulisch's long accumulator, kept sparse
 * (three limbs per addition). No leaf is ever split: tiles and shards are multiples of 256 elements of a parameter. */
#ifndef INSTEP_NUMERIC_NORM_H
#define INSTEP_NUMERIC_NORM_H

#include "numeric/math.h"

namespace {

/* A leaf sum as three limbs, which are added from limb `index` on. */
struct LeafLimbs {
    uint32_t index;
    uint64_t part[3];
};

/* `sum` is finite and positive: at least the square of a subnormal (2^-298), at most 2^264. */
INSTEP_INLINE LeafLimbs leaf_limbs(double sum) {
    const uint64_t bits = bits_of(sum);
    const uint64_t mantissa = (bits & 0xfffffffffffffull) | 0x10000000000000ull;
    const uint32_t shift = static_cast<uint32_t>(bits >> 52) - 723; /* exponent field - 1075 + 352 */
    const uint32_t within = shift % 32;
    const uint64_t low = mantissa << within;
    const uint64_t high = within ? mantissa >> (64 - within) : 0;
    LeafLimbs limbs = {shift / 32, {low & 0xffffffffull, low >> 32, high}};
    return limbs;
}

/* Returns the accumulator, rounded once to f64. The loop carries from the lowest limb up. It keeps the highest nonzero
 * digit so far, the two digits below it, and whether any lower digit is nonzero. An array of digits would not be in
 * registers on a GPU. */
INSTEP_INLINE double limbs_value(const uint64_t* limbs) {
    uint64_t carry = 0, lower = 0, low = 0, middle = 0, high = 0; /* the last three digits, and the bits below them */
    uint64_t top = 0, below = 0, sticky = 0;                      /* the same at the highest nonzero digit so far */
    int top_index = 0;
    for (int k = 0; k < INSTEP_NORM_LIMBS + 2; ++k) {
        const uint64_t limb = k < INSTEP_NORM_LIMBS ? limbs[k] : 0;
        const uint64_t sum = (limb & 0xffffffffull) + (carry & 0xffffffffull); /* limb + carry could wrap */
        carry = (limb >> 32) + (carry >> 32) + (sum >> 32);
        lower |= low;
        low = middle;
        middle = high;
        high = sum & 0xffffffffull;
        if (high == 0) continue;
        top = high;
        below = middle << 32 | low;
        sticky = lower;
        top_index = k;
    }
    if (top == 0) return 0.0;
    int zeros = 0; /* leading zeros of the top digit */
    while (!(top >> (31 - zeros) & 1)) ++zeros;
    sticky |= below << (32 + zeros);
    const uint64_t head = top << (32 + zeros) | below >> (32 - zeros);
    const int exponent = 32 * (top_index - 1) - 352 - zeros; /* weight of head's lowest bit */
    return static_cast<double>(head | (sticky != 0)) * double_of(static_cast<uint64_t>(exponent + 1023) << 52);
}

/* Returns the norm of the elements that were added; `worst` is their largest magnitude. */
INSTEP_INLINE double norm_value(const uint64_t* limbs, uint32_t worst) {
    if (worst > INSTEP_F32_INFINITY_BITS) return double_of(0x7ff8000000000000ull);
    if (worst == INSTEP_F32_INFINITY_BITS) return double_of(0x7ff0000000000000ull);
    return square_root(limbs_value(limbs));
}

/* Returns the largest magnitude to store. All NaNs become one NaN, because a GPU drops their payload when it widens
 * f16. */
INSTEP_INLINE uint32_t stored_magnitude(uint32_t worst) {
    return worst > INSTEP_F32_INFINITY_BITS ? 0x7fffffffu : worst;
}

/* The order of a leaf's sum. Elements j and 128 + j make a pair, and each of 32 lanes adds four pairs. One half of the
 * lanes is then added to the other, until one is left. A warp needs two loads of four elements per lane and five
 * shuffles. cpu/squares.h has this order in vectors. */
INSTEP_INLINE double pair_of(double a, double b) {
#if defined(__CUDA_ARCH__)
    return __fma_rn(a, a, b * b); /* saves an operation; same bits, because the square of an f32 is exact */
#else
    return a * a + b * b;
#endif
}

INSTEP_INLINE double lane_of(double t0, double t1, double t2, double t3) { return (t0 + t2) + (t1 + t3); }

}  // namespace

#endif
