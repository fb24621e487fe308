/* The kernels that run once per pass on the GPU: they open the pass, make its decisions and publish its outcome.
 *
 * They run the functions of control.h, so the decisions have the CPU's bits. No kernel here waits. The host reads the
 * outcome from mapped memory, without copy or synchronisation. These kernels run on one stream with the steps and
 * norms of their control block. */
#include "numeric/control.h"

/* All threads must read the number of the settings' slot before the count of passes grows, so there is one block. The
 * ring buffer is in host memory. The threads read it once, in parallel, and then use the copy. */
extern "C" __global__ void __launch_bounds__(INSTEP_GPU_THREADS)
    instep_begin(const __grid_constant__ InstepBeginArgs args) {
    if (blockIdx.x != 0) return;
    if (args.ring) {
        const uint32_t* slot = args.ring + args.control->passes % args.slot_count * args.slot_words;
        uint32_t* settings = reinterpret_cast<uint32_t*>(args.hypers);
#pragma unroll 4
        for (uint64_t w = threadIdx.x; w < args.slot_words; w += INSTEP_GPU_THREADS) settings[w] = slot[w];
    }
    __syncthreads();
#pragma unroll 1
    for (uint64_t k = threadIdx.x; k <= args.further_count; k += INSTEP_GPU_THREADS) {
        begin_pass(args, k == 0 ? args.control : &args.further_controls[k - 1]);
    }
#pragma unroll 1
    for (uint64_t k = threadIdx.x; k < args.record_count; k += INSTEP_GPU_THREADS) {
        begin_record(args, k);
    }
}

/* Runs before the user's own code, on the same stream. */
extern "C" __global__ void __launch_bounds__(INSTEP_GPU_THREADS)
    instep_custom(const __grid_constant__ InstepStepArgs args) {
    if (blockIdx.x != 0) return;
#pragma unroll 1
    for (uint64_t t = threadIdx.x; t < args.tile_count; t += INSTEP_GPU_THREADS) instruct(args, args.tiles[t]);
}

/* Runs in one thread, because the result is a few scalars. */
extern "C" __global__ void instep_decide(const __grid_constant__ InstepDecideArgs args) {
    if (blockIdx.x == 0 && threadIdx.x == 0) decide(args);
}

/* Runs in one thread, after the last step of the pass. */
extern "C" __global__ void instep_publish(const __grid_constant__ InstepPublishArgs args) {
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    const InstepControl& control = *args.control;
    volatile InstepStatus* slot = &args.ring[control.passes % args.slot_count];
    slot->sequence = 0;
    __threadfence_system();
    slot->norm = control.norm;
    slot->clip = control.clip;
    slot->loss_scale = control.loss_scale;
    slot->decided = control.decided;
    slot->skipped = control.skip;
    slot->first_nonfinite_bucket = control.first_nonfinite_bucket;
    __threadfence_system();
    slot->sequence = control.passes;
}
