/* Adamax: the update rule. It is written nowhere else. t counts a parameter's own steps.
 *
 *     g <- -g                                        if maximize
 *     g <- g + weight_decay * p                      if weight_decay != 0
 *     m <- beta1 * m + (1 - beta1) * g
 *     u <- max(beta2 * u, |g| + eps)
 *     p <- p - (lr / (1 - beta1^t)) * m / u
 *
 * Kingma & Ba, "Adam", ICLR 2015, section 7.1, in the variant of torch.optim.Adamax: eps is inside the maximum. u
 * decays as an average with zeros, because the f32 value of 0.999 has a 1000th power that is wrong by 1.3e-5. */
#ifndef INSTEP_RULES_ADAMAX_H
#define INSTEP_RULES_ADAMAX_H

#include "numeric/math.h"

namespace {

/* Scalars of one update, each rounded once from f64. */
struct AdamaxScalars {
    float weight1, weight2, step_size, eps, weight_decay;
    uint32_t from_sample1, from_sample2, maximize;
};

template <int STATES_>
struct Adamax {
    using Scalars = AdamaxScalars;
    static constexpr int STATES = STATES_; /* exp_avg, exp_inf */
    static constexpr uint32_t SIGNED = 1;  /* bit k is set if state k may be negative */

    /* `step` counts from 1. */
    static INSTEP_INLINE AdamaxScalars prepare(const InstepAdamaxHyper& h, uint64_t step) {
        AdamaxScalars s = {};
        average_weight(h.beta1, &s.weight1, &s.from_sample1);
        average_weight(h.beta2, &s.weight2, &s.from_sample2);
        s.step_size = static_cast<float>(h.lr / (1.0 - power(h.beta1, step)));
        s.eps = static_cast<float>(h.eps);
        s.weight_decay = static_cast<float>(h.weight_decay);
        s.maximize = h.maximize;
        return s;
    }

    /* Returns the factor of the summed gradient. Negating it for `maximize` adds no work per element. */
    static INSTEP_INLINE float factor(const AdamaxScalars& s, float multiplier) {
        return s.maximize ? -multiplier : multiplier;
    }

    /* The flags on which `update` branches. A loop compiled for constant flags has no select instruction. */
    static constexpr uint32_t FROM_SAMPLE1 = 1, FROM_SAMPLE2 = 2, DECAY = 4;
    static constexpr uint32_t COMMON[2] = {0, DECAY};

    /* An infinite gradient makes m infinite or NaN and u infinite, so m / u is NaN. The maximum drops a NaN in u, so u
     * cannot keep one. */
    static constexpr uint32_t HIDDEN = 0;

    static INSTEP_INLINE uint32_t flags(const AdamaxScalars& s) {
        return (s.from_sample1 ? FROM_SAMPLE1 : 0) | (s.from_sample2 ? FROM_SAMPLE2 : 0) |
               (s.weight_decay != 0.0f ? DECAY : 0);
    }

    /* A loop may run these three functions in separate stages. The first function updates the states. */
    template <class F>
    static INSTEP_INLINE F numerator(const AdamaxScalars& s, uint32_t flags, F p, F g, F* state) {
        g = flags & DECAY ? g + s.weight_decay * p : g;
        state[0] = moved_average(state[0], g, s.weight1, flags & FROM_SAMPLE1);
        const F decayed = moved_average(state[1], F{}, s.weight2, flags & FROM_SAMPLE2);
        state[1] = larger(decayed, magnitude(g) + s.eps);
        return state[0];
    }

    template <class F>
    static INSTEP_INLINE F denominator(const AdamaxScalars&, uint32_t, const F* state) {
        return state[1];
    }

    template <class F>
    static INSTEP_INLINE F stepped(const AdamaxScalars& s, uint32_t, F p, F quotient) {
        return p - s.step_size * quotient;
    }

    template <class F>
    static INSTEP_INLINE F update(const AdamaxScalars& s, uint32_t flags, F p, F g, F* state) {
        const F above = numerator(s, flags, p, g, state);
        return stepped(s, flags, p, above / denominator(s, flags, state));
    }
};

}  // namespace

#endif
