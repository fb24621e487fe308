/* The GPU's loop around the shared rules: one kernel per optimizer, one launch per bucket.
 *
 * A block takes a tile, or every gridDim-th one if fewer blocks than tiles are launched; each thread has four elements
 * of every stream in flight. Dtypes and the number of states are branches on arguments: they cost no register, where a
 * template would multiply the kernels. Must give the bits of step_cpu.cpp, for every launch shape. */
#include "control.h"
#include "vector.cuh"

namespace {

constexpr uint32_t ELEMENTS_PER_ROUND = 4 * INSTEP_GPU_THREADS;

/* States that the run lacks are zeros, not read and not written: a rule's scalars then leave them out. */
template <class Rule, class Scalars>
INSTEP_DEVICE uint32_t step_tile(const InstepStepArgs& args, const InstepTile& tile, const Scalars& scalars,
                                 float multiplier) {
    const bool narrow = args.param_dtype != INSTEP_DTYPE_F32;
    const Run gradients = {args.grads, tile.grad_offset, args.grad_dtype, tile.count};
    void* const param = param_of(args, tile);
    float* const params = narrow ? args.master + tile.state_offset : static_cast<float*>(param);
    uint32_t nonfinite = 0;
#pragma unroll 1
    for (uint32_t at = 4 * threadIdx.x; at < tile.count; at += ELEMENTS_PER_ROUND) {
        Four p = load(params, at, tile.count), states[INSTEP_MAX_STATES] = {};
#pragma unroll
        for (uint32_t k = 0; k < Rule::STATES; ++k) {
            if (k < args.state_count) states[k] = load(args.states[k] + tile.state_offset, at, tile.count);
        }
        const Four sum = gradients.read_shifted(at);
        const Scalars s = scalars; /* behind the loads of the data, and anew each round: registers are short */
        const float factor = Rule::factor(s, multiplier);
        const uint32_t flags = Rule::flags(s);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            nonfinite |= is_nonfinite(sum.x[i]);
            float state[INSTEP_MAX_STATES] = {states[0].x[i], states[1].x[i], states[2].x[i]};
            p.x[i] = canonical(Rule::update(s, flags, p.x[i], sum.x[i] * factor, state));
#pragma unroll
            for (uint32_t k = 0; k < Rule::STATES; ++k) states[k].x[i] = canonical(state[k]);
        }
        store(params, at, tile.count, p);
        if (narrow) store(static_cast<uint16_t*>(param), at, tile.count, narrowed(p, args.param_dtype));
        if (args.copy) Run{args.copy, tile.state_offset, args.copy_dtype, tile.count}.write(at, p);
#pragma unroll
        for (uint32_t k = 0; k < Rule::STATES; ++k) {
            if (k < args.state_count) store(args.states[k] + tile.state_offset, at, tile.count, states[k]);
        }
    }
    return nonfinite;
}

INSTEP_DEVICE void average_tile(const InstepStepArgs& args, const InstepTile& tile, float multiplier) {
    const Run gradients = {args.grads, tile.grad_offset, args.grad_dtype, tile.count};
#pragma unroll 1
    for (uint32_t at = 4 * threadIdx.x; at < tile.count; at += ELEMENTS_PER_ROUND) {
        Four sum = gradients.read(at);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) sum.x[i] = canonical(sum.x[i] * multiplier);
        gradients.write(at, sum);
    }
}

/* Behind all reads of the tile, which belong to this block. */
INSTEP_DEVICE void zero_tile(const InstepStepArgs& args, const InstepTile& tile) {
    const Run gradients = {args.grads, tile.grad_offset, args.grad_dtype, tile.count};
    __syncthreads();
#pragma unroll 1
    for (uint32_t at = 4 * threadIdx.x; at < tile.count; at += ELEMENTS_PER_ROUND) gradients.clear(at);
}

/* `scalars` is the rule's member of the union. */
template <class Rule, class Scalars>
INSTEP_DEVICE void step_bucket(const InstepStepArgs& args, Scalars InstepScalars::* scalars) {
    const uint32_t skip = args.control->skip;
    uint32_t nonfinite = 0;
#pragma unroll 1
    for (uint64_t t = blockIdx.x; t < args.tile_count; t += gridDim.x) {
        const InstepTile& tile = args.tiles[t]; /* a copy would cost registers that sm_120 has not */
        InstepSegment& segment = args.segments[tile.segment];
        const uint32_t action = segment_action(segment);
        if (action == INSTEP_ACTION_AVERAGE) {
            average_tile(args, tile, average_multiplier(args, segment));
        } else if (action == INSTEP_ACTION_STEP) {
            if (!skip) {
                const float multiplier = step_multiplier(args, segment);
                nonfinite |= step_tile<Rule>(args, tile, segment.scalars.*scalars, multiplier);
                if (tile.first && threadIdx.x == 0) segment.stepped = 1;
            }
            if (args.zero_grads) zero_tile(args, tile);
        }
    }
    if (__any_sync(0xffffffffu, nonfinite) && threadIdx.x % 32 == 0) {
        atomicMin(&args.control->first_nonfinite_bucket, args.bucket);
    }
}

}  // namespace

#define OPTIMIZER(name, Rule, min_states, max_states)                     \
    extern "C" __global__ void __launch_bounds__(INSTEP_GPU_THREADS, 4)   \
        instep_step_##name(const __grid_constant__ InstepStepArgs args) { \
        step_bucket<Rule<max_states>>(args, &InstepScalars::name);        \
    }
#include "optimizers.def"
#undef OPTIMIZER
