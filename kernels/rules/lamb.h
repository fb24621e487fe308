/* LAMB: the update rule. It is written nowhere else. t counts a parameter's own steps.
 *
 *     g <- -g                                        if maximize
 *     m <- beta1 * m + (1 - beta1) * g
 *     v <- beta2 * v + (1 - beta2) * g^2
 *     u = m / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^t) + eps) + weight_decay * p
 *     p <- p - lr * (|p| / |u|) * u                  norms over the whole parameter; scaled.h
 *
 * You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020, algorithm 2 with
 * phi(z) = z. Both launches compute u from the stored states, so the norm is that of the u that is applied. */
#ifndef INSTEP_RULES_LAMB_H
#define INSTEP_RULES_LAMB_H

#include "numeric/math.h"

namespace {

/* Scalars of one update, each rounded once from f64. */
struct LambScalars {
    double lr;
    float weight1, weight2, inv_bias_correction1, inv_sqrt_bias_correction2, eps, weight_decay;
    uint32_t from_sample1, from_sample2, maximize, reserved; /* no padding: records are compared by their bytes */
};

template <int STATES_>
struct Lamb {
    using Scalars = LambScalars;
    static constexpr int STATES = STATES_; /* exp_avg, exp_avg_sq */
    static constexpr uint32_t SIGNED = 1;  /* bit k is set if state k may be negative */

    /* `step` counts from 1. */
    static INSTEP_INLINE LambScalars prepare(const InstepLambHyper& h, uint64_t step) {
        LambScalars s = {};
        s.lr = h.lr;
        average_weight(h.beta1, &s.weight1, &s.from_sample1);
        average_weight(h.beta2, &s.weight2, &s.from_sample2);
        s.inv_bias_correction1 = static_cast<float>(1.0 / (1.0 - power(h.beta1, step)));
        s.inv_sqrt_bias_correction2 = static_cast<float>(1.0 / square_root(1.0 - power(h.beta2, step)));
        s.eps = static_cast<float>(h.eps);
        s.weight_decay = static_cast<float>(h.weight_decay);
        s.maximize = h.maximize;
        return s;
    }

    /* Returns the factor of the summed gradient. Negating it for `maximize` adds no work per element. */
    static INSTEP_INLINE float factor(const LambScalars& s, float multiplier) {
        return s.maximize ? -multiplier : multiplier;
    }

    /* The flags on which `update` and `change` branch. A loop compiled for constant flags has no select instruction. */
    static constexpr uint32_t FROM_SAMPLE1 = 1, FROM_SAMPLE2 = 2, DECAYS = 4;
    static constexpr uint32_t COMMON[2] = {DECAYS, 0};

    /* The parameter is not stepped here. If a gradient is infinite or NaN, so is m after the update. */
    static constexpr uint32_t HIDDEN = hidden_state(0) | hidden_state(1);

    static INSTEP_INLINE uint32_t flags(const LambScalars& s) {
        return (s.from_sample1 ? FROM_SAMPLE1 : 0) | (s.from_sample2 ? FROM_SAMPLE2 : 0) |
               (s.weight_decay != 0.0f ? DECAYS : 0);
    }

    /* Updates only the states. */
    template <class F>
    static INSTEP_INLINE F update(const LambScalars& s, uint32_t flags, F p, F g, F* state) {
        state[0] = moved_average(state[0], g, s.weight1, flags & FROM_SAMPLE1);
        state[1] = moved_average(state[1], g * g, s.weight2, flags & FROM_SAMPLE2);
        return p;
    }

    /* Returns u. The caller multiplies it by the result of `scale`. */
    static INSTEP_INLINE float change(const LambScalars& s, uint32_t flags, float p, const float* state) {
        const float denominator = square_root(state[1]) * s.inv_sqrt_bias_correction2 + s.eps;
        const float direction = s.inv_bias_correction1 * (state[0] / denominator);
        return flags & DECAYS ? direction + s.weight_decay * p : direction;
    }

    static INSTEP_INLINE double scale(const LambScalars& s, double ratio) { return s.lr * ratio; }
};

}  // namespace

#endif
