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
#include "gpu/prefetch.cuh"
#include "numeric/control.h"

namespace {

/* The tile that is stepped. What it says is read where it is needed, from shared memory: copies would cost
 * registers. */
struct Place {
    const InstepStepArgs& args;
    const TileSlot& slot;
    bool is_full; /* a constant, Extent */

    INSTEP_DEVICE const InstepTile& tile() const { return slot.tile(); }
    INSTEP_DEVICE const InstepRecord& record() const { return slot.record(); }
    INSTEP_DEVICE uint32_t count() const { return is_full ? INSTEP_TILE_ELEMENTS : tile().count; }
    INSTEP_DEVICE Extent extent() const { return {count(), is_full}; }
    INSTEP_DEVICE Run gradients() const { return {args.grads, tile().grad_offset, args.grad_dtype, extent()}; }

    template <class T>
    INSTEP_DEVICE T* params() const {
        return static_cast<T*>(param_of(args, tile()));
    }

    /* Its run of a stream that is placed like the states. */
    template <class T>
    INSTEP_DEVICE T* of(void* base) const {
        return static_cast<T*>(base) + tile().state_offset;
    }

    INSTEP_DEVICE uint32_t random(uint32_t at, uint32_t stream) const {
        return RandomPosition(random_key(args.seed, record().steps + 1), tile().element).bits(at, stream);
    }
};

INSTEP_DEVICE Words narrowed_stochastically(const Place& place, uint32_t at, uint32_t stream, const Four& four) {
    Words words = {};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        set_element<16>(words, i, bfloat16_stochastic(four.x[i], place.random(at + i, stream)));
    }
    return words;
}

/* The parameters, with their master weights. */
struct Weights {
    const Place& place;

    /* As they are stored: parameters, and the rest of a master that is split. An f32 master stands for both. */
    struct Stored {
        Words params, rest;
    };

    INSTEP_DEVICE Stored load_at(uint32_t at) const {
        const InstepStepArgs& args = place.args;
        const Extent extent = place.extent();
        Stored stored = {};
        if (args.param_dtype == INSTEP_DTYPE_F32) {
            stored.params = load(place.params<float>(), at, extent);
        } else if (args.master_kind == INSTEP_MASTER_F32) {
            stored.params = load(place.of<float>(args.master), at, extent);
        } else {
            stored.params = load(place.params<uint16_t>(), at, extent);
            if (args.master_kind == INSTEP_MASTER_REMAINDER16) {
                stored.rest = load(place.of<uint16_t>(args.master), at, extent);
            } else if (args.master_kind == INSTEP_MASTER_REMAINDER8) {
                stored.rest = load(place.of<uint8_t>(args.master), at, extent);
            }
        }
        return stored;
    }

    INSTEP_DEVICE Four values_of(const Stored& stored) const {
        const InstepStepArgs& args = place.args;
        if (args.param_dtype == INSTEP_DTYPE_F32 || args.master_kind == INSTEP_MASTER_F32) {
            return as_floats(stored.params);
        }
        if (args.master_kind == INSTEP_MASTER_NONE) return widened(stored.params, args.param_dtype);
        Four four;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint16_t upper = static_cast<uint16_t>(element_of<16>(stored.params, i));
            four.x[i] = args.master_kind == INSTEP_MASTER_REMAINDER16
                            ? joined_with_16(upper, static_cast<uint16_t>(element_of<16>(stored.rest, i)))
                            : joined_with_8(upper, static_cast<uint8_t>(element_of<8>(stored.rest, i)));
        }
        return four;
    }

    /* Returns the parameters in 16 bits, if they have 16; `four` becomes the stored values. */
    INSTEP_DEVICE Words write(uint32_t at, Four& four) const {
        const InstepStepArgs& args = place.args;
        const Extent extent = place.extent();
        Words params = {};
        if (args.param_dtype == INSTEP_DTYPE_F32) {
            store(place.params<float>(), at, extent, as_words(four));
            return params;
        }
        if (args.master_kind == INSTEP_MASTER_F32) {
            store(place.of<float>(args.master), at, extent, as_words(four));
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
        store(place.params<uint16_t>(), at, extent, params);
        return params;
    }

  private:
    INSTEP_DEVICE Words write_split(uint32_t at, Four& four) const {
        const InstepStepArgs& args = place.args;
        Words params = {}, rest = {};
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            Split split;
            if (args.master_kind == INSTEP_MASTER_REMAINDER16) {
                split = split_to_16(four.x[i]);
                set_element<16>(rest, i, split.remainder);
            } else {
                four.x[i] = args.stochastic
                                ? rounded_to_24(four.x[i], place.random(at + i, PARAM_STREAM) >> 8)
                                : rounded_to_24(four.x[i]);
                split = split_to_8(four.x[i]);
                set_element<8>(rest, i, split.remainder);
            }
            set_element<16>(params, i, split.param);
        }
        if (args.master_kind == INSTEP_MASTER_REMAINDER16) {
            store(place.of<uint16_t>(args.master), at, place.extent(), rest);
        } else {
            store(place.of<uint8_t>(args.master), at, place.extent(), rest);
        }
        return params;
    }
};

INSTEP_DEVICE Words load_state(const Place& place, uint32_t k, uint32_t at) {
    const InstepStepArgs& args = place.args;
    if (args.moments == INSTEP_MOMENTS_F32) return load(place.of<float>(args.states[k]), at, place.extent());
    return load(place.of<uint16_t>(args.states[k]), at, place.extent());
}

INSTEP_DEVICE Four state_values(const Place& place, const Words& words) {
    return place.args.moments == INSTEP_MOMENTS_F32 ? as_floats(words) : widened(words, INSTEP_DTYPE_BF16);
}

/* Returns the stored values. */
INSTEP_DEVICE Four write_state(const Place& place, uint32_t k, uint32_t at, const Four& four) {
    const InstepStepArgs& args = place.args;
    if (args.moments == INSTEP_MOMENTS_F32) {
        store(place.of<float>(args.states[k]), at, place.extent(), as_words(four));
        return four;
    }
    const Words words = args.stochastic ? narrowed_stochastically(place, at, FIRST_STATE_STREAM + k, four)
                                        : narrowed(four, INSTEP_DTYPE_BF16);
    store(place.of<uint16_t>(args.states[k]), at, place.extent(), words);
    return widened(words, INSTEP_DTYPE_BF16);
}

/* A thread's four elements lie in one block. */
INSTEP_DEVICE float* scale_of(const Place& place, uint32_t k, uint32_t at) {
    return place.args.scales[k] + (place.tile().state_offset + at) / INSTEP_QUANTUM;
}

/* Four codes in the first word, and the scale of their block in the second. */
INSTEP_DEVICE Words load_codes(const Place& place, uint32_t k, uint32_t at) {
    if (at >= place.count()) return {};
    Words words = load(place.of<uint8_t>(place.args.states[k]), at, place.extent());
    words.word[1] = bits_of(*scale_of(place, k, at));
    return words;
}

INSTEP_DEVICE Four decoded(const Words& codes, bool is_signed, float scale) {
    Four four;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const uint8_t code = static_cast<uint8_t>(element_of<8>(codes, i));
        four.x[i] = is_signed ? from_signed_code(code, scale) : from_unsigned_code(code, scale);
    }
    return four;
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

/* `stochastic` is a constant, so that codes to the nearest cost no draw. */
INSTEP_DEVICE Words coded(const Place& place, uint32_t k, bool is_signed, uint32_t at, const Four& four, float scale,
                          bool stochastic) {
    const float factor = coding_factor(is_signed, scale);
    Words codes = {};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t random = stochastic ? place.random(at + i, FIRST_STATE_STREAM + k) : 0;
        const uint32_t code = is_signed ? signed_code(four.x[i], scale, factor, stochastic, random)
                                        : unsigned_code(four.x[i], scale, factor, stochastic, random);
        set_element<8>(codes, i, code);
    }
    codes.word[0] = is_coded(scale) ? codes.word[0] : 0;
    return codes;
}

/* `largest` is the block's. The thread with its first element writes the scale, after every thread has read the old
 * one. Returns the stored values. */
INSTEP_DEVICE Four write_codes(const Place& place, uint32_t k, bool is_signed, uint32_t at, const Four& four,
                               uint32_t largest) {
    if (at >= place.count()) return {};
    const float scale = block_scale(largest);
    const Words codes = place.args.stochastic ? coded(place, k, is_signed, at, four, scale, true)
                                              : coded(place, k, is_signed, at, four, scale, false);
    store(place.of<uint8_t>(place.args.states[k]), at, place.extent(), codes);
    if (at % INSTEP_QUANTUM == 0) *scale_of(place, k, at) = scale;
    return decoded(codes, is_signed, scale);
}

/* The end of a loop over `at` in which every thread makes as many rounds, for the barrier in each. */
INSTEP_DEVICE uint32_t whole_rounds(const Place& place) {
    return (place.count() + ELEMENTS_PER_ROUND - 1) / ELEMENTS_PER_ROUND * ELEMENTS_PER_ROUND;
}

/* A wait, if the gradients are misaligned: the last load of a round. */
INSTEP_DEVICE Words load_gradients(const Place& place, uint32_t at) {
    const Run run = place.gradients();
    return run.shifted(run.load_shifted_at(at));
}

/* Every state of four elements, as it is stored; those that the run does not keep stay zero. */
template <class Rule, bool CODED>
INSTEP_DEVICE void load_states(const Place& place, uint32_t at, Words* words) {
#pragma unroll
    for (uint32_t k = 0; k < Rule::STATES; ++k) {
        if (k < place.args.state_count) words[k] = CODED ? load_codes(place, k, at) : load_state(place, k, at);
    }
}

/* All words of a round; `gradients` only if it reads some. */
INSTEP_DEVICE void hold_back(Weights::Stored& stored, Words (&states)[INSTEP_MAX_STATES], Words* gradients) {
    hold_back(stored.params);
    hold_back(stored.rest);
#pragma unroll
    for (uint32_t k = 0; k < INSTEP_MAX_STATES; ++k) hold_back(states[k]);
    if (gradients) hold_back(*gradients);
}

template <class Rule, bool CODED>
INSTEP_DEVICE void state_values(const Place& place, const Words* words, Four* states) {
#pragma unroll
    for (uint32_t k = 0; k < Rule::STATES; ++k) {
        if (CODED) {
            states[k] = decoded(words[k], Rule::SIGNED >> k & 1, float_of(words[k].word[1]));
        } else {
            states[k] = state_values(place, words[k]);
        }
    }
}

/* Copies the parameters. A copy of their own dtype has their bits. */
INSTEP_DEVICE void write_copy(const Place& place, uint32_t at, const Four& four, const Words& params) {
    const InstepStepArgs& args = place.args;
    if (args.copy_dtype == args.param_dtype && args.param_dtype != INSTEP_DTYPE_F32) {
        return store(place.of<uint16_t>(args.copy), at, place.extent(), params);
    }
    Run{args.copy, place.tile().state_offset, args.copy_dtype, place.extent()}.write(at, four);
}

/* A parameter's first average is the parameter itself. */
INSTEP_DEVICE void write_ema(const Place& place, uint32_t at, const Four& four) {
    const InstepStepArgs& args = place.args;
    const bool is_first = args.records[place.tile().first_record].steps == 0;
    float* const ema = place.of<float>(args.ema);
    Four average = as_floats(load(ema, at, place.extent()));
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const float moved = moved_average(average.x[i], four.x[i], args.ema_weight, args.ema_from_sample);
        average.x[i] = canonical(is_first ? four.x[i] : moved);
    }
    store(ema, at, place.extent(), as_words(average));
}

}  // namespace

#endif
