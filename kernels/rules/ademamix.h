/* AdEMAMix: the update rule. It is written nowhere else. t counts a parameter's own steps.
 *
 *     g <- -g                                        if maximize
 *     m1 <- beta1 * m1 + (1 - beta1) * g
 *     m2 <- beta3 * m2 + (1 - beta3) * g
 *     v <- beta2 * v + (1 - beta2) * g^2
 *     correction = sqrt(1 - beta2^t)
 *     change = lr * correction * (m1 / (1 - beta1^t) + alpha * m2) / (sqrt(v) + eps * correction)
 *     p <- p - change - lr * weight_decay * p
 *
 * Pagliardini, Ablin & Grangier, "The AdEMAMix Optimizer: Better, Faster, Older", 2024, algorithm 1. The slow average
 * m2 has no bias correction. There are no warm-ups of alpha and beta3. The warm-up of beta3 would need logarithms,
 * which differ between machines. The decay is decoupled, and is subtracted for the reason in adam.h. The paper divides
 * sqrt(v) by the bias correction. Here the bias correction multiplies both numerator and denominator instead, which
 * takes one register less. */
#ifndef INSTEP_RULES_ADEMAMIX_H
#define INSTEP_RULES_ADEMAMIX_H

#include "numeric/math.h"

namespace {

/* Scalars of one update, each rounded once from f64. */
struct AdEmaMixScalars {
    float weight1, weight2, weight3, fast_rate, slow_rate, eps, lr_weight_decay;
    uint32_t from_sample1, from_sample2, maximize, reserved;
};

template <int STATES_>
struct AdEmaMix {
    using Scalars = AdEmaMixScalars;
    static constexpr int STATES = STATES_; /* exp_avg_fast, exp_avg_slow, exp_avg_sq */
    static constexpr uint32_t SIGNED = 3;  /* bit k is set if state k may be negative */

    /* `step` counts from 1. */
    static INSTEP_INLINE AdEmaMixScalars prepare(const InstepAdEmaMixHyper& h, uint64_t step) {
        AdEmaMixScalars s = {};
        average_weight(h.beta1, &s.weight1, &s.from_sample1);
        average_weight(h.beta2, &s.weight2, &s.from_sample2);
        s.weight3 = static_cast<float>(1.0 - h.beta3); /* from_sample is always 0: this average moves little */
        const double correction = square_root(1.0 - power(h.beta2, step));
        s.fast_rate = static_cast<float>(h.lr * correction / (1.0 - power(h.beta1, step)));
        s.slow_rate = static_cast<float>(h.lr * correction * h.alpha);
        s.eps = static_cast<float>(h.eps * correction);
        s.lr_weight_decay = static_cast<float>(h.lr * h.weight_decay);
        s.maximize = h.maximize;
        return s;
    }

    /* Returns the factor of the summed gradient. Negating it for `maximize` adds no work per element. */
    static INSTEP_INLINE float factor(const AdEmaMixScalars& s, float multiplier) {
        return s.maximize ? -multiplier : multiplier;
    }

    /* The flags on which `update` branches. A loop compiled for constant flags has no select instruction. */
    static constexpr uint32_t FROM_SAMPLE1 = 1, FROM_SAMPLE2 = 2, DECAY = 4;
    static constexpr uint32_t COMMON[2] = {0, DECAY};

    /* HIDDEN is 0 for the reason in adam.h, with both averages in place of m. */
    static constexpr uint32_t HIDDEN = 0;

    static INSTEP_INLINE uint32_t flags(const AdEmaMixScalars& s) {
        return (s.from_sample1 ? FROM_SAMPLE1 : 0) | (s.from_sample2 ? FROM_SAMPLE2 : 0) |
               (s.lr_weight_decay != 0.0f ? DECAY : 0);
    }

    /* A loop may run these three functions in separate stages. The first function updates the states. */
    template <class F>
    static INSTEP_INLINE F numerator(const AdEmaMixScalars& s, uint32_t flags, F, F g, F* state) {
        state[0] = moved_average(state[0], g, s.weight1, flags & FROM_SAMPLE1);
        state[1] = moved_average(state[1], g, s.weight3, 0);
        state[2] = moved_average(state[2], g * g, s.weight2, flags & FROM_SAMPLE2);
        return s.fast_rate * state[0] + s.slow_rate * state[1];
    }

    template <class F>
    static INSTEP_INLINE F denominator(const AdEmaMixScalars& s, uint32_t, const F* state) {
        return square_root(state[2]) + s.eps;
    }

    template <class F>
    static INSTEP_INLINE F stepped(const AdEmaMixScalars& s, uint32_t flags, F p, F quotient) {
        return p - (flags & DECAY ? quotient + s.lr_weight_decay * p : quotient);
    }

    template <class F>
    static INSTEP_INLINE F update(const AdEmaMixScalars& s, uint32_t flags, F p, F g, F* state) {
        const F above = numerator(s, flags, p, g, state);
        return stepped(s, flags, p, above / denominator(s, flags, state));
    }
};

}  // namespace

#endif
