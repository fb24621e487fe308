/* On a CPU, opens the streams of one run of a segment as f32, steps them, and stores them again.
 *
 * This file handles all tensors of a step, but no threads and no choice of a rule. It stores the streams in the GPU's
 * order, so that copy and average use the stored parameter. */
#ifndef INSTEP_CPU_PART_H
#define INSTEP_CPU_PART_H

#include "cpu/bfloat16.h"

namespace {

/* The arguments of a launch. If segments are in separate memory, the addresses are those of the
 * segment with the tile that was last passed to `at`. */
class Placed {
  public:
    Placed(const InstepStepArgs& args, const InstepBases* bases) : args_(args), bases_(bases) {}

    const InstepStepArgs& at(const InstepTile& tile) {
        if (!bases_) return args_;
        const InstepBases& own = bases_[tile.record];
        args_.param_base = own.param_base;
        args_.grads = own.grads;
        args_.master = own.master;
        args_.copy = own.copy;
        args_.ema = own.ema;
        for (uint32_t k = 0; k < INSTEP_MAX_STATES; ++k) args_.states[k] = own.states[k];
        for (uint32_t k = 0; k < INSTEP_MAX_STATES; ++k) args_.scales[k] = own.scales[k];
        return args_;
    }

    /* Sets the run of a tile. All its streams are f32 in place. A run that is made separately and copied would wait for
     * its own stores. */
    void set(Run* run, const InstepTile& tile) const {
        return bases_ ? set_at(run, bases_[tile.record], tile) : set_at(run, args_, tile);
    }

  private:
    template <class Addresses>
    void set_at(Run* run, const Addresses& own, const InstepTile& tile) const {
        run->count = tile.count;
        run->p = reinterpret_cast<float*>(reinterpret_cast<uintptr_t>(own.param_base) + tile.param);
        run->g = static_cast<const float*>(own.grads) + tile.grad_offset;
        for (uint32_t k = 0; k < INSTEP_MAX_STATES; ++k) {
            run->states[k] = k < args_.state_count ? static_cast<float*>(own.states[k]) + tile.state_offset : nullptr;
        }
        run->change = nullptr;
    }

    InstepStepArgs args_;
    const InstepBases* bases_;
};

/* Returns a run of a bucket's gradients as f32: in place, or converted into `buffer`. */
const float* gradients(const InstepStepArgs& args, uint64_t offset, uint32_t count, float* buffer) {
    if (args.grad_dtype == INSTEP_DTYPE_F32) return static_cast<const float*>(args.grads) + offset;
    widen_run(args.grad_dtype, count, static_cast<const uint16_t*>(args.grads) + offset, buffer);
    return buffer;
}

/* Number of elements that are converted to f32 at a time, in whole blocks of 8-bit states. Buffers of this length for
 * five streams leave most of a first-level cache to the tensors. */
constexpr uint32_t CHUNK = 2 * INSTEP_QUANTUM;

/* A parameter's first average is the parameter itself. */
__attribute__((noinline)) void average_params(const InstepStepArgs& args, bool is_first, uint32_t count,
                                              const float* __restrict params, float* __restrict ema) {
    const float weight = args.ema_weight;
    const uint32_t from_new = args.ema_from_sample;
    for (uint32_t i = 0; i < count; ++i) {
        const float moved = moved_average(ema[i], params[i], weight, from_new);
        ema[i] = canonical(is_first ? params[i] : moved);
    }
}

/* A part of a tile. It has at most CHUNK elements, unless no buffer is necessary. */
struct Part {
    const InstepStepArgs& args;
    uint64_t state_offset; /* of the first element */
    uint32_t count;
    void* param;
    Rounding rounding;
    uint64_t ahead_bytes; /* how far ahead a loop prefetches; 0: no line that it does not read yet */

    template <class T>
    T* placed(void* base) const {
        return static_cast<T*>(base) + state_offset;
    }

    void* remainders() const {
        return args.master_kind == INSTEP_MASTER_REMAINDER16 ? static_cast<void*>(placed<uint16_t>(args.master))
                                                             : placed<uint8_t>(args.master);
    }

    /* Returns the parameters as f32: in place, or in `buffer`. */
    float* open_params(float* buffer) const {
        if (args.param_dtype == INSTEP_DTYPE_F32) return static_cast<float*>(param);
        const uint16_t* narrow = static_cast<const uint16_t*>(param);
        switch (args.master_kind) {
            case INSTEP_MASTER_F32: return placed<float>(args.master);
            case INSTEP_MASTER_NONE: widen_run(args.param_dtype, count, narrow, buffer); break;
            default: join_run(args.master_kind, count, narrow, remainders(), buffer);
        }
        return buffer;
    }

    /* Stores the parameters. Afterwards `params` has the stored values, if there is a copy or an average. */
    void close_params(float* params) const {
        if (args.param_dtype == INSTEP_DTYPE_F32) return;
        uint16_t* narrow = static_cast<uint16_t*>(param);
        switch (args.master_kind) {
            case INSTEP_MASTER_F32: return narrow_run(args.param_dtype, count, params, narrow);
            case INSTEP_MASTER_NONE:
                if (args.stochastic) {
                    narrow_stochastically(rounding.position, PARAM_STREAM, count, params, narrow);
                } else {
                    narrow_run(args.param_dtype, count, params, narrow);
                }
                if (args.copy || args.ema) {
                    widen_run(args.param_dtype, count, narrow, params);
                    make_canonical(params, count); /* widening keeps a NaN's payload only on a CPU */
                }
                return;
            default: split_run(args.master_kind, rounding, count, params, narrow, remainders());
        }
    }

    float* scales(uint32_t k) const { return args.scales[k] + state_offset / INSTEP_QUANTUM; }

    float* open_state(uint32_t k, bool is_signed, float* buffer) const {
        switch (args.moments) {
            case INSTEP_MOMENTS_F32: return placed<float>(args.states[k]);
            case INSTEP_MOMENTS_BF16:
                widen_run(INSTEP_DTYPE_BF16, count, placed<uint16_t>(args.states[k]), buffer);
                break;
            default: decode_run(is_signed, count, placed<uint8_t>(args.states[k]), scales(k), buffer);
        }
        return buffer;
    }

    void close_state(uint32_t k, bool is_signed, const float* values) const {
        const uint32_t stream = FIRST_STATE_STREAM + k;
        if (args.moments == INSTEP_MOMENTS_8BIT) {
            return encode_run(is_signed, rounding, stream, count, values, placed<uint8_t>(args.states[k]), scales(k));
        }
        if (args.moments != INSTEP_MOMENTS_BF16) return;
        if (args.stochastic) {
            narrow_stochastically(rounding.position, stream, count, values, placed<uint16_t>(args.states[k]));
        } else {
            narrow_run(INSTEP_DTYPE_BF16, count, values, placed<uint16_t>(args.states[k]));
        }
    }

    /* Copies the stepped parameters while they are in the cache. A copy in the parameter's dtype has the parameter's
     * bits. */
    void copy(const float* params) const {
        if (args.copy_dtype == INSTEP_DTYPE_F32) {
            __builtin_memcpy(placed<float>(args.copy), params, count * sizeof(float));
        } else if (args.copy_dtype == args.param_dtype) {
            __builtin_memcpy(placed<uint16_t>(args.copy), param, count * sizeof(uint16_t));
        } else {
            narrow_run(args.copy_dtype, count, params, placed<uint16_t>(args.copy));
        }
    }

    /* Stores the stepped parameters, then the copy and the moving average. */
    void finish(float* params, bool is_first) const {
        close_params(params);
        if (args.copy) copy(params);
        if (args.ema) average_params(args, is_first, count, params, placed<float>(args.ema));
    }
};

template <class Rule>
uint32_t step_part(const Part& part, const typename Rule::Scalars& scalars, float multiplier, uint64_t grad_offset, bool is_first) {
    const InstepStepArgs& args = part.args;
    float grad_buffer[CHUNK], param_buffer[CHUNK], state_buffers[Rule::STATES > 0 ? Rule::STATES : 1][CHUNK];
    const float* grads = gradients(args, grad_offset, part.count, grad_buffer);
    float* params = part.open_params(param_buffer);
#if INSTEP_HAS_VECTORS
    if (args.moments == INSTEP_MOMENTS_BF16 && has_vector_loop<Rule>(scalars, part.count) && part.rounding.is_one_loop(part.count)) {
        uint16_t* narrow[INSTEP_MAX_STATES] = {};
        for (uint32_t k = 0; k < Rule::STATES; ++k) narrow[k] = part.placed<uint16_t>(args.states[k]);
        const WholeTensors tensors = {params, grads};
        const auto run = args.stochastic ? step_vector_run<Rule, true, WholeTensors, uint16_t>
                                         : step_vector_run<Rule, false, WholeTensors, uint16_t>;
        const uint32_t nonfinite =
            run(scalars, multiplier, part.rounding.position, part.ahead_bytes, part.count, tensors, narrow);
        part.finish(params, is_first);
        return nonfinite;
    }
#endif
    Run run = {part.count, params, grads, {}, nullptr};
    for (uint32_t k = 0; k < Rule::STATES; ++k) {
        run.states[k] = part.open_state(k, Rule::SIGNED >> k & 1, state_buffers[k]);
    }
    const uint32_t nonfinite = step_runs<Rule>(scalars, multiplier, part.ahead_bytes, &run, 1);
    for (uint32_t k = 0; k < Rule::STATES; ++k) part.close_state(k, Rule::SIGNED >> k & 1, run.states[k]);
    part.finish(params, is_first);
    return nonfinite;
}

}  // namespace

#endif
