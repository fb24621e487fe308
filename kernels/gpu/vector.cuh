/* Four consecutive elements of a stream per thread: one wide access where it is aligned and whole.
 *
 * Loads return the words as they are stored, so that a round can issue all its loads before it waits for the first;
 * a conversion beside its load would wait at once. A warp's request is contiguous whole sectors: 16 bytes a lane on
 * f32, 8 on 16-bit streams. Four elements that are misaligned or cut off by the end of their run are accessed one by
 * one. Gradients are the exception: a foreign bucket may start at any element, so whole aligned words around it are
 * read and shifted. All streams but the gradients pass once through the L2 cache and are marked to leave it first, so that
 * the gradients of the next bucket stay. No access touches a byte outside the run [run, run + count), not even in an aligned word that
 * cannot fault: its neighbours may be written meanwhile. */
#ifndef INSTEP_GPU_VECTOR_CUH
#define INSTEP_GPU_VECTOR_CUH

#include "numeric/dtype.h"

#define INSTEP_DEVICE __device__ __forceinline__

namespace {

/* Elements of a block while each thread has four. */
constexpr uint32_t ELEMENTS_PER_ROUND = 4 * INSTEP_GPU_THREADS;

struct Four {
    float x[4];
};

/* Four elements as they are stored, the first in the lowest bits: four words of f32, two of 16 bits, one of 8. Words
 * that the elements do not fill are zero. */
struct Words {
    uint32_t word[4];
};

/* Element i, where elements have 16 or 8 bits. */
template <uint32_t BITS>
INSTEP_DEVICE uint32_t element_of(const Words& words, uint32_t i) {
    constexpr uint32_t PER_WORD = 32 / BITS;
    return words.word[i / PER_WORD] >> BITS * (i % PER_WORD) & ((1u << BITS) - 1);
}

template <uint32_t BITS>
INSTEP_DEVICE void set_element(Words& words, uint32_t i, uint32_t element) {
    constexpr uint32_t PER_WORD = 32 / BITS;
    words.word[i / PER_WORD] |= element << BITS * (i % PER_WORD);
}

/* How far a run reaches. `is_full` says that its tiles are full and every stream is aligned: a constant where this
 * is inlined, so that nothing is asked in the loop of such a tile. */
struct Extent {
    uint32_t count;
    bool is_full;

    /* Whether elements at..at+4 are one access; `bytes` is their size. */
    INSTEP_DEVICE bool has_whole(const void* first, uint32_t bytes, uint32_t at) const {
        return is_full || (is_aligned(first, bytes) && at + 4 <= count);
    }

    INSTEP_DEVICE static bool is_aligned(const void* first, uint32_t bytes) {
        return reinterpret_cast<uintptr_t>(first) % bytes == 0;
    }
};

/* How long the cache should keep what is accessed. */
enum class Kept { AS_USUAL, BRIEFLY };

template <Kept KEPT, class Word>
INSTEP_DEVICE Word word_at(const Word* word) {
    if constexpr (KEPT == Kept::BRIEFLY) return __ldcs(word);
    return *word;
}

template <Kept KEPT = Kept::AS_USUAL>
INSTEP_DEVICE Words words_at(const float* first) {
    const uint4 words = word_at<KEPT>(reinterpret_cast<const uint4*>(first));
    return {{words.x, words.y, words.z, words.w}};
}

template <Kept KEPT = Kept::AS_USUAL>
INSTEP_DEVICE Words words_at(const uint16_t* first) {
    const uint2 words = word_at<KEPT>(reinterpret_cast<const uint2*>(first));
    return {{words.x, words.y}};
}

template <Kept KEPT = Kept::AS_USUAL>
INSTEP_DEVICE Words words_at(const uint8_t* first) {
    return {{word_at<KEPT>(reinterpret_cast<const uint32_t*>(first))}};
}

/* Marks the end of a round's loads: no conversion of these words moves before it, where it would wait among loads. */
INSTEP_DEVICE void hold_back(Words& words) {
#if defined(__CUDA_ARCH__)
    asm volatile("" : "+r"(words.word[0]), "+r"(words.word[1]), "+r"(words.word[2]), "+r"(words.word[3]));
#else
    (void)words;
#endif
}

/* Wide stores are spelled out for a GPU: its compiler merges them with the stores of single elements beside them, and
 * then splits them up. */
template <Kept KEPT>
INSTEP_DEVICE void put_words(float* first, const Words& words) {
    const uint4 all = make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]);
    if constexpr (KEPT == Kept::BRIEFLY) return __stcs(reinterpret_cast<uint4*>(first), all);
#if defined(__CUDA_ARCH__)
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(first)), "r"(all.x), "r"(all.y),
                 "r"(all.z), "r"(all.w)
                 : "memory");
#else
    *reinterpret_cast<uint4*>(first) = all;
#endif
}

template <Kept KEPT>
INSTEP_DEVICE void put_words(uint16_t* first, const Words& words) {
    const uint2 all = make_uint2(words.word[0], words.word[1]);
    if constexpr (KEPT == Kept::BRIEFLY) return __stcs(reinterpret_cast<uint2*>(first), all);
#if defined(__CUDA_ARCH__)
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(first)), "r"(all.x), "r"(all.y)
                 : "memory");
#else
    *reinterpret_cast<uint2*>(first) = all;
#endif
}

template <Kept KEPT>
INSTEP_DEVICE void put_words(uint8_t* first, const Words& words) {
    if constexpr (KEPT == Kept::BRIEFLY) return __stcs(reinterpret_cast<uint32_t*>(first), words.word[0]);
    *reinterpret_cast<uint32_t*>(first) = words.word[0];
}

/* An element's bits, and back. */
INSTEP_DEVICE uint32_t stored_bits(float element) { return bits_of(element); }
INSTEP_DEVICE uint32_t stored_bits(uint16_t element) { return element; }
INSTEP_DEVICE uint32_t stored_bits(uint8_t element) { return element; }
INSTEP_DEVICE void put_bits(float* element, uint32_t bits) { *element = float_of(bits); }
INSTEP_DEVICE void put_bits(uint16_t* element, uint32_t bits) { *element = static_cast<uint16_t>(bits); }
INSTEP_DEVICE void put_bits(uint8_t* element, uint32_t bits) { *element = static_cast<uint8_t>(bits); }

/* Elements at..at+4 of a run; zero past its end. */
template <Kept KEPT = Kept::BRIEFLY, class T>
INSTEP_DEVICE Words load(const T* run, uint32_t at, Extent extent) {
    if (extent.has_whole(run + at, 4 * sizeof(T), at)) return words_at<KEPT>(run + at);
    Words words = {};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t bits = at + i < extent.count ? stored_bits(run[at + i]) : 0;
        words.word[i * sizeof(T) / 4] |= bits << 8 * (i * sizeof(T) % 4);
    }
    return words;
}

template <Kept KEPT = Kept::BRIEFLY, class T>
INSTEP_DEVICE void store(T* run, uint32_t at, Extent extent, const Words& words) {
    if (extent.has_whole(run + at, 4 * sizeof(T), at)) return put_words<KEPT>(run + at, words);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        if (at + i < extent.count) put_bits(&run[at + i], words.word[i * sizeof(T) / 4] >> 8 * (i * sizeof(T) % 4));
    }
}

INSTEP_DEVICE Four as_floats(const Words& words) {
    Four four;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) four.x[i] = float_of(words.word[i]);
    return four;
}

INSTEP_DEVICE Words as_words(const Four& four) {
    return {{bits_of(four.x[0]), bits_of(four.x[1]), bits_of(four.x[2]), bits_of(four.x[3])}};
}

/* Of a 16-bit dtype. */
INSTEP_DEVICE Four widened(const Words& words, uint32_t dtype) {
    Four four;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) four.x[i] = widened(static_cast<uint16_t>(element_of<16>(words, i)), dtype);
    return four;
}

INSTEP_DEVICE Words narrowed(const Four& four, uint32_t dtype) {
    Words words = {};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) set_element<16>(words, i, narrowed(four.x[i], dtype));
    return words;
}

/* Elements from an aligned four to the start of a run. */
INSTEP_DEVICE uint32_t misalignment(const void* run, uint32_t element_bytes) {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(run) / element_bytes % 4);
}

/* Four elements and, if they are misaligned, the aligned four after them; the first is element `shift` of both. */
struct ShiftedWords {
    Words low, high;
    uint32_t shift;
};

/* As `load`, but with two aligned words where both lie inside the run; `at` is a multiple of four. */
template <class T>
INSTEP_DEVICE ShiftedWords load_shifted(const T* run, uint32_t at, Extent extent) {
    const uint32_t shift = extent.is_full ? 0 : misalignment(run, sizeof(T));
    if (shift == 0 || at < shift || at - shift + 8 > extent.count) return {load<Kept::AS_USUAL>(run, at, extent), {}, 0};
    const T* const first = run + (at - shift);
    return {words_at(first), words_at(first + 4), shift};
}

INSTEP_DEVICE Words shifted_floats(const ShiftedWords& both) {
    const uint32_t* const a = both.low.word;
    const uint32_t* const b = both.high.word;
    const uint32_t element[7] = {a[0], a[1], a[2], a[3], b[0], b[1], b[2]};
    uint32_t five[5];
    Words words; /* without a branch: a load would move past it */
#pragma unroll
    for (uint32_t i = 0; i < 5; ++i) five[i] = both.shift & 2 ? element[i + 2] : element[i];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) words.word[i] = both.shift & 1 ? five[i + 1] : five[i];
    return words;
}

INSTEP_DEVICE Words shifted_halves(const ShiftedWords& both) {
    const uint32_t* const a = both.low.word;
    const uint32_t* const b = both.high.word;
    /* The words from the one with the first element on. After an odd shift that element is in the upper half, and a
     * third word is needed. */
    const uint32_t first = both.shift & 2 ? a[1] : a[0], second = both.shift & 2 ? b[0] : a[1];
    const uint32_t third = both.shift & 2 ? b[1] : b[0];
    const bool is_odd = both.shift & 1;
    return {{is_odd ? first >> 16 | second << 16 : first, is_odd ? second >> 16 | third << 16 : second}};
}

/* A run of a stream whose dtype is an argument. Only gradients are read this way: they alone may be foreign memory. */
struct Run {
    void* base;
    uint64_t offset; /* elements */
    uint32_t dtype;
    Extent extent;

    INSTEP_DEVICE bool is_f32() const { return dtype == INSTEP_DTYPE_F32; }
    INSTEP_DEVICE float* floats() const { return static_cast<float*>(base) + offset; }
    INSTEP_DEVICE uint16_t* halves() const { return static_cast<uint16_t*>(base) + offset; }

    /* To four elements. */
    INSTEP_DEVICE bool is_aligned() const {
        return is_f32() ? Extent::is_aligned(floats(), 16) : Extent::is_aligned(halves(), 8);
    }

    INSTEP_DEVICE Words load_at(uint32_t at) const {
        return is_f32() ? load<Kept::AS_USUAL>(floats(), at, extent) : load<Kept::AS_USUAL>(halves(), at, extent);
    }

    INSTEP_DEVICE Four read(uint32_t at) const { return values_of(load_at(at)); }

    /* No thread may write to the run meanwhile: the words also hold neighbours' elements. */
    INSTEP_DEVICE ShiftedWords load_shifted_at(uint32_t at) const {
        return is_f32() ? load_shifted(floats(), at, extent) : load_shifted(halves(), at, extent);
    }

    INSTEP_DEVICE Words shifted(const ShiftedWords& words) const {
        return is_f32() ? shifted_floats(words) : shifted_halves(words);
    }

    INSTEP_DEVICE Four values_of(const Words& words) const {
        return is_f32() ? as_floats(words) : widened(words, dtype);
    }

    INSTEP_DEVICE void write(uint32_t at, const Four& four) const {
        if (is_f32()) return store<Kept::AS_USUAL>(floats(), at, extent, as_words(four));
        store<Kept::AS_USUAL>(halves(), at, extent, narrowed(four, dtype));
    }

    /* +0 is all bits zero in every dtype. */
    INSTEP_DEVICE void clear(uint32_t at) const {
        if (is_f32()) return store<Kept::AS_USUAL>(floats(), at, extent, Words{});
        store<Kept::AS_USUAL>(halves(), at, extent, Words{});
    }
};

}  // namespace

#endif
