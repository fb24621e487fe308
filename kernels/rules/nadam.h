/* NAdam: the update rule. It is written nowhere else. t counts a parameter's own steps.
 *
 *     g <- -g                                        if maximize
 *     g <- g + weight_decay * p                      if decay is coupled
 *     mu(t) = beta1 * (1 - 0.96^(t * momentum_decay) / 2)
 *     product <- product * mu(t)                     1 before the first step
 *     m <- beta1 * m + (1 - beta1) * g
 *     v <- beta2 * v + (1 - beta2) * g^2
 *     direction = (1 - mu(t)) / (1 - product) * g + mu(t+1) / (1 - product * mu(t+1)) * m
 *     p <- p - lr * direction / (sqrt(v) / sqrt(1 - beta2^t) + eps) - lr * weight_decay * p   (last term: decoupled)
 *
 * Dozat, "Incorporating Nesterov Momentum into Adam", ICLR 2016 workshop, in the variant of torch.optim.NAdam. The
 * record carries the product of momenta. It cannot be derived from t, because momenta may change between steps. */
#ifndef INSTEP_RULES_NADAM_H
#define INSTEP_RULES_NADAM_H

#include "numeric/math.h"

namespace {

/* Scalars of one update, each rounded once from f64. */
struct NAdamScalars {
    float weight1, weight2, gradient_rate, average_rate, inv_sqrt_bias_correction2, eps, weight_decay, lr_weight_decay;
    uint32_t from_sample1, from_sample2, maximize;
};

template <int STATES_>
struct NAdam {
    using Scalars = NAdamScalars;
    static constexpr int STATES = STATES_; /* exp_avg, exp_avg_sq */
    static constexpr uint32_t SIGNED = 1;  /* bit k is set if state k may be negative */

    /* Returns 0.96^x for x >= 0, and 0 for x from 18,300 on. pow() differs between machines; the series of the
     * exponential does not. For exponents of at most 0.041, nine terms are as exact as f64. */
    static INSTEP_INLINE double base(double x) {
        const uint64_t whole = x < 1e5 ? static_cast<uint64_t>(x) : 100000;
        const double exponent = x < 1e5 ? (x - static_cast<double>(whole)) * -0.040821994520255166 : 0.0;
        double series = 1.0;
        for (int k = 9; k > 0; --k) series = 1.0 + exponent / k * series;
        return power(0.96, whole) * series;
    }

    /* `step` counts from 1. `carried` is the product of momenta before this step and after it. The rates are computed
     * one after the other, so that all values fit into a GPU's registers. */
    static INSTEP_INLINE NAdamScalars prepare(const InstepNAdamHyper& h, uint64_t step, double* carried) {
        const double c = base(h.momentum_decay);
        const double mu = h.beta1 * (1.0 - 0.5 * power(c, step));
        const double product = carried[0] * mu;
        carried[1] = product;
        NAdamScalars s = {};
        s.gradient_rate = static_cast<float>(h.lr * (1.0 - mu) / (1.0 - product));
        const double next_mu = h.beta1 * (1.0 - 0.5 * power(c, step + 1));
        s.average_rate = static_cast<float>(h.lr * next_mu / (1.0 - product * next_mu));
        average_weight(h.beta1, &s.weight1, &s.from_sample1);
        average_weight(h.beta2, &s.weight2, &s.from_sample2);
        s.inv_sqrt_bias_correction2 = static_cast<float>(1.0 / square_root(1.0 - power(h.beta2, step)));
        s.eps = static_cast<float>(h.eps);
        s.weight_decay = static_cast<float>(h.decoupled ? 0.0 : h.weight_decay);
        s.lr_weight_decay = static_cast<float>(h.decoupled ? h.lr * h.weight_decay : 0.0);
        s.maximize = h.maximize;
        return s;
    }

    /* Returns the factor of the summed gradient. Negating it for `maximize` adds no work per element. */
    static INSTEP_INLINE float factor(const NAdamScalars& s, float multiplier) {
        return s.maximize ? -multiplier : multiplier;
    }

    /* The flags on which `update` branches. A loop compiled for constant flags has no select instruction. */
    static constexpr uint32_t FROM_SAMPLE1 = 1, FROM_SAMPLE2 = 2, COUPLED = 4, DECOUPLED = 8;
    static constexpr uint32_t COMMON[2] = {0, DECOUPLED};

    /* HIDDEN is 0 for the reason in adam.h, with g and m in place of m. */
    static constexpr uint32_t HIDDEN = 0;

    static INSTEP_INLINE uint32_t flags(const NAdamScalars& s) {
        return (s.from_sample1 ? FROM_SAMPLE1 : 0) | (s.from_sample2 ? FROM_SAMPLE2 : 0) |
               (s.weight_decay != 0.0f ? COUPLED : 0) | (s.lr_weight_decay != 0.0f ? DECOUPLED : 0);
    }

    /* A loop may run these three functions in separate stages. The first function updates the states. */
    template <class F>
    static INSTEP_INLINE F numerator(const NAdamScalars& s, uint32_t flags, F p, F g, F* state) {
        g = flags & COUPLED ? g + s.weight_decay * p : g;
        state[0] = moved_average(state[0], g, s.weight1, flags & FROM_SAMPLE1);
        state[1] = moved_average(state[1], g * g, s.weight2, flags & FROM_SAMPLE2);
        return s.gradient_rate * g + s.average_rate * state[0];
    }

    template <class F>
    static INSTEP_INLINE F denominator(const NAdamScalars& s, uint32_t, const F* state) {
        return square_root(state[1]) * s.inv_sqrt_bias_correction2 + s.eps;
    }

    template <class F>
    static INSTEP_INLINE F stepped(const NAdamScalars& s, uint32_t flags, F p, F quotient) {
        return p - (flags & DECOUPLED ? quotient + s.lr_weight_decay * p : quotient);
    }

    template <class F>
    static INSTEP_INLINE F update(const NAdamScalars& s, uint32_t flags, F p, F g, F* state) {
        const F above = numerator(s, flags, p, g, state);
        return stepped(s, flags, p, above / denominator(s, flags, state));
    }
};

}  // namespace

#endif
