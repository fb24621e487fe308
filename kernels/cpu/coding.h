/* Encodes values as 8-bit codes on a CPU, a vector at a time, by comparison with thresholds; codes.h defines the codes.
 *
 * The codes are bit for bit those of codes.h. The self-test compares all thresholds with those of the roots. */
#ifndef INSTEP_CPU_CODING_H
#define INSTEP_CPU_CODING_H

#include "cpu/vectors.h"
#include "numeric/codes.h"
#include "numeric/random.h"

namespace {

/* A state's values in a block, and where their codes go. */
struct Coding {
    const float* values;
    uint8_t* codes;
    float scale, factor;
    RandomPosition position;
    uint32_t stream;
};

/* The definition, for elements that do not fill a vector. */
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

/* Values on the way to their codes. Those of an unsigned state are not below zero. */
struct Rough {
    Floats x, power, root;
};

/* By the sign bit, as integers: one instruction. */
INSTEP_INLINE Floats positive(Floats x) { return float_of(reinterpret_cast<Words>(larger(reinterpret_cast<Integers>(x), Integers{}))); }

template <bool SIGNED>
INSTEP_INLINE Floats rough_root(Floats power) {
    return SIGNED ? rough_square_root(power) : rough_inverse_root(rough_inverse_root(power)) * 15.9375f;
}

/* Of a value of a signed state, or of one without a sign bit. */
template <bool SIGNED>
INSTEP_INLINE Rough roughly(const Coding& c, Floats x) {
    const Floats power = (SIGNED ? magnitude(x) : x) * c.factor;
    return {x, power, rough_root<SIGNED>(power)};
}

template <bool SIGNED>
INSTEP_INLINE Rough roughly(const Coding& c, uint32_t i) {
    const Floats stored = load_floats(c.values + i);
    return roughly<SIGNED>(c, SIGNED ? stored : positive(stored));
}

/* The threshold next to a rough root, its power, distance_to it, and the code just below it. */
struct Candidate {
    Floats x, power, threshold, threshold_power;
    Words distance, below;
};

template <bool SIGNED, bool STOCHASTIC>
INSTEP_INLINE Candidate candidate_of(const Rough& r) {
    const Words below = STOCHASTIC ? Words{} : reinterpret_cast<Words>(truncated(r.root));
    const Floats threshold = STOCHASTIC ? rounded(r.root) : real(below) + 0.5f, power = power_of(SIGNED, threshold);
    return {r.x, r.power, threshold, power, distance_to(power, r.power), below};
}

/* Whether a draw next to a whole code may depend on which side of it the root lies: at most 6 of 65536 do at either end.
 * Any other draw gives the whole code. So an element that equals the scale gets the largest code. */
INSTEP_INLINE Integers is_extreme(Words word) { return reinterpret_cast<Integers>(word + (8u << 16) < 16u << 16); }

INSTEP_INLINE bool is_close(Words distance) { return any_below(~distance, BELOW + ABOVE); }

/* Codes the WIDTH elements from number i on, and adds to what says whether one was too close to a threshold. `mixed` is
 * used only if rounding is stochastic. */
template <bool SIGNED, bool STOCHASTIC>
INSTEP_INLINE void encode(const Coding& c, const Candidate& near, uint32_t i, Words mixed, Words& closest) {
    Words code;
    if (STOCHASTIC) {
        /* The other end of the interval that the power lies in. */
        const Floats other = near.threshold - one_with_sign_of(near.distance), other_power = power_of(SIGNED, other);
        const Floats low = smaller(near.threshold_power, other_power), high = larger(near.threshold_power, other_power);
        const Words word = c.position.word(mixed, c.stream);
        const auto above = draws_above(near.power, low, high, word >> 16);
        code = one_more(reinterpret_cast<Words>(truncated(smaller(near.threshold, other))), reinterpret_cast<Integers>(above));
        closest = larger(closest, is_extreme(word) ? near.distance : Words{});
    } else {
        code = near.below + (near.distance >> 31);
        closest = larger(closest, near.distance);
    }
    if (SIGNED) {
        store_bytes(c.codes + i, with_sign_of(code, near.x));
    } else {
        store_bytes(c.codes + i, larger(code, smaller(bits_of(near.x), Words{} + 1u))); /* above zero stays so */
    }
}

/* Whether the roots agree next to each threshold, where they are just not asked. Roots never fall as powers rise, so
 * they agree everywhere else too. */
template <bool SIGNED, bool STOCHASTIC>
__attribute__((noinline)) bool has_thresholds_of_the_roots() {
    bool agrees = true;
    for (uint32_t code = 1; code <= (SIGNED ? 127u : 255u); ++code) {
        const uint32_t threshold = bits_of(power_of(SIGNED, real(code) - (STOCHASTIC ? 0.0f : 0.5f)));
        for (int side = 0; side < 2; ++side) {
            const Floats power = float_of(Words{} + (side ? threshold + ABOVE : threshold - (BELOW + 1))), root = root_of(SIGNED, power);
            const Candidate found = candidate_of<SIGNED, STOCHASTIC>({power, power, rough_root<SIGNED>(power)});
            const Floats below = STOCHASTIC ? found.threshold - 1.0f : real(found.below), whole = below + real(found.distance >> 31);
            agrees &= !is_close(found.distance) && whole[0] == (STOCHASTIC ? whole_below(root) : nearest_whole(root))[0];
        }
    }
    return agrees;
}

/* Codes again, by the roots, the vectors with a value that is too close to a threshold. */
template <bool SIGNED, bool STOCHASTIC>
__attribute__((noinline, cold)) void encode_close(const Coding& coding, uint32_t count) {
    const Coding c = coding;
    for (uint32_t i = 0; i + WIDTH <= count; i += WIDTH) {
        const Words word = STOCHASTIC ? c.position.word(mixed_words(c, i), c.stream) : Words{};
        const Words distance = candidate_of<SIGNED, STOCHASTIC>(roughly<SIGNED>(c, i)).distance;
        if (!is_close(STOCHASTIC ? (is_extreme(word) ? distance : Words{}) : distance)) continue;
        const Floats x = load_floats(c.values + i);
        store_bytes(c.codes + i, SIGNED ? signed_code(x, c.scale, c.factor, STOCHASTIC, word >> 16)
                                        : unsigned_code(x, c.scale, c.factor, STOCHASTIC, word >> 16));
    }
}

#endif

/* The largest magnitude_bits. */
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

/* A block or the start of one. */
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
    /* In rounds, since a code is a long chain of operations: a vector is begun while the ones before it are finished. */
    if (count >= 2 * WIDTH) {
        const auto mixed = [&](uint32_t at) __attribute__((always_inline)) { return STOCHASTIC ? mixed_words(c, at) : Words{}; };
        Words closest = {};
        Candidate older = candidate_of<SIGNED, STOCHASTIC>(roughly<SIGNED>(c, 0));
        Rough newer = roughly<SIGNED>(c, WIDTH);
        for (i = 2 * WIDTH; i + WIDTH <= count; i += WIDTH) {
            encode<SIGNED, STOCHASTIC>(c, older, i - 2 * WIDTH, mixed(i - 2 * WIDTH), closest);
            older = candidate_of<SIGNED, STOCHASTIC>(newer);
            newer = roughly<SIGNED>(c, i);
        }
        encode<SIGNED, STOCHASTIC>(c, older, i - 2 * WIDTH, mixed(i - 2 * WIDTH), closest);
        encode<SIGNED, STOCHASTIC>(c, candidate_of<SIGNED, STOCHASTIC>(newer), i - WIDTH, mixed(i - WIDTH), closest);
        if (is_close(closest)) encode_close<SIGNED, STOCHASTIC>(c, i);
    }
#endif
    encode_by_roots<SIGNED, STOCHASTIC>(c, i, count);
}

}  // namespace

#endif
