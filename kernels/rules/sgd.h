/* Stochastic gradient descent with momentum: the update rule. It is written nowhere else.
 *
 *     g <- -g                                        if maximize
 *     g <- g + weight_decay * p                      if weight_decay != 0
 *     b <- g                                         on a parameter's first step
 *     b <- momentum * b + (1 - dampening) * g        afterwards
 *     g <- g + momentum * b  (nesterov)   or   b
 *     p <- p - lr * g
 *
 * Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013, in the variant of
 * torch.optim.SGD: the learning rate is not part of the buffer, and the first step copies g into the buffer. */
#ifndef INSTEP_RULES_SGD_H
#define INSTEP_RULES_SGD_H

#include "numeric/math.h"

namespace {

/* Scalars of one update, each rounded once from f64. */
struct SgdScalars {
    float lr, momentum, one_minus_dampening, weight_decay;
    uint32_t has_momentum, first, nesterov, maximize;
};

template <int STATES_>
struct Sgd {
    using Scalars = SgdScalars;
    static constexpr int STATES = STATES_; /* momentum_buffer, if there is momentum */
    static constexpr uint32_t SIGNED = 1;  /* bit k is set if state k may be negative */

    /* `step` counts from 1. */
    static INSTEP_INLINE SgdScalars prepare(const InstepSgdHyper& h, uint64_t step) {
        SgdScalars s = {};
        s.lr = static_cast<float>(h.lr);
        s.momentum = static_cast<float>(h.momentum);
        s.one_minus_dampening = static_cast<float>(1.0 - h.dampening);
        s.weight_decay = static_cast<float>(h.weight_decay);
        s.has_momentum = h.momentum != 0.0;
        s.first = step == 1;
        s.nesterov = h.nesterov;
        s.maximize = h.maximize;
        return s;
    }

    /* Returns the factor of the summed gradient. Negating it for `maximize` adds no work per element. */
    static INSTEP_INLINE float factor(const SgdScalars& s, float multiplier) {
        return s.maximize ? -multiplier : multiplier;
    }

    /* The flags on which `update` branches. A loop compiled for constant flags has no select instruction. */
    static constexpr uint32_t MOMENTUM = 1, FIRST = 2, NESTEROV = 4, DECAY = 8;
    static constexpr uint32_t WITH_STATES = STATES > 0 ? MOMENTUM : 0;
    static constexpr uint32_t COMMON[2] = {WITH_STATES, WITH_STATES | DECAY};

    /* If a gradient or a momentum is infinite or NaN, so is the parameter: 0 times infinity is NaN. */
    static constexpr uint32_t HIDDEN = 0;

    static INSTEP_INLINE uint32_t flags(const SgdScalars& s) {
        const uint32_t decay = s.weight_decay != 0.0f ? DECAY : 0;
        if (STATES == 0) return decay;
        return decay | (s.has_momentum ? MOMENTUM : 0) | (s.first ? FIRST : 0) | (s.nesterov ? NESTEROV : 0);
    }

    template <class F>
    static INSTEP_INLINE F update(const SgdScalars& s, uint32_t flags, F p, F g, F* state) {
        g = flags & DECAY ? g + s.weight_decay * p : g;
        if constexpr (STATES > 0) {
            const F b = flags & FIRST ? g : s.momentum * state[0] + s.one_minus_dampening * g;
            const F direction = flags & NESTEROV ? g + s.momentum * b : b;
            state[0] = flags & MOMENTUM ? b : state[0];
            g = flags & MOMENTUM ? direction : g;
        }
        return p - s.lr * g;
    }
};

}  // namespace

#endif
