/* Reads and writes 8-bit states on a GPU: each thread takes its codes and the scale of their block.
 *
 * A block of 256 elements belongs to two warps. A scale is written only after every thread of these warps has read the
 * old scale. The bits equal those of cpu/streams.h. */
#ifndef INSTEP_GPU_CODES_CUH
#define INSTEP_GPU_CODES_CUH

#include "numeric/codes.h"
#include "gpu/place.cuh"

namespace {

/* Returns the address of a scale. All elements of a thread are in one block. */
INSTEP_DEVICE float* scale_of(const Place& place, uint32_t k, uint32_t at) {
    return place.args.scales[k] + (place.tile().state_offset + at) / INSTEP_QUANTUM;
}

/* Returns the codes, with the scale of their block in the last word. */
template <uint32_t N>
INSTEP_DEVICE Words<N> load_codes(const Place& place, uint32_t k, uint32_t at) {
    if (!place.has(at)) return {};
    Words<N> words = load<N>(place.of<uint8_t>(place.args.states[k]), at, place.extent());
    words.word[N - 1] = bits_of(*scale_of(place, k, at));
    return words;
}

template <uint32_t N>
INSTEP_DEVICE Lane<N> decoded(const Words<N>& codes, bool is_signed, float scale) {
    Lane<N> lane;
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
        const uint8_t code = static_cast<uint8_t>(element_of<8>(codes, i));
        lane.x[i] = is_signed ? from_signed_code(code, scale) : from_unsigned_code(code, scale);
    }
    return lane;
}

/* Returns the largest magnitude_bits of a lane. Elements past the end of the run do not count. */
template <uint32_t N>
INSTEP_DEVICE uint32_t largest_magnitude(const Place& place, uint32_t at, const Lane<N>& lane) {
    uint32_t largest = 0;
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
        const uint32_t magnitude = place.has(at + i) ? static_cast<uint32_t>(magnitude_bits(lane.x[i])) : 0;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/* Returns an approximate root. The root only selects the threshold next to a power, and no stored value depends on
 * it. */
INSTEP_DEVICE float rough_square_root(float x) {
#if defined(__CUDA_ARCH__)
    float root;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
#else
    return square_root(x) * 0x1.002p0f;
#endif
}

INSTEP_DEVICE float rough_root(bool is_signed, float power) {
    const float root = rough_square_root(power);
    return is_signed ? root : rough_square_root(root) * 15.9375f;
}

/* Returns the nearest code of a magnitude. `closest` becomes the larger of its old value and the
 * distance_to the threshold. */
INSTEP_DEVICE uint32_t likely_code(bool is_signed, float size, float factor, uint32_t& closest) {
    const float power = size * factor, root = rough_root(is_signed, power);
    const uint32_t distance = distance_to(power_of(is_signed, nearest_whole(root - 0.5f) + 0.5f), power);
    closest = distance > closest ? distance : closest;
    return nearest_integer(root - 0.5f) + (distance >> 31);
}

/* Rounds to the nearest code by thresholds, or by exact roots if a value is too close to a threshold. A random draw
 * costs more than a root, so stochastic codes always come from exact roots. `stochastic` is a constant. */
template <uint32_t N>
INSTEP_DEVICE Words<N> coded(const Place& place, uint32_t k, bool is_signed, uint32_t at, const Lane<N>& lane, float scale,
                             bool stochastic) {
    const float factor = coding_factor(is_signed, scale);
    Words<N> codes = {};
    uint32_t closest = stochastic ? FIRST_CLOSE : 0;
#pragma unroll
    for (uint32_t i = 0; i < N && !stochastic; ++i) {
        const bool is_negative = bits_of(lane.x[i]) >> 31;
        const float size = is_signed ? magnitude(lane.x[i]) : is_negative ? 0.0f : lane.x[i];
        uint32_t code = likely_code(is_signed, size, factor, closest);
        if (is_signed) {
            code = is_negative ? 0u - code : code;
        } else {
            code = code == 0 ? bits_of(size) != 0 : code; /* at least 1 above zero */
        }
        set_element<8>(codes, i, code & 0xffu);
    }
    if (closest < FIRST_CLOSE) return is_coded(scale) ? codes : Words<N>{};
    codes = {};
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
        const uint32_t random = stochastic ? place.random(at + i, FIRST_STATE_STREAM + k) : 0;
        const uint32_t code = is_signed ? signed_code(lane.x[i], scale, factor, stochastic, random)
                                        : unsigned_code(lane.x[i], scale, factor, stochastic, random);
        set_element<8>(codes, i, code & 0xffu);
    }
    return is_coded(scale) ? codes : Words<N>{};
}

/* Writes codes and scale, and returns the stored values. `largest` is the block's largest magnitude. The thread with
 * the block's first element writes the scale, after every thread has read the old scale. */
template <uint32_t N>
INSTEP_DEVICE Lane<N> write_codes(const Place& place, uint32_t k, bool is_signed, uint32_t at, const Lane<N>& lane,
                                  uint32_t largest) {
    if (!place.has(at)) return {};
    const float scale = block_scale(largest);
    const Words<N> codes = place.is_stochastic() ? coded(place, k, is_signed, at, lane, scale, true)
                                                 : coded(place, k, is_signed, at, lane, scale, false);
    store(place.of<uint8_t>(place.args.states[k]), at, place.extent(), codes);
    if (at % INSTEP_QUANTUM == 0) *scale_of(place, k, at) = scale;
    return decoded(codes, is_signed, scale);
}

/* Returns the end of a loop over `at`. Each round has a barrier, so all threads make the same number of rounds. */
template <uint32_t N>
INSTEP_DEVICE uint32_t whole_rounds(const Place& place) {
    if (place.is_full) return place.count();
    return (place.count() + PER_ROUND<N> - 1) / PER_ROUND<N> * PER_ROUND<N>;
}

}  // namespace

#endif
