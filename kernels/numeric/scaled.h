/* Code shared by the two launches of a rule that scales its change by norms of the whole parameter, such as LAMB.
 *
 * The first launch updates the states and adds the squares of parameter and change to the record's InstepNorms. Its
 * sums are integers, so the norms have the same bits for any split of the work (norm.h). The second launch computes the
 * change again, from the stored states, and scales it. Rules with a member `change` are scaled by norms, and their
 * `update` changes only the states. Scales depend only on the norms, so they are equal on every device. */
#ifndef INSTEP_NUMERIC_SCALED_H
#define INSTEP_NUMERIC_SCALED_H

#include "numeric/norm.h"

namespace {

template <class Rule, class = void>
struct IsScaled {
    static constexpr bool value = false;
};

template <class Rule>
struct IsScaled<Rule, decltype(static_cast<void>(&Rule::change))> {
    static constexpr bool value = true;
};

/* Indices into the arrays of InstepNorms. */
constexpr uint32_t OF_PARAM = 0, OF_CHANGE = 1;

INSTEP_INLINE void empty(InstepNorms* norms) {
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
    for (int k = 0; k < INSTEP_NORM_LIMBS; ++k) norms->limbs[OF_PARAM][k] = norms->limbs[OF_CHANGE][k] = 0;
    norms->nonfinite[OF_PARAM] = norms->nonfinite[OF_CHANGE] = 0;
}

/* Returns infinity also if a NaN was added, because the scale is the same in both cases. */
INSTEP_INLINE double norm_of(const uint64_t* limbs, uint32_t nonfinite) {
    return norm_value(limbs, nonfinite ? INSTEP_F32_INFINITY_BITS : 0);
}

INSTEP_INLINE double norm_of(const InstepNorms& norms, uint32_t which) {
    return norm_of(norms.limbs[which], norms.nonfinite[which]);
}

/* The result is false for NaN. */
INSTEP_INLINE bool is_positive_and_finite(double norm) { return norm > 0.0 && norm <= 0x1.fffffffffffffp1023; }

/* Returns the factor of a change. If a norm is zero, infinite or NaN, the ratio is 1, because another ratio could make
 * finite values infinite. If the scale is too large for f32, it becomes the largest f32. Otherwise, after a thousand
 * steps of zero gradients, an infinite scale would make a tiny change infinite. */
template <class Rule>
INSTEP_INLINE float step_scale(const typename Rule::Scalars& s, double param_norm, double change_norm) {
    const bool has_ratio = is_positive_and_finite(param_norm) && is_positive_and_finite(change_norm);
    const double ratio = has_ratio ? param_norm / change_norm : 1.0;
    const double scale = Rule::scale(s, ratio);
    return static_cast<float>(scale > 0x1.fffffep127 ? 0x1.fffffep127 : scale);
}

}  // namespace

#endif
