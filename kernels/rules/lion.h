/* Lion: the update rule. It is written nowhere else.
 *
 *     g <- -g                                        if maximize
 *     c <- beta1 * m + (1 - beta1) * g
 *     p <- p - lr * sign(c) - lr * weight_decay * p  sign(0) = 0
 *     m <- beta2 * m + (1 - beta2) * g
 *
 * Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023. The decay is decoupled, and is subtracted
 * for the reason in adam.h. Rounding of c matters only near zero, where it may flip the sign. */
#ifndef INSTEP_RULES_LION_H
#define INSTEP_RULES_LION_H

#include "numeric/math.h"

namespace {

/* Scalars of one update, each rounded once from f64. */
struct LionScalars {
    float weight1, weight2, lr, lr_weight_decay;
    uint32_t from_sample1, from_sample2, maximize;
};

template <int STATES_>
struct Lion {
    using Scalars = LionScalars;
    static constexpr int STATES = STATES_; /* exp_avg */
    static constexpr uint32_t SIGNED = 1;  /* bit k is set if state k may be negative */

    /* No prepared scalar depends on the step. */
    static INSTEP_INLINE LionScalars prepare(const InstepLionHyper& h, uint64_t) {
        LionScalars s = {};
        average_weight(h.beta1, &s.weight1, &s.from_sample1);
        average_weight(h.beta2, &s.weight2, &s.from_sample2);
        s.lr = static_cast<float>(h.lr);
        s.lr_weight_decay = static_cast<float>(h.lr * h.weight_decay);
        s.maximize = h.maximize;
        return s;
    }

    /* Returns the factor of the summed gradient. Negating it for `maximize` adds no work per element. */
    static INSTEP_INLINE float factor(const LionScalars& s, float multiplier) {
        return s.maximize ? -multiplier : multiplier;
    }

    /* The flags on which `update` branches. A loop compiled for constant flags has no select instruction. */
    static constexpr uint32_t FROM_SAMPLE1 = 1, FROM_SAMPLE2 = 2, DECAY = 4;
    static constexpr uint32_t COMMON[2] = {DECAY, 0};

    /* The step uses only the sign of c. If a gradient is infinite or NaN, or m is NaN, the
     * new m is infinite or NaN. */
    static constexpr uint32_t HIDDEN = hidden_state(0);

    static INSTEP_INLINE uint32_t flags(const LionScalars& s) {
        return (s.from_sample1 ? FROM_SAMPLE1 : 0) | (s.from_sample2 ? FROM_SAMPLE2 : 0) |
               (s.lr_weight_decay != 0.0f ? DECAY : 0);
    }

    template <class F>
    static INSTEP_INLINE F update(const LionScalars& s, uint32_t flags, F p, F g, F* state) {
        const F direction = moved_average(state[0], g, s.weight1, flags & FROM_SAMPLE1);
        state[0] = moved_average(state[0], g, s.weight2, flags & FROM_SAMPLE2);
        const F change = with_sign(s.lr, direction);
        return p - (flags & DECAY ? change + s.lr_weight_decay * p : change);
    }
};

}  // namespace

#endif
