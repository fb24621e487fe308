/* Atomic updates of integers that the pool's threads share, and sums of squares that use these updates.
 *
 * Relaxed order is enough, because the integers are read after the whole launch. Floats are never added this way,
 * because their sums depend on the order. */
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

typedef float FourFloats __attribute__((vector_size(16), aligned(4), may_alias));
typedef double FourDoubles __attribute__((vector_size(32)));
typedef int64_t FourPlaces __attribute__((vector_size(32)));

/* Picks four of the eight elements of a and b. */
#if defined(__clang__)
#define INSTEP_PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define INSTEP_PICK(a, b, ...) __builtin_shuffle(a, b, FourPlaces{__VA_ARGS__})
#endif

/* Returns the sum of a leaf in its fixed order (numeric/norm.h); `worst` keeps the largest magnitude. The code uses
 * explicit vectors. Without them, compilers would move every pair through memory to add four neighbours. */
INSTEP_INLINE double leaf_sum(const float* x, int32_t* worst) {
    const auto pairs = [&](uint32_t at, FourDoubles& four) __attribute__((always_inline)) {
        const FourDoubles a = __builtin_convertvector(*reinterpret_cast<const FourFloats*>(x + at), FourDoubles);
        const FourDoubles b = __builtin_convertvector(*reinterpret_cast<const FourFloats*>(x + 128 + at), FourDoubles);
        four = a * a + b * b;
    };
    FourDoubles lanes[8];
    for (uint32_t k = 0; k < 8; ++k) {
        FourDoubles t0, t1, t2, t3; /* the pairs of four lanes */
        pairs(16 * k, t0);
        pairs(16 * k + 4, t1);
        pairs(16 * k + 8, t2);
        pairs(16 * k + 12, t3);
        const FourDoubles even = INSTEP_PICK(t0, t2, 0, 1, 4, 5) + INSTEP_PICK(t0, t2, 2, 3, 6, 7);
        const FourDoubles odd = INSTEP_PICK(t1, t3, 0, 1, 4, 5) + INSTEP_PICK(t1, t3, 2, 3, 6, 7);
        lanes[k] = INSTEP_PICK(even, odd, 0, 4, 2, 6) + INSTEP_PICK(even, odd, 1, 5, 3, 7);
    }
    int32_t magnitude = *worst;
    for (uint32_t i = 0; i < INSTEP_QUANTUM; ++i) {
        const int32_t bits = magnitude_bits(x[i]);
        magnitude = bits > magnitude ? bits : magnitude;
    }
    *worst = magnitude;
    for (uint32_t half = 4; half >= 1; half /= 2) {
        for (uint32_t k = 0; k < half; ++k) lanes[k] = lanes[k] + lanes[k + half];
    }
    return (lanes[0][0] + lanes[0][2]) + (lanes[0][1] + lanes[0][3]);
}

/* The sum of squares of runs that start with a leaf, and their largest magnitude. */
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
