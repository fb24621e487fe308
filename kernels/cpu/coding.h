/* Encodes values as 8-bit codes on a CPU, a vector at a time. It uses roots, or comparisons with thresholds; codes.h
 * defines both.
 *
 * The codes are bit for bit those of codes.h. The self-test compares all thresholds with those of the roots. */
#ifndef INSTEP_CPU_CODING_H
#define INSTEP_CPU_CODING_H

#include "cpu/vectors.h"
#include "numeric/codes.h"
#include "numeric/random.h"

namespace {

/* A state's values in a block, and the place of their codes. */
struct Coding {
    const float* values;
    uint8_t* codes;
    float scale, factor;
    RandomPosition position;
    uint32_t stream;
};

/* Follows the definition, for elements that do not fill a vector. */
template <bool SIGNED, bool STOCHASTIC>
INSTEP_INLINE void encode_by_roots(const Coding& c, uint32_t first, uint32_t last) {
    for (uint32_t i = first; i < last; ++i) {
        const uint32_t random = STOCHASTIC ? c.position.bits(i, c.stream) : 0;
        const uint32_t code = SIGNED ? signed_code(c.values[i], c.scale, c.factor, STOCHASTIC, random)
                                     : unsigned_code(c.values[i], c.scale, c.factor, STOCHASTIC, random);
        c.codes[i] = static_cast<uint8_t>(code);
#if INSTEP_HAS_VECTORS
        asm volatile("" ::: "memory"); /* vectors for these few would make the object larger */
#endif
    }
}

#if INSTEP_HAS_VECTORS

INSTEP_INLINE Floats decoded(bool is_signed, const uint8_t* codes, float scale) {
    return is_signed ? signed_value(real(load_signed_bytes(codes)), scale) : unsigned_value(real(load_bytes(codes)), scale);
}

INSTEP_INLINE Words mixed_words(const Coding& c, uint32_t i) { return c.position.mixed(lane_numbers() + i); }

/* Whether a state's codes come from thresholds (codes.h) and not from roots. A threshold takes more operations than one
 * square root, and fewer than two. Stochastic draws take so many operations that two roots are computed instead. */
template <bool SIGNED, bool STOCHASTIC>
constexpr bool HAS_THRESHOLDS = !SIGNED && !STOCHASTIC;

/* The floats from this value to its double are exactly the whole numbers. A sum with it therefore has a whole number in
 * its lowest bits. */
constexpr float WHOLE = 0x1p23f;

/* Values that do not have their codes yet. Values of an unsigned state are not below zero. `sum` is WHOLE plus a code:
 * the value's code, the code below it, or the code next to the threshold. */
struct Begun {
    Floats x, power, sum;
};

/* Compares the sign bit as an integer, which is one instruction. */
INSTEP_INLINE Floats positive(Floats x) { return float_of(reinterpret_cast<Words>(larger(reinterpret_cast<Integers>(x), Integers{}))); }

/* Returns WHOLE plus the whole part of a rough root of an unsigned power. Smaller powers count as 2^-14, whose root is
 * above 1. The root of zero is therefore finite, and every value above zero has a code of at least 1. */
INSTEP_INLINE Floats rough_sum(Floats power) {
    const Floats enough = float_of(larger(bits_of(power), Words{} + bits_of(0x1p-14f)));
    return rough_inverse_root(rough_inverse_root(enough)) * 15.9375f + (WHOLE - 0.5f);
}

/* Begins a value of a signed state, or a value without a sign bit. */
template <bool SIGNED, bool STOCHASTIC>
INSTEP_INLINE Begun begin_code(const Coding& c, Floats x) {
    const Floats power = (SIGNED ? magnitude(x) : x) * c.factor;
    if (HAS_THRESHOLDS<SIGNED, STOCHASTIC>) return {x, power, rough_sum(power)};
    const Floats root = root_of(SIGNED, power);
    return {x, power, (STOCHASTIC ? positive(root - 0.5f) : root) + WHOLE};
}

template <bool SIGNED, bool STOCHASTIC>
INSTEP_INLINE Begun begin_code(const Coding& c, uint32_t i) {
    const Floats stored = load_floats(c.values + i);
    return begin_code<SIGNED, STOCHASTIC>(c, SIGNED ? stored : positive(stored));
}

/* Returns the distance from the threshold next to a rough root; the threshold is half a code above the whole part. */
INSTEP_INLINE Words distance_of(const Begun& b) { return distance_to(power_of(false, b.sum - (WHOLE - 0.5f)), b.power); }

INSTEP_INLINE bool is_close(Words distance) { return any_below(~distance, BELOW + ABOVE); }

/* Finishes the codes of the WIDTH elements from number i on. With thresholds, `closest` becomes the largest distance.
 * `mixed` is used only if rounding is stochastic. */
template <bool SIGNED, bool STOCHASTIC>
INSTEP_INLINE void end_code(const Coding& c, const Begun& b, uint32_t i, Words mixed, Words& closest) {
    const Words most = bits_of(Floats{} + (WHOLE + (SIGNED ? 127.0f : 255.0f)));
    Words code = bits_of(b.sum);
    if (HAS_THRESHOLDS<SIGNED, STOCHASTIC>) {
        const Words distance = distance_of(b);
        closest = larger(closest, distance);
        code = with_top_bit_of(code, distance);
    }
    if (STOCHASTIC) {
        const Floats below = b.sum - WHOLE;
        const Words random = c.position.word(mixed, c.stream) >> 16;
        const Integers above = draws_above(b.power, power_of(SIGNED, below), power_of(SIGNED, below + 1.0f), random);
        code = smaller(one_more(code, reinterpret_cast<Integers>(above)), most);
        if (!SIGNED) code = larger(b.x == c.scale ? most : code, bits_of(Floats{} + (WHOLE + 1.0f))); /* above zero stays so */
    }
    store_bytes(c.codes + i, SIGNED ? with_sign_of(code, b.x) : where_not_zero(code, bits_of(b.x)));
}

/* Whether the roots agree with each threshold at the nearest powers that the loop does not check by roots. Roots never
 * fall as powers rise, so they agree for all other powers too. A value below the threshold of 2 has the code 1 or is
 * zero, whatever the roots are. */
__attribute__((noinline)) bool has_thresholds_of_the_roots() {
    bool agrees = true;
    for (uint32_t code = 2; code <= 255; ++code) {
        const uint32_t threshold = bits_of(power_of(false, real(code) - 0.5f));
        for (int side = 0; side < 2; ++side) {
            const Floats power = float_of(Words{} + (side ? threshold + ABOVE : threshold - (BELOW + 1)));
            const Begun begun = {power, power, rough_sum(power)};
            const Words distance = distance_of(begun);
            const Floats whole = begun.sum - WHOLE + real(distance >> 31);
            agrees &= !is_close(distance) && whole[0] == nearest_whole(root_of(false, power))[0];
        }
    }
    return agrees;
}

/* Codes vectors again by the roots if a value in them is too close to a threshold. */
__attribute__((noinline, cold)) void encode_close(const Coding& coding, uint32_t count) {
    const Coding c = coding;
    for (uint32_t i = 0; i + WIDTH <= count; i += WIDTH) {
        if (!is_close(distance_of(begin_code<false, false>(c, i)))) continue;
        store_bytes(c.codes + i, unsigned_code(load_floats(c.values + i), c.scale, c.factor, false, Words{}));
    }
}

#endif

/* Returns the largest magnitude_bits. */
INSTEP_INLINE uint32_t largest_magnitude(const float* values, uint32_t count) {
    uint32_t i = 0;
    uint32_t largest = 0;
#if INSTEP_HAS_VECTORS
    Integers lanes = {};
    for (; i + WIDTH <= count; i += WIDTH) lanes = larger(lanes, magnitude_bits(load_floats(values + i)));
    largest = largest_lane(reinterpret_cast<Words>(lanes));
#endif
    for (; i < count; ++i) largest = larger(largest, bits_of(magnitude(values[i])));
    return largest;
}

/* Encodes a block or the start of a block. */
template <bool SIGNED>
__attribute__((noinline)) void decode_block(float scale, uint32_t count, const uint8_t* codes, float* to) {
    uint32_t i = 0;
#if INSTEP_HAS_VECTORS
    for (; i + WIDTH <= count; i += WIDTH) store_floats(to + i, decoded(SIGNED, codes + i, scale));
#endif
    for (; i < count; ++i) to[i] = SIGNED ? from_signed_code(codes[i], scale) : from_unsigned_code(codes[i], scale);
}

template <bool SIGNED, bool STOCHASTIC>
__attribute__((noinline)) void encode_block(const Coding& coding, uint32_t count) {
    const Coding c = coding;
    if (!is_coded(c.scale)) {
        __builtin_memset(c.codes, 0, count);
        return;
    }
    uint32_t i = 0;
#if INSTEP_HAS_VECTORS
    /* The loop works in rounds, because a root takes long: a vector begins while the one before it is finished. */
    if (count >= WIDTH) {
        Words closest = {};
        Begun begun = begin_code<SIGNED, STOCHASTIC>(c, 0u);
        const auto end = [&]() __attribute__((always_inline)) {
            const Words mixed = STOCHASTIC ? mixed_words(c, i) : Words{};
            end_code<SIGNED, STOCHASTIC>(c, begun, i, mixed, closest);
            i += WIDTH;
        };
        while (i + 2 * WIDTH <= count) {
            const Begun next = begin_code<SIGNED, STOCHASTIC>(c, i + WIDTH);
            end();
            begun = next;
        }
        end();
        if (HAS_THRESHOLDS<SIGNED, STOCHASTIC> && is_close(closest)) encode_close(c, i);
    }
#endif
    encode_by_roots<SIGNED, STOCHASTIC>(c, i, count);
}

}  // namespace

#endif
