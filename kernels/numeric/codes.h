/* Optimizer states in 8 bits: a code per element, and a scale per block of 256 elements of a parameter.
 *
 *     scale = largest |x| of the block
 *     x = sign(c) * (c / 127)^2 * scale         c in -127..127, for states of either sign
 *     x = (c / 255)^4 * scale                   c in 0..255, for states that are never negative
 *
 * The codes are powers and need no table: they need only + x / and root, whose bits are the same everywhere. They also
 * give small values a finer grid. Without this finer grid, a second moment below 1/65025 of its block's largest would
 * be zero, and the step would divide by eps alone. For the same reason a value above zero never becomes the code 0. An
 * average that moves by less than half a code does not change, unless rounding is stochastic. With h = 1/254, or 1/510,
 * a value rounded to the nearest code has an error of at most (2 sqrt(x/scale) h + h^2) scale. This is about 4
 * (x/scale)^(3/4) h scale; see tests/precision/eight_bit.rs. The largest element is kept exactly, so decoding and
 * encoding again gives the same codes.
 *
 * If a block has a NaN or an infinity, all its elements become NaN, so that the fault shows. If its largest magnitude
 * is below 2^-90, a code could leave the normal numbers, so the block is zero. Dettmers et al., "8-bit Optimizers via
 * Block-wise Quantization", ICLR 2022; square-root companding as Ortiz et al., "FlashOptim", 2026. */
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

/* Whether a block of this scale has codes. */
INSTEP_INLINE bool is_coded(float scale) { return scale >= SMALLEST_SCALE; }

/* The functions below take one value as float and uint32_t, or a vector of such values (cpu/vectors.h). */

/* Returns the integer nearest to x, ties to even, for 0 <= x < 2^22: the sum has no bits for a fraction. */
template <class F>
INSTEP_INLINE auto nearest_integer(F x) { return bits_of(x + 12582912.0f) - 0x4b400000u; }

/* Returns the same integer as a real number. */
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

/* The factor that turns values into powers of codes. (127^2 / scale) x is the square of a signed code. (16^4 / scale) x
 * is the fourth power of 16/255 times an unsigned code. No factor leaves the normal numbers. */
INSTEP_INLINE float coding_factor(bool is_signed, float scale) { return (is_signed ? 16129.0f : 65536.0f) / scale; }

/* Returns the power of a code that may have a fraction. */
template <class F>
INSTEP_INLINE F power_of(bool is_signed, F code) { return is_signed ? squared(code) : to_the_fourth(code * 0x1.010102p-4f); }

/* Returns a code with a fraction, from its power. */
template <class F>
INSTEP_INLINE F root_of(bool is_signed, F power) {
    return is_signed ? square_root(power) : square_root(square_root(power)) * 15.9375f;
}

/* Roots are slow, and codes are few. Where a rough root costs less than the exact root, it selects the threshold next
 * to a power. A threshold is the code less 1/2. The threshold's power takes a few products, and comparing the two
 * powers gives the code. Roots are rounded, so the least power that gets a code from code_of is near the power of its
 * threshold: at most BELOW last places under it, and at most ABOVE over it. Powers that close to a threshold are coded
 * by the roots. Every code therefore has the bits of code_of if the rough root's error is less than half a code. */
constexpr uint32_t BELOW = 9, ABOVE = 5;

/* Returns a word whose top bit is set if the power is at least that of the threshold. If only the roots can decide, the
 * word is at least FIRST_CLOSE. */
template <class F>
INSTEP_INLINE auto distance_to(F threshold_power, F power) { return bits_of(threshold_power) - (bits_of(power) + (BELOW + 1)); }

constexpr uint32_t FIRST_CLOSE = 0u - (BELOW + ABOVE);

/* Returns whether to take the code above, from the powers of the code below and the code above. Compares the position
 * of `power` between the two with 16 random bits; this probability keeps the mean. */
template <class F, class U>
INSTEP_INLINE auto draws_above(F power, F low, F high, U random) { return power - low > real(random) * 0x1p-16f * (high - low); }

template <class F, class U>
INSTEP_INLINE F drawn(bool is_signed, F power, F below, U random) {
    const F above = below + 1.0f;
    return draws_above(power, power_of(is_signed, below), power_of(is_signed, above), random) ? above : below;
}

/* The largest element of a block always gets the largest code, and no element gets a larger code. `random` has 16 bits
 * and is used only if rounding is stochastic. */
template <class F, class U>
INSTEP_INLINE U code_of(bool is_signed, F size, float scale, float factor, bool stochastic, U random) {
    const F power = size * factor, root = root_of(is_signed, power);
    const U most = U{} + (is_signed ? 127u : 255u);
    const U code = nearest_integer(stochastic ? drawn(is_signed, power, whole_below(root), random) : root);
    return ((size == scale) | (code > most)) ? most : code; /* without a branch */
}

template <class F, class U>
INSTEP_INLINE U signed_code(F x, float scale, float factor, bool stochastic, U random) {
    const U code = code_of(true, magnitude(x), scale, factor, stochastic, random);
    return bits_of(x) >> 31 ? 0u - code : code;
}

template <class F, class U>
INSTEP_INLINE U unsigned_code(F x, float scale, float factor, bool stochastic, U random) {
    const F positive = bits_of(x) >> 31 ? F{} : x; /* by its sign bit: a comparison would become max.f32 */
    const U code = code_of(false, positive, scale, factor, stochastic, random);
    return ((code == 0u) & (positive > 0.0f)) ? U{} + 1u : code;
}

/* Returns the value of a code that is given as a real number. */
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
