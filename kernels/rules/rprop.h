/* Rprop, resilient backpropagation: the update rule. It is written nowhere else.
 *
 *     g <- -g                                        if maximize
 *     s <- lr                                        on a parameter's first step
 *     s <- clamp(s * eta, step_size_min, step_size_max)
 *                                                    eta: eta_plus if g * prev > 0, eta_minus if g * prev < 0, else 1
 *     g <- 0                                         if g * prev < 0
 *     p <- p - s * sign(g)                           sign(0) = 0
 *     prev <- g
 *
 * Riedmiller & Braun, "A Direct Adaptive Method for Faster Backpropagation Learning: The RPROP Algorithm", ICNN
 * 1993, in the variant of torch.optim.Rprop: when the sign changes, p does not move, and the next comparison
 * ignores g. The product g * prev is never computed. It would underflow if both gradients are small, and the step
 * size would then not change. */
#ifndef INSTEP_RULES_RPROP_H
#define INSTEP_RULES_RPROP_H

#include "numeric/math.h"

namespace {

/* Scalars of one update, each rounded once from f64. */
struct RpropScalars {
    float lr, eta_minus, eta_plus, step_size_min, step_size_max;
    uint32_t first, maximize;
};

template <int STATES_>
struct Rprop {
    using Scalars = RpropScalars;
    static constexpr int STATES = STATES_; /* prev, step_size */
    static constexpr uint32_t SIGNED = 1;  /* bit k is set if state k may be negative */

    /* `step` counts from 1. */
    static INSTEP_INLINE RpropScalars prepare(const InstepRpropHyper& h, uint64_t step) {
        RpropScalars s = {};
        s.lr = static_cast<float>(h.lr);
        s.eta_minus = static_cast<float>(h.eta_minus);
        s.eta_plus = static_cast<float>(h.eta_plus);
        s.step_size_min = static_cast<float>(h.step_size_min);
        s.step_size_max = static_cast<float>(h.step_size_max);
        s.first = step == 1;
        s.maximize = h.maximize;
        return s;
    }

    /* Returns the factor of the summed gradient. Negating it for `maximize` adds no work per element. */
    static INSTEP_INLINE float factor(const RpropScalars& s, float multiplier) {
        return s.maximize ? -multiplier : multiplier;
    }

    /* The flags on which `update` branches. A loop compiled for constant flags has no select instruction. */
    static constexpr uint32_t FIRST = 1;
    static constexpr uint32_t COMMON[2] = {0, FIRST};

    /* The step uses only the sign of the gradient, so a NaN does not show in the parameter. */
    static constexpr uint32_t HIDDEN = HIDDEN_EVERYTHING;

    static INSTEP_INLINE uint32_t flags(const RpropScalars& s) { return s.first ? FIRST : 0; }

    template <class F>
    static INSTEP_INLINE F update(const RpropScalars& s, uint32_t flags, F p, F g, F* state) {
        const F agreement = with_sign(g, state[0]); /* has the sign of g * prev */
        const F eta = agreement > 0.0f ? s.eta_plus : agreement < 0.0f ? s.eta_minus : 1.0f;
        const F wanted = (flags & FIRST ? in_all<F>(s.lr) : state[1]) * eta;
        const F at_least = wanted < s.step_size_min ? s.step_size_min : wanted;
        const F step_size = at_least > s.step_size_max ? s.step_size_max : at_least;
        g = agreement < 0.0f ? 0.0f : g;
        state[0] = g;
        state[1] = step_size;
        return p - with_sign(step_size, g);
    }
};

}  // namespace

#endif
