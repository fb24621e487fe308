/* On a CPU, encodes values as 8-bit codes, a vector at a time. Codes come from exact roots, or from comparisons with
 * thresholds; codes.h defines both.
 *
 * The codes equal those of codes.h, bit for bit. The self-test compares every threshold with exact roots. */
#ifndef INSTEP_CPU_CODING_H
#define INSTEP_CPU_CODING_H

#include "cpu/vectors.h"
#include "numeric/codes.h"
#include "numeric/random.h"

namespace {

/* The values of a state in a block, and the address of their codes. */
struct Coding {
    const float* values;
    uint8_t* codes;
    float scale, factor;
    RandomPosition position;
    uint32_t stream;
};

/* Encodes elements that do not fill a vector, by the definition in codes.h. */
template <bool SIGNED, bool STOCHASTIC>
INSTEP_INLINE void encode_by_roots(const Coding& c, uint32_t first, uint32_t last) {
    for (uint32_t i = first; i < last; ++i) {
        const uint32_t random = STOCHASTIC ? c.position.advanced_by(i).bits(0u, c.stream) : 0;
        const uint32_t code = SIGNED ? signed_code(c.values[i], c.scale, c.factor, STOCHASTIC, random)
                                     : unsigned_code(c.values[i], c.scale, c.factor, STOCHASTIC, random);
        c.codes[i] = static_cast<uint8_t>(code);
#if INSTEP_HAS_VECTORS
        asm volatile("" ::: "memory"); /* no vectors: for so few elements, they only make the object larger */
#endif
    }
}

#if INSTEP_HAS_VECTORS

INSTEP_INLINE Floats decoded(bool is_signed, const uint8_t* codes, float scale) {
    return is_signed ? signed_value(real(load_signed_bytes(codes)), scale) : unsigned_value(real(load_bytes(codes)), scale);
}

/* Whether a state's codes come from thresholds instead of exact roots (codes.h). A threshold takes more operations than
 * one square root, and fewer than two. Stochastic draws take so many operations that they use exact roots. */
template <bool SIGNED, bool STOCHASTIC>
constexpr bool HAS_THRESHOLDS = !SIGNED && !STOCHASTIC;

/* Every float from 2^23 to 2^24 is a whole number. A sum of WHOLE and a small number therefore has a whole
 * number in its lowest bits. */
constexpr float WHOLE = 0x1p23f;

/* Values that do not have their codes yet. Values of an unsigned state are not negative. `sum` is WHOLE plus a code:
 * the value's code, the code below the value, or the code below a threshold. */
struct Begun {
    Floats x, power, sum;
};

/* Returns x, or 0 if x has a sign bit. As a maximum of integers, this is one instruction. */
INSTEP_INLINE Floats positive(Floats x) { return float_of(reinterpret_cast<Words>(larger(reinterpret_cast<Integers>(x), Integers{}))); }

/* Returns WHOLE plus the whole part of a rough root of an unsigned power. Powers below 2^-14 count as 2^-14, which has
 * a root above 1. Therefore the root of zero is finite, and every value above zero has a code of at least 1. */
INSTEP_INLINE Floats rough_sum(Floats power) {
    const Floats enough = float_of(larger(bits_of(power), Words{} + bits_of(0x1p-14f)));
    return rough_inverse_root(rough_inverse_root(enough)) * 15.9375f + (WHOLE - 0.5f);
}

/* Begins the codes of a signed state's values, or of values without a sign bit. */
template <bool SIGNED, bool STOCHASTIC>
INSTEP_INLINE Begun begin_code(const Coding& c, Floats x) {
    const Floats power = (SIGNED ? magnitude(x) : x) * c.factor;
    if (HAS_THRESHOLDS<SIGNED, STOCHASTIC>) return {x, power, rough_sum(power)};
    const Floats root = root_of(SIGNED, power);
    return {x, power, STOCHASTIC ? larger(root, Floats{} + 0.5f) + (WHOLE - 0.5f) : root + WHOLE}; /* as whole_below */
}

template <bool SIGNED, bool STOCHASTIC>
INSTEP_INLINE Begun begin_code(const Coding& c, uint32_t i) {
    const Floats stored = load_floats(c.values + i);
    return begin_code<SIGNED, STOCHASTIC>(c, SIGNED ? stored : positive(stored));
}

/* Returns the distance of a power from its threshold, which is half a code above the whole part of the rough root. */
INSTEP_INLINE Words distance_of(const Begun& b) { return distance_to(power_of(false, b.sum - (WHOLE - 0.5f)), b.power); }

INSTEP_INLINE bool is_close(Words distance) { return any_below(~distance, BELOW + ABOVE); }

/* Finishes the codes of the WIDTH elements from number i on. With thresholds, `closest` keeps the largest distance.
 * `mixed` is used only if rounding is stochastic. A block's largest element needs no case of its own. Its power is at
 * most one unit in the last place below the largest code's, and every draw from three units below on takes that code. */
template <bool SIGNED, bool STOCHASTIC>
INSTEP_INLINE void end_code(const Coding& c, const Begun& b, uint32_t i, Words mixed, Words& closest) {
    Words code = bits_of(b.sum);
    if (HAS_THRESHOLDS<SIGNED, STOCHASTIC>) {
        const Words distance = distance_of(b);
        closest = larger(closest, distance);
        code = with_top_bit_of(code, distance);
    }
    if (STOCHASTIC) {
        const Words random = c.position.word(mixed, c.stream) >> 16;
        const Integers above = draws_above(SIGNED, b.power, b.sum - WHOLE, random);
        const Floats most = Floats{} + (WHOLE + (SIGNED ? 127.0f : 255.0f)), least = Floats{} + (WHOLE + 1.0f);
        const Floats drawn = smaller(float_of(one_more(code, above)), most);
        code = bits_of(SIGNED ? drawn : larger(drawn, least));
    }
    store_bytes(c.codes + i, SIGNED ? with_sign_of(code, b.x) : where_not_zero(code, bits_of(b.x)));
}

/* Returns whether thresholds and exact roots give equal codes. For each threshold, it tests the two nearest powers that
 * the loop codes without roots. Roots never fall as powers rise, so all other powers agree too. No test needs code 1: a
 * value below the threshold of code 2 is zero or has the code 1. */
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

/* Encodes vectors again, by exact roots, if a value in them is too close to a threshold. */
__attribute__((noinline, cold)) void encode_close(const Coding& coding, uint32_t count) {
    const Coding c = coding;
    for (uint32_t i = 0; i + WIDTH <= count; i += WIDTH) {
        if (!is_close(distance_of(begin_code<false, false>(c, i)))) continue;
        store_bytes(c.codes + i, unsigned_code(load_floats(c.values + i), c.scale, c.factor, false, Words{}));
    }
}

#endif

/* Returns the largest magnitude_bits of the values. */
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

/* Decodes a block or the start of a block. */
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
    /* A root takes long. The loop therefore begins a vector before it finishes the previous vector. */
    if (count >= WIDTH && (!STOCHASTIC || c.position.count_before_carry(count) == count)) {
        Words closest = {}, numbers = lane_numbers() + c.position.low;
        Begun begun = begin_code<SIGNED, STOCHASTIC>(c, 0u);
        const auto end = [&]() __attribute__((always_inline)) {
            const Words mixed = STOCHASTIC ? c.position.mixed(numbers) : Words{};
            end_code<SIGNED, STOCHASTIC>(c, begun, i, mixed, closest);
            numbers += WIDTH;
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
