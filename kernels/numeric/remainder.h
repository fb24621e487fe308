/* A bf16 parameter and the bits that it lacks: 16 more bits give an f32 master weight, and 8 more bits a 24-bit master
 * weight.
 *
 *     bits(master) = (param << 16) + remainder                 16-bit remainder, two's complement
 *     bits(master) = (param << 16) + (remainder << 8)          8-bit remainder, two's complement
 *
 * The parameter is therefore its master rounded to the nearest bf16, ties away from zero. With ties to even, a
 * remainder would need one more value than fits. Joining parameter and remainder gives the master back, bit for bit.
 * The layout is that of apex's DistributedFusedAdam, except for NaN: in apex the parameter of a NaN becomes -0.0, here
 * it stays NaN. A 24-bit master is f32 rounded to a fraction of 15 bits. No other rounding loses bits. */
#ifndef INSTEP_NUMERIC_REMAINDER_H
#define INSTEP_NUMERIC_REMAINDER_H

#include "numeric/math.h"

namespace {

struct Split {
    uint16_t param;
    uint16_t remainder; /* an 8-bit remainder is in the lower half */
};

/* Extends the sign in two's complement, without shifting signed numbers. */
INSTEP_INLINE uint32_t sign_extended(uint32_t x, uint32_t bits) { return (x ^ 1u << (bits - 1)) - (1u << (bits - 1)); }

INSTEP_INLINE Split split_to_16(float master) {
    const uint32_t bits = bits_of(master);
    const uint32_t param = master == master ? (bits + 0x8000u) >> 16 : 0x7fffu;
    return {static_cast<uint16_t>(param), static_cast<uint16_t>(bits)};
}

INSTEP_INLINE float joined_with_16(uint16_t param, uint16_t remainder) {
    return canonical(float_of((static_cast<uint32_t>(param) << 16) + sign_extended(remainder, 16)));
}

/* Rounds the bits to the nearest multiple of 2^8, ties to even. The overload with `chance` rounds stochastically: it
 * adds 8 random bits instead of one half. A NaN is unchanged. */
INSTEP_INLINE float rounded_to_24(float master) {
    const uint32_t bits = bits_of(master);
    const uint32_t rounded = (bits + 0x7fu + (bits >> 8 & 1u)) & 0xffffff00u;
    return master == master ? float_of(rounded) : master;
}

INSTEP_INLINE float rounded_to_24(float master, uint32_t chance) {
    return master == master ? float_of((bits_of(master) + chance) & 0xffffff00u) : master;
}

/* Splits a master that rounded_to_24 has returned. */
INSTEP_INLINE Split split_to_8(float master) {
    const Split split = split_to_16(master);
    return {split.param, static_cast<uint16_t>(split.remainder >> 8)};
}

INSTEP_INLINE float joined_with_8(uint16_t param, uint8_t remainder) {
    return canonical(float_of((static_cast<uint32_t>(param) << 16) + (sign_extended(remainder, 8) << 8)));
}

}  // namespace

#endif
