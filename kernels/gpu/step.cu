/* The GPU's loop around the shared rules: two kernels per optimizer, for states in floats and in codes, and one
 * launch per bucket.
 *
 * A block takes a tile, or every gridDim-th one if fewer blocks than tiles are launched; each thread has four
 * elements of every stream in flight. Dtypes and the number of states are branches on arguments: they cost no
 * register, and a template would multiply the kernels. The bits equal those of cpu/step.h for every launch shape. */
#include "numeric/control.h"
#include "gpu/maximum.cuh"
#include "gpu/scaled.cuh"
#include "gpu/streams.cuh"

namespace {

/* A state that this run does not keep reads as zero and is never written; a rule's scalars then leave it out. CODED
 * states need every thread in every round, for the barrier. */
template <class Rule, bool CODED>
INSTEP_DEVICE uint32_t step_tile(const Place& place, const Weights& weights, const Run& gradients, float multiplier,
                                 BlockMaximum& maximum) {
    const InstepStepArgs& args = place.args;
    const InstepTile& tile = place.tile;
    uint32_t nonfinite = 0;
#pragma unroll 1
    for (uint32_t round = 0; round < tile.count; round += ELEMENTS_PER_ROUND) {
        const uint32_t at = round + 4 * threadIdx.x;
        if (!CODED && at >= tile.count) break;
        Four p = weights.read(at), states[INSTEP_MAX_STATES] = {};
#pragma unroll
        for (uint32_t k = 0; k < Rule::STATES; ++k) {
            if (k >= args.state_count) continue;
            states[k] = CODED ? read_codes(place, k, Rule::SIGNED >> k & 1, at) : read_state(place, k, at);
        }
        const Four sum = gradients.read_shifted(at);
        /* After the loads of the data, and again each round, to save registers. */
        const typename Rule::Scalars s = scalars_of<Rule>(place.record);
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
#pragma unroll
        for (uint32_t k = 0; k < Rule::STATES; ++k) { /* first: a stored value needs no register any more */
            if (CODED) {
                maximum.offer(k, largest_magnitude(states[k], at, tile.count));
            } else if (k < args.state_count) {
                write_state(place, k, at, states[k]);
            }
        }
        const Packed params = weights.write(at, p);
        if (args.copy) write_copy(place, at, p, params);
        if (args.ema) write_ema(place, at, p);
        if (!CODED) continue;
        __syncthreads();
#pragma unroll
        for (uint32_t k = 0; k < Rule::STATES; ++k) {
            if (k < args.state_count) {
                write_codes(place, k, Rule::SIGNED >> k & 1, at, states[k], maximum.largest(k));
            }
        }
        maximum.turn ^= 1;
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

/* Runs after all reads of the tile, which only this block makes. */
INSTEP_DEVICE void zero_tile(const InstepStepArgs& args, const InstepTile& tile) {
    const Run gradients = {args.grads, tile.grad_offset, args.grad_dtype, tile.count};
    __syncthreads();
#pragma unroll 1
    for (uint32_t at = 4 * threadIdx.x; at < tile.count; at += ELEMENTS_PER_ROUND) gradients.clear(at);
}

/* Shared memory that not every kernel has. */
template <bool IS_THERE, class T>
struct Optional {
    T value;
    INSTEP_DEVICE T* address() { return &value; }
};

template <class T>
struct Optional<false, T> {
    INSTEP_DEVICE T* address() { return nullptr; }
};

/* The data that a kernel's threads share. */
template <class Rule, bool CODED>
struct Shared {
    Optional<CODED, MaximumSlots> slots;
    Optional<IsScaled<Rule>::value, Exchange> exchange;
};

template <class Rule, bool CODED>
INSTEP_DEVICE void step_bucket(const InstepStepArgs& args, Shared<Rule, CODED>& shared) {
    BlockMaximum maximum = {shared.slots.address(), 0};
    const bool is_last = !IsScaled<Rule>::value || args.part != INSTEP_PART_MEASURE;
    uint32_t nonfinite = 0;
#pragma unroll 1
    for (uint64_t t = blockIdx.x; t < args.tile_count; t += gridDim.x) {
        const InstepTile& tile = args.tiles[t]; /* a copy would cost registers that sm_120 lacks */
        InstepRecord& record = args.records[tile.record];
        const uint32_t action = record_action(args, record);
        if (action == INSTEP_ACTION_AVERAGE && is_last) {
            average_tile(args, tile, average_multiplier(args, record));
        } else if (action == INSTEP_ACTION_STEP) {
            if (!args.control->skip) { /* read again, which saves a register throughout the tile */
                const Place place = {args, tile, record, tile.count};
                const Weights weights = {place, param_of(args, tile)};
                const Run gradients = {args.grads, tile.grad_offset, args.grad_dtype, tile.count};
                const float multiplier = step_multiplier(args, record);
                if constexpr (!IsScaled<Rule>::value) {
                    nonfinite |= step_tile<Rule, CODED>(place, weights, gradients, multiplier, maximum);
                } else {
                    const ScaledTile scaled = {place, weights, maximum, *shared.exchange.address(),
                                               args.norms[tile.record]};
                    if (is_last) {
                        apply_tile<Rule, CODED>(scaled);
                    } else {
                        nonfinite |= measure_tile<Rule, CODED>(scaled, gradients, multiplier);
                    }
                }
                if (tile.first && is_last && threadIdx.x == 0) record.stepped = 1;
            }
            if (args.zero_grads && is_last) zero_tile(args, tile);
        }
    }
    if (__any_sync(0xffffffffu, nonfinite) && threadIdx.x % 32 == 0) {
        atomicMin(&args.control->first_nonfinite_bucket, args.bucket);
    }
}

}  // namespace

/* Shared memory is declared in a kernel, not in a template. g++ takes it as static and would place a template's among
 * other statics, where host-run-lane.py neither overwrites nor watches it. */
#define OPTIMIZER(name, Rule, min_states, max_states)                            \
    extern "C" __global__ void __launch_bounds__(INSTEP_GPU_THREADS, 4)          \
        instep_step_##name(const __grid_constant__ InstepStepArgs args) {        \
        __shared__ Shared<Rule<max_states>, false> shared;                       \
        step_bucket<Rule<max_states>, false>(args, shared);                         \
    }                                                                            \
    extern "C" __global__ void __launch_bounds__(INSTEP_GPU_THREADS, 4)          \
        instep_step_##name##_8bit(const __grid_constant__ InstepStepArgs args) { \
        __shared__ Shared<Rule<max_states>, true> shared;                        \
        step_bucket<Rule<max_states>, true>(args, shared);                         \
    }
#include "optimizers.def"
#undef OPTIMIZER
