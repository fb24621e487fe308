/* Random bits for stochastic rounding: a function of only seed, update, element and stream.
 *
 * Elements are numbered over the whole layout in registration order, and updates are counted per parameter. The bits
 * therefore do not depend on buckets, shards, launch shapes, threads or instruction sets. A resumed run draws the same
 * bits as an uninterrupted run. There is no state. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2,
 * 3", SC 2011, on counter-based generators; the mixer is Wellons' lowbias32. */
#ifndef INSTEP_NUMERIC_RANDOM_H
#define INSTEP_NUMERIC_RANDOM_H

#include "numeric/math.h"

namespace {

/* Numbers of the streams that are rounded: first the parameter, then the states. */
constexpr uint32_t PARAM_STREAM = 0, FIRST_STATE_STREAM = 1;

/* The key of one update of one parameter. */
struct RandomKey {
    uint32_t first, second;
};

INSTEP_INLINE RandomKey random_key(uint64_t seed, uint64_t update) {
    uint64_t x = seed + update * 0x9e3779b97f4a7c15ull; /* SplitMix64 */
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    x ^= x >> 31;
    return {static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32)};
}

/* The start of a run. The first element's number is two words, because 64-bit lanes would halve a vector's lanes. */
struct RandomPosition {
    RandomKey key;
    uint32_t low, high;

    RandomPosition() = default;
    INSTEP_INLINE RandomPosition(const RandomKey& key, uint64_t element)
        : key(key), low(static_cast<uint32_t>(element)), high(static_cast<uint32_t>(element >> 32)) {}

    INSTEP_INLINE RandomPosition advanced_by(uint32_t elements) const {
        RandomPosition later = *this;
        later.low += elements;
        later.high += later.low < elements;
        return later;
    }

    /* Returns how many of the run's `count` elements come before the next multiple of 2^32. `bits` and `mixed` are
     * only for these, because a carry into the upper word would cost three instructions per vector. */
    INSTEP_INLINE uint32_t count_before_carry(uint32_t count) const { return low != 0 && 0u - low < count ? 0u - low : count; }

    /* Returns 16 bits for the i-th element of the run. The bits are the upper half of lowbias32, with one key before its
     * two rounds and one between them. With only the first key, one update would draw another update's bits in a
     * shifted order. */
    INSTEP_INLINE uint32_t bits(uint32_t i, uint32_t stream) const { return word(mixed(i + low), stream) >> 16; }

    /* Computes what all streams of an element share, from the lower word of its number: the first round, and the shift
     * of the second. U is uint32_t or a vector of such words. */
    template <class U>
    INSTEP_INLINE U mixed(U number) const {
        const U x = number ^ (high * 0x9e3779b9u + key.first), y = (x ^ x >> 16) * 0x7feb352du;
        return y ^ y >> 15;
    }

    /* Computes the rest of the second round. The bits are the upper half of its result. */
    template <class U>
    INSTEP_INLINE U word(U mixed, uint32_t stream) const {
        const uint32_t second = key.second + stream * 0x85ebca6bu;
        return (mixed ^ (second ^ second >> 15)) * 0x846ca68bu;
    }
};

}  // namespace

#endif
