/* Adam and AdamW: the update rule. It is written nowhere else. t counts a parameter's own steps.
 *
 *     g <- -g                                        if maximize
 *     g <- g + weight_decay * p                      if decay is coupled (Adam)
 *     m <- beta1 * m + (1 - beta1) * g
 *     v <- beta2 * v + (1 - beta2) * g^2
 *     w <- max(w, v)                                 if amsgrad; w then replaces v below
 *     denominator = sqrt(v) / sqrt(1 - beta2^t) + eps
 *     p <- p - (lr / (1 - beta1^t)) * m / denominator - lr * weight_decay * p     (last term: AdamW)
 *
 * Kingma & Ba, "Adam", ICLR 2015; Loshchilov & Hutter, "Decoupled Weight Decay Regularization", ICLR 2019; Reddi,
 * Kale & Kumar, "On the Convergence of Adam and Beyond", ICLR 2018 (the maximum is taken before bias correction, as
 * in torch.optim). The decay is subtracted, not multiplied. In f32, 1 - lr*weight_decay is wrong by 19 % of the decay
 * at lr*weight_decay = 1e-7. */
#ifndef INSTEP_RULES_ADAM_H
#define INSTEP_RULES_ADAM_H

#include "numeric/math.h"

namespace {

/* Scalars of one update, each rounded once from f64. */
struct AdamScalars {
    float weight1, weight2, step_size, inv_sqrt_bias_correction2, eps, weight_decay, lr_weight_decay;
    uint32_t from_sample1, from_sample2, amsgrad, maximize;
};

template <int STATES_>
struct Adam {
    using Scalars = AdamScalars;
    static constexpr int STATES = STATES_; /* exp_avg, exp_avg_sq, and with amsgrad max_exp_avg_sq */
    static constexpr uint32_t SIGNED = 1;  /* bit k is set if state k may be negative */

    /* `step` counts from 1. */
    static INSTEP_INLINE AdamScalars prepare(const InstepAdamHyper& h, uint64_t step) {
        AdamScalars s = {};
        average_weight(h.beta1, &s.weight1, &s.from_sample1);
        average_weight(h.beta2, &s.weight2, &s.from_sample2);
        s.step_size = static_cast<float>(h.lr / (1.0 - power(h.beta1, step)));
        s.inv_sqrt_bias_correction2 = static_cast<float>(1.0 / square_root(1.0 - power(h.beta2, step)));
        s.eps = static_cast<float>(h.eps);
        s.weight_decay = static_cast<float>(h.decoupled ? 0.0 : h.weight_decay);
        s.lr_weight_decay = static_cast<float>(h.decoupled ? h.lr * h.weight_decay : 0.0);
        s.amsgrad = h.amsgrad;
        s.maximize = h.maximize;
        return s;
    }

    /* Returns the factor of the summed gradient. Negating it for `maximize` adds no work per element. */
    static INSTEP_INLINE float factor(const AdamScalars& s, float multiplier) {
        return s.maximize ? -multiplier : multiplier;
    }

    /* The flags on which `update` branches. A loop compiled for constant flags has no select instruction. */
    static constexpr uint32_t FROM_SAMPLE1 = 1, FROM_SAMPLE2 = 2, COUPLED = 4, DECOUPLED = 8, AMSGRAD = 16;
    static constexpr uint32_t WITH_STATES = STATES > 2 ? AMSGRAD : 0;
    static constexpr uint32_t COMMON[2] = {WITH_STATES | DECOUPLED, WITH_STATES};

    /* An infinite gradient makes v infinite, and m infinite or NaN, so m / sqrt(v) is NaN. A NaN in the gradient, m or
     * v also makes this quotient NaN. */
    static constexpr uint32_t HIDDEN = 0;

    static INSTEP_INLINE uint32_t flags(const AdamScalars& s) {
        return (s.from_sample1 ? FROM_SAMPLE1 : 0) | (s.from_sample2 ? FROM_SAMPLE2 : 0) |
               (s.weight_decay != 0.0f ? COUPLED : 0) | (s.lr_weight_decay != 0.0f ? DECOUPLED : 0) |
               (s.amsgrad ? WITH_STATES : 0);
    }

    /* A loop may run these three functions in separate stages. The first function updates the states. */
    template <class F>
    static INSTEP_INLINE F numerator(const AdamScalars& s, uint32_t flags, F p, F g, F* state) {
        g = flags & COUPLED ? g + s.weight_decay * p : g;
        state[0] = moved_average(state[0], g, s.weight1, flags & FROM_SAMPLE1);
        state[1] = moved_average(state[1], g * g, s.weight2, flags & FROM_SAMPLE2);
        if constexpr (STATES > 2) state[2] = flags & AMSGRAD ? larger(state[2], state[1]) : state[2];
        return state[0];
    }

    template <class F>
    static INSTEP_INLINE F denominator(const AdamScalars& s, uint32_t flags, const F* state) {
        const F second_moment = STATES > 2 && flags & AMSGRAD ? state[STATES - 1] : state[1];
        return square_root(second_moment) * s.inv_sqrt_bias_correction2 + s.eps;
    }

    template <class F>
    static INSTEP_INLINE F stepped(const AdamScalars& s, uint32_t flags, F p, F quotient) {
        const F change = s.step_size * quotient;
        return p - (flags & DECOUPLED ? change + s.lr_weight_decay * p : change);
    }

    template <class F>
    static INSTEP_INLINE F update(const AdamScalars& s, uint32_t flags, F p, F g, F* state) {
        const F above = numerator(s, flags, p, g, state);
        return stepped(s, flags, p, above / denominator(s, flags, state));
    }
};

}  // namespace

#endif
