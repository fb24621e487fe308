/* The GPU's loop around the shared rules: two kernels per optimizer, for states in floats and in codes, and one launch
 * per bucket.
 *
 * A block takes every gridDim-th tile; each thread has four elements of every stream in flight. The loop stands up
 * to three times in a kernel: for any tile, for full and aligned ones, and for those whose streams are all f32.
 * Other dtypes and options are branches on arguments: they cost no register, and a template would multiply the
 * kernels. The bits equal those of cpu/step.h for every launch shape. */
#include "numeric/control.h"
#include "gpu/maximum.cuh"
#include "gpu/plain.cuh"
#include "gpu/prefetch.cuh"
#include "gpu/scaled.cuh"
#include "gpu/streams.cuh"

namespace {

/* A state that this run does not keep reads as zero and is never written; a rule's scalars then leave it out. CODED
 * states need every thread in every round, for the barrier. */
template <class Rule, bool CODED>
INSTEP_DEVICE uint32_t step_tile(const Place& place, float multiplier, BlockMaximum& maximum) {
    const InstepStepArgs& args = place.args;
    const Weights weights = {place};
    uint32_t nonfinite = 0;
#pragma unroll 1
    for (uint32_t at = 4 * threadIdx.x; at < (CODED ? whole_rounds(place) : place.count()); at += ELEMENTS_PER_ROUND) {
        /* Every load of the round, before the first conversion waits for one. */
        Weights::Stored stored = weights.load_at(at);
        Words words[INSTEP_MAX_STATES] = {};
        load_states<Rule, CODED>(place, at, words);
        Words sums = load_gradients(place, at); /* last: a shift waits */
        hold_back(stored, words, &sums);
        Four p = weights.values_of(stored), states[INSTEP_MAX_STATES] = {};
        state_values<Rule, CODED>(place, words, states);
        const Four sum = place.gradients().values_of(sums);
        /* Again each round, to save registers. */
        const typename Rule::Scalars s = scalars_of<Rule>(place.record());
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
                maximum.offer(k, largest_magnitude(states[k], at, place.count()));
            } else if (k < args.state_count) {
                write_state(place, k, at, states[k]);
            }
        }
        const Words params = weights.write(at, p);
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

INSTEP_DEVICE void average_tile(const Place& place, float multiplier) {
#pragma unroll 1
    for (uint32_t at = 4 * threadIdx.x; at < place.count(); at += ELEMENTS_PER_ROUND) {
        Four sum = place.gradients().read(at);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) sum.x[i] = canonical(sum.x[i] * multiplier);
        place.gradients().write(at, sum);
    }
}

/* Runs after all reads of the tile, which only this block makes. */
INSTEP_DEVICE void zero_tile(const Place& place) {
    __syncthreads();
#pragma unroll 1
    for (uint32_t at = 4 * threadIdx.x; at < place.count(); at += ELEMENTS_PER_ROUND) place.gradients().clear(at);
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
    TileSlots tiles;
    Optional<CODED, MaximumSlots> slots;
    Optional<IsScaled<Rule>::value, Exchange> exchange;
};

/* Whether the streams that are placed like the states begin aligned. */
INSTEP_DEVICE bool has_aligned_states(const InstepStepArgs& args) {
    uintptr_t bits = reinterpret_cast<uintptr_t>(args.master) | reinterpret_cast<uintptr_t>(args.copy) |
                     reinterpret_cast<uintptr_t>(args.ema);
#pragma unroll
    for (uint32_t k = 0; k < INSTEP_MAX_STATES; ++k) bits |= reinterpret_cast<uintptr_t>(args.states[k]);
    return bits % 16 == 0;
}

/* Whether a tile is full and every stream of it is aligned to four elements. */
INSTEP_DEVICE bool is_full(const InstepStepArgs& args, const InstepTile& tile) {
    const Run gradients = {args.grads, tile.grad_offset, args.grad_dtype, {}};
    return tile.count == INSTEP_TILE_ELEMENTS && tile.state_offset % 4 == 0 &&
           Extent::is_aligned(param_of(args, tile), 4 * bytes_of(args.param_dtype)) && gradients.is_aligned();
}

/* Steps a full tile, if it is plain and the rule can have as many states as the launch has. */
template <template <int> class Rule, int STATES, int MOST>
INSTEP_DEVICE bool step_if_plain(const Place& place, float multiplier, uint32_t* nonfinite) {
    if constexpr (STATES <= MOST && STATES <= MOST_PLAIN_STATES) {
        if (place.args.state_count != STATES) {
            return step_if_plain<Rule, STATES + 1, MOST>(place, multiplier, nonfinite);
        }
        *nonfinite |= step_plain_tile<Rule<STATES>>(place, multiplier);
        return true;
    }
    return false;
}

/* What is the same for all tiles of a launch. Read once: after each store the compiler would read it again. */
struct Common {
    bool skips, has_aligned_states, is_plain, has_multiplier;
    float multiplier;

    INSTEP_DEVICE explicit Common(const InstepStepArgs& args) {
        const InstepControl& control = *args.control;
        skips = control.skip;
        has_aligned_states = ::has_aligned_states(args);
        is_plain = ::is_plain(args);
        has_multiplier = knows_multiplier(args);
        multiplier = args.local ? control.local_multiplier : control.multiplier;
    }

    INSTEP_DEVICE float multiplier_of(const InstepStepArgs& args, const InstepRecord& record) const {
        return has_multiplier ? multiplier : step_multiplier(args, record);
    }
};

/* The part of a launch that a tile of a scaled rule takes in it. */
template <class Rule, bool CODED>
INSTEP_DEVICE uint32_t step_scaled_tile(const ScaledTile& tile, const Common& common) {
    const InstepStepArgs& args = tile.place.args;
    if (args.part != INSTEP_PART_MEASURE) {
        apply_tile<Rule, CODED>(tile);
        return 0;
    }
    const float multiplier = common.multiplier_of(args, tile.place.record());
    return measure_tile<Rule, CODED>(tile, multiplier);
}

/* Any tile. `Rule` is taken with as many states as it can have. */
template <template <int> class Rule, int FEWEST, int MOST, bool CODED>
INSTEP_DEVICE uint32_t step_any_tile(const Place& place, const Common& common, SharedByTile& shared) {
    const bool is_whole = common.has_aligned_states && is_full(place.args, place.tile());
    const Place full = {place.args, place.slot, true};
    if constexpr (IsScaled<Rule<MOST>>::value) {
        return is_whole ? step_scaled_tile<Rule<MOST>, CODED>({full, {full}, shared}, common)
                        : step_scaled_tile<Rule<MOST>, CODED>({place, {place}, shared}, common);
    } else {
        const float multiplier = common.multiplier_of(place.args, place.record());
        if (!is_whole) return step_tile<Rule<MOST>, CODED>(place, multiplier, shared.maximum);
        uint32_t nonfinite = 0;
        const bool is_plain = !CODED && common.is_plain;
        if (is_plain && step_if_plain<Rule, FEWEST, MOST>(full, multiplier, &nonfinite)) return nonfinite;
        return step_tile<Rule<MOST>, CODED>(full, multiplier, shared.maximum);
    }
}

template <template <int> class Rule, int FEWEST, int MOST, bool CODED>
INSTEP_DEVICE void step_bucket(const InstepStepArgs& args, Shared<Rule<MOST>, CODED>& shared) {
    SharedByTile by_tile = {{shared.slots.address(), 0}, shared.exchange.address(), NO_SCALE};
    const bool is_last = args.part != INSTEP_PART_MEASURE;
    uint32_t nonfinite = 0;
    const Common common(args);
    TilePrefetch tiles = {args, shared.tiles, blockIdx.x, 0};
#pragma unroll 1
    for (tiles.open(); tiles.has_tile(); tiles.advance()) {
        tiles.look_ahead();
        const Place place = {args, tiles.current(), false};
        const uint32_t action = record_action(args, place.record());
        if (action == INSTEP_ACTION_AVERAGE && is_last) {
            average_tile(place, average_multiplier(args, place.record()));
        } else if (action == INSTEP_ACTION_STEP) {
            if (!common.skips) {
                nonfinite |= step_any_tile<Rule, FEWEST, MOST, CODED>(place, common, by_tile);
                if (place.tile().first && is_last && threadIdx.x == 0) args.records[place.tile().record].stepped = 1;
            }
            if (args.zero_grads && is_last) zero_tile(place);
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
        step_bucket<Rule, min_states, max_states, false>(args, shared);                         \
    }                                                                            \
    extern "C" __global__ void __launch_bounds__(INSTEP_GPU_THREADS, 4)          \
        instep_step_##name##_8bit(const __grid_constant__ InstepStepArgs args) { \
        __shared__ Shared<Rule<max_states>, true> shared;                        \
        step_bucket<Rule, min_states, max_states, true>(args, shared);                         \
    }
#include "optimizers.def"
#undef OPTIMIZER
