/* The part of CUDA that the kernels use, for g++: qualifiers, launch variables, vectors, warp operations, atomics.
 *
 * Where the kernels use inline assembly or intrinsics, they do so under __CUDA_ARCH__, with plain C++ beside it.
 * Atomics are plain operations, because only one fiber runs. This header must not be more lenient than a GPU: vectors
 * keep their alignment, masks are whole warps, a warp or block meets in one line of the kernel, and shared memory
 * starts as garbage. */
#ifndef INSTEP_CUDA_ON_CPU_H
#define INSTEP_CUDA_ON_CPU_H

#include "fibers.h"
#include "races.h"

#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline
/* All shared memory is in one section, so that the runner can overwrite it before each block; static is enough, because
 * blocks run one at a time. */
#define __shared__ static __attribute__((section("instep_shared")))

struct Index {
    uint32_t x;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

struct __attribute__((may_alias, aligned(16))) float4 {
    float x, y, z, w;
};
struct __attribute__((may_alias, aligned(8))) uint2 {
    uint32_t x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct __attribute__((may_alias, aligned(16))) uint4 {
    uint32_t x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

/* A cache policy changes no value. */
template <class T>
inline T __ldcs(const T* from) {
    return *from;
}
template <class T>
inline void __stcs(T* to, T value) {
    *to = value;
}

namespace fibers {

/* Returns every lane's value, once the whole warp has reached this operation. */
INSTEP_RUNNER inline const uint64_t* exchange(const char* operation, int line, uint32_t mask, uint64_t value) {
    if (mask != 0xffffffffu) fail("a warp operation on part of a warp");
    Group& warp = warps[threadIdx.x / WARP];
    return values_of(warp, meet(warp, operation, line, threadIdx.x % WARP, value));
}

}  // namespace fibers

template <class T>
INSTEP_RUNNER T __shfl_xor_sync(uint32_t mask, T value, uint32_t lane_mask, int line = __builtin_LINE()) {
    static_assert(sizeof(T) <= 8, "a shuffle of more than a register pair");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof value);
    const uint64_t* lanes = fibers::exchange("shuffle", line, mask, bits);
    __builtin_memcpy(&value, &lanes[(threadIdx.x ^ lane_mask) % fibers::WARP], sizeof value);
    return value;
}

INSTEP_RUNNER inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t value, int line = __builtin_LINE()) {
    const uint64_t* lanes = fibers::exchange("maximum", line, mask, value);
    uint64_t largest = 0;
    for (uint32_t k = 0; k < fibers::WARP; ++k) largest = lanes[k] > largest ? lanes[k] : largest;
    return static_cast<uint32_t>(largest);
}

INSTEP_RUNNER inline int __any_sync(uint32_t mask, int predicate, int line = __builtin_LINE()) {
    const uint64_t* lanes = fibers::exchange("vote", line, mask, predicate != 0);
    uint64_t any = 0;
    for (uint32_t k = 0; k < fibers::WARP; ++k) any |= lanes[k];
    return any != 0;
}

INSTEP_RUNNER inline void __syncthreads(int line = __builtin_LINE()) {
    races::settle();
    fibers::meet(fibers::block, "barrier", line, fibers::WARP, 0);
}

INSTEP_RUNNER inline void __syncwarp(int line = __builtin_LINE()) {
    races::settle();
    fibers::Group& warp = fibers::warps[threadIdx.x / fibers::WARP];
    fibers::meet(warp, "warp barrier", line, threadIdx.x % fibers::WARP, 0);
    ++fibers::all[fibers::current].warp_barriers;
}

inline void __threadfence_system() {}

template <class T>
INSTEP_RUNNER T atomicAdd(T* target, T value) {
    races::access(target, sizeof *target, races::ATOMIC);
    const T before = *target;
    *target = before + value;
    return before;
}

INSTEP_RUNNER inline uint32_t atomicMin(uint32_t* target, uint32_t value) {
    races::access(target, sizeof *target, races::ATOMIC);
    const uint32_t before = *target;
    *target = value < before ? value : before;
    return before;
}

INSTEP_RUNNER inline uint32_t atomicMax(uint32_t* target, uint32_t value) {
    races::access(target, sizeof *target, races::ATOMIC);
    const uint32_t before = *target;
    *target = value > before ? value : before;
    return before;
}

#endif
