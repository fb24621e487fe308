/* A copy by the multiprocessors: the second ceiling of a step on a GPU, beside the driver's device-to-device copy.
 *
 * The driver may copy with its copy engines, or in a way that does not reach the memory's full rate; a kernel with the
 * access pattern of a step shows whether it does. src/bench/gpu.rs repeats its struct and the number of float4 per block. It must
 * move each word once. */
#include <cstdint>

namespace {

constexpr uint32_t THREADS = 256, COPIES_IN_FLIGHT = 2; /* float4 of a thread */

struct Copy {
    const float4* from;
    float4* to;
    uint64_t count; /* of float4 */
};

}  // namespace

/* Blocks start in the order of their parts, so little memory is in use at a time. */
extern "C" __global__ void __launch_bounds__(THREADS) bench_copy(const __grid_constant__ Copy args) {
    const uint64_t first = uint64_t{blockIdx.x} * THREADS * COPIES_IN_FLIGHT + threadIdx.x;
    float4 x[COPIES_IN_FLIGHT];
#pragma unroll
    for (uint32_t i = 0; i < COPIES_IN_FLIGHT; ++i) {
        const uint64_t k = first + i * THREADS;
        if (k < args.count) x[i] = args.from[k];
    }
#pragma unroll
    for (uint32_t i = 0; i < COPIES_IN_FLIGHT; ++i) {
        const uint64_t k = first + i * THREADS;
        if (k < args.count) args.to[k] = x[i];
    }
}
