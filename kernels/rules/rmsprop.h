/* RMSprop: the update rule. It is written nowhere else.
 *
 *     g <- -g                                        if maximize
 *     g <- g + weight_decay * p                      if weight_decay != 0
 *     v <- alpha * v + (1 - alpha) * g^2
 *     a <- alpha * a + (1 - alpha) * g               if centered
 *     d <- g / (sqrt(v) + eps)                       if centered, v - a^2 replaces v
 *     b <- momentum * b + d                          if momentum != 0; b then replaces d below
 *     p <- p - lr * d
 *
 * Tieleman & Hinton, "Neural Networks for Machine Learning", lecture 6.5, 2012; centered: Graves, "Generating
 * Sequences With Recurrent Neural Networks", 2013; in the variant of torch.optim.RMSprop: eps is outside the root. As
 * in torch, v - a^2 has no clamp. If gradients hardly vary, it may round below zero, and its root is then NaN. a^2 is
 * rounded once. (sqrt(v) - a) * (sqrt(v) + a) would have twice the error. */
#ifndef INSTEP_RULES_RMSPROP_H
#define INSTEP_RULES_RMSPROP_H

#include "numeric/math.h"

namespace {

/* Scalars of one update, each rounded once from f64. */
struct RmsPropScalars {
    float weight, lr, eps, weight_decay, momentum;
    uint32_t from_sample, has_momentum, centered, maximize;
};

template <int STATES_>
struct RmsProp {
    using Scalars = RmsPropScalars;
    static constexpr int STATES = STATES_; /* square_avg, momentum_buffer if there is momentum, grad_avg if centered */
    static constexpr uint32_t SIGNED = 6;  /* bit k is set if state k may be negative */

    /* No prepared scalar depends on the step. */
    static INSTEP_INLINE RmsPropScalars prepare(const InstepRmsPropHyper& h, uint64_t) {
        RmsPropScalars s = {};
        average_weight(h.alpha, &s.weight, &s.from_sample);
        s.lr = static_cast<float>(h.lr);
        s.eps = static_cast<float>(h.eps);
        s.weight_decay = static_cast<float>(h.weight_decay);
        s.momentum = static_cast<float>(h.momentum);
        s.has_momentum = h.momentum != 0.0;
        s.centered = h.centered;
        s.maximize = h.maximize;
        return s;
    }

    /* Returns the factor of the summed gradient. Negating it for `maximize` adds no work per element. */
    static INSTEP_INLINE float factor(const RmsPropScalars& s, float multiplier) {
        return s.maximize ? -multiplier : multiplier;
    }

    /* The flags on which `update` branches. A loop compiled for constant flags has no select instruction. */
    static constexpr uint32_t FROM_SAMPLE = 1, MOMENTUM = 2, CENTERED = 4, DECAY = 8;
    static constexpr uint32_t COMMON[2] = {STATES == 1 ? 0 : STATES == 2 ? MOMENTUM : MOMENTUM | CENTERED,
                                           STATES == 1 ? DECAY : CENTERED};

    /* With one state, this is 0 as adagrad.h explains. With more, a group's step may ignore states of other groups. */
    static constexpr uint32_t HIDDEN = STATES == 1 ? 0 : HIDDEN_EVERYTHING;

    static INSTEP_INLINE uint32_t flags(const RmsPropScalars& s) {
        const uint32_t common = (s.from_sample ? FROM_SAMPLE : 0) | (s.weight_decay != 0.0f ? DECAY : 0);
        if (STATES == 1) return common;
        return common | (s.has_momentum ? MOMENTUM : 0) | (s.centered ? CENTERED : 0);
    }

    template <class F>
    static INSTEP_INLINE F update(const RmsPropScalars& s, uint32_t flags, F p, F g, F* state) {
        g = flags & DECAY ? g + s.weight_decay * p : g;
        const uint32_t from_sample = flags & FROM_SAMPLE;
        const F v = moved_average(state[0], g * g, s.weight, from_sample);
        state[0] = v;
        if constexpr (STATES == 1) {
            return p - s.lr * (g / (square_root(v) + s.eps));
        } else {
            /* grad_avg comes after momentum_buffer, if momentum_buffer is kept. Other groups of the launch may keep
             * more states. */
            const uint32_t has_buffer = STATES > 2 ? flags & MOMENTUM : 0;
            const F a = moved_average(has_buffer ? state[STATES - 1] : state[1], g, s.weight, from_sample);
            const F d = g / (square_root(flags & CENTERED ? v - a * a : v) + s.eps);
            const F b = s.momentum * state[1] + d;
            state[1] = flags & MOMENTUM ? b : flags & CENTERED ? a : state[1];
            if constexpr (STATES > 2) state[2] = has_buffer && flags & CENTERED ? a : state[2];
            return p - s.lr * (flags & MOMENTUM ? b : d);
        }
    }
};

}  // namespace

#endif
