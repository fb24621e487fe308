/* The GPU's loop around the shared rules. Each optimizer has two kernels, one for 8-bit states and one for all others.
 * A launch steps one bucket, or several neighbouring buckets.
 *
 * Blocks have equal shares of consecutive tiles. Each lane loads four or eight elements of every stream at a time. A
 * run of full aligned tiles in a known format (place.cuh) has a loop without branches on formats. For all other runs
 * the loop branches on arguments for dtypes and options. The bits equal those of cpu/step.h for every launch shape. */
#include "numeric/control.h"
#include "gpu/scaled.cuh"
#include "gpu/tile.cuh"

namespace {

/* Shared memory that only some kernels have. */
template <bool IS_THERE, class T>
struct Optional {
    T value;
    INSTEP_DEVICE T* address() { return &value; }
};

template <class T>
struct Optional<false, T> {
    INSTEP_DEVICE T* address() { return nullptr; }
};

/* Values that are equal for all runs of a launch. One lane of each warp computes them. They are in shared memory, so
 * they take no register. */
struct Common {
    uint32_t skips, has_aligned_states, has_multiplier;
    Format format;
    float multiplier;

    INSTEP_DEVICE float multiplier_of(const TileSlot& run) const { return has_multiplier ? multiplier : run.multiplier; }
};

/* The shared memory of a block. */
template <class Rule, bool CODED>
struct Shared {
    struct OfWarp {
        TileSlots tiles;
        Common common;
    } of_warp[WARPS];
    Optional<CODED, MaximumSlots> slots;
    Optional<IsScaled<Rule>::value, Exchange> exchange;
};

/* Returns whether all streams with the offsets of the states begin at aligned addresses. */
INSTEP_DEVICE bool has_aligned_states(const InstepStepArgs& args) {
    uintptr_t bits = reinterpret_cast<uintptr_t>(args.master) | reinterpret_cast<uintptr_t>(args.copy) |
                     reinterpret_cast<uintptr_t>(args.ema);
#pragma unroll
    for (uint32_t k = 0; k < INSTEP_MAX_STATES; ++k) bits |= reinterpret_cast<uintptr_t>(args.states[k]);
    return bits % WIDEST == 0;
}

INSTEP_DEVICE Common common_of(const InstepStepArgs& args, const InstepGiven& given, bool is_coded) {
    if (!args.records) return {0, has_aligned_states(args), 1, format_of(args, is_coded), given.multiplier};
    const InstepControl& control = *args.control;
    const float multiplier = args.local ? control.local_multiplier : control.multiplier;
    return {steps_nothing(args), has_aligned_states(args), knows_multiplier(args), format_of(args, is_coded), multiplier};
}

/* Returns whether a tile is full, and all its streams except gradients are aligned to the widest access. */
INSTEP_DEVICE bool is_full(const InstepStepArgs& args, const InstepTile& tile) {
    return tile.count == INSTEP_TILE_ELEMENTS && tile.state_offset % WIDEST == 0 &&
           Extent::is_aligned(param_of(args, tile), WIDEST);
}

template <class Rule, bool CODED, Format FORMAT>
INSTEP_DEVICE uint32_t step_as(const Place& place, float multiplier, BlockMaximum& maximum) {
    constexpr uint32_t N = LANE_ELEMENTS<FORMAT, Rule::STATES, CODED>;
    if constexpr (CODED || Rule::STATES > 2 || N > 4) { /* too many values for the registers */
        return step_tile<Rule, CODED, N>({place.args, place.slot, true, FORMAT, Rule::STATES}, multiplier, maximum);
    }
    const TileSlot slot = place.slot; /* a copy in registers */
    return step_tile<Rule, CODED, N>({place.args, slot, true, FORMAT, Rule::STATES}, multiplier, maximum);
}

/* Steps full tiles of a known format. */
template <class Rule, bool CODED>
INSTEP_DEVICE uint32_t step_known_tile(const Place& place, Format format, float multiplier, BlockMaximum& maximum) {
    if constexpr (!CODED) {
        switch (format) {
            case Format::F32_SHIFTED: return step_as<Rule, CODED, Format::F32_SHIFTED>(place, multiplier, maximum);
            case Format::MASTER: return step_as<Rule, CODED, Format::MASTER>(place, multiplier, maximum);
            case Format::BF16_STOCHASTIC: return step_as<Rule, CODED, Format::BF16_STOCHASTIC>(place, multiplier, maximum);
            case Format::REMAINDER16: return step_as<Rule, CODED, Format::REMAINDER16>(place, multiplier, maximum);
            case Format::REMAINDER8: return step_as<Rule, CODED, Format::REMAINDER8>(place, multiplier, maximum);
            default: break;
        }
    }
    switch (format) {
        case Format::F32: return step_as<Rule, CODED, Format::F32>(place, multiplier, maximum);
        case Format::BF16: return step_as<Rule, CODED, Format::BF16>(place, multiplier, maximum);
        default: break;
    }
    __builtin_unreachable();
}

/* The numbers of states for which a rule has loops for known formats: its smallest number, and others up to two. With
 * 8-bit states only the smallest number has such loops, if it is at most two. More loops would take long to compile. */
constexpr int MOST_KNOWN_STATES = 2;

template <int FEWEST, int MOST, bool CODED>
struct Known {
    static constexpr int FIRST = CODED && FEWEST == 0 ? 1 : FEWEST;
    static constexpr int TO_TWO = MOST < MOST_KNOWN_STATES ? MOST : MOST_KNOWN_STATES;
    static constexpr int LAST = CODED ? (FIRST > MOST_KNOWN_STATES ? 0 : FIRST) : FIRST > TO_TWO ? FIRST : TO_TWO;
};

/* Calls the loop for the launch's number of states, if this number is from STATES to LAST. */
template <template <int> class Rule, int STATES, int LAST, bool CODED>
INSTEP_DEVICE bool step_if_known(const Place& place, Format format, float multiplier, BlockMaximum& maximum,
                                 uint32_t* nonfinite) {
    if constexpr (STATES <= LAST) {
        if (place.args.state_count != STATES) {
            return step_if_known<Rule, STATES + 1, LAST, CODED>(place, format, multiplier, maximum, nonfinite);
        }
        *nonfinite |= step_known_tile<Rule<STATES>, CODED>(place, format, multiplier, maximum);
        return true;
    }
    return false;
}

/* Does this launch's part of the step of a scaled rule, for one run. */
template <class Rule, bool CODED>
INSTEP_DEVICE uint32_t step_scaled_tile(const ScaledTile& tile, const Common& common) {
    const InstepStepArgs& args = tile.place.args;
    if (args.part != INSTEP_PART_MEASURE) {
        apply_tile<Rule, CODED>(tile);
        return 0;
    }
    const float multiplier = common.multiplier_of(tile.place.slot);
    return measure_tile<Rule, CODED>(tile, multiplier);
}

/* Steps any run. Rule<MOST> has the largest number of states of the rule. */
template <template <int> class Rule, int FEWEST, int MOST, bool CODED>
INSTEP_DEVICE uint32_t step_any_tile(const Place& place, const Common& common, SharedByTile& shared) {
    const bool has_aligned_gradients = place.gradients().is_aligned();
    const bool is_full = common.has_aligned_states && ::is_full(place.args, place.tile());
    const Place full = {place.args, place.slot, true, Format::ANY, 0};
    if constexpr (IsScaled<Rule<MOST>>::value) {
        return is_full && has_aligned_gradients ? step_scaled_tile<Rule<MOST>, CODED>({full, {full}, shared}, common)
                                                : step_scaled_tile<Rule<MOST>, CODED>({place, {place}, shared}, common);
    } else {
        const float multiplier = common.multiplier_of(place.slot);
        using Loops = Known<FEWEST, MOST, CODED>;
        uint32_t nonfinite = 0;
        if (is_full) {
            const Format shifted = !CODED && common.format == Format::F32 ? Format::F32_SHIFTED : Format::ANY;
            const Format format = has_aligned_gradients ? common.format : shifted;
            if (format != Format::ANY &&
                step_if_known<Rule, Loops::FIRST, Loops::LAST, CODED>(place, format, multiplier, shared.maximum,
                                                                      &nonfinite)) {
                return nonfinite;
            }
        }
        return is_full && has_aligned_gradients ? step_tile<Rule<MOST>, CODED>(full, multiplier, shared.maximum)
                                                : step_tile<Rule<MOST>, CODED>(place, multiplier, shared.maximum);
    }
}

/* Returns the multiplier of a run, for means or if the launch has no common multiplier. */
INSTEP_DEVICE float multiplier_of(const InstepStepArgs& args, const InstepGiven& given, const InstepRecord& record,
                                  uint32_t action) {
    if (args.records) return gradient_multiplier(args, record, action);
    return action == INSTEP_ACTION_STEP ? given.multiplier : given.average_multiplier;
}

template <template <int> class Rule, int FEWEST, int MOST, bool CODED>
INSTEP_DEVICE void step_bucket(const InstepStepLaunch& launch, Shared<Rule<MOST>, CODED>& shared) {
    const InstepStepArgs& args = launch.args;
    const InstepGiven& given = launch.given;
    SharedByTile by_tile = {{shared.slots.address(), 0}, shared.exchange.address(), NO_SCALE};
    const bool is_last = args.part != INSTEP_PART_MEASURE;
    auto& of_warp = shared.of_warp[threadIdx.x / 32];
    Common& common = of_warp.common;
    TilePrefetch runs = {args, &given, of_warp.tiles};
    runs.ask();
    if (threadIdx.x % 32 == 0) common = common_of(args, given, CODED);
#pragma unroll 1
    for (bool has_run = runs.open(); has_run; has_run = runs.advance()) { /* all lanes of the warp are here */
        runs.look_ahead();
        const Place place = {args, runs.current(), false, Format::ANY, 0};
        const uint32_t action = record_action(args, place.record());
        const bool averages = args.gradients == INSTEP_GRADIENTS_AVERAGE || action == INSTEP_ACTION_AVERAGE;
        if (averages || !common.has_multiplier) {
            runs.set_multiplier(multiplier_of(args, given, place.record(), action));
        }
        if (args.stochastic) runs.set_key(random_key(args.seed, place.record().steps + 1));
        if (action == INSTEP_ACTION_STEP) {
            if (!common.skips) {
                const uint32_t nonfinite = step_any_tile<Rule, FEWEST, MOST, CODED>(place, common, by_tile);
                if (__any_sync(0xffffffffu, nonfinite) && threadIdx.x % 32 == 0) {
                    atomicMin(&args.control->first_nonfinite_bucket, args.bucket + place.tile().bucket);
                }
                if (place.tile().first && is_last && threadIdx.x == 0 && args.records) {
                    args.records[place.tile().record].stepped = 1;
                }
            }
            if (args.gradients == INSTEP_GRADIENTS_ZERO && is_last) zero_tile(place);
            /* If a step has two launches, the one that reads the sums writes the means. */
            if (args.gradients != INSTEP_GRADIENTS_AVERAGE || args.part == INSTEP_PART_APPLY) continue;
            __syncthreads(); /* all reads of the tile are made; only this block reads it */
        } else if (action != INSTEP_ACTION_AVERAGE || !is_last) {
            continue;
        }
        average_tile(place, place.slot.multiplier); /* in shared memory, so the step needs no register for it */
    }
}

}  // namespace

/* Shared memory is declared in a kernel, not in a template. g++ treats it as static, and would place a template's
 * memory among other statics. host-run-lane.py could then neither overwrite nor watch it. */
#define OPTIMIZER(name, Rule, min_states, max_states)                              \
    extern "C" __global__ void __launch_bounds__(INSTEP_GPU_THREADS, 4)            \
        instep_step_##name(const __grid_constant__ InstepStepLaunch launch) {      \
        __shared__ Shared<Rule<max_states>, false> shared;                         \
        step_bucket<Rule, min_states, max_states, false>(launch, shared);          \
    }                                                                              \
    extern "C" __global__ void __launch_bounds__(INSTEP_GPU_THREADS, 4)            \
        instep_step_##name##_8bit(const __grid_constant__ InstepStepLaunch launch) { \
        __shared__ Shared<Rule<max_states>, true> shared;                          \
        step_bucket<Rule, min_states, max_states, true>(launch, shared);           \
    }
#include "optimizers.def"
#undef OPTIMIZER
