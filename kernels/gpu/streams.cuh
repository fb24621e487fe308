/* Reads and writes the streams of a step on a GPU: the elements of one lane at a time, in every format.
 *
 * If storing loses bits, the stored value also replaces the value in registers. Copies and averages then use the
 * stored value. The code branches on the formats in the arguments, so all threads branch in the same way. The bits
 * equal those of cpu/streams.h. */
#ifndef INSTEP_GPU_STREAMS_CUH
#define INSTEP_GPU_STREAMS_CUH

#include "numeric/remainder.h"
#include "gpu/codes.cuh"

namespace {

template <uint32_t N>
INSTEP_DEVICE Words<N> narrowed_stochastically(const Place& place, uint32_t at, uint32_t stream, const Lane<N>& lane) {
    Words<N> words = {};
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
        set_element<16>(words, i, bfloat16_stochastic(lane.x[i], place.random(at + i, stream)));
    }
    return words;
}

/* Stored parameters with their master weights. `params` has the parameters, or f32 masters. `rest` has the remainders,
 * if the parameters have remainders. */
template <uint32_t N>
struct StoredWeights {
    Words<N> params, rest;
};

/* Loads and stores the parameters with their master weights. */
struct Weights {
    const Place& place;

    template <uint32_t N>
    INSTEP_DEVICE StoredWeights<N> load_at(uint32_t at) const {
        const InstepStepArgs& args = place.args;
        const Extent extent = place.extent();
        StoredWeights<N> stored = {};
        if (place.param_dtype() == INSTEP_DTYPE_F32) {
            stored.params = load<N>(place.params<float>(), at, extent);
        } else if (place.master_kind() == INSTEP_MASTER_F32) {
            stored.params = load<N>(place.of<float>(args.master), at, extent);
        } else {
            stored.params = load<N>(place.params<uint16_t>(), at, extent);
            if (place.master_kind() == INSTEP_MASTER_REMAINDER16) {
                stored.rest = load<N>(place.of<uint16_t>(args.master), at, extent);
            } else if (place.master_kind() == INSTEP_MASTER_REMAINDER8) {
                stored.rest = load<N>(place.of<uint8_t>(args.master), at, extent);
            }
        }
        return stored;
    }

    template <uint32_t N>
    INSTEP_DEVICE Lane<N> values_of(const StoredWeights<N>& stored) const {
        if (place.param_dtype() == INSTEP_DTYPE_F32 || place.master_kind() == INSTEP_MASTER_F32) {
            return as_floats(stored.params);
        }
        if (place.master_kind() == INSTEP_MASTER_NONE) return widened(stored.params, place.param_dtype());
        Lane<N> lane;
#pragma unroll
        for (uint32_t i = 0; i < N; ++i) {
            const uint16_t upper = static_cast<uint16_t>(element_of<16>(stored.params, i));
            lane.x[i] = place.master_kind() == INSTEP_MASTER_REMAINDER16
                            ? joined_with_16(upper, static_cast<uint16_t>(element_of<16>(stored.rest, i)))
                            : joined_with_8(upper, static_cast<uint8_t>(element_of<8>(stored.rest, i)));
        }
        return lane;
    }

    /* Stores the parameters, and returns those of 16 bits as words. `lane` becomes the stored values. */
    template <uint32_t N>
    INSTEP_DEVICE Words<N> write(uint32_t at, Lane<N>& lane) const {
        const InstepStepArgs& args = place.args;
        const Extent extent = place.extent();
        Words<N> params = {};
        if (place.param_dtype() == INSTEP_DTYPE_F32) {
            store(place.params<float>(), at, extent, as_words(lane));
            return params;
        }
        if (place.master_kind() == INSTEP_MASTER_F32) {
            store(place.of<float>(args.master), at, extent, as_words(lane));
            params = narrowed(lane, place.param_dtype());
        } else if (place.master_kind() == INSTEP_MASTER_NONE) {
            params = place.is_stochastic() ? narrowed_stochastically(place, at, PARAM_STREAM, lane)
                                     : narrowed(lane, place.param_dtype());
            lane = widened(params, place.param_dtype());
            /* Machines widen an f16 NaN to different payloads, and an f32 copy
             * would store such a payload. */
#pragma unroll
            for (uint32_t i = 0; i < N; ++i) lane.x[i] = canonical(lane.x[i]);
        } else {
            params = write_split(at, lane);
        }
        store(place.params<uint16_t>(), at, extent, params);
        return params;
    }

  private:
    template <uint32_t N>
    INSTEP_DEVICE Words<N> write_split(uint32_t at, Lane<N>& lane) const {
        const InstepStepArgs& args = place.args;
        Words<N> params = {}, rest = {};
#pragma unroll
        for (uint32_t i = 0; i < N; ++i) {
            Split split;
            if (place.master_kind() == INSTEP_MASTER_REMAINDER16) {
                split = split_to_16(lane.x[i]);
                set_element<16>(rest, i, split.remainder);
            } else {
                lane.x[i] = place.is_stochastic()
                                ? rounded_to_24(lane.x[i], place.random(at + i, PARAM_STREAM) >> 8)
                                : rounded_to_24(lane.x[i]);
                split = split_to_8(lane.x[i]);
                set_element<8>(rest, i, split.remainder);
            }
            set_element<16>(params, i, split.param);
        }
        if (place.master_kind() == INSTEP_MASTER_REMAINDER16) {
            store(place.of<uint16_t>(args.master), at, place.extent(), rest);
        } else {
            store(place.of<uint8_t>(args.master), at, place.extent(), rest);
        }
        return params;
    }
};

template <uint32_t N>
INSTEP_DEVICE Words<N> load_state(const Place& place, uint32_t k, uint32_t at) {
    const InstepStepArgs& args = place.args;
    if (place.moments() == INSTEP_MOMENTS_F32) return load<N>(place.of<float>(args.states[k]), at, place.extent());
    return load<N>(place.of<uint16_t>(args.states[k]), at, place.extent());
}

template <uint32_t N>
INSTEP_DEVICE Lane<N> state_values(const Place& place, const Words<N>& words) {
    return place.moments() == INSTEP_MOMENTS_F32 ? as_floats(words) : widened(words, INSTEP_DTYPE_BF16);
}

/* Stores a state, and returns the stored values. */
template <uint32_t N>
INSTEP_DEVICE Lane<N> write_state(const Place& place, uint32_t k, uint32_t at, const Lane<N>& lane) {
    const InstepStepArgs& args = place.args;
    if (place.moments() == INSTEP_MOMENTS_F32) {
        store(place.of<float>(args.states[k]), at, place.extent(), as_words(lane));
        return lane;
    }
    const Words<N> words = place.is_stochastic() ? narrowed_stochastically(place, at, FIRST_STATE_STREAM + k, lane)
                                        : narrowed(lane, INSTEP_DTYPE_BF16);
    store(place.of<uint16_t>(args.states[k]), at, place.extent(), words);
    return widened(words, INSTEP_DTYPE_BF16);
}

/* If the gradients are misaligned, this function waits for its loads, so a round calls it last. */
template <uint32_t N>
INSTEP_DEVICE Words<N> load_gradients(const Place& place, uint32_t at) {
    const Run run = place.gradients();
    return run.shifted(run.load_shifted_at<N>(at));
}

/* Loads every state of a lane as stored words. States that the launch does not have stay zero. */
template <class Rule, bool CODED, uint32_t N>
INSTEP_DEVICE void load_states(const Place& place, uint32_t at, Words<N>* words) {
#pragma unroll
    for (int k = 0; k < Rule::STATES; ++k) {
        if (static_cast<uint32_t>(k) >= place.state_count()) continue;
        words[k] = CODED ? load_codes<N>(place, k, at) : load_state<N>(place, k, at);
    }
}

/* Marks the end of the loads of a round. `gradients` is null if the round reads no gradients. */
template <uint32_t N>
INSTEP_DEVICE void hold_back(StoredWeights<N>& stored, Words<N> (&states)[INSTEP_MAX_STATES], Words<N>* gradients) {
    hold_back(stored.params);
    hold_back(stored.rest);
#pragma unroll
    for (uint32_t k = 0; k < INSTEP_MAX_STATES; ++k) hold_back(states[k]);
    if (gradients) hold_back(*gradients);
}

template <class Rule, bool CODED, uint32_t N>
INSTEP_DEVICE void state_values(const Place& place, const Words<N>* words, Lane<N>* states) {
#pragma unroll
    for (int k = 0; k < Rule::STATES; ++k) {
        if (CODED) {
            states[k] = decoded(words[k], Rule::SIGNED >> k & 1, float_of(words[k].word[N - 1]));
        } else {
            states[k] = state_values(place, words[k]);
        }
    }
}

/* Copies the parameters. A copy of the same dtype has the same bits. */
template <uint32_t N>
INSTEP_DEVICE void write_copy(const Place& place, uint32_t at, const Lane<N>& lane, const Words<N>& params) {
    const InstepStepArgs& args = place.args;
    if (args.copy_dtype == place.param_dtype() && place.param_dtype() != INSTEP_DTYPE_F32) {
        return store(place.of<uint16_t>(args.copy), at, place.extent(), params);
    }
    Run{args.copy, place.tile().state_offset, args.copy_dtype, place.extent()}.write(at, lane);
}

/* A parameter's first average is the parameter itself. */
template <uint32_t N>
INSTEP_DEVICE void write_ema(const Place& place, uint32_t at, const Lane<N>& lane) {
    const InstepStepArgs& args = place.args;
    /* If records are in the argument, each parameter has only one optimizer. */
    const uint64_t steps = args.records ? args.records[place.tile().first_record].steps : place.record().steps;
    const bool is_first = steps == 0;
    float* const ema = place.of<float>(args.ema);
    Lane<N> average = as_floats(load<N>(ema, at, place.extent()));
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
        const float moved = moved_average(average.x[i], lane.x[i], args.ema_weight, args.ema_from_sample);
        average.x[i] = canonical(is_first ? lane.x[i] : moved);
    }
    store(ema, at, place.extent(), as_words(average));
}

}  // namespace

#endif
