/* Four neighbouring elements of a stream per thread: one wide access where it is aligned and whole.
 *
 * A warp's request is then contiguous whole sectors: 16 bytes a lane on f32, 8 on 16-bit streams. Four elements that
 * are misaligned or cut off by the end of their run are accessed one by one. Gradients are the exception: a foreign
 * bucket may start at any element, so whole aligned words around it are read and shifted. No access touches a byte
 * outside the run [run, run + count), not even in an aligned word that cannot fault: its neighbours may be written
 * meanwhile. */
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

/* Four 16-bit elements, the first in the low half of the first word. */
struct Packed {
    uint32_t word[2];
};

/* `bytes` is the size of four elements. */
INSTEP_DEVICE bool is_whole(const void* first, uint32_t bytes, uint32_t at, uint32_t count) {
    return reinterpret_cast<uintptr_t>(first) % bytes == 0 && at + 4 <= count;
}

/* Elements at..at+4 of a run; zero past its end. */
INSTEP_DEVICE Four load(const float* run, uint32_t at, uint32_t count) {
    Four four = {};
    if (is_whole(run + at, 16, at, count)) {
        const float4 word = *reinterpret_cast<const float4*>(run + at);
        four = {{word.x, word.y, word.z, word.w}};
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) four.x[i] = at + i < count ? run[at + i] : 0.0f;
    }
    return four;
}

INSTEP_DEVICE void store(float* run, uint32_t at, uint32_t count, const Four& four) {
    if (is_whole(run + at, 16, at, count)) {
        *reinterpret_cast<float4*>(run + at) = make_float4(four.x[0], four.x[1], four.x[2], four.x[3]);
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            if (at + i < count) run[at + i] = four.x[i];
        }
    }
}

INSTEP_DEVICE Packed load(const uint16_t* run, uint32_t at, uint32_t count) {
    Packed packed = {};
    if (is_whole(run + at, 8, at, count)) {
        const uint2 word = *reinterpret_cast<const uint2*>(run + at);
        packed = {{word.x, word.y}};
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t element = at + i < count ? run[at + i] : 0u;
            packed.word[i / 2] |= element << 16 * (i % 2);
        }
    }
    return packed;
}

INSTEP_DEVICE void store(uint16_t* run, uint32_t at, uint32_t count, const Packed& packed) {
    if (is_whole(run + at, 8, at, count)) {
        *reinterpret_cast<uint2*>(run + at) = make_uint2(packed.word[0], packed.word[1]);
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            if (at + i < count) run[at + i] = static_cast<uint16_t>(packed.word[i / 2] >> 16 * (i % 2));
        }
    }
}

/* Four bytes, the first in the lowest. */
INSTEP_DEVICE uint32_t load(const uint8_t* run, uint32_t at, uint32_t count) {
    if (is_whole(run + at, 4, at, count)) return *reinterpret_cast<const uint32_t*>(run + at);
    uint32_t word = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) word |= at + i < count ? static_cast<uint32_t>(run[at + i]) << 8 * i : 0u;
    return word;
}

INSTEP_DEVICE void store(uint8_t* run, uint32_t at, uint32_t count, uint32_t word) {
    if (is_whole(run + at, 4, at, count)) {
        *reinterpret_cast<uint32_t*>(run + at) = word;
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            if (at + i < count) run[at + i] = static_cast<uint8_t>(word >> 8 * i);
        }
    }
}

/* Elements from an aligned four to the start of a run. */
INSTEP_DEVICE uint32_t misalignment(const void* run, uint32_t element_bytes) {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(run) / element_bytes % 4);
}

/* As `load`, but with two aligned words where both lie inside the run; `at` is a multiple of four. */
INSTEP_DEVICE Four load_shifted(const float* run, uint32_t at, uint32_t count) {
    const uint32_t shift = misalignment(run, 4);
    if (shift == 0 || at < shift || at - shift + 8 > count) return load(run, at, count);
    const float4* words = reinterpret_cast<const float4*>(run + (at - shift));
    const float4 a = words[0], b = words[1];
    const float element[7] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z};
    Four four;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        four.x[i] = shift == 1 ? element[i + 1] : shift == 2 ? element[i + 2] : element[i + 3];
    }
    return four;
}

INSTEP_DEVICE Packed load_shifted(const uint16_t* run, uint32_t at, uint32_t count) {
    const uint32_t shift = misalignment(run, 2);
    if (shift == 0 || at < shift || at - shift + 8 > count) return load(run, at, count);
    const uint2* words = reinterpret_cast<const uint2*>(run + (at - shift));
    const uint2 a = words[0], b = words[1];
    /* The words from the one with the first element on. After an odd shift that element is in the upper half, and a
     * third word is needed. */
    const uint32_t first = shift & 2 ? a.y : a.x, second = shift & 2 ? b.x : a.y, third = shift & 2 ? b.y : b.x;
    if (shift == 2) return {{first, second}};
    return {{first >> 16 | second << 16, second >> 16 | third << 16}};
}

INSTEP_DEVICE Four widened(const Packed& packed, uint32_t dtype) {
    Four four;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const uint16_t element = static_cast<uint16_t>(packed.word[i / 2] >> 16 * (i % 2));
        four.x[i] = widened(element, dtype);
    }
    return four;
}

INSTEP_DEVICE Packed narrowed(const Four& four, uint32_t dtype) {
    Packed packed = {};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t element = narrowed(four.x[i], dtype);
        packed.word[i / 2] |= element << 16 * (i % 2);
    }
    return packed;
}

/* A run of a stream whose dtype is an argument. Only gradients are read this way: they alone may be foreign memory. */
struct Run {
    void* base;
    uint64_t offset; /* elements */
    uint32_t dtype, count;

    INSTEP_DEVICE Four read(uint32_t at) const {
        if (dtype == INSTEP_DTYPE_F32) return load(static_cast<const float*>(base) + offset, at, count);
        return widened(load(static_cast<const uint16_t*>(base) + offset, at, count), dtype);
    }

    /* No thread may write to the run meanwhile: the words also hold neighbours' elements. */
    INSTEP_DEVICE Four read_shifted(uint32_t at) const {
        if (dtype == INSTEP_DTYPE_F32) return load_shifted(static_cast<const float*>(base) + offset, at, count);
        return widened(load_shifted(static_cast<const uint16_t*>(base) + offset, at, count), dtype);
    }

    INSTEP_DEVICE void write(uint32_t at, const Four& four) const {
        if (dtype == INSTEP_DTYPE_F32) return store(static_cast<float*>(base) + offset, at, count, four);
        store(static_cast<uint16_t*>(base) + offset, at, count, narrowed(four, dtype));
    }

    /* +0 is all bits zero in every dtype. */
    INSTEP_DEVICE void clear(uint32_t at) const {
        if (dtype == INSTEP_DTYPE_F32) return store(static_cast<float*>(base) + offset, at, count, Four{});
        store(static_cast<uint16_t*>(base) + offset, at, count, Packed{});
    }
};

}  // namespace

#endif
