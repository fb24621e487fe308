/* The arithmetic that every rule may use, written so that each compiler gives the same bits.
 *
 * The rules may use + - x / and square root, comparisons and integer operations. They never use fma, fmin, fmax, other
 * functions of libm, or a float reduction in a loop, because machines round or order these differently. Everything has
 * internal linkage. The linker could otherwise choose the AVX-512 copy of a weak symbol for a machine without
 * AVX-512. */
#ifndef INSTEP_NUMERIC_MATH_H
#define INSTEP_NUMERIC_MATH_H

#include <stdint.h>

#include "abi.h"

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "instep: fast-math flags break bit equality; remove them from CXXFLAGS"
#endif
#if defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0
#error "instep: this target evaluates f32 in a wider type (x87); use SSE2 arithmetic"
#endif

#if defined(__CUDACC__)
#define INSTEP_INLINE __host__ __device__ __forceinline__
#else
#define INSTEP_INLINE inline __attribute__((always_inline))
#endif

namespace {

INSTEP_INLINE uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(x);
#else
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}

INSTEP_INLINE float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

INSTEP_INLINE uint64_t bits_of(double x) {
#if defined(__CUDA_ARCH__)
    return static_cast<uint64_t>(__double_as_longlong(x));
#else
    uint64_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}

INSTEP_INLINE double double_of(uint64_t bits) {
#if defined(__CUDA_ARCH__)
    return __longlong_as_double(static_cast<long long>(bits));
#else
    double x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

/* The square root is correctly rounded everywhere. The build's flags make division correctly rounded too. */
INSTEP_INLINE float square_root(float x) {
#if defined(__CUDA_ARCH__)
    return __fsqrt_rn(x);
#else
    return __builtin_sqrtf(x);
#endif
}

INSTEP_INLINE double square_root(double x) {
#if defined(__CUDA_ARCH__)
    return __dsqrt_rn(x);
#else
    return __builtin_sqrt(x);
#endif
}

/* Returns the bits of |x| as an integer. These integers have the order of |x|, with NaN above infinity. Their maximum
 * does not depend on the order of comparisons, and keeps NaN. */
INSTEP_INLINE int32_t magnitude_bits(float x) { return static_cast<int32_t>(bits_of(x) & 0x7fffffffu); }

INSTEP_INLINE float magnitude(float x) { return float_of(bits_of(x) & 0x7fffffffu); }

INSTEP_INLINE bool is_nonfinite(float x) { return (bits_of(x) & INSTEP_F32_INFINITY_BITS) == INSTEP_F32_INFINITY_BITS; }

/* NaN payloads differ between machines (x86 0xffc00000, NVIDIA 0x7fffffff), so every stored NaN has the same value. */
INSTEP_INLINE float canonical(float x) { return x == x ? x : float_of(0x7fffffffu); }
INSTEP_INLINE double canonical(double x) { return x == x ? x : double_of(0x7ff8000000000000ull); }

/* Rounds f32 to bf16, to the nearest, ties to even; NaN becomes 0x7fff. A GPU has an instruction for this. A CPU uses
 * integers; tests/cuda/gpu/conversions.rs compares the two. */
INSTEP_INLINE uint16_t bfloat16_by_integers(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return static_cast<uint16_t>(x == x ? rounded : 0x7fffu);
}

INSTEP_INLINE uint16_t bfloat16_of(float x) {
#if defined(__CUDA_ARCH__)
    uint16_t narrow;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow) : "f"(x));
    return narrow;
#else
    return bfloat16_by_integers(x);
#endif
}

/* Rounds stochastically to the bf16 below or above in magnitude, by 16 random bits. The probabilities keep the mean. A
 * value between the largest bf16 and infinity becomes one of these two. */
INSTEP_INLINE uint16_t bfloat16_stochastic(float x, uint32_t random) {
    const uint32_t rounded = (bits_of(x) + random) >> 16;
    return static_cast<uint16_t>(x == x ? rounded : 0x7fffu);
}

/* Rounds f32 to f16, to the nearest, ties to even; 65520 and more become infinity. 0x38000000 is the difference of the
 * exponents' biases. 0x38800000 is 2^-14, below which f16 is subnormal, and 0x47800000 is 2^16. The last bit of a sum
 * with 0.5 is 2^-24, the smallest subnormal f16. */
INSTEP_INLINE uint16_t half_by_integers(float x) {
    const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    const uint32_t unsigned_half = magnitude < 0x47800000u ? finite : 0x7c00u;
    return static_cast<uint16_t>(x == x ? unsigned_half | (bits >> 16 & 0x8000u) : 0x7fffu);
}

INSTEP_INLINE uint16_t half_of(float x) {
#if defined(__CUDA_ARCH__)
    uint16_t narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(x));
    return narrow;
#else
    return half_by_integers(x);
#endif
}

/* The conversion is exact, and NaN stays NaN. */
INSTEP_INLINE float from_bfloat16(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }

INSTEP_INLINE float from_half_by_integers(uint16_t x) {
    const uint32_t magnitude = x & 0x7fffu, sign = static_cast<uint32_t>(x & 0x8000u) << 16;
    const uint32_t rebias = magnitude < 0x7c00u ? 0x38000000u : 0x70000000u;
    const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    return float_of((magnitude < 0x400u ? subnormal : (magnitude << 13) + rebias) | sign);
}

INSTEP_INLINE float from_half(uint16_t x) {
#if defined(__CUDA_ARCH__)
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
    return wide;
#else
    return from_half_by_integers(x);
#endif
}

/* A rule's `update` is a template over F: a float, or a vector of floats (cpu/vectors.h). Vector operators work lane by
 * lane. This function puts one number into all lanes, and keeps the sign of a zero. */
template <class F>
INSTEP_INLINE F in_all(float x) { return x - F{}; }

/* Returns the larger value. A NaN in `y` survives. fmaxf would drop the NaN, and is a libm call under g++. */
template <class F>
INSTEP_INLINE F larger(F x, F y) { return x > y ? x : y; }

/* Returns size * sign(x) by two comparisons, because a product could underflow. The result is zero if x is a zero or
 * NaN, as in torch.sign. */
template <class Size, class F>
INSTEP_INLINE F with_sign(Size size, F x) { return x > 0.0f ? size : x < 0.0f ? -size : 0.0f; }

/* Computes base^n by squaring, with two roundings per bit of n. They are the same on every machine. pow() does not
 * promise that. */
INSTEP_INLINE double power(double base, uint64_t n) {
    double result = 1.0;
    for (; n != 0; n >>= 1) {
        if (n & 1) result = result * base;
        base = base * base;
    }
    return result;
}

/* The exponential moving average is average + weight*(sample - average), with weight = 1 - beta rounded to f32. The
 * usual beta*average + (1-beta)*sample has a steady bias of 1.3e-5 at beta = 0.999. Its two rounded coefficients do not
 * add up to 1. For 1 - beta >= 0.5 the formula is sample - beta*(sample - average), and `weight` is -beta rounded to
 * f32. The term with the larger weight is then never multiplied. */
template <class F>
INSTEP_INLINE F moved_average(F average, F sample, float weight, uint32_t from_sample) {
    return (from_sample ? sample : average) + weight * (sample - average);
}

/* Computes the scalars of moved_average, from beta in f64. */
INSTEP_INLINE void average_weight(double beta, float* weight, uint32_t* from_sample) {
    const double one_minus_beta = 1.0 - beta;
    *from_sample = one_minus_beta >= 0.5;
    *weight = static_cast<float>(*from_sample ? -beta : one_minus_beta);
}

/* Some rules keep the parameter finite although a gradient is infinite or NaN, or a state is NaN. A rule's `HIDDEN`
 * names the inputs for which this can happen, under the flags of `COMMON`. A loop checks the parameter and these
 * inputs. */
constexpr uint32_t HIDDEN_GRADIENT = 1, HIDDEN_EVERYTHING = ~0u;
INSTEP_INLINE constexpr uint32_t hidden_state(int k) { return 2u << k; }

}  // namespace

#endif
