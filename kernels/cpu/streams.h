/* Reads and writes the streams of a step on a CPU: gradients, parameters, masters and states. Formats other than f32
 * pass through a few KiB of f32 in the first-level cache, so the rules' loops are f32 for all dtypes.
 *
 * Every loop vectorises on every instruction set. If storing loses bits, the stored value also replaces the value in
 * the buffer. Copies and averages then use the stored value. The bits equal those of gpu/streams.cuh. */
#ifndef INSTEP_CPU_STREAMS_H
#define INSTEP_CPU_STREAMS_H

#include "cpu/coding.h"
#include "numeric/dtype.h"
#include "numeric/remainder.h"

namespace {

/* How stored values are rounded if they lose bits: to the nearest, or stochastically. */
struct Rounding {
    RandomPosition position;
    bool stochastic;

    /* Returns whether one loop can draw the bits of `count` elements: their numbers have the same upper word, or nothing
     * is drawn. */
    INSTEP_INLINE bool is_one_loop(uint32_t count) const { return !stochastic || position.count_before_carry(count) == count; }
};

__attribute__((noinline)) void make_canonical(float* x, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) x[i] = canonical(x[i]);
}

__attribute__((noinline)) void multiply_run(float factor, uint32_t count, float* x) {
    for (uint32_t i = 0; i < count; ++i) x[i] = canonical(x[i] * factor);
}

__attribute__((noinline)) void widen_run(uint32_t dtype, uint32_t count, const uint16_t* __restrict from,
                                         float* __restrict to) {
    switch (static_cast<InstepDtype>(dtype)) {
        case INSTEP_DTYPE_BF16:
            for (uint32_t i = 0; i < count; ++i) to[i] = from_bfloat16(from[i]);
            return;
        case INSTEP_DTYPE_F16:
            for (uint32_t i = 0; i < count; ++i) to[i] = from_half(from[i]);
            return;
        case INSTEP_DTYPE_F32: __builtin_unreachable();
    }
}

__attribute__((noinline)) void narrow_run(uint32_t dtype, uint32_t count, const float* __restrict from,
                                          uint16_t* __restrict to) {
    switch (static_cast<InstepDtype>(dtype)) {
        case INSTEP_DTYPE_BF16:
            for (uint32_t i = 0; i < count; ++i) to[i] = bfloat16_of(from[i]);
            return;
        case INSTEP_DTYPE_F16:
            for (uint32_t i = 0; i < count; ++i) to[i] = half_of(from[i]);
            return;
        case INSTEP_DTYPE_F32: __builtin_unreachable();
    }
}

/* Rounds only to bf16. f16 has no stochastic rounding, because its subnormals have no fixed number of bits to draw. */
__attribute__((noinline)) void narrow_stochastically(const RandomPosition& position, uint32_t stream, uint32_t count,
                                                const float* __restrict from, uint16_t* __restrict to) {
    RandomPosition at = position;
    for (uint32_t length; count != 0; count -= length, from += length, to += length, at = at.advanced_by(length)) {
        length = at.count_before_carry(count);
        for (uint32_t i = 0; i < length; ++i) to[i] = bfloat16_stochastic(from[i], at.bits(i, stream));
    }
}

__attribute__((noinline)) void join_run(uint32_t kind, uint32_t count, const uint16_t* __restrict params,
                                        const void* remainders, float* __restrict to) {
    if (kind == INSTEP_MASTER_REMAINDER16) {
        const uint16_t* __restrict remainder = static_cast<const uint16_t*>(remainders);
        for (uint32_t i = 0; i < count; ++i) to[i] = joined_with_16(params[i], remainder[i]);
    } else {
        const uint8_t* __restrict remainder = static_cast<const uint8_t*>(remainders);
        for (uint32_t i = 0; i < count; ++i) to[i] = joined_with_8(params[i], remainder[i]);
    }
}

__attribute__((noinline)) void round_to_24_stochastically(const RandomPosition& position, uint32_t count, float* x) {
    RandomPosition at = position;
    for (uint32_t length; count != 0; count -= length, x += length, at = at.advanced_by(length)) {
        length = at.count_before_carry(count);
        for (uint32_t i = 0; i < length; ++i) x[i] = rounded_to_24(x[i], at.bits(i, PARAM_STREAM) >> 8);
    }
}

/* With 8-bit remainders, values in `from` are first rounded to 24 bits. */
__attribute__((noinline)) void split_run(uint32_t kind, const Rounding& rounding, uint32_t count,
                                         float* __restrict from, uint16_t* __restrict params, void* remainders) {
    if (kind == INSTEP_MASTER_REMAINDER16) {
        uint16_t* __restrict remainder = static_cast<uint16_t*>(remainders);
        for (uint32_t i = 0; i < count; ++i) {
            const Split split = split_to_16(from[i]);
            params[i] = split.param;
            remainder[i] = split.remainder;
        }
        return;
    }
    if (rounding.stochastic) {
        round_to_24_stochastically(rounding.position, count, from);
    } else {
        for (uint32_t i = 0; i < count; ++i) from[i] = rounded_to_24(from[i]);
    }
    uint8_t* __restrict remainder = static_cast<uint8_t*>(remainders);
    for (uint32_t i = 0; i < count; ++i) {
        const Split split = split_to_8(from[i]);
        params[i] = split.param;
        remainder[i] = static_cast<uint8_t>(split.remainder);
    }
}

/* The run must start at the first element of a block. */
__attribute__((noinline)) void decode_run(bool is_signed, uint32_t count, const uint8_t* from, const float* scales,
                                          float* to) {
    for (uint32_t at = 0; at < count; at += INSTEP_QUANTUM) {
        const uint32_t length = count - at < INSTEP_QUANTUM ? count - at : INSTEP_QUANTUM;
        const float scale = scales[at / INSTEP_QUANTUM];
        is_signed ? decode_block<true>(scale, length, from + at, to + at)
                  : decode_block<false>(scale, length, from + at, to + at);
    }
}

__attribute__((noinline)) void encode_run(bool is_signed, const Rounding& rounding, uint32_t stream, uint32_t count,
                                          const float* from, uint8_t* to, float* scales) {
    for (uint32_t at = 0; at < count; at += INSTEP_QUANTUM) {
        const uint32_t length = count - at < INSTEP_QUANTUM ? count - at : INSTEP_QUANTUM;
        const float scale = block_scale(largest_magnitude(from + at, length));
        scales[at / INSTEP_QUANTUM] = scale;
        const Coding coding = {from + at, to + at, scale, coding_factor(is_signed, scale), rounding.position.advanced_by(at), stream};
        if (is_signed) {
            rounding.stochastic ? encode_block<true, true>(coding, length) : encode_block<true, false>(coding, length);
        } else {
            rounding.stochastic ? encode_block<false, true>(coding, length) : encode_block<false, false>(coding, length);
        }
    }
}

}  // namespace

#endif
