/* Optimizer states in 8 bits: a code per element, and a scale per block of 256 elements of a parameter.
 *
 *     scale = largest |x| of the block
 *     x = sign(c) * (c / 127)^2 * scale         c in -127..127, for states of either sign
 *     x = (c / 255)^4 * scale                   c in 0..255, for states that are never negative
 *
 * Powers replace a table: they need only + x / and root, whose bits are the same everywhere. They also give small
 * values a finer grid. Without it a second moment below 1/65025 of its block's largest would be zero, and the step
 * would divide by eps alone. For the same reason a value above zero never becomes the code 0. An average that moves by
 * less than half a code stands still, unless rounding is stochastic. With h = 1/254, or 1/510, a value rounded to the
 * nearest code is off by at most (2 sqrt(x/scale) h + h^2) scale, or about 4 (x/scale)^(3/4) h scale,
 * tests/precision/eight_bit.rs. The largest element is kept exactly, so decoding and encoding again gives the same
 * codes.
 *
 * A block with a NaN or an infinity becomes NaN in all elements, so that the fault shows. A block whose largest is
 * below 2^-90, where a code could leave the normal numbers, is zero. Dettmers et al., "8-bit Optimizers via Block-wise
 * Quantization", ICLR 2022; square-root companding as Ortiz et al., "FlashOptim", 2026. */
#ifndef INSTEP_NUMERIC_CODES_H
#define INSTEP_NUMERIC_CODES_H

#include "numeric/math.h"

namespace {

constexpr float SMALLEST_SCALE = 0x1p-90f;

/* The scale of a block, from the largest of its magnitude_bits. */
INSTEP_INLINE float block_scale(uint32_t largest_magnitude) {
    const float scale = canonical(float_of(largest_magnitude));
    const bool is_finite = largest_magnitude < INSTEP_F32_INFINITY_BITS;
    return !is_finite ? float_of(0x7fffffffu) : scale < SMALLEST_SCALE ? 0.0f : scale;
}

/* Whether a block of this scale has codes. */
INSTEP_INLINE bool is_coded(float scale) { return scale >= SMALLEST_SCALE; }

/* To the nearest integer, ties to even, of 0 <= x < 2^22: the sum has no room for a fraction. */
INSTEP_INLINE uint32_t nearest_integer(float x) { return bits_of(x + 12582912.0f) - 0x4b400000u; }

/* The largest integer not above, of the same; of an integer it may be the one below. */
INSTEP_INLINE uint32_t floor_integer(float x) { return nearest_integer(x < 0.5f ? 0.0f : x - 0.5f); }

INSTEP_INLINE float squared(float x) { return x * x; }
INSTEP_INLINE float to_the_fourth(float x) { return squared(squared(x)); }
INSTEP_INLINE float real(uint32_t code) { return static_cast<float>(static_cast<int32_t>(code)); }

/* Compares how far `value` is from `low` to `high` with 16 random bits: this probability keeps the mean. */
INSTEP_INLINE uint32_t is_drawn(float value, float low, float high, uint32_t random) {
    return value - low > real(random) * 0x1p-16f * (high - low);
}

/* The largest of a block always gets the largest code, and no element gets a larger one. */
INSTEP_INLINE uint32_t capped(uint32_t code, uint32_t most, bool is_largest) {
    const bool is_capped = is_largest | (code > most); /* without a branch */
    return is_capped ? most : code;
}

/* Turns values into powers of codes: (127^2 / scale) x is the square of a signed code, (16^4 / scale) x the fourth
 * power of 16/255 of an unsigned one. No factor leaves the normal numbers. */
INSTEP_INLINE float coding_factor(bool is_signed, float scale) { return (is_signed ? 16129.0f : 65536.0f) / scale; }

/* `random` has 16 bits and is used only if rounding is stochastic. */
INSTEP_INLINE uint8_t signed_code(float x, float scale, float factor, bool stochastic, uint32_t random) {
    const float magnitude = float_of(static_cast<uint32_t>(magnitude_bits(x)));
    const float square = magnitude * factor, root = square_root(square);
    const uint32_t below = floor_integer(root);
    const uint32_t drawn = below + is_drawn(square, squared(real(below)), squared(real(below + 1)), random);
    const uint32_t code = capped(stochastic ? drawn : nearest_integer(root), 127, magnitude == scale);
    return static_cast<uint8_t>(bits_of(x) >> 31 ? 0u - code : code);
}

INSTEP_INLINE uint8_t unsigned_code(float x, float scale, float factor, bool stochastic, uint32_t random) {
    const float positive = bits_of(x) >> 31 ? 0.0f : x; /* by its sign bit: a comparison would become max.f32 */
    const float fourth = positive * factor, root = square_root(square_root(fourth)) * 15.9375f;
    const uint32_t below = floor_integer(root);
    const float low = to_the_fourth(real(below) * 0x1.010102p-4f), high = to_the_fourth(real(below + 1) * 0x1.010102p-4f);
    const uint32_t drawn = below + is_drawn(fourth, low, high, random);
    const uint32_t code = capped(stochastic ? drawn : nearest_integer(root), 255, positive == scale);
    const bool is_lost = (code == 0) & (positive > 0.0f);
    return static_cast<uint8_t>(is_lost ? 1u : code);
}

INSTEP_INLINE float from_signed_code(uint8_t code, float scale) {
    const float root = static_cast<float>(static_cast<int32_t>((code ^ 0x80u) - 0x80u)) * (1.0f / 127.0f);
    const float magnitude = squared(root) * scale;
    return root < 0.0f ? -magnitude : magnitude;
}

INSTEP_INLINE float from_unsigned_code(uint8_t code, float scale) {
    return to_the_fourth(real(code) * (1.0f / 255.0f)) * scale;
}

}  // namespace

#endif
