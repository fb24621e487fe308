/* Copies a run of elements in another dtype, for inputs and outputs of the forward pass.
 *
 * It gives the bits of the CPU's conversions (cpu/buffers.h), except for NaNs. Each thread takes four elements at a
 * time, at any alignment. If the grid is smaller than the run, threads take further elements. */
#include "gpu/vector.cuh"

extern "C" __global__ void __launch_bounds__(INSTEP_GPU_THREADS)
    instep_cast(const __grid_constant__ InstepCastArgs args) {
    const uint64_t first = uint64_t{PER_ROUND<4>} * blockIdx.x + 4 * threadIdx.x;
#pragma unroll 1
    for (uint64_t at = first; at < args.count; at += uint64_t{PER_ROUND<4>} * gridDim.x) {
        const uint64_t left = args.count - at;
        const Extent extent = {static_cast<uint32_t>(left < 4 ? left : 4), false};
        const Run from = {const_cast<void*>(args.from), at, args.from_dtype, extent};
        const Run to = {args.to, at, args.to_dtype, extent};
        to.write(0, from.read(0));
    }
}
