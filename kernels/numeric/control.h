/* Makes the decisions of a pass on the device that has the gradients: scalars, multiplier, clip and skip.
 *
 * All arithmetic is f64, and each result is rounded once. Nothing here depends on threads or launch shape, so the GPU's
 * control kernels compile the same code. */
#ifndef INSTEP_NUMERIC_CONTROL_H
#define INSTEP_NUMERIC_CONTROL_H

#include "numeric/dtype.h"
#include "numeric/norm.h"
#include "rules/rules.h"

namespace {

static_assert(sizeof(InstepTile) == 64 && sizeof(InstepStatus) == 64, "one cache line each");

/* Reads a count of ranks. It was summed with the gradients, so it has their dtype. */
INSTEP_INLINE float count_at(const void* count, uint32_t grad_dtype) {
    if (grad_dtype == INSTEP_DTYPE_F32) return *static_cast<const float*>(count);
    return widened(*static_cast<const uint16_t*>(count), grad_dtype);
}

INSTEP_INLINE float count_at(uint64_t address, uint32_t grad_dtype) {
    return count_at(reinterpret_cast<const void*>(address), grad_dtype);
}

/* Writes this rank's own contribution, which is 1. */
INSTEP_INLINE void count_this_rank(uint64_t address, uint32_t grad_dtype) {
    void* const count = reinterpret_cast<void*>(address);
    if (grad_dtype == INSTEP_DTYPE_F32) {
        *static_cast<float*>(count) = 1.0f;
    } else {
        *static_cast<uint16_t*>(count) = narrowed(1.0f, grad_dtype);
    }
}

/* Returns the number of ranks over which the mean is taken. If no rank contributed, nothing is stepped, and the divisor
 * does not matter. */
INSTEP_INLINE double divisor_of(const InstepControl& control, const void* contributors, uint32_t grad_dtype) {
    if (control.divisor > 0.0) return control.divisor;
    const float ranks = count_at(contributors, grad_dtype);
    return ranks > 0.0f ? static_cast<double>(ranks) : 1.0;
}

/* Computes the clip coefficient by the formula of torch.nn.utils.clip_grad_norm_. */
INSTEP_INLINE double clip_coefficient(double max_norm, double norm) {
    const double clip = max_norm / (norm + 1e-6);
    return clip >= 1.0 ? 1.0 : canonical(clip);
}

/* Returns the loss scale: another program's scale, a constant, or the result of the last Decide. */
INSTEP_INLINE double loss_scale_of(const InstepBeginArgs& args, const InstepControl& control) {
    if (args.grad_scale) return static_cast<double>(*args.grad_scale);
    return args.loss_scale > 0.0 ? args.loss_scale : static_cast<double>(control.next_loss_scale);
}

/* Opens a pass in one control block. It makes only the decisions that depend on the previous pass, and zeroes the
 * accumulators. Every block gets the dynamic loss scale of the pass's own block. */
INSTEP_INLINE void begin_pass(const InstepBeginArgs& args, InstepControl* control) {
    const double divisor = args.divisor;
    const double loss_scale = loss_scale_of(args, *args.control);
    const bool clips = args.previous_max_norm >= 0.0 && control->previous_norm >= 0.0;
    for (int k = 0; k < INSTEP_NORM_LIMBS; ++k) control->limbs[k] = 0;
    control->passes += 1;
    control->norm = 0.0;
    control->clip = clips ? clip_coefficient(args.previous_max_norm, control->previous_norm) : args.clip;
    control->divisor = divisor;
    control->loss_scale = loss_scale;
    control->multiplier = divisor > 0.0 ? static_cast<float>(1.0 / (divisor * loss_scale) * control->clip) : 0.0f;
    control->average_multiplier = divisor > 0.0 ? static_cast<float>(1.0 / divisor) : 0.0f;
    control->local_multiplier = static_cast<float>(1.0 / loss_scale);
    control->max_abs_bits = 0;
    control->first_nonfinite_bucket = INSTEP_NO_BUCKET;
    control->skip = args.found_inf && *args.found_inf != 0.0f;
    control->decided = 0;
}

/* A record holds the scalars of its rule as bytes, because only the rule's header knows their meaning. A GPU's compiler
 * would turn memcpy into copies of single bytes, so the GPU's code casts. */
template <class Rule>
INSTEP_INLINE typename Rule::Scalars scalars_of(const InstepRecord& record) {
#if defined(__CUDA_ARCH__)
    return reinterpret_cast<const typename Rule::Scalars&>(record.scalars);
#else
    typename Rule::Scalars scalars;
    __builtin_memcpy(&scalars, &record.scalars, sizeof scalars);
    return scalars;
#endif
}

template <class Rule>
INSTEP_INLINE void set_scalars(InstepRecord* record, const typename Rule::Scalars& scalars) {
#if defined(__CUDA_ARCH__)
    reinterpret_cast<typename Rule::Scalars&>(record->scalars) = scalars;
#else
    __builtin_memcpy(&record->scalars, &scalars, sizeof scalars);
#endif
}

/* Derives the scalars of a record's next update. If the rule carries a number, its `prepare` also reads that number and
 * sets its next value. `prepare` of other rules has no such argument. */
template <class Rule, class Hyper>
INSTEP_INLINE auto prepared(const Hyper& hyper, InstepRecord* record, int)
    -> decltype(Rule::prepare(hyper, record->steps + 1, record->carried)) {
    return Rule::prepare(hyper, record->steps + 1, record->carried);
}

template <class Rule, class Hyper>
INSTEP_INLINE auto prepared(const Hyper& hyper, InstepRecord* record, long)
    -> decltype(Rule::prepare(hyper, record->steps + 1)) {
    return Rule::prepare(hyper, record->steps + 1);
}

/* Counts the update of the last pass, if there was one, and prepares a record for the new pass. */
INSTEP_INLINE void open_record(const InstepBeginArgs& args, uint64_t index) {
    InstepRecord* const record = &args.records[index];
    record->steps += record->stepped;
    if (record->stepped) record->carried[0] = record->carried[1];
    record->stepped = 0;
    record->action = args.actions[index];
    if (args.norms) empty(&args.norms[index]);
    /* By default this rank has every gradient. All segments of a bucket write 1 to its count. */
    if (record->tail) count_this_rank(record->tail, record->grad_dtype);
    if (record->contributors) count_this_rank(record->contributors, record->grad_dtype);
}

/* Derives the scalars of an open record's next update. */
INSTEP_INLINE void derive_scalars(const InstepBeginArgs& args, uint64_t index) {
    InstepRecord* const record = &args.records[index];
    InstepHyper hyper = args.hypers[record->hyper];
    hyper.words[0] *= args.lr_multipliers[index]; /* the first word is lr in every rule */
    switch (record->optimizer) {
#define OPTIMIZER(name, Rule, min_states, max_states)                                                   \
    case INSTEP_OPTIMIZER_##name:                                                                       \
        set_scalars<Rule<max_states>>(record, prepared<Rule<max_states>>(hyper.name, record, 0)); \
        break;
#include "optimizers.def"
#undef OPTIMIZER
    case INSTEP_OPTIMIZER_CUSTOM:
        record->scalars.custom.lr = hyper.custom.lr;
        record->scalars.custom.step = record->steps + 1;
        break;
    }
}

INSTEP_INLINE void begin_record(const InstepBeginArgs& args, uint64_t index) {
    open_record(args, index);
    derive_scalars(args, index);
}

/* A GPU's compiler recognises global memory only if the base address is an argument of the kernel. For an address from
 * a table, it would emit generic accesses, which allow for shared and local memory. */
INSTEP_INLINE void* param_of(const InstepStepArgs& args, const InstepTile& tile) {
#if defined(__CUDA_ARCH__)
    return static_cast<char*>(args.param_base) + tile.param;
#else
    return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(args.param_base) + tile.param);
#endif
}

/* Returns the action on a segment, after its bucket has been reduced. A segment that no
 * rank used does not change. */
INSTEP_INLINE uint32_t record_action(const InstepStepArgs& args, const InstepRecord& record) {
    const uint32_t dtype = args.grad_dtype;
    if ((record.tail | record.contributors) == 0) return record.action;
    if (record.tail && count_at(record.tail, dtype) == 0.0f) return INSTEP_ACTION_LEAVE;
    if (record.contributors && count_at(record.contributors, dtype) == 0.0f) return INSTEP_ACTION_LEAVE;
    return record.action;
}

INSTEP_INLINE double divisor_of(const InstepStepArgs& args, const InstepRecord& record) {
    return divisor_of(*args.control, reinterpret_cast<const void*>(record.contributors), args.grad_dtype);
}

/* Returns whether a launch knows its gradients' multiplier without the bucket's own count of ranks. */
INSTEP_INLINE bool knows_multiplier(const InstepStepArgs& args) {
    const InstepControl& control = *args.control;
    return (args.local != 0) | (control.decided != 0) | (control.divisor > 0.0); /* `|`: no load waits for another */
}

/* Returns the factor of a reduced gradient that is stepped or averaged. Begin or Decide has computed it, or it follows
 * from the bucket's own count of ranks. An averaged gradient has neither loss scale nor clip. */
INSTEP_INLINE float gradient_multiplier(const InstepStepArgs& args, const InstepRecord& record, uint32_t action) {
    const InstepControl& control = *args.control;
    const bool steps = action == INSTEP_ACTION_STEP;
    if (args.local) return steps ? control.local_multiplier : 1.0f;
    if (steps ? knows_multiplier(args) : control.divisor > 0.0) {
        return steps ? control.multiplier : control.average_multiplier;
    }
    const double loss_scale = steps ? control.loss_scale : 1.0, clip = steps ? control.clip : 1.0;
    return static_cast<float>(1.0 / (divisor_of(args, record) * loss_scale) * clip);
}

/* Returns whether a sum of this magnitude has a mean that is infinite or NaN. The mean is the sum times the step's
 * multiplier for the tile, without a clip that is decided later. */
INSTEP_INLINE bool has_nonfinite_mean(const InstepStepArgs& args, const InstepTile& tile, uint32_t magnitude) {
    return is_nonfinite(float_of(magnitude) * gradient_multiplier(args, args.records[tile.record], INSTEP_ACTION_STEP));
}

/* Returns whether a launch changes no parameter and no state. */
INSTEP_INLINE bool steps_nothing(const InstepStepArgs& args) {
    return (args.control->skip != 0) | (args.part == INSTEP_PART_END);
}

/* Decides the action of the user's own code on a segment. It runs before that code, because the code cannot read the
 * skip flag and the tail block. */
INSTEP_INLINE void instruct(const InstepStepArgs& args, const InstepTile& tile) {
    if (!tile.first) return;
    InstepRecord& record = args.records[tile.record];
    const bool steps = record_action(args, record) == INSTEP_ACTION_STEP && !args.control->skip;
    record.scalars.custom.multiplier = gradient_multiplier(args, record, INSTEP_ACTION_STEP);
    record.scalars.custom.action = steps ? INSTEP_ACTION_STEP : INSTEP_ACTION_LEAVE;
    if (steps) record.stepped = 1;
}

/* Sets the loss scale of the next pass, like torch.amp.GradScaler. The scale falls after a skipped pass, and rises
 * after a number of passes in a row without a skip. If f32 gradients could not be divided by the new scale, the current
 * scale stays. */
INSTEP_INLINE void adapt_loss_scale(const InstepDecideArgs& args) {
    InstepControl* control = args.control;
    double factor = 1.0;
    if (control->skip) {
        factor = args.backoff_factor;
        control->growth_tracker = 0;
    } else if (control->growth_tracker + uint64_t{1} < args.growth_interval) {
        control->growth_tracker += 1;
    } else {
        factor = args.growth_factor;
        control->growth_tracker = 0;
    }
    const float scale = static_cast<float>(static_cast<double>(control->next_loss_scale) * factor);
    if (scale >= 0x1p-126f && static_cast<double>(scale) <= args.largest_loss_scale) control->next_loss_scale = scale;
}

/* Computes the norm of one clip set's averaged gradients, and its clip coefficient. Returns whether a mean that the
 * step would use is infinite or NaN. Dividing a finite sum by a small loss scale may overflow. */
INSTEP_INLINE bool decide_set(const InstepDecideArgs& args, InstepControl* control, double max_norm) {
    const double ranks = divisor_of(*control, args.contributors, args.grad_dtype);
    const double multiplier = 1.0 / (ranks * control->loss_scale);
    const uint32_t worst = control->max_abs_bits;
    control->norm = canonical(multiplier * norm_value(control->limbs, worst));
    if (max_norm >= 0.0) control->clip = clip_coefficient(max_norm, control->norm);
    control->multiplier = canonical(static_cast<float>(multiplier * control->clip));
    control->decided = 1;
    const bool overflows = is_nonfinite(float_of(worst) * control->multiplier);
    /* The norm may have named a bucket with a mean that overflows. The clip makes this mean finite. The steps run after
     * this decision, so no step has named a bucket yet. */
    if (max_norm >= 0.0 && !overflows) control->first_nonfinite_bucket = INSTEP_NO_BUCKET;
    return overflows;
}

/* Decides norms, clip coefficients, a skip, and the state for the next pass. If one clip set skips, all sets skip.
 * Without skip_nonfinite, IEEE arithmetic clips: an infinite norm gives the coefficient 0, and NaN gives NaN. */
INSTEP_INLINE void decide(const InstepDecideArgs& args) {
    InstepControl* control = args.control;
    bool overflows = false;
    for (uint64_t k = 0; k <= args.set_count; ++k) {
        InstepControl* const set = k == 0 ? control : &args.set_controls[k - 1];
        overflows |= decide_set(args, set, k == 0 ? args.max_norm : set->max_norm);
        /* The status names the first non-finite bucket of the whole pass. */
        if (set->first_nonfinite_bucket < control->first_nonfinite_bucket) {
            control->first_nonfinite_bucket = set->first_nonfinite_bucket;
        }
    }
    const bool spoils = args.skip_nonfinite && overflows;
    const bool forbidden = args.found_inf && *args.found_inf != 0.0f;
    control->skip |= spoils | forbidden; /* Begin has already set it if another program forbids the pass */
    if (control->skip) control->clip = 1.0;
    for (uint64_t k = 0; k < args.set_count; ++k) {
        args.set_controls[k].skip = control->skip;
        if (control->skip) args.set_controls[k].clip = 1.0;
    }
    if (args.found_inf) *args.found_inf = control->skip ? 1.0f : 0.0f;
    /* Decisions run one after another, so no other thread writes there. */
    if (args.pass_control && overflows && args.bucket < args.pass_control->first_nonfinite_bucket) {
        args.pass_control->first_nonfinite_bucket = args.bucket;
    }
    if (args.contributors && count_at(args.contributors, args.grad_dtype) == 0.0f) return; /* no rank had data */
    if (control->max_abs_bits < INSTEP_F32_INFINITY_BITS && !control->skip) control->previous_norm = control->norm;
    if (args.growth_interval != 0) adapt_loss_scale(args);
}

}  // namespace

#endif
