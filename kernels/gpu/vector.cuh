/* Loads and stores of a lane's consecutive elements of a stream. Accesses are wide if the
 * elements are aligned and complete.
 *
 * Loads return the stored words, so that a round can issue all its loads before it waits for the first. A conversion
 * next to its load would wait at once. A lane has four elements, or eight (16 bytes) if every stream has 16-bit
 * elements. Misaligned elements, and elements at the end of their run, are accessed one by one. Gradients are an
 * exception. The caller's buckets may start at any element, so the whole aligned words around the elements are read and
 * shifted. No access touches a byte outside the run [run, run + count), because another thread may write the
 * neighbouring elements at that time. This also rules out aligned words that cannot fault. */
#ifndef INSTEP_GPU_VECTOR_CUH
#define INSTEP_GPU_VECTOR_CUH

#include "numeric/dtype.h"

#define INSTEP_DEVICE __device__ __forceinline__

namespace {

/* Number of elements per round of a thread block, with N elements per thread. */
template <uint32_t N>
constexpr uint32_t PER_ROUND = N * INSTEP_GPU_THREADS;

/* N consecutive elements. */
template <uint32_t N>
struct Lane {
    float x[N];
};

using Four = Lane<4>;

/* N stored elements, the first in the lowest bits. If elements of 16 or 8 bits do not fill a word, the rest is zero. */
template <uint32_t N>
struct Words {
    uint32_t word[N];
};

/* Returns element i, for elements of 16 or 8 bits. */
template <uint32_t BITS, uint32_t N>
INSTEP_DEVICE uint32_t element_of(const Words<N>& words, uint32_t i) {
    constexpr uint32_t PER_WORD = 32 / BITS;
    return words.word[i / PER_WORD] >> BITS * (i % PER_WORD) & ((1u << BITS) - 1);
}

template <uint32_t BITS, uint32_t N>
INSTEP_DEVICE void set_element(Words<N>& words, uint32_t i, uint32_t element) {
    constexpr uint32_t PER_WORD = 32 / BITS;
    words.word[i / PER_WORD] |= element << BITS * (i % PER_WORD);
}

constexpr uint32_t WIDEST = 16; /* bytes of an access */

/* The size in bytes of each access to N elements. */
template <uint32_t N, class T>
constexpr uint32_t ACCESS_BYTES = N * sizeof(T) < WIDEST ? N * sizeof(T) : WIDEST;

/* Returns the larger of two magnitudes, or NaN if one of them is NaN. */
INSTEP_DEVICE float larger_magnitude(float magnitude, float y) {
#if defined(__CUDA_ARCH__)
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(magnitude), "f"(fabsf(y)));
    return larger;
#else
    const uint32_t a = bits_of(magnitude), b = static_cast<uint32_t>(magnitude_bits(y));
    return float_of(a > b ? a : b);
#endif
}

/* The extent of a run. `is_full` says that its tiles are full and every stream is aligned. It is a constant at each
 * inlined call, so the loop over full tiles has no bounds checks. */
struct Extent {
    uint32_t count;
    bool is_full;

    /* Returns whether elements at..at+N can be accessed at once, with this number of bytes per access. */
    template <uint32_t N>
    INSTEP_DEVICE bool has_whole(const void* first, uint32_t bytes, uint32_t at) const {
        return is_full || (is_aligned(first, bytes) && at + N <= count);
    }

    INSTEP_DEVICE static bool is_aligned(const void* first, uint32_t bytes) {
        return reinterpret_cast<uintptr_t>(first) % bytes == 0;
    }
};

template <uint32_t N, class T>
INSTEP_DEVICE Words<N> words_at(const T* first) {
    Words<N> words = {};
    if constexpr (ACCESS_BYTES<N, T> == 4) {
        words.word[0] = *reinterpret_cast<const uint32_t*>(first);
    } else if constexpr (ACCESS_BYTES<N, T> == 8) {
        const uint2 two = *reinterpret_cast<const uint2*>(first);
        words.word[0] = two.x, words.word[1] = two.y;
    } else {
#pragma unroll
        for (uint32_t i = 0; i < N * sizeof(T) / WIDEST; ++i) {
            const uint4 four = *(reinterpret_cast<const uint4*>(first) + i);
            uint32_t* const word = words.word + 4 * i;
            word[0] = four.x, word[1] = four.y, word[2] = four.z, word[3] = four.w;
        }
    }
    return words;
}

/* Marks the end of a round's loads. The compiler cannot move a conversion of these words before the mark, where the
 * conversion would wait between loads. */
template <uint32_t N>
INSTEP_DEVICE void hold_back(Words<N>& words) {
#if defined(__CUDA_ARCH__)
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) asm volatile("" : "+r"(words.word[i]));
#else
    (void)words;
#endif
}

/* A GPU's code writes wide stores explicitly. Otherwise the compiler merges them with nearby stores of single
 * elements, and then splits them. */
INSTEP_DEVICE void put_word(uint4* to, uint4 word) {
#if defined(__CUDA_ARCH__)
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(word.x), "r"(word.y),
                 "r"(word.z), "r"(word.w)
                 : "memory");
#else
    *to = word;
#endif
}

INSTEP_DEVICE void put_word(uint2* to, uint2 word) {
#if defined(__CUDA_ARCH__)
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(word.x), "r"(word.y)
                 : "memory");
#else
    *to = word;
#endif
}

template <uint32_t N, class T>
INSTEP_DEVICE void put_words(T* first, const Words<N>& words) {
    if constexpr (ACCESS_BYTES<N, T> == 4) {
        *reinterpret_cast<uint32_t*>(first) = words.word[0];
    } else if constexpr (ACCESS_BYTES<N, T> == 8) {
        put_word(reinterpret_cast<uint2*>(first), make_uint2(words.word[0], words.word[1]));
    } else {
#pragma unroll
        for (uint32_t i = 0; i < N * sizeof(T) / WIDEST; ++i) {
            const uint32_t* const word = words.word + 4 * i;
            put_word(reinterpret_cast<uint4*>(first) + i, make_uint4(word[0], word[1], word[2], word[3]));
        }
    }
}

/* Converts an element to its bits and back. */
INSTEP_DEVICE uint32_t stored_bits(float element) { return bits_of(element); }
INSTEP_DEVICE uint32_t stored_bits(uint16_t element) { return element; }
INSTEP_DEVICE uint32_t stored_bits(uint8_t element) { return element; }
INSTEP_DEVICE void put_bits(float* element, uint32_t bits) { *element = float_of(bits); }
INSTEP_DEVICE void put_bits(uint16_t* element, uint32_t bits) { *element = static_cast<uint16_t>(bits); }
INSTEP_DEVICE void put_bits(uint8_t* element, uint32_t bits) { *element = static_cast<uint8_t>(bits); }

/* Loads elements at..at+N of a run, with zeros past its end. */
template <uint32_t N, class T>
INSTEP_DEVICE Words<N> load(const T* run, uint32_t at, Extent extent) {
    if (extent.has_whole<N>(run + at, ACCESS_BYTES<N, T>, at)) return words_at<N>(run + at);
    Words<N> words = {};
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
        const uint32_t bits = at + i < extent.count ? stored_bits(run[at + i]) : 0;
        words.word[i * sizeof(T) / 4] |= bits << 8 * (i * sizeof(T) % 4);
    }
    return words;
}

template <uint32_t N, class T>
INSTEP_DEVICE void store(T* run, uint32_t at, Extent extent, const Words<N>& words) {
    if (extent.has_whole<N>(run + at, ACCESS_BYTES<N, T>, at)) return put_words(run + at, words);
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
        if (at + i < extent.count) put_bits(&run[at + i], words.word[i * sizeof(T) / 4] >> 8 * (i * sizeof(T) % 4));
    }
}

template <uint32_t N>
INSTEP_DEVICE Lane<N> as_floats(const Words<N>& words) {
    Lane<N> lane;
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) lane.x[i] = float_of(words.word[i]);
    return lane;
}

template <uint32_t N>
INSTEP_DEVICE Words<N> as_words(const Lane<N>& lane) {
    Words<N> words;
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) words.word[i] = bits_of(lane.x[i]);
    return words;
}

/* Converts elements of a 16-bit dtype to f32. */
template <uint32_t N>
INSTEP_DEVICE Lane<N> widened(const Words<N>& words, uint32_t dtype) {
    Lane<N> lane;
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) lane.x[i] = widened(static_cast<uint16_t>(element_of<16>(words, i)), dtype);
    return lane;
}

template <uint32_t N>
INSTEP_DEVICE Words<N> narrowed(const Lane<N>& lane, uint32_t dtype) {
    Words<N> words = {};
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) set_element<16>(words, i, narrowed(lane.x[i], dtype));
    return words;
}

/* Returns the number of elements from an aligned group of N to the start of a run. */
template <uint32_t N, class T>
INSTEP_DEVICE uint32_t misalignment(const T* run) {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(run) / sizeof(T) % N);
}

/* N elements from number `shift` on, in two adjacent groups of N. If `shift` is 0, `high` is not used. */
template <uint32_t N>
struct ShiftedWords {
    Words<N> low, high;
    uint32_t shift;
};

/* Like `load`, but reads two aligned groups if both lie inside the run. `at` is a multiple of N. */
template <uint32_t N, class T>
INSTEP_DEVICE ShiftedWords<N> load_shifted(const T* run, uint32_t at, Extent extent) {
    const uint32_t shift = extent.is_full ? 0 : misalignment<N>(run);
    if (shift == 0 || at < shift || at - shift + 2 * N > extent.count) return {load<N>(run, at, extent), {}, 0};
    const T* const first = run + (at - shift);
    return {words_at<N>(first), words_at<N>(first + N), shift};
}

/* Returns the N elements of type T from `shift` on. */
template <class T, uint32_t N>
INSTEP_DEVICE Words<N> shifted(const ShiftedWords<N>& both) {
    constexpr uint32_t PER_WORD = 4 / sizeof(T), COUNT = N / PER_WORD;
    uint32_t word[2 * COUNT];
#pragma unroll
    for (uint32_t i = 0; i < 2 * COUNT; ++i) word[i] = i < COUNT ? both.low.word[i] : both.high.word[i - COUNT];
#pragma unroll
    for (uint32_t by = COUNT / 2; by >= 1; by /= 2) { /* no branch, because loads would move past it */
#pragma unroll
        for (uint32_t i = 0; i < 2 * COUNT - by; ++i) word[i] = both.shift & by * PER_WORD ? word[i + by] : word[i];
    }
    Words<N> words = {};
#pragma unroll
    for (uint32_t i = 0; i < COUNT; ++i) { /* after an odd shift, the first 16 bits are an upper half */
        const bool is_odd = PER_WORD == 2 && both.shift & 1;
        words.word[i] = is_odd ? word[i] >> 16 | word[i + 1] << 16 : word[i];
    }
    return words;
}

/* A run of a stream, with a dtype that is known only at run time. Gradients, copies
 * and casts use this struct. */
struct Run {
    void* base;
    uint64_t offset; /* elements */
    uint32_t dtype;
    Extent extent;

    INSTEP_DEVICE bool is_f32() const { return dtype == INSTEP_DTYPE_F32; }
    INSTEP_DEVICE float* floats() const { return static_cast<float*>(base) + offset; }
    INSTEP_DEVICE uint16_t* halves() const { return static_cast<uint16_t*>(base) + offset; }

    INSTEP_DEVICE bool is_aligned() const {
        return is_f32() ? Extent::is_aligned(floats(), WIDEST) : Extent::is_aligned(halves(), WIDEST);
    }

    template <uint32_t N>
    INSTEP_DEVICE Words<N> load_at(uint32_t at) const {
        return is_f32() ? load<N>(floats(), at, extent) : load<N>(halves(), at, extent);
    }

    INSTEP_DEVICE Four read(uint32_t at) const { return values_of(load_at<4>(at)); }

    /* No thread may write to the run during this load, because the words also have elements of other lanes. */
    template <uint32_t N>
    INSTEP_DEVICE ShiftedWords<N> load_shifted_at(uint32_t at) const {
        return is_f32() ? load_shifted<N>(floats(), at, extent) : load_shifted<N>(halves(), at, extent);
    }

    template <uint32_t N>
    INSTEP_DEVICE Words<N> shifted(const ShiftedWords<N>& words) const {
        return is_f32() ? ::shifted<float>(words) : ::shifted<uint16_t>(words);
    }

    template <uint32_t N>
    INSTEP_DEVICE Lane<N> values_of(const Words<N>& words) const {
        return is_f32() ? as_floats(words) : widened(words, dtype);
    }

    template <uint32_t N>
    INSTEP_DEVICE void write(uint32_t at, const Lane<N>& lane) const {
        if (is_f32()) return store(floats(), at, extent, as_words(lane));
        store(halves(), at, extent, narrowed(lane, dtype));
    }

    /* The bits of +0 are zero in every dtype. */
    INSTEP_DEVICE void clear(uint32_t at) const {
        if (is_f32()) return store(floats(), at, extent, Words<4>{});
        store(halves(), at, extent, Words<4>{});
    }
};

}  // namespace

#endif
