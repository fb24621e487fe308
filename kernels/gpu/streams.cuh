/* Streams of a step as a GPU reads and writes them: four elements a thread at a time, in every format.
 *
 * Where storing loses bits, the stored value also replaces the one in registers, so that a copy and an average are of
 * the stored value. Formats are branches on arguments, the same for all threads. The bits equal those of
 * cpu/streams.h. */
#ifndef INSTEP_GPU_STREAMS_CUH
#define INSTEP_GPU_STREAMS_CUH

#include "numeric/codes.h"
#include "numeric/random.h"
#include "numeric/remainder.h"
#include "gpu/vector.cuh"

namespace {

/* A tile, and the rounding of values that lose bits. References, because copies would cost registers. */
struct Place {
    const InstepStepArgs& args;
    const InstepTile& tile;
    const InstepRecord& record;
    uint32_t count;

    /* Its run of a stream that is placed like the states. */
    template <class T>
    INSTEP_DEVICE T* of(void* base) const {
        return static_cast<T*>(base) + tile.state_offset;
    }

    INSTEP_DEVICE uint32_t random(uint32_t at, uint32_t stream) const {
        return RandomPosition(random_key(args.seed, record.steps + 1), tile.element).bits(at, stream);
    }
};

INSTEP_DEVICE uint16_t half_word(const Packed& packed, uint32_t i) {
    return static_cast<uint16_t>(packed.word[i / 2] >> 16 * (i % 2));
}

INSTEP_DEVICE uint8_t byte_of(uint32_t word, uint32_t i) { return static_cast<uint8_t>(word >> 8 * i); }

INSTEP_DEVICE Packed narrowed_stochastically(const Place& place, uint32_t at, uint32_t stream, const Four& four) {
    Packed packed = {};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t element = bfloat16_stochastic(four.x[i], place.random(at + i, stream));
        packed.word[i / 2] |= element << 16 * (i % 2);
    }
    return packed;
}

/* The parameters, with their master weights. */
struct Weights {
    const Place& place;
    void* param;

    INSTEP_DEVICE Four read(uint32_t at) const {
        const InstepStepArgs& args = place.args;
        const uint32_t count = place.count;
        if (args.param_dtype == INSTEP_DTYPE_F32) return load(static_cast<const float*>(param), at, count);
        if (args.master_kind == INSTEP_MASTER_F32) return load(place.of<float>(args.master), at, count);
        const Packed params = load(static_cast<const uint16_t*>(param), at, count);
        if (args.master_kind == INSTEP_MASTER_NONE) return widened(params, args.param_dtype);
        Four four;
        if (args.master_kind == INSTEP_MASTER_REMAINDER16) {
            const Packed rest = load(place.of<uint16_t>(args.master), at, count);
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) four.x[i] = joined_with_16(half_word(params, i), half_word(rest, i));
        } else {
            const uint32_t rest = load(place.of<uint8_t>(args.master), at, count);
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) four.x[i] = joined_with_8(half_word(params, i), byte_of(rest, i));
        }
        return four;
    }

    /* Returns the parameters in 16 bits, if they have 16; `four` becomes the stored values. */
    INSTEP_DEVICE Packed write(uint32_t at, Four& four) const {
        const InstepStepArgs& args = place.args;
        const uint32_t count = place.count;
        Packed params = {};
        if (args.param_dtype == INSTEP_DTYPE_F32) {
            store(static_cast<float*>(param), at, count, four);
            return params;
        }
        if (args.master_kind == INSTEP_MASTER_F32) {
            store(place.of<float>(args.master), at, count, four);
            params = narrowed(four, args.param_dtype);
        } else if (args.master_kind == INSTEP_MASTER_NONE) {
            params = args.stochastic ? narrowed_stochastically(place, at, PARAM_STREAM, four)
                                     : narrowed(four, args.param_dtype);
            four = widened(params, args.param_dtype);
            /* Widening an f16 NaN gives a payload that differs between machines, and a copy in f32 would store it. */
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) four.x[i] = canonical(four.x[i]);
        } else {
            params = write_split(at, four);
        }
        store(static_cast<uint16_t*>(param), at, count, params);
        return params;
    }

  private:
    INSTEP_DEVICE Packed write_split(uint32_t at, Four& four) const {
        const InstepStepArgs& args = place.args;
        Packed params = {}, wide_rest = {};
        uint32_t rest = 0;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            Split split;
            if (args.master_kind == INSTEP_MASTER_REMAINDER16) {
                split = split_to_16(four.x[i]);
                wide_rest.word[i / 2] |= static_cast<uint32_t>(split.remainder) << 16 * (i % 2);
            } else {
                four.x[i] = args.stochastic
                                ? rounded_to_24(four.x[i], place.random(at + i, PARAM_STREAM) >> 8)
                                : rounded_to_24(four.x[i]);
                split = split_to_8(four.x[i]);
                rest |= static_cast<uint32_t>(split.remainder) << 8 * i;
            }
            params.word[i / 2] |= static_cast<uint32_t>(split.param) << 16 * (i % 2);
        }
        if (args.master_kind == INSTEP_MASTER_REMAINDER16) {
            store(place.of<uint16_t>(args.master), at, place.count, wide_rest);
        } else {
            store(place.of<uint8_t>(args.master), at, place.count, rest);
        }
        return params;
    }
};

INSTEP_DEVICE Four read_state(const Place& place, uint32_t k, uint32_t at) {
    const InstepStepArgs& args = place.args;
    if (args.moments == INSTEP_MOMENTS_F32) return load(place.of<float>(args.states[k]), at, place.count);
    return widened(load(place.of<uint16_t>(args.states[k]), at, place.count), INSTEP_DTYPE_BF16);
}

/* Returns the stored values. */
INSTEP_DEVICE Four write_state(const Place& place, uint32_t k, uint32_t at, const Four& four) {
    const InstepStepArgs& args = place.args;
    if (args.moments == INSTEP_MOMENTS_F32) {
        store(place.of<float>(args.states[k]), at, place.count, four);
        return four;
    }
    const Packed packed = args.stochastic ? narrowed_stochastically(place, at, FIRST_STATE_STREAM + k, four)
                                          : narrowed(four, INSTEP_DTYPE_BF16);
    store(place.of<uint16_t>(args.states[k]), at, place.count, packed);
    return widened(packed, INSTEP_DTYPE_BF16);
}

/* A thread's four elements lie in one block. */
INSTEP_DEVICE float* scale_of(const Place& place, uint32_t k, uint32_t at) {
    return place.args.scales[k] + (place.tile.state_offset + at) / INSTEP_QUANTUM;
}

INSTEP_DEVICE Four decoded(uint32_t codes, bool is_signed, float scale) {
    Four four;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const uint8_t code = byte_of(codes, i);
        four.x[i] = is_signed ? from_signed_code(code, scale) : from_unsigned_code(code, scale);
    }
    return four;
}

INSTEP_DEVICE Four read_codes(const Place& place, uint32_t k, bool is_signed, uint32_t at) {
    if (at >= place.count) return {};
    return decoded(load(place.of<uint8_t>(place.args.states[k]), at, place.count), is_signed, *scale_of(place, k, at));
}

/* Elements past the end of the run are in no block. */
INSTEP_DEVICE uint32_t largest_magnitude(const Four& four, uint32_t at, uint32_t count) {
    uint32_t largest = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t magnitude = at + i < count ? static_cast<uint32_t>(magnitude_bits(four.x[i])) : 0;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/* `largest` is the block's. The thread with its first element writes the scale, after every thread has read the old
 * one. Returns the stored values. */
INSTEP_DEVICE Four write_codes(const Place& place, uint32_t k, bool is_signed, uint32_t at, const Four& four,
                               uint32_t largest) {
    if (at >= place.count) return {};
    const float scale = block_scale(largest), factor = coding_factor(is_signed, scale);
    uint32_t codes = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const bool stochastic = place.args.stochastic;
        const uint32_t random = stochastic ? place.random(at + i, FIRST_STATE_STREAM + k) : 0;
        const uint32_t code = is_signed ? signed_code(four.x[i], scale, factor, stochastic, random)
                                        : unsigned_code(four.x[i], scale, factor, stochastic, random);
        codes |= code << 8 * i;
    }
    codes = is_coded(scale) ? codes : 0;
    store(place.of<uint8_t>(place.args.states[k]), at, place.count, codes);
    if (at % INSTEP_QUANTUM == 0) *scale_of(place, k, at) = scale;
    return decoded(codes, is_signed, scale);
}

/* Copies the parameters. A copy of their own dtype has their bits. */
INSTEP_DEVICE void write_copy(const Place& place, uint32_t at, const Four& four, const Packed& params) {
    const InstepStepArgs& args = place.args;
    if (args.copy_dtype == args.param_dtype && args.param_dtype != INSTEP_DTYPE_F32) {
        return store(place.of<uint16_t>(args.copy), at, place.count, params);
    }
    Run{args.copy, place.tile.state_offset, args.copy_dtype, place.count}.write(at, four);
}

/* A parameter's first average is the parameter itself. */
INSTEP_DEVICE void write_ema(const Place& place, uint32_t at, const Four& four) {
    const InstepStepArgs& args = place.args;
    const bool is_first = args.records[place.tile.first_record].steps == 0;
    float* const ema = place.of<float>(args.ema);
    Four average = load(ema, at, place.count);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const float moved = moved_average(average.x[i], four.x[i], args.ema_weight, args.ema_from_sample);
        average.x[i] = canonical(is_first ? four.x[i] : moved);
    }
    store(ema, at, place.count, average);
}

}  // namespace

#endif
