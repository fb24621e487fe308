/* Vectors of 32-bit lanes, and operations that C++ lacks, for instruction sets with an approximate root.
 *
 * The relative error of an approximate inverse or inverse root is at most 1.5/4096. Its result is infinity for 0, and 0
 * for infinity. No stored bit may depend on this error, because processors differ. For other builds this file has no
 * vectors, and INSTEP_HAS_VECTORS is 0. */
#ifndef INSTEP_CPU_VECTORS_H
#define INSTEP_CPU_VECTORS_H

#include "numeric/math.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define INSTEP_HAS_VECTORS 1
#else
#define INSTEP_HAS_VECTORS 0
#endif

#if INSTEP_HAS_VECTORS

#if defined(INSTEP_RULES_RULES_H) || defined(INSTEP_NUMERIC_CODES_H)
#error "instep: include cpu/vectors.h first; templates see only the functions declared before them"
#endif

namespace {

#if defined(__AVX512F__)
constexpr uint32_t WIDTH = 16;
#elif defined(__AVX2__)
constexpr uint32_t WIDTH = 8;
#else
constexpr uint32_t WIDTH = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Integers __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));

INSTEP_INLINE Floats load_floats(const float* x) {
    Floats v;
    __builtin_memcpy(&v, x, sizeof v);
    return v;
}
INSTEP_INLINE void store_floats(float* to, Floats x) { __builtin_memcpy(to, &x, sizeof x); }
INSTEP_INLINE Words bits_of(Floats x) { return reinterpret_cast<Words>(x); }
INSTEP_INLINE Floats float_of(Words x) { return reinterpret_cast<Floats>(x); }
INSTEP_INLINE Integers magnitude_bits(Floats x) { return reinterpret_cast<Integers>(bits_of(x) & 0x7fffffffu); }
INSTEP_INLINE Floats magnitude(Floats x) { return float_of(bits_of(x) & 0x7fffffffu); }
INSTEP_INLINE Floats real(Integers x) { return __builtin_convertvector(x, Floats); }
INSTEP_INLINE Floats real(Words x) { return real(reinterpret_cast<Integers>(x)); } /* for x below 2^31 */

/* `larger` and `smaller` of Floats give the bits of x > y ? x : y and x < y ? x : y, so a NaN in y survives. Compilers
 * would make two instructions of each. The rules call this `larger` instead of the template in numeric/math.h. */

#if defined(__AVX512F__)

/* The intrinsic has a mask, because g++ 12 warns of its variant without a mask. */
INSTEP_INLINE Floats rough_inverse_root(Floats x) { return _mm512_maskz_rsqrt14_ps(0xffff, x); }
/* This function compares, because an instruction that moves sign bits would occupy a port that arithmetic needs. */
INSTEP_INLINE __mmask16 has_top_bit(Words x) { return _mm512_cmplt_epi32_mask(reinterpret_cast<__m512i>(x), _mm512_setzero_si512()); }
/* Returns the code, negated where x has a sign bit. The code of a zero is zero. */
INSTEP_INLINE Words with_sign_of(Words code, Floats x) {
    const __m512i codes = reinterpret_cast<__m512i>(code);
    return reinterpret_cast<Words>(_mm512_mask_sub_epi32(codes, has_top_bit(bits_of(x)), _mm512_setzero_si512(), codes));
}
/* Returns x, plus 1 where `chosen` is all ones. */
INSTEP_INLINE Words one_more(Words x, Integers chosen) { return chosen ? x + 1u : x; }
/* Returns x, plus 1 where the top bit of y is set. */
INSTEP_INLINE Words with_top_bit_of(Words x, Words y) {
    const __m512i less = reinterpret_cast<__m512i>(x);
    return reinterpret_cast<Words>(_mm512_mask_add_epi32(less, has_top_bit(y), less, _mm512_set1_epi32(1)));
}
INSTEP_INLINE Floats square_root(Floats x) { return _mm512_maskz_sqrt_ps(0xffff, x); }
INSTEP_INLINE Floats larger(Floats x, Floats y) { return _mm512_maskz_max_ps(0xffff, x, y); }
INSTEP_INLINE Floats smaller(Floats x, Floats y) { return _mm512_maskz_min_ps(0xffff, x, y); }
INSTEP_INLINE bool any_below(Words x, uint32_t limit) {
    return _mm512_cmplt_epu32_mask(reinterpret_cast<__m512i>(x), _mm512_set1_epi32(static_cast<int>(limit))) != 0;
}
INSTEP_INLINE Integers load_bytes(const uint8_t* x) {
    return reinterpret_cast<Integers>(_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}
INSTEP_INLINE Integers load_signed_bytes(const uint8_t* x) {
    return reinterpret_cast<Integers>(_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}
/* Loads 16-bit words into the upper halves of lanes. store_upper_halves is the reverse. */
INSTEP_INLINE Words load_upper_halves(const uint16_t* x) {
    return reinterpret_cast<Words>(_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)))) << 16;
}
INSTEP_INLINE void store_upper_halves(uint16_t* to, Words x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtepi32_epi16(0xffff, reinterpret_cast<__m512i>(x >> 16)));
}
INSTEP_INLINE Words load_signed_halves(const uint16_t* x) {
    return reinterpret_cast<Words>(_mm512_maskz_cvtepi16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))));
}
/* Stores the upper halves of x, and the lower halves of y. */
INSTEP_INLINE void store_halves(uint16_t* upper, uint16_t* lower, Words x, Words y) {
    store_upper_halves(upper, x);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lower), _mm512_maskz_cvtepi32_epi16(0xffff, reinterpret_cast<__m512i>(y)));
}
/* Stores the lowest byte of each lane. */
INSTEP_INLINE void store_bytes(uint8_t* to, Words x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_maskz_cvtepi32_epi8(0xffff, reinterpret_cast<__m512i>(x)));
}
/* Returns x, or 0 where y is 0. Where y has its top bit set, the result has no meaning. */
INSTEP_INLINE Words where_not_zero(Words x, Words y) {
    const __m512i bits = reinterpret_cast<__m512i>(y);
    return reinterpret_cast<Words>(_mm512_maskz_mov_epi32(_mm512_test_epi32_mask(bits, bits), reinterpret_cast<__m512i>(x)));
}

#elif defined(__AVX2__)

INSTEP_INLINE Floats rough_inverse_root(Floats x) { return _mm256_rsqrt_ps(x); }
INSTEP_INLINE Words with_sign_of(Words code, Floats x) {
    return reinterpret_cast<Words>(_mm256_sign_epi32(reinterpret_cast<__m256i>(code), reinterpret_cast<__m256i>(x)));
}
/* Returns x, or 0 where y is 0. Where y has its top bit set, the result has no meaning. */
INSTEP_INLINE Words where_not_zero(Words x, Words y) { return with_sign_of(x, reinterpret_cast<Floats>(y)); }
INSTEP_INLINE Floats square_root(Floats x) { return _mm256_sqrt_ps(x); }
INSTEP_INLINE Floats larger(Floats x, Floats y) { return _mm256_max_ps(x, y); }
INSTEP_INLINE Floats smaller(Floats x, Floats y) { return _mm256_min_ps(x, y); }
INSTEP_INLINE bool any_below(Words x, uint32_t limit) {
    const __m256i bits = reinterpret_cast<__m256i>(x), most = _mm256_set1_epi32(static_cast<int>(limit) - 1);
    return _mm256_movemask_epi8(_mm256_cmpeq_epi32(_mm256_min_epu32(bits, most), bits)) != 0;
}
INSTEP_INLINE Integers load_bytes(const uint8_t* x) {
    return reinterpret_cast<Integers>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
}
INSTEP_INLINE Integers load_signed_bytes(const uint8_t* x) {
    return reinterpret_cast<Integers>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
}
INSTEP_INLINE Words load_upper_halves(const uint16_t* x) {
    return reinterpret_cast<Words>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)))) << 16;
}
INSTEP_INLINE void store_upper_halves(uint16_t* to, Words x) {
    const __m256i halves = reinterpret_cast<__m256i>(x >> 16);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
}
INSTEP_INLINE Words load_signed_halves(const uint16_t* x) {
    return reinterpret_cast<Words>(_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}
/* Stores the upper halves of x, and the lower halves of y. */
INSTEP_INLINE void store_halves(uint16_t* upper, uint16_t* lower, Words x, Words y) {
    const __m256i both = _mm256_blend_epi16(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(y), 0x55);
    const __m256i order = _mm256_set_epi64x(0x0f0e0b0a07060302, 0x0d0c090805040100, 0x0f0e0b0a07060302, 0x0d0c090805040100);
    const __m256i sorted = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(both, order), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(lower), _mm256_castsi256_si128(sorted));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(upper), _mm256_extracti128_si256(sorted, 1));
}
INSTEP_INLINE void store_bytes(uint8_t* to, Words x) {
    const __m256i bytes = _mm256_shuffle_epi8(reinterpret_cast<__m256i>(x), _mm256_set1_epi32(0x0c080400));
    const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), both);
}

#else

INSTEP_INLINE Floats rough_inverse_root(Floats x) { return _mm_rsqrt_ps(x); }
INSTEP_INLINE Words with_sign_of(Words code, Floats x) {
    const Words sign = reinterpret_cast<Words>(reinterpret_cast<Integers>(x) >> 31);
    return (code ^ sign) - sign;
}
INSTEP_INLINE Floats square_root(Floats x) { return _mm_sqrt_ps(x); }
INSTEP_INLINE Floats larger(Floats x, Floats y) { return _mm_max_ps(x, y); }
INSTEP_INLINE Floats smaller(Floats x, Floats y) { return _mm_min_ps(x, y); }
INSTEP_INLINE bool any_below(Words x, uint32_t limit) { return _mm_movemask_epi8(reinterpret_cast<__m128i>(x < limit)) != 0; }
/* Loads each byte into the upper quarter of its lane. */
INSTEP_INLINE Integers spread_bytes(const uint8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, sizeof four);
    const __m128i none = _mm_setzero_si128();
    return reinterpret_cast<Integers>(_mm_unpacklo_epi16(none, _mm_unpacklo_epi8(none, _mm_cvtsi32_si128(four))));
}
INSTEP_INLINE Integers load_bytes(const uint8_t* x) {
    return reinterpret_cast<Integers>(reinterpret_cast<Words>(spread_bytes(x)) >> 24);
}
INSTEP_INLINE Integers load_signed_bytes(const uint8_t* x) { return spread_bytes(x) >> 24; }
INSTEP_INLINE Words load_upper_halves(const uint16_t* x) {
    return reinterpret_cast<Words>(_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
}
INSTEP_INLINE void store_upper_halves(uint16_t* to, Words x) {
    const __m128i halves = _mm_srai_epi32(reinterpret_cast<__m128i>(x), 16);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi32(halves, halves));
}
INSTEP_INLINE Words load_signed_halves(const uint16_t* x) {
    return reinterpret_cast<Words>(reinterpret_cast<Integers>(load_upper_halves(x)) >> 16);
}
/* Stores the upper halves of x, and the lower halves of y. */
INSTEP_INLINE void store_halves(uint16_t* upper, uint16_t* lower, Words x, Words y) {
    store_upper_halves(upper, x);
    store_upper_halves(lower, y << 16);
}
INSTEP_INLINE void store_bytes(uint8_t* to, Words x) {
    const __m128i words = reinterpret_cast<__m128i>(x & 0xff);
    const int32_t four = _mm_cvtsi128_si32(_mm_packus_epi16(_mm_packs_epi32(words, words), words));
    __builtin_memcpy(to, &four, sizeof four);
}

#endif

#if !defined(__AVX512F__)
/* Returns x, plus 1 where `chosen` is all ones. */
INSTEP_INLINE Words one_more(Words x, Integers chosen) { return x - reinterpret_cast<Words>(chosen); }
/* Returns x, plus 1 where the top bit of y is set. */
INSTEP_INLINE Words with_top_bit_of(Words x, Words y) { return x + (y >> 31); }
#endif
#if !defined(__AVX2__)
/* Returns x, or 0 where y is 0. Where y has its top bit set, the result has no meaning. */
INSTEP_INLINE Words where_not_zero(Words x, Words y) { return x & ~reinterpret_cast<Words>(y == 0u); }
#endif

INSTEP_INLINE Words lane_numbers() {
    Words numbers;
    for (uint32_t lane = 0; lane < WIDTH; ++lane) numbers[lane] = lane;
    return numbers;
}

/* Returns the largest lane. It halves the vector in registers; compilers would otherwise use memory. */
INSTEP_INLINE uint32_t largest_lane(Words x) {
    typedef uint32_t FourWords __attribute__((vector_size(16)));
#if defined(__AVX512F__)
    const __m512i lanes = reinterpret_cast<__m512i>(x);
    const __m256i half = _mm256_max_epu32(_mm512_maskz_extracti64x4_epi64(0xf, lanes, 0), _mm512_maskz_extracti64x4_epi64(0xf, lanes, 1));
#elif defined(__AVX2__)
    const __m256i half = reinterpret_cast<__m256i>(x);
#endif
#if defined(__AVX2__)
    FourWords four = reinterpret_cast<FourWords>(_mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
#else
    FourWords four = x;
#endif
    four = larger(four, reinterpret_cast<FourWords>(_mm_shuffle_epi32(reinterpret_cast<__m128i>(four), 0x4e)));
    return larger(four, reinterpret_cast<FourWords>(_mm_shuffle_epi32(reinterpret_cast<__m128i>(four), 0xb1)))[0];
}
typedef uint16_t Halves __attribute__((vector_size(4 * WIDTH)));

/* Returns x - y, or 0 where that is negative. */
INSTEP_INLINE Halves lowered(Halves x, Halves y) {
#if defined(__AVX512F__)
    return reinterpret_cast<Halves>(_mm512_subs_epu16(reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(y)));
#elif defined(__AVX2__)
    return reinterpret_cast<Halves>(_mm256_subs_epu16(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(y)));
#else
    return reinterpret_cast<Halves>(_mm_subs_epu16(reinterpret_cast<__m128i>(x), reinterpret_cast<__m128i>(y)));
#endif
}

INSTEP_INLINE bool any_sign(Words x) {
#if defined(__AVX512F__)
    return has_top_bit(x) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(float_of(x)) != 0;
#else
    return _mm_movemask_ps(float_of(x)) != 0;
#endif
}

}  // namespace

#endif

#endif
