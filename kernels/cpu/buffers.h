/* Work on whole buffers, outside a step: the sum over ranks, and conversions between stored values and f32.
 *
 * This file uses the loops of the step, so a value that is read and written back keeps its bits. */
#ifndef INSTEP_CPU_BUFFERS_H
#define INSTEP_CPU_BUFFERS_H

#include "cpu/streams.h"

namespace {

/* Number of elements of a buffer that are processed at a time. They are few enough to stay in the
 * first-level cache between two loops. */
constexpr uint64_t RUN = 1024;

INSTEP_INLINE uint32_t run_length(uint64_t start, uint64_t last) {
    return static_cast<uint32_t>(last - start < RUN ? last - start : RUN);
}

/* Adds in rank order, also if ranks arrive in another order. 16-bit elements are added as f32 and rounded once. A ring
 * all-reduce would round at every hop. */
__attribute__((noinline)) void sum_range(void* const* ranks, uint64_t rank_count, uint32_t dtype, uint64_t first,
                                         uint64_t last, void* to) {
    const bool wide = dtype == INSTEP_DTYPE_F32;
    const uint64_t bytes = bytes_of(dtype);
    float total[RUN], widened[RUN];
    uint16_t narrowed[RUN];
    for (uint64_t start = first; start < last; start += RUN) {
        const uint32_t count = run_length(start, last);
        for (uint64_t r = 0; r < rank_count; ++r) {
            if (!wide) widen_run(dtype, count, static_cast<const uint16_t*>(ranks[r]) + start, widened);
            const float* __restrict source = wide ? static_cast<const float*>(ranks[r]) + start : widened;
            if (r == 0) {
                for (uint32_t i = 0; i < count; ++i) total[i] = source[i];
            } else {
                for (uint32_t i = 0; i < count; ++i) total[i] = total[i] + source[i];
            }
        }
        if (wide) {
            make_canonical(total, count);
        } else {
            narrow_run(dtype, count, total, narrowed);
        }
        const void* const sum = wide ? static_cast<const void*>(total) : narrowed;
        if (to) {
            __builtin_memcpy(static_cast<char*>(to) + (start - first) * bytes, sum, count * bytes);
            continue;
        }
        for (uint64_t r = 0; r < rank_count; ++r) {
            __builtin_memcpy(static_cast<char*>(ranks[r]) + start * bytes, sum, count * bytes);
        }
    }
}

__attribute__((noinline)) void narrow_all(const float* from, uint16_t* to, uint32_t dtype, float factor,
                                          uint64_t count) {
    float scaled[RUN];
    for (uint64_t start = 0; start < count; start += RUN) {
        const uint32_t length = run_length(start, count);
        for (uint32_t i = 0; i < length; ++i) scaled[i] = from[start + i] * factor;
        narrow_run(dtype, length, scaled, to + start);
    }
}

__attribute__((noinline)) void widen_all(const uint16_t* from, float* to, uint32_t dtype, float factor,
                                         uint64_t count) {
    for (uint64_t start = 0; start < count; start += RUN) {
        const uint32_t length = run_length(start, count);
        widen_run(dtype, length, from + start, to + start);
        multiply_run(factor, length, to + start);
    }
}

__attribute__((noinline)) void decode_all(const InstepStored* from, float* to) {
    for (uint64_t start = 0; start < from->count; start += RUN) {
        const uint32_t count = run_length(start, from->count);
        const uint16_t* narrow = static_cast<const uint16_t*>(from->values) + start;
        if (from->format == INSTEP_MOMENTS_8BIT) {
            decode_run(from->is_signed, count, static_cast<const uint8_t*>(from->values) + start,
                       static_cast<const float*>(from->second) + start / INSTEP_QUANTUM, to + start);
            make_canonical(to + start, count);
        } else if (from->format == INSTEP_DTYPE_F32) {
            __builtin_memcpy(to + start, static_cast<const float*>(from->values) + start, count * sizeof(float));
        } else if (from->second) {
            const uint64_t bytes = from->master_kind == INSTEP_MASTER_REMAINDER16 ? 2 : 1;
            join_run(from->master_kind, count, narrow, static_cast<const char*>(from->second) + start * bytes,
                     to + start);
        } else {
            widen_run(from->format, count, narrow, to + start);
            make_canonical(to + start, count);
        }
    }
}

__attribute__((noinline)) void encode_all(const float* from, const InstepStored* to) {
    const Rounding nearest = {{{0, 0}, 0}, false};
    for (uint64_t start = 0; start < to->count; start += RUN) {
        const uint32_t count = run_length(start, to->count);
        uint16_t* narrow = static_cast<uint16_t*>(to->values) + start;
        float values[RUN];
        __builtin_memcpy(values, from + start, count * sizeof(float));
        if (to->format == INSTEP_MOMENTS_8BIT) {
            encode_run(to->is_signed, nearest, 0, count, values, static_cast<uint8_t*>(to->values) + start,
                       static_cast<float*>(to->second) + start / INSTEP_QUANTUM);
        } else if (to->format == INSTEP_DTYPE_F32) {
            __builtin_memcpy(static_cast<float*>(to->values) + start, values, count * sizeof(float));
        } else if (to->second) {
            const uint64_t bytes = to->master_kind == INSTEP_MASTER_REMAINDER16 ? 2 : 1;
            split_run(to->master_kind, nearest, count, values, narrow, static_cast<char*>(to->second) + start * bytes);
        } else {
            narrow_run(to->format, count, values, narrow);
        }
    }
}

}  // namespace

#endif
