/* The CPU's loop for bf16 throughout. It converts to f32, steps and rounds.
 *
 * AdamW moves 14 bytes per element, so division and root take longer than memory. They hide the latency of
 * the conversions only if the conversions are few and in the same loop. Two neighbouring elements are
 * therefore read as one word of 32 bits, and a shift and a mask widen its halves. Lanes of 16 bits would need
 * shuffle instructions. This loop serves the two most common sets of flags. The general path serves the
 * others, and both give the same bits. */
#ifndef INSTEP_CPU_BFLOAT16_H
#define INSTEP_CPU_BFLOAT16_H

#include "cpu/loops.h"

namespace {

INSTEP_INLINE float lower(uint32_t word) { return float_of(word << 16); }
INSTEP_INLINE float upper(uint32_t word) { return float_of(word & 0xffff0000u); }

/* Returns an f32 with the rounded bf16 in its upper half. A NaN stays a NaN, but may be another NaN. NaNs from bf16
 * arithmetic have a lower half of 0, so the addition does not carry. */
template <bool STOCHASTIC>
INSTEP_INLINE uint32_t rounded(float x, const RandomPosition& at, uint32_t i, uint32_t stream) {
    const uint32_t bits = bits_of(x);
    return bits + (STOCHASTIC ? at.bits(i, stream) : 0x7fffu + (bits >> 16 & 1u));
}

/* A pair's first element is in the lower half. */
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a pair is read as one word");

/* Two neighbouring elements as one word, which is aligned only to one element. */
typedef uint32_t __attribute__((may_alias, aligned(2))) Pair;

/* Returns the pairs from number `first` on. A state that the rule does not keep has a null address. */
INSTEP_INLINE Pair* pairs(uint16_t* x, uint32_t first) { return x ? reinterpret_cast<Pair*>(x) + first : nullptr; }
INSTEP_INLINE const Pair* pairs(const uint16_t* x, uint32_t first) { return reinterpret_cast<const Pair*>(x) + first; }

INSTEP_INLINE uint32_t joined(uint32_t first, uint32_t second) { return first >> 16 | (second & 0xffff0000u); }

/* One element's parameter and states in f32, and their bits after the step. */
struct Wide {
    float param, state[INSTEP_MAX_STATES];
    uint32_t param_bits, state_bits[INSTEP_MAX_STATES];
};

template <class Rule, bool STOCHASTIC>
INSTEP_INLINE float step_wide(const typename Rule::Scalars& s, uint32_t flags, float factor, const RandomPosition& at, uint32_t i,
                                 float sum, Wide& x) {
    const float param = Rule::update(s, flags, x.param, sum * factor, x.state);
    x.param_bits = rounded<STOCHASTIC>(param, at, i, PARAM_STREAM);
    if constexpr (Rule::STATES > 0) x.state_bits[0] = rounded<STOCHASTIC>(x.state[0], at, i, FIRST_STATE_STREAM);
    if constexpr (Rule::STATES > 1) x.state_bits[1] = rounded<STOCHASTIC>(x.state[1], at, i, FIRST_STATE_STREAM + 1);
    if constexpr (Rule::STATES > 2) x.state_bits[2] = rounded<STOCHASTIC>(x.state[2], at, i, FIRST_STATE_STREAM + 2);
    return alarm_of<Rule, Rule::HIDDEN>(param, sum, x.state);
}

template <class Rule, bool STOCHASTIC>
INSTEP_INLINE void step_pairs(const typename Rule::Scalars& s, uint32_t flags, float factor, const RandomPosition& at,
                              uint32_t first, uint32_t count, Pair* __restrict p, const Pair* __restrict g,
                              Pair* __restrict state0, Pair* __restrict state1, Pair* __restrict state2,
                              float* __restrict alarms) {
#pragma GCC unroll 1 /* compilers do not vectorise sixteen copies of a short body */
    for (uint32_t i = 0; i < count; ++i) {
        const uint32_t sums = g[i], params = p[i];
        uint32_t words[INSTEP_MAX_STATES] = {};
        if constexpr (Rule::STATES > 0) words[0] = state0[i];
        if constexpr (Rule::STATES > 1) words[1] = state1[i];
        if constexpr (Rule::STATES > 2) words[2] = state2[i];
        Wide low = {lower(params), {lower(words[0]), lower(words[1]), lower(words[2])}, 0, {}};
        Wide high = {upper(params), {upper(words[0]), upper(words[1]), upper(words[2])}, 0, {}};
        alarms[i] += step_wide<Rule, STOCHASTIC>(s, flags, factor, at, 2 * (first + i), lower(sums), low) +
                   step_wide<Rule, STOCHASTIC>(s, flags, factor, at, 2 * (first + i) + 1, upper(sums), high);
        p[i] = joined(low.param_bits, high.param_bits);
        if constexpr (Rule::STATES > 0) state0[i] = joined(low.state_bits[0], high.state_bits[0]);
        if constexpr (Rule::STATES > 1) state1[i] = joined(low.state_bits[1], high.state_bits[1]);
        if constexpr (Rule::STATES > 2) state2[i] = joined(low.state_bits[2], high.state_bits[2]);
    }
}

/* Steps the last element of a run with an odd count. */
template <class Rule, bool STOCHASTIC>
void step_last(const typename Rule::Scalars& s, uint32_t flags, float factor, const RandomPosition& at, uint32_t i, uint16_t* p,
               const uint16_t* g, uint16_t* const* states, float* alarms) {
    Pair last[INSTEP_MAX_STATES + 2] = {p[i], g[i]};
    for (int k = 0; k < Rule::STATES; ++k) last[2 + k] = states[k][i];
    step_pairs<Rule, STOCHASTIC>(s, flags, factor, at.advanced_by(i), 0, 1, last, last + 1, last + 2, last + 3, last + 4, alarms);
    p[i] = static_cast<uint16_t>(last[0]);
    for (int k = 0; k < Rule::STATES; ++k) states[k][i] = static_cast<uint16_t>(last[2 + k]);
}

#if INSTEP_HAS_VECTORS

/* Of 2 * WIDTH neighbouring elements, those with even numbers and those with odd numbers. */
struct EvenOdd {
    Floats even, odd;
};

INSTEP_INLINE EvenOdd load_pairs(const uint16_t* x) {
    Words words;
    __builtin_memcpy(&words, x, sizeof words);
    return {float_of(words << 16), float_of(words & 0xffff0000u)};
}

/* A step between its two stages: the quotient, or the parameter if the rule has no quotient. The `mixed` words are the
 * random bits of stochastic rounding. */
struct InFlight {
    EvenOdd x;
    Words mixed_even, mixed_odd;
};

/* Gives the bits of rounded(). Rounding to the nearest works on lanes of 16 bits: an upper half is increased by one
 * if the lower half is above the tie. */
template <bool STOCHASTIC>
INSTEP_INLINE void store_pairs(uint16_t* to, const EvenOdd& x, const RandomPosition& at, const InFlight& flight, uint32_t stream) {
    Words even = bits_of(x.even), odd = bits_of(x.odd);
    if constexpr (STOCHASTIC) {
        even += at.word(flight.mixed_even, stream) >> 16;
        odd += at.word(flight.mixed_odd, stream) >> 16;
    }
    Halves upper = reinterpret_cast<Halves>((odd & 0xffff0000u) | even >> 16);
    if constexpr (!STOCHASTIC) {
        const Halves lower = reinterpret_cast<Halves>(odd << 16 | (even & 0xffffu));
        upper += lowered(lower, ~upper & 1) >> 15;
    }
    __builtin_memcpy(to, &upper, sizeof upper);
}

/* Steps whole pairs of vectors, and returns the number of their elements. Root and division take long, so the loop
 * updates the next states before it steps a parameter. */
template <class Rule, bool STOCHASTIC>
INSTEP_INLINE uint32_t step_vectors_of_pairs(const typename Rule::Scalars& s, uint32_t flags, float factor, const RandomPosition& at,
                                    uint64_t ahead_bytes, uint32_t count, uint16_t* p, const uint16_t* g, uint16_t* const* states, float* alarms) {
    constexpr bool ROUNDS = HasRounds<Rule>::value;
    constexpr uint32_t LENGTH = 2 * WIDTH;
    const uint32_t whole = count / LENGTH * LENGTH;
    if (whole == 0) return 0;
    uint16_t* to[INSTEP_MAX_STATES] = {states[0], states[1], states[2]};
    Floats alarm = {};
    Words numbers = lane_numbers() * 2 + at.low; /* lower words of the even elements' numbers */
    const auto begin = [&](uint32_t i) __attribute__((always_inline)) {
        if (ahead_bytes) {
            prefetch(p + i, ahead_bytes);
            prefetch(g + i, ahead_bytes);
            each_state<Rule>([&](auto k) __attribute__((always_inline)) { prefetch(to[k] + i, ahead_bytes); });
        }
        const EvenOdd sum = load_pairs(g + i), param = load_pairs(p + i);
        Floats even[INSTEP_MAX_STATES] = {}, odd[INSTEP_MAX_STATES] = {};
        each_state<Rule>([&](auto k) __attribute__((always_inline)) {
            const EvenOdd state = load_pairs(to[k] + i);
            even[k] = state.even;
            odd[k] = state.odd;
        });
        InFlight flight = {};
        flight.x = {first_round<Rule>(s, flags, param.even, sum.even * factor, even),
                    first_round<Rule>(s, flags, param.odd, sum.odd * factor, odd)};
        if constexpr (!ROUNDS) alarm += alarm_of<Rule, Rule::HIDDEN>(flight.x.even, sum.even, even);
        if constexpr (!ROUNDS) alarm += alarm_of<Rule, Rule::HIDDEN>(flight.x.odd, sum.odd, odd);
        if constexpr (STOCHASTIC) {
            flight.mixed_even = at.mixed(numbers);
            flight.mixed_odd = at.mixed(numbers + 1);
            numbers += LENGTH;
        }
        each_state<Rule>([&](auto k) __attribute__((always_inline)) {
            store_pairs<STOCHASTIC>(to[k] + i, {even[k], odd[k]}, at, flight, FIRST_STATE_STREAM + k);
        });
        return flight;
    };
    const auto land = [&](uint32_t i, const InFlight& flight) __attribute__((always_inline)) {
        EvenOdd param = flight.x;
        if constexpr (ROUNDS) {
            const EvenOdd old = load_pairs(p + i);
            param = {Rule::stepped(s, flags, old.even, param.even), Rule::stepped(s, flags, old.odd, param.odd)};
            alarm += param.even;
            alarm += param.odd;
        }
        store_pairs<STOCHASTIC>(p + i, param, at, flight, PARAM_STREAM);
    };
    InFlight older = begin(0);
#pragma GCC unroll 1
    for (uint32_t i = LENGTH; i < whole; i += LENGTH) {
        const InFlight newer = begin(i);
        land(i - LENGTH, older);
        older = newer;
    }
    land(whole - LENGTH, older);
    store_floats(alarms, alarm);
    return whole;
}

#endif

template <class Rule, bool STOCHASTIC>
INSTEP_INLINE bool step_bfloat16_rounds(const typename Rule::Scalars& s, uint32_t flags, float factor, const RandomPosition& at,
                                        uint64_t ahead_bytes, uint32_t count, uint16_t* p, const uint16_t* g,
                                        uint16_t* const* states) {
    float alarms[LANES] = {};
    uint32_t i = 0;
    const auto step = [&](uint32_t length) __attribute__((always_inline)) {
        step_pairs<Rule, STOCHASTIC>(s, flags, factor, at, i, length, pairs(p, i), pairs(g, i), pairs(states[0], i),
                                     pairs(states[1], i), pairs(states[2], i), alarms);
    };
#if INSTEP_HAS_VECTORS
    i = step_vectors_of_pairs<Rule, STOCHASTIC>(s, flags, factor, at, ahead_bytes, count, p, g, states, alarms) / 2;
#else
    for (; i + LANES <= count / 2; i += LANES) {
        if (ahead_bytes) {
            prefetch(p + 2 * i, ahead_bytes);
            prefetch(g + 2 * i, ahead_bytes);
            for (int k = 0; k < Rule::STATES; ++k) prefetch(states[k] + 2 * i, ahead_bytes);
        }
        step(LANES);
    }
#endif
    for (; i < count / 2; ++i) {
        step(1);
        asm volatile("" ::: "memory"); /* no vectors: for so few elements, they make the object a third larger */
    }
    if (count % 2 != 0) step_last<Rule, STOCHASTIC>(s, flags, factor, at, count - 1, p, g, states, alarms);
    return any_lane(alarms);
}

/* Returns whether a loop for these scalars exists. A NaN multiplier has none, because the NaN's lower half is not 0. */
template <class Rule>
INSTEP_INLINE bool has_bfloat16_loop(const typename Rule::Scalars& s, float multiplier) {
    const uint32_t flags = Rule::flags(s);
    return ((flags == Rule::COMMON[0]) | (flags == Rule::COMMON[1])) & (multiplier == multiplier);
}

/* Steps one run of one segment, like step_runs. */
template <class Rule, bool STOCHASTIC>
__attribute__((noinline)) uint32_t step_bfloat16_run(const typename Rule::Scalars& scalars, float multiplier,
                                                     const RandomPosition& position, uint64_t ahead_bytes, uint32_t count,
                                                     uint16_t* p, const uint16_t* g, uint16_t* const* states) {
    const typename Rule::Scalars s = scalars;
    const RandomPosition at = position;
    const float factor = Rule::factor(s, multiplier);
    const bool alarmed =
        Rule::flags(s) == Rule::COMMON[0]
            ? step_bfloat16_rounds<Rule, STOCHASTIC>(s, Rule::COMMON[0], factor, at, ahead_bytes, count, p, g, states)
            : step_bfloat16_rounds<Rule, STOCHASTIC>(s, Rule::COMMON[1], factor, at, ahead_bytes, count, p, g, states);
    if (!alarmed) return 0;
    make_canonical(p, count);
    for (int k = 0; k < Rule::STATES; ++k) make_canonical(states[k], count);
    return any_special(g, count);
}

}  // namespace

#endif
