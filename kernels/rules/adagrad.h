/* Adagrad: the update rule. It is written nowhere else. t counts a parameter's own steps.
 *
 *     g <- -g                                        if maximize
 *     g <- g + weight_decay * p                      if weight_decay != 0
 *     s <- initial_accumulator_value                 on a parameter's first step
 *     s <- s + g^2
 *     p <- p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)
 *
 * Duchi, Hazan & Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", JMLR 12, 2011,
 * in the variant of torch.optim.Adagrad. State memory starts as zeros, so the first step sets the initial value. */
#ifndef INSTEP_RULES_ADAGRAD_H
#define INSTEP_RULES_ADAGRAD_H

#include "numeric/math.h"

namespace {

/* Scalars of one update, each rounded once from f64. */
struct AdagradScalars {
    float step_size, eps, weight_decay, initial_sum;
    uint32_t first, maximize;
};

template <int STATES_>
struct Adagrad {
    using Scalars = AdagradScalars;
    static constexpr int STATES = STATES_; /* sum */
    static constexpr uint32_t SIGNED = 0;  /* bit k is set if state k may be negative */

    /* `step` counts from 1. */
    static INSTEP_INLINE AdagradScalars prepare(const InstepAdagradHyper& h, uint64_t step) {
        AdagradScalars s = {};
        s.step_size = static_cast<float>(h.lr / (1.0 + static_cast<double>(step - 1) * h.lr_decay));
        s.eps = static_cast<float>(h.eps);
        s.weight_decay = static_cast<float>(h.weight_decay);
        s.initial_sum = static_cast<float>(h.initial_accumulator_value);
        s.first = step == 1;
        s.maximize = h.maximize;
        return s;
    }

    /* Returns the factor of the summed gradient. Negating it for `maximize` adds no work per element. */
    static INSTEP_INLINE float factor(const AdagradScalars& s, float multiplier) {
        return s.maximize ? -multiplier : multiplier;
    }

    /* The flags on which `update` branches. A loop compiled for constant flags has no select instruction. */
    static constexpr uint32_t FIRST = 1, DECAY = 2;
    static constexpr uint32_t COMMON[2] = {0, DECAY};

    /* An infinite gradient makes s infinite, so g / sqrt(s) is NaN. A NaN in g or s makes this quotient NaN too. */
    static constexpr uint32_t HIDDEN = 0;

    static INSTEP_INLINE uint32_t flags(const AdagradScalars& s) {
        return (s.first ? FIRST : 0) | (s.weight_decay != 0.0f ? DECAY : 0);
    }

    /* A loop may run these three functions in separate stages. The first function updates the states. */
    template <class F>
    static INSTEP_INLINE F numerator(const AdagradScalars& s, uint32_t flags, F p, F g, F* state) {
        g = flags & DECAY ? g + s.weight_decay * p : g;
        state[0] = (flags & FIRST ? in_all<F>(s.initial_sum) : state[0]) + g * g;
        return g;
    }

    template <class F>
    static INSTEP_INLINE F denominator(const AdagradScalars& s, uint32_t, const F* state) {
        return square_root(state[0]) + s.eps;
    }

    template <class F>
    static INSTEP_INLINE F stepped(const AdagradScalars& s, uint32_t, F p, F quotient) {
        return p - s.step_size * quotient;
    }

    template <class F>
    static INSTEP_INLINE F update(const AdagradScalars& s, uint32_t flags, F p, F g, F* state) {
        const F above = numerator(s, flags, p, g, state);
        return stepped(s, flags, p, above / denominator(s, flags, state));
    }
};

}  // namespace

#endif
