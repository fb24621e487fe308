/* The step of a bucket, written as plainly as possible: one thread steps one element. Read it before step.cu.
 *
 * It gives the bits of step.cu; tests/host_run/naive.rs compares the two. It has no masters, 8-bit states, stochastic
 * rounding, copies or moving averages. It keeps the gradients of stepped elements, and computes no norms. The library
 * does not embed it. Each tile takes BLOCKS_PER_TILE blocks. No thread reads what another writes. */
#include "numeric/control.h"

namespace {

constexpr uint32_t BLOCKS_PER_TILE = INSTEP_TILE_ELEMENTS / INSTEP_GPU_THREADS;

__device__ float load_element(const void* base, uint64_t at, uint32_t dtype) {
    if (dtype == INSTEP_DTYPE_F32) return static_cast<const float*>(base)[at];
    return widened(static_cast<const uint16_t*>(base)[at], dtype);
}

__device__ void store_element(void* base, uint64_t at, uint32_t dtype, float value) {
    if (dtype == INSTEP_DTYPE_F32) static_cast<float*>(base)[at] = canonical(value);
    else static_cast<uint16_t*>(base)[at] = narrowed(canonical(value), dtype);
}

template <class Rule>
__device__ void step_element(const InstepStepArgs& args) {
    const InstepTile& tile = args.tiles[blockIdx.x / BLOCKS_PER_TILE];
    const uint32_t at = blockIdx.x % BLOCKS_PER_TILE * INSTEP_GPU_THREADS + threadIdx.x;
    InstepRecord& record = args.records[tile.record];
    const bool measures = args.part == INSTEP_PART_MEASURE; /* the first of two launches updates only the states */
    const uint32_t action = record_action(args, record);
    const bool steps = action == INSTEP_ACTION_STEP && !steps_nothing(args);
    if (steps && !measures && tile.first && at == 0) record.stepped = 1; /* the next Begin counts it */
    if (at >= tile.count) return;
    const uint64_t grad = tile.grad_offset + at, place = tile.state_offset + at;
    const float multiplier = gradient_multiplier(args, record, action); /* mean over ranks, loss scale, clip */
    const float sum = load_element(args.grads, grad, args.grad_dtype);
    const bool averages = action == INSTEP_ACTION_AVERAGE && !measures;
    if (averages) store_element(args.grads, grad, args.grad_dtype, sum * multiplier);
    if (!steps) return;

    const typename Rule::Scalars s = scalars_of<Rule>(record); /* Begin has derived them from the hyperparameters */
    float p = load_element(param_of(args, tile), at, args.param_dtype), state[INSTEP_MAX_STATES] = {};
    for (uint32_t k = 0; k < args.state_count; ++k) state[k] = load_element(args.states[k], place, args.moments);
    if constexpr (IsScaled<Rule>::value) { /* lamb.h: the second launch scales by the norms of the first */
        const InstepNorms& norms = args.norms[tile.record];
        const float scale = step_scale<Rule>(s, norm_of(norms, OF_PARAM), norm_of(norms, OF_CHANGE));
        const float change = scale * Rule::change(s, Rule::flags(s), p, state);
        if (!measures) return store_element(param_of(args, tile), at, args.param_dtype, p - change);
    }
    p = Rule::update(s, Rule::flags(s), p, sum * Rule::factor(s, multiplier), state);
    for (uint32_t k = 0; k < args.state_count; ++k) store_element(args.states[k], place, args.moments, state[k]);
    if (!measures) store_element(param_of(args, tile), at, args.param_dtype, p);
    if (is_nonfinite(sum)) atomicMin(&args.control->first_nonfinite_bucket, args.bucket + tile.bucket);
}

}  // namespace
#define OPTIMIZER(name, Rule, min_states, max_states)                                             \
    extern "C" __global__ void instep_naive_##name(const __grid_constant__ InstepStepArgs args) { \
        step_element<Rule<max_states>>(args);                                                     \
    }
#include "optimizers.def"
#undef OPTIMIZER
