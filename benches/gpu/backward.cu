/* What a step meets on a GPU: stand-ins for backward's kernels and for an all-reduce, for `instep bench --only overlap`.
 *
 * None computes anything that is wanted: they take time, multiprocessors and memory bandwidth as the real ones would.
 * Each takes one struct, which src/bench/load.rs repeats. Must leave a reduced buffer's values as they are, and must not
 * be linked into the library. */
#include <cuda_bf16.h>
#include <mma.h>

#include <cstdint>

namespace {

constexpr uint32_t SIDE = 128; /* of a block's part of the product */
constexpr uint32_t DEPTH = 32; /* of what a block has in shared memory */
constexpr uint32_t IN_FLIGHT = 8; /* float4 of a thread of the all-reduce */

struct Matmul {
    const __nv_bfloat16* a; /* rows x depth */
    const __nv_bfloat16* b; /* depth x columns */
    float* out;             /* rows x columns: the gradient */
    uint32_t rows, columns, depth, reserved;
};

struct Elementwise {
    const float4* from;
    float4* to;
    float4* gradient;
    uint64_t count, gradient_count; /* of float4 */
};

struct Reduce {
    float4* buffer;
    float4* scratch;      /* as long */
    uint64_t count;       /* of float4 */
    uint64_t duration_ns; /* at least */
};

__device__ uint64_t now_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__device__ void hold(uint64_t start, uint64_t duration_ns) {
    while (now_ns() - start < duration_ns) __nanosleep(200);
}

/* Not fused: the software GPU (docs/software-gpu.md) has no fused operations, since the library's kernels may have none. */
__device__ float plain(float x) { return __fadd_rn(__fmul_rn(x, 0.5f), 0.1f); }

/* Through L2, and not to be elided: a compiler sees that the values come back. */
__device__ float4 read(const float4* at) {
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(at)
                 : "memory");
    return x;
}

__device__ void write(float4* at, float4 x) {
    asm volatile("st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}

/* All reads of a thread before its writes: few blocks must keep much in flight. */
__device__ void move(float4* to, const float4* from, uint64_t first, uint64_t count) {
    float4 x[IN_FLIGHT];
#pragma unroll
    for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
        const uint64_t k = first + uint64_t{i} * blockDim.x;
        if (k < count) x[i] = read(&from[k]);
    }
#pragma unroll
    for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
        const uint64_t k = first + uint64_t{i} * blockDim.x;
        if (k < count) write(&to[k], x[i]);
    }
}

}  // namespace

/* The gradient of a weight as a product on tensor cores, inputs staged through shared memory: compute-heavy. A block has
 * 128 x 128 of the result, each of its eight warps 32 x 64. */
extern "C" __global__ void __launch_bounds__(256) bench_matmul(const __grid_constant__ Matmul args) {
    using namespace nvcuda;
    __shared__ __align__(32) __nv_bfloat16 a[SIDE][DEPTH];
    __shared__ __align__(32) __nv_bfloat16 b[DEPTH][SIDE];
    const uint32_t across = args.columns / SIDE;
    const uint64_t row = blockIdx.x / across * SIDE, column = blockIdx.x % across * SIDE;
    const uint32_t warp = threadIdx.x / 32, warp_row = warp / 2 * 32, warp_column = warp % 2 * 64;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums[2][4];
    for (auto& line : sums) {
        for (auto& sum : line) wmma::fill_fragment(sum, 0.0f);
    }
    for (uint64_t depth = 0; depth < args.depth; depth += DEPTH) {
        /* 8 elements a lane: 16 bytes. */
        for (uint32_t k = threadIdx.x * 8; k < SIDE * DEPTH; k += blockDim.x * 8) {
            const uint32_t a_row = k / DEPTH, a_column = k % DEPTH, b_row = k / SIDE, b_column = k % SIDE;
            *reinterpret_cast<uint4*>(&a[a_row][a_column]) =
                *reinterpret_cast<const uint4*>(&args.a[(row + a_row) * args.depth + depth + a_column]);
            *reinterpret_cast<uint4*>(&b[b_row][b_column]) =
                *reinterpret_cast<const uint4*>(&args.b[(depth + b_row) * args.columns + column + b_column]);
        }
        __syncthreads();
        for (uint32_t at = 0; at < DEPTH; at += 16) {
            wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> left[2];
            for (uint32_t i = 0; i < 2; ++i) wmma::load_matrix_sync(left[i], &a[warp_row + 16 * i][at], DEPTH);
            for (uint32_t j = 0; j < 4; ++j) {
                wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::row_major> right;
                wmma::load_matrix_sync(right, &b[at][warp_column + 16 * j], SIDE);
                for (uint32_t i = 0; i < 2; ++i) wmma::mma_sync(sums[i][j], left[i], right, sums[i][j]);
            }
        }
        __syncthreads();
    }
    for (uint32_t i = 0; i < 2; ++i) {
        for (uint32_t j = 0; j < 4; ++j) {
            float* const out = args.out + (row + warp_row + 16 * i) * args.columns + column + warp_column + 16 * j;
            wmma::store_matrix_sync(out, sums[i][j], args.columns, wmma::mem_row_major);
        }
    }
}

/* Reads and writes activations, and writes the gradient: bandwidth-heavy. */
extern "C" __global__ void __launch_bounds__(256) bench_elementwise(const __grid_constant__ Elementwise args) {
    const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
    for (uint64_t k = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; k < args.count; k += step) {
        const float4 x = args.from[k];
        const float4 y = {plain(x.x), plain(x.y), plain(x.z), plain(x.w)};
        args.to[k] = y;
        if (k < args.gradient_count) args.gradient[k] = y;
    }
}

/* An all-reduce's traffic on one rank at an all-reduce's pace: the buffer goes through a scratch and comes back, by few
 * blocks, each of which holds its progress to the clock. The shape is that of NCCL's kernel: 640 threads, and so many
 * registers that no block of a step fits beside one. Every block stays to the end. scripts/bench-kernels.sh checks the
 * registers. */
extern "C" __global__ void __launch_bounds__(640, 1) bench_reduce(const __grid_constant__ Reduce args) {
    const uint64_t start = now_ns();
    const uint64_t part = uint64_t{blockDim.x} * IN_FLIGHT, step = gridDim.x * part;
    for (uint64_t first = blockIdx.x * part; first < args.count; first += step) {
        move(args.scratch, args.buffer, first + threadIdx.x, args.count);
        __syncthreads();
        move(args.buffer, args.scratch, first + threadIdx.x, args.count);
        const uint64_t done = first + step < args.count ? first + step : args.count;
        hold(start, args.duration_ns * done / args.count); /* below 2^64: seconds, times gigabytes */
    }
    hold(start, args.duration_ns);
}
