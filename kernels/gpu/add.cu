/* Adds one run of gradients to another: the sums of a pass's micro-batches.
 *
 * It gives the bits of the CPU's sum of two ranks (cpu/buffers.h). Each thread takes four elements at a time. If the
 * grid is smaller than the run, threads take further elements. */
#include "gpu/vector.cuh"

extern "C" __global__ void __launch_bounds__(INSTEP_GPU_THREADS)
    instep_add(const __grid_constant__ InstepAddArgs args) {
    const Extent four = {4, true};
    const uint64_t first = uint64_t{PER_ROUND<4>} * blockIdx.x + 4 * threadIdx.x;
#pragma unroll 1
    for (uint64_t at = first; at < args.count; at += uint64_t{PER_ROUND<4>} * gridDim.x) {
        const Run from = {const_cast<void*>(args.from), at, args.dtype, four}, to = {args.to, at, args.dtype, four};
        Words<4> summand = from.load_at<4>(0), words = to.load_at<4>(0);
        hold_back(summand);
        hold_back(words);
        const Four added = from.values_of(summand);
        Four sum = to.values_of(words);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) sum.x[i] = canonical(sum.x[i] + added.x[i]);
        to.write(0, sum);
    }
}
