/* Optimizer states in 8 bits: a code per element, and a scale per block of 256 elements of a parameter.
 *
 *     scale = largest |x| of the block
 *     x = sign(c) * (c / 127)^2 * scale         c in -127..127, for states of either sign
 *     x = (c / 255)^4 * scale                   c in 0..255, for states that are never negative
 *
 * Values are powers of codes. They need no table, only + x / and root, which have the same bits everywhere. Powers also
 * give small values a finer grid. Without this finer grid, a second moment below 1/65025 of its block's largest would
 * be zero, and the step would divide by eps alone. For the same reason an unsigned value above zero never gets the code
 * 0. An update of less than half a code does not change a moving average, unless rounding is stochastic. The error of
 * rounding to the nearest code is at most (2 sqrt(x/scale) h + h^2) scale for signed codes, with h = 1/254. For
 * unsigned codes it is about 4 (x/scale)^(3/4) h scale, with h = 1/510; see tests/precision/eight_bit.rs. The largest
 * element is kept exactly, so decoding and encoding again gives the same codes.
 *
 * If a block has a NaN or an infinity, all its elements become NaN, so that the fault shows. If its largest magnitude
 * is below 2^-90, the block becomes zero: its codes could otherwise stand for subnormals. Dettmers et al., "8-bit
 * Optimizers via Block-wise Quantization", ICLR 2022; square-root companding: Ortiz et al., "FlashOptim", 2026. */
#ifndef INSTEP_NUMERIC_CODES_H
#define INSTEP_NUMERIC_CODES_H

#include "numeric/math.h"

namespace {

constexpr float SMALLEST_SCALE = 0x1p-90f;

/* Returns the scale of a block, from its largest magnitude_bits. */
INSTEP_INLINE float block_scale(uint32_t largest_magnitude) {
    const float scale = canonical(float_of(largest_magnitude));
    const bool is_finite = largest_magnitude < INSTEP_F32_INFINITY_BITS;
    return !is_finite ? float_of(0x7fffffffu) : scale < SMALLEST_SCALE ? 0.0f : scale;
}

/* Returns whether a block with this scale has codes. */
INSTEP_INLINE bool is_coded(float scale) { return scale >= SMALLEST_SCALE; }

/* The functions below take one value as float and uint32_t, or a vector of such values (cpu/vectors.h). */

/* Returns the integer nearest to x, ties to even, for 0 <= x < 2^22. The sum has no bits for a fraction. */
template <class F>
INSTEP_INLINE auto nearest_integer(F x) { return bits_of(x + 12582912.0f) - 0x4b400000u; }

/* Returns the same integer as a float. */
template <class F>
INSTEP_INLINE F nearest_whole(F x) { return (x + 12582912.0f) - 12582912.0f; }

/* Returns the largest whole number that is not above x. If x is a whole number, the result may be the next one
 * below. */
template <class F>
INSTEP_INLINE F whole_below(F x) { return nearest_whole(x < 0.5f ? F{} : x - 0.5f); }

template <class F>
INSTEP_INLINE F squared(F x) { return x * x; }
template <class F>
INSTEP_INLINE F to_the_fourth(F x) { return squared(squared(x)); }
INSTEP_INLINE float real(uint32_t code) { return static_cast<float>(static_cast<int32_t>(code)); }

/* Returns the factor that turns values into powers of codes. (127^2 / scale) x is the square of a signed code. (16^4 /
 * scale) x is the fourth power of 16/255 times an unsigned code. Every factor is a normal number. */
INSTEP_INLINE float coding_factor(bool is_signed, float scale) { return (is_signed ? 16129.0f : 65536.0f) / scale; }

/* Returns the power of a code that may have a fraction. */
template <class F>
INSTEP_INLINE F power_of(bool is_signed, F code) { return is_signed ? squared(code) : to_the_fourth(code * 0x1.010102p-4f); }

/* Returns a code with a fraction, from its power. */
template <class F>
INSTEP_INLINE F root_of(bool is_signed, F power) {
    return is_signed ? square_root(power) : square_root(square_root(power)) * 15.9375f;
}

/* Exact roots are slow. If an approximate root costs less, it selects the threshold next to a value. The threshold
 * below a code is the code less 1/2. A few products give the threshold's power, and comparing it with the value's power
 * gives the code. code_of rounds its roots, so its code may change up to BELOW units in the last place below a
 * threshold's power, or up to ABOVE units above it. Exact roots decide for powers in this range. All codes then equal
 * those of code_of, if the error of the approximate root is less than half a code. */
constexpr uint32_t BELOW = 9, ABOVE = 5;

/* Returns a word with its top bit set if the power is at least that of the threshold. The word is at least FIRST_CLOSE
 * if only exact roots can decide. */
template <class F>
INSTEP_INLINE auto distance_to(F threshold_power, F power) { return bits_of(threshold_power) - (bits_of(power) + (BELOW + 1)); }

constexpr uint32_t FIRST_CLOSE = 0u - (BELOW + ABOVE);

/* Returns whether to take the code above instead of the code below. The probability is the position of `power` between
 * their powers, so the draws have the mean `power`. `unit` is the 65536th part of the distance between these powers. For
 * signed codes it is exact: (c + 1)^2 - c^2 = 2c + 1. */
template <class F, class U>
INSTEP_INLINE auto draws_above(bool is_signed, F power, F below, U random) {
    const F low = power_of(is_signed, below);
    const F unit = is_signed ? below * 0x1p-15f + 0x1p-16f : (power_of(is_signed, below + 1.0f) - low) * 0x1p-16f;
    return power - low > real(random) * unit;
}

template <class F, class U>
INSTEP_INLINE F drawn(bool is_signed, F power, F below, U random) {
    return draws_above(is_signed, power, below, random) ? below + 1.0f : below;
}

/* The largest element of a block always gets the largest code, and no element gets a larger code. `random` has 16 bits
 * and is used only if rounding is stochastic. */
template <class F, class U>
INSTEP_INLINE U code_of(bool is_signed, F size, float scale, float factor, bool stochastic, U random) {
    const F power = size * factor, root = root_of(is_signed, power);
    const U most = U{} + (is_signed ? 127u : 255u);
    const U code = nearest_integer(stochastic ? drawn(is_signed, power, whole_below(root), random) : root);
    return ((size == scale) | (code > most)) ? most : code; /* no branch */
}

template <class F, class U>
INSTEP_INLINE U signed_code(F x, float scale, float factor, bool stochastic, U random) {
    const U code = code_of(true, magnitude(x), scale, factor, stochastic, random);
    return bits_of(x) >> 31 ? 0u - code : code;
}

template <class F, class U>
INSTEP_INLINE U unsigned_code(F x, float scale, float factor, bool stochastic, U random) {
    const F positive = bits_of(x) >> 31 ? F{} : x; /* a comparison x < 0 would compile to max.f32 */
    const U code = code_of(false, positive, scale, factor, stochastic, random);
    return ((code == 0u) & (positive > 0.0f)) ? U{} + 1u : code;
}

/* Returns the value of a code that is given as a float. */
template <class F>
INSTEP_INLINE F signed_value(F code, float scale) {
    const F root = code * (1.0f / 127.0f);
    return root * magnitude(root) * scale;
}

template <class F>
INSTEP_INLINE F unsigned_value(F code, float scale) {
    return to_the_fourth(code * (1.0f / 255.0f)) * scale;
}

INSTEP_INLINE float from_signed_code(uint8_t code, float scale) { return signed_value(real((code ^ 0x80u) - 0x80u), scale); }
INSTEP_INLINE float from_unsigned_code(uint8_t code, float scale) { return unsigned_value(real(code), scale); }

}  // namespace

#endif
