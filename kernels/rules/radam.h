/* RAdam: the update rule. It is written nowhere else. t counts a parameter's own steps.
 *
 *     g <- -g                                        if maximize
 *     g <- g + weight_decay * p                      if decay is coupled
 *     m <- beta1 * m + (1 - beta1) * g
 *     v <- beta2 * v + (1 - beta2) * g^2
 *     rho_inf = 2 / (1 - beta2) - 1,   rho = rho_inf - 2 t beta2^t / (1 - beta2^t)
 *     rectification = sqrt((rho - 4) (rho - 2) rho_inf / ((rho_inf - 4) (rho_inf - 2) rho))
 *     adapted = rectification * sqrt(1 - beta2^t) / (sqrt(v) + eps)   if rho > 5, else 1
 *     p <- p - lr / (1 - beta1^t) * m * adapted - lr * weight_decay * p   (last term: decoupled)
 *
 * Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond", ICLR 2020, in the variant of
 * torch.optim.RAdam: the limit is 5 instead of the paper's 4, and eps is added to the uncorrected root. */
#ifndef INSTEP_RULES_RADAM_H
#define INSTEP_RULES_RADAM_H

#include "numeric/math.h"

namespace {

/* Scalars of one update, each rounded once from f64. */
struct RAdamScalars {
    float weight1, weight2, step_size, eps, weight_decay, lr_weight_decay;
    uint32_t from_sample1, from_sample2, rectified, maximize;
};

struct RAdamLength {
    double complement; /* 1 - beta2^t */
    double rho;
};

/* While t is small, the formula of rho above subtracts two numbers of the size of rho_inf. At beta2 = 1 - 1e-7 two
 * digits would be left, and rho could be on the wrong side of 5. The same rho is 2 sum(t) / (1 - beta2^t) - 1. Here
 * sum(t) adds up beta2^k - beta2^t over k < t. The recurrences below compute sum(t) from the bits of t without a
 * subtraction that cancels:
 *
 *     sum(2n) = sum(n) (1 + beta2^n) + n beta2^n (1 - beta2^n),   sum(n + 1) = sum(n) + (n + 1) beta2^n (1 - beta2) */
INSTEP_INLINE RAdamLength radam_length(double beta2, uint64_t step) {
    const double one_minus_beta2 = 1.0 - beta2;
    double n = 0.0, beta2_power = 1.0, complement = 0.0, sum = 0.0;
    uint64_t bit = 1;
    while (step / 2 >= bit) bit *= 2;
    for (; bit != 0; bit /= 2) {
        sum = sum * (1.0 + beta2_power) + n * beta2_power * complement;
        complement = complement * (1.0 + beta2_power);
        beta2_power = beta2_power * beta2_power;
        n = n + n;
        if (!(step & bit)) continue;
        n = n + 1.0;
        const double next = beta2_power * one_minus_beta2;
        sum = sum + n * next;
        complement = complement + next;
        beta2_power = beta2_power * beta2;
    }
    /* `removed` is the subtracted term of the formula. While it is at most half of rho_inf, the formula is exact
     * enough. Unlike the sum, the formula never exceeds rho_inf. This matters if rho_inf is 5 (beta2 = 2/3), because
     * rounding must not cross the limit. */
    const double rho_inf = 2.0 / one_minus_beta2 - 1.0;
    const double removed = 2.0 * n * beta2_power / complement;
    return {complement, removed <= 0.5 * rho_inf ? rho_inf - removed : 2.0 * sum / complement - 1.0};
}

template <int STATES_>
struct RAdam {
    using Scalars = RAdamScalars;
    static constexpr int STATES = STATES_; /* exp_avg, exp_avg_sq */
    static constexpr uint32_t SIGNED = 1;  /* bit k is set if state k may be negative */

    /* `step` counts from 1. */
    static INSTEP_INLINE RAdamScalars prepare(const InstepRAdamHyper& h, uint64_t step) {
        const RAdamLength length = radam_length(h.beta2, step);
        const double bias_correction2 = length.complement, rho = length.rho;
        const double rho_inf = 2.0 / (1.0 - h.beta2) - 1.0;
        double step_size = h.lr / (1.0 - power(h.beta1, step));
        RAdamScalars s = {};
        s.rectified = rho > 5.0;
        if (s.rectified) {
            const double of_rho = (rho - 4.0) * (rho - 2.0) / rho;
            const double of_rho_inf = (rho_inf - 4.0) * (rho_inf - 2.0) / rho_inf;
            step_size = step_size * square_root(of_rho / of_rho_inf) * square_root(bias_correction2);
        }
        average_weight(h.beta1, &s.weight1, &s.from_sample1);
        average_weight(h.beta2, &s.weight2, &s.from_sample2);
        s.step_size = static_cast<float>(step_size);
        s.eps = static_cast<float>(h.eps);
        s.weight_decay = static_cast<float>(h.decoupled ? 0.0 : h.weight_decay);
        s.lr_weight_decay = static_cast<float>(h.decoupled ? h.lr * h.weight_decay : 0.0);
        s.maximize = h.maximize;
        return s;
    }

    /* Returns the factor of the summed gradient. Negating it for `maximize` adds no work per element. */
    static INSTEP_INLINE float factor(const RAdamScalars& s, float multiplier) {
        return s.maximize ? -multiplier : multiplier;
    }

    /* The flags on which `update` branches. A loop compiled for constant flags has no select instruction. */
    static constexpr uint32_t FROM_SAMPLE1 = 1, FROM_SAMPLE2 = 2, COUPLED = 4, DECOUPLED = 8, RECTIFIED = 16;
    static constexpr uint32_t COMMON[2] = {RECTIFIED, RECTIFIED | DECOUPLED};

    /* HIDDEN is 0 for the reason in adam.h: with both sets of flags, the step divides by the root. */
    static constexpr uint32_t HIDDEN = 0;

    static INSTEP_INLINE uint32_t flags(const RAdamScalars& s) {
        return (s.from_sample1 ? FROM_SAMPLE1 : 0) | (s.from_sample2 ? FROM_SAMPLE2 : 0) |
               (s.weight_decay != 0.0f ? COUPLED : 0) | (s.lr_weight_decay != 0.0f ? DECOUPLED : 0) |
               (s.rectified ? RECTIFIED : 0);
    }

    /* A loop may run these three functions in separate stages. The first function updates the states. */
    template <class F>
    static INSTEP_INLINE F numerator(const RAdamScalars& s, uint32_t flags, F p, F g, F* state) {
        g = flags & COUPLED ? g + s.weight_decay * p : g;
        state[0] = moved_average(state[0], g, s.weight1, flags & FROM_SAMPLE1);
        state[1] = moved_average(state[1], g * g, s.weight2, flags & FROM_SAMPLE2);
        return state[0];
    }

    template <class F>
    static INSTEP_INLINE F denominator(const RAdamScalars& s, uint32_t flags, const F* state) {
        return flags & RECTIFIED ? square_root(state[1]) + s.eps : in_all<F>(1.0f);
    }

    template <class F>
    static INSTEP_INLINE F stepped(const RAdamScalars& s, uint32_t flags, F p, F quotient) {
        const F change = s.step_size * quotient;
        return p - (flags & DECOUPLED ? change + s.lr_weight_decay * p : change);
    }

    template <class F>
    static INSTEP_INLINE F update(const RAdamScalars& s, uint32_t flags, F p, F g, F* state) {
        const F above = numerator(s, flags, p, g, state);
        return stepped(s, flags, p, above / denominator(s, flags, state));
    }
};

}  // namespace

#endif
