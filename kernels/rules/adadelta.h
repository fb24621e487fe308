/* Adadelta: the update rule. It is written nowhere else.
 *
 *     g <- -g                                        if maximize
 *     g <- g + weight_decay * p                      if weight_decay != 0
 *     v <- rho * v + (1 - rho) * g^2
 *     d <- sqrt(u + eps) / sqrt(v + eps) * g
 *     u <- rho * u + (1 - rho) * d^2
 *     p <- p - lr * d
 *
 * Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012, in the variant of torch.optim.Adadelta, which adds lr. */
#ifndef INSTEP_RULES_ADADELTA_H
#define INSTEP_RULES_ADADELTA_H

#include "numeric/math.h"

namespace {

/* Scalars of one update, each rounded once from f64. */
struct AdadeltaScalars {
    float weight, lr, eps, weight_decay;
    uint32_t from_sample, maximize;
};

template <int STATES_>
struct Adadelta {
    using Scalars = AdadeltaScalars;
    static constexpr int STATES = STATES_; /* square_avg, acc_delta */
    static constexpr uint32_t SIGNED = 0;  /* bit k is set if state k may be negative */

    /* No prepared scalar depends on the step. */
    static INSTEP_INLINE AdadeltaScalars prepare(const InstepAdadeltaHyper& h, uint64_t) {
        AdadeltaScalars s = {};
        average_weight(h.rho, &s.weight, &s.from_sample);
        s.lr = static_cast<float>(h.lr);
        s.eps = static_cast<float>(h.eps);
        s.weight_decay = static_cast<float>(h.weight_decay);
        s.maximize = h.maximize;
        return s;
    }

    /* Returns the factor of the summed gradient. Negating it for `maximize` adds no work per element. */
    static INSTEP_INLINE float factor(const AdadeltaScalars& s, float multiplier) {
        return s.maximize ? -multiplier : multiplier;
    }

    /* The flags on which `update` branches. A loop compiled for constant flags has no select instruction. */
    static constexpr uint32_t FROM_SAMPLE = 1, DECAY = 2;
    static constexpr uint32_t COMMON[2] = {0, DECAY};

    /* An infinite gradient makes v infinite, so d = 0 * g is NaN. Only u may become NaN while p stays finite, if rho is
     * 1 and d^2 overflows. */
    static constexpr uint32_t HIDDEN = hidden_state(1);

    static INSTEP_INLINE uint32_t flags(const AdadeltaScalars& s) {
        return (s.from_sample ? FROM_SAMPLE : 0) | (s.weight_decay != 0.0f ? DECAY : 0);
    }

    template <class F>
    static INSTEP_INLINE F update(const AdadeltaScalars& s, uint32_t flags, F p, F g, F* state) {
        g = flags & DECAY ? g + s.weight_decay * p : g;
        const uint32_t from_sample = flags & FROM_SAMPLE;
        const F v = moved_average(state[0], g * g, s.weight, from_sample);
        const F d = square_root(state[1] + s.eps) / square_root(v + s.eps) * g;
        state[0] = v;
        state[1] = moved_average(state[1], d * d, s.weight, from_sample);
        return p - s.lr * d;
    }
};

}  // namespace

#endif
