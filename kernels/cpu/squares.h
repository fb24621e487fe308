/* Atomic updates of the integers that threads of the pool share, and squares summed into them.
 *
 * Relaxed order is enough: they are read after the whole launch. They are never floats, whose sums depend on the
 * order. */
#ifndef INSTEP_CPU_SQUARES_H
#define INSTEP_CPU_SQUARES_H

#include "numeric/norm.h"

namespace {

void atomic_maximum(uint32_t* target, uint32_t value) {
    uint32_t seen = __atomic_load_n(target, __ATOMIC_RELAXED);
    while (value > seen &&
           !__atomic_compare_exchange_n(target, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

void atomic_minimum(uint32_t* target, uint32_t value) {
    uint32_t seen = __atomic_load_n(target, __ATOMIC_RELAXED);
    while (value < seen &&
           !__atomic_compare_exchange_n(target, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

/* The sum of squares of a run that starts with a leaf, and its largest magnitude. */
struct Squares {
    uint64_t limbs[INSTEP_NORM_LIMBS] = {};
    int32_t worst = 0;

    void add(const float* x, uint32_t count) {
        for (uint32_t start = 0; start < count; start += INSTEP_QUANTUM) {
            const float* leaf = x + start;
            float padded[INSTEP_QUANTUM];
            const uint32_t left = count - start;
            if (left < INSTEP_QUANTUM) {
                for (uint32_t i = 0; i < INSTEP_QUANTUM; ++i) padded[i] = i < left ? leaf[i] : 0.0f;
                leaf = padded;
            }
            int32_t magnitude = 0;
            const double sum = leaf_sum(leaf, &magnitude);
            worst = magnitude > worst ? magnitude : worst;
            if (magnitude == 0 || is_worst_nonfinite(magnitude)) continue;
            const LeafLimbs add = leaf_limbs(sum);
            for (uint32_t k = 0; k < 3 && add.index + k < INSTEP_NORM_LIMBS; ++k) limbs[add.index + k] += add.part[k];
        }
    }

    bool is_nonfinite() const { return is_worst_nonfinite(worst); }
    uint32_t magnitude() const { return stored_magnitude(static_cast<uint32_t>(worst)); }

    void add_to(uint64_t* total) const {
        for (int k = 0; k < INSTEP_NORM_LIMBS; ++k) {
            if (limbs[k] != 0) __atomic_fetch_add(&total[k], limbs[k], __ATOMIC_RELAXED);
        }
    }

  private:
    static bool is_worst_nonfinite(int32_t magnitude) {
        return magnitude >= static_cast<int32_t>(INSTEP_F32_INFINITY_BITS);
    }
};

}  // namespace

#endif
