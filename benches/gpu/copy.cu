/* A copy by the multiprocessors: the second ceiling of a step on a GPU, beside the driver's device-to-device copy.
 *
 * The driver may copy with its copy engines, or in a way that does not reach the memory's full rate; a kernel with the
 * access pattern of a step shows whether it does. src/bench/samples.rs repeats its struct. It must move each word once. */
#include <cstdint>

namespace {

constexpr uint32_t COPIES_IN_FLIGHT = 4; /* float4 of a thread */

struct Copy {
    const float4* from;
    float4* to;
    uint64_t count; /* of float4 */
};

}  // namespace

/* Any number of blocks: they stride over the array, and all loads of a thread's round stand before its stores. */
extern "C" __global__ void __launch_bounds__(256) bench_copy(const __grid_constant__ Copy args) {
    const uint64_t part = uint64_t{blockDim.x} * COPIES_IN_FLIGHT, step = gridDim.x * part;
    for (uint64_t first = blockIdx.x * part + threadIdx.x; first < args.count; first += step) {
        float4 x[COPIES_IN_FLIGHT];
#pragma unroll
        for (uint32_t i = 0; i < COPIES_IN_FLIGHT; ++i) {
            const uint64_t k = first + uint64_t{i} * blockDim.x;
            if (k < args.count) x[i] = __ldcs(&args.from[k]);
        }
#pragma unroll
        for (uint32_t i = 0; i < COPIES_IN_FLIGHT; ++i) {
            const uint64_t k = first + uint64_t{i} * blockDim.x;
            if (k < args.count) __stcs(&args.to[k], x[i]);
        }
    }
}
