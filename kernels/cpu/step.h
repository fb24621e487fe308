/* On a CPU, steps the tiles of a bucket: picks the action on each tile, and the loop for the rule and precision.
 *
 * Any number of threads may step tiles of the same launch. Threads share only integer atomics, and the order
 * of these does not matter. */
#ifndef INSTEP_CPU_STEP_H
#define INSTEP_CPU_STEP_H

#include "cpu/bfloat16.h"
#include "cpu/eight_bit.h"
#include "cpu/scaled.h"
#include "numeric/control.h"

namespace {

void average_tile(const InstepStepArgs& args, const InstepTile& tile, float multiplier) {
    if (args.grad_dtype == INSTEP_DTYPE_F32) {
        return multiply_run(multiplier, tile.count, static_cast<float*>(args.grads) + tile.grad_offset);
    }
    uint16_t* narrow = static_cast<uint16_t*>(args.grads) + tile.grad_offset;
    float wide[INSTEP_TILE_ELEMENTS];
    widen_run(args.grad_dtype, tile.count, narrow, wide);
    multiply_run(multiplier, tile.count, wide);
    narrow_run(args.grad_dtype, tile.count, wide, narrow);
}

/* The bits of +0 are zero in every dtype. */
void zero_tile(const InstepStepArgs& args, const InstepTile& tile) {
    const uint64_t bytes = bytes_of(args.grad_dtype);
    __builtin_memset(static_cast<char*>(args.grads) + tile.grad_offset * bytes, 0, tile.count * bytes);
}

/* Returns whether the bf16 loop can step the tiles of a launch. */
bool is_bfloat16_throughout(const InstepStepArgs& args) {
    const bool is_plain = args.master_kind == INSTEP_MASTER_NONE && !args.copy && !args.ema;
    const bool has_states = args.state_count == 0 || args.moments == INSTEP_MOMENTS_BF16;
    return is_plain && has_states && args.param_dtype == INSTEP_DTYPE_BF16 && args.grad_dtype == INSTEP_DTYPE_BF16;
}

/* Steps a tile in one loop that reads and writes bf16. */
template <class Rule>
uint32_t step_bfloat16_tile(const InstepStepArgs& args, const InstepTile& tile, const typename Rule::Scalars& scalars,
                            float multiplier, const Rounding& rounding, uint64_t ahead_bytes) {
    uint16_t* states[INSTEP_MAX_STATES] = {};
    for (int k = 0; k < Rule::STATES; ++k) states[k] = static_cast<uint16_t*>(args.states[k]) + tile.state_offset;
    uint16_t* params = static_cast<uint16_t*>(param_of(args, tile));
    const uint16_t* grads = static_cast<const uint16_t*>(args.grads) + tile.grad_offset;
    const auto run = rounding.stochastic ? step_bfloat16_run<Rule, true> : step_bfloat16_run<Rule, false>;
    return run(scalars, multiplier, rounding.position, ahead_bytes, tile.count, params, grads, states);
}

/* Steps a tile of whole vectors whose parameters have remainders. Its states are f32 or bf16. */
#if INSTEP_HAS_VECTORS
template <class Rule, class State>
uint32_t step_split_tile(const InstepStepArgs& args, const InstepTile& tile, const typename Rule::Scalars& scalars,
                         float multiplier, const RandomPosition& position, uint64_t ahead_bytes) {
    State* states[INSTEP_MAX_STATES] = {};
    for (int k = 0; k < Rule::STATES; ++k) states[k] = static_cast<State*>(args.states[k]) + tile.state_offset;
    const SplitTensors tensors = {static_cast<uint16_t*>(param_of(args, tile)), static_cast<uint16_t*>(args.master) + tile.state_offset,
                                  static_cast<const uint16_t*>(args.grads) + tile.grad_offset};
    return step_vector_run<Rule, false>(scalars, multiplier, position, ahead_bytes, tile.count, tensors, states);
}
#endif

/* Returns whether the loop for 8-bit states can step the tile. */
template <class Rule>
bool has_coded_loop(const InstepStepArgs& args, const InstepTile& tile, const Rounding& rounding, uint32_t flags) {
    const bool is_common = (flags == Rule::COMMON[0]) | (flags == Rule::COMMON[1]);
    return INSTEP_HAS_VECTORS && HasRounds<Rule>::value && args.moments == INSTEP_MOMENTS_8BIT && is_common &&
           tile.count % INSTEP_QUANTUM == 0 && rounding.is_one_loop(tile.count);
}

/* Largest number of tiles that one call of a loop steps. */
constexpr uint64_t MOST_TOGETHER = 32;

/* Returns whether a launch has only f32 streams, only steps its tiles, and knows its multiplier. */
bool is_plain(const InstepStepArgs& args) {
    return args.param_dtype == INSTEP_DTYPE_F32 && args.grad_dtype == INSTEP_DTYPE_F32 && args.moments == INSTEP_MOMENTS_F32 &&
           !args.copy && !args.ema && args.gradients == INSTEP_GRADIENTS_KEEP && args.part == INSTEP_PART_WHOLE && knows_multiplier(args);
}

bool have_equal_scalars(const InstepRecord& a, const InstepRecord& b) {
    uint64_t differs = 0;
    for (uint64_t k = 0; k < sizeof a.scalars.words / sizeof a.scalars.words[0]; ++k) {
        differs |= a.scalars.words[k] ^ b.scalars.words[k];
    }
    return differs == 0;
}

/* Returns how many tiles, from the first one on, are stepped and have the first one's bucket and scalars. */
uint64_t count_alike(const InstepStepArgs& args, const InstepTile* tiles, uint64_t left) {
    const InstepRecord& record = args.records[tiles->record];
    const uint64_t most = left < MOST_TOGETHER ? left : MOST_TOGETHER;
    uint64_t count = 1;
    for (; count < most && tiles[count].bucket == tiles->bucket; ++count) {
        const InstepRecord& other = args.records[tiles[count].record];
        if (record_action(args, other) != INSTEP_ACTION_STEP || !have_equal_scalars(record, other)) break;
    }
    return count;
}

template <class Rule>
uint32_t step_tile(const InstepStepArgs& args, const InstepTile& tile, const InstepRecord& record, uint64_t ahead_bytes) {
    const typename Rule::Scalars scalars = scalars_of<Rule>(record);
    const float multiplier = gradient_multiplier(args, record, INSTEP_ACTION_STEP);
    const RandomKey key = random_key(args.seed, record.steps + 1);
    const bool narrow_param = args.param_dtype != INSTEP_DTYPE_F32;
    const uint32_t flags = Rule::flags(scalars);
    const Rounding rounding = {{key, tile.element}, args.stochastic != 0};
    const bool is_coded = has_coded_loop<Rule>(args, tile, rounding, flags);
    const bool is_f32_in_place = args.grad_dtype == INSTEP_DTYPE_F32 && (!narrow_param || args.master_kind == INSTEP_MASTER_F32);
    const bool is_bfloat16_in_place = rounding.stochastic ? are_drawn(args) : are_split(args);
    const bool in_place = is_coded ? is_f32_in_place || is_bfloat16_in_place : is_f32_in_place && args.moments == INSTEP_MOMENTS_F32;
    const uint32_t longest = in_place && !IsScaled<Rule>::value ? INSTEP_TILE_ELEMENTS : CHUNK;
    char* const param = static_cast<char*>(param_of(args, tile));
    const auto each_part = [&](auto step) {
        for (uint32_t at = 0; at < tile.count; at += longest) {
            const uint32_t count = tile.count - at < longest ? tile.count - at : longest;
            /* Part makes its Rounding in place, because a copy would wait for its own stores. */
            step(Part{args, tile.state_offset + at, count, param + at * bytes_of(args.param_dtype),
                      {{key, tile.element + at}, args.stochastic != 0}, ahead_bytes},
                 tile.grad_offset + at);
        }
    };
    const bool is_first = args.records[tile.first_record].steps == 0;
    uint32_t nonfinite = 0;
    if constexpr (IsScaled<Rule>::value) {
        InstepNorms* const norms = &args.norms[tile.record];
        if (args.part == INSTEP_PART_MEASURE) {
            Squares squares[2];
            each_part([&](const Part& part, uint64_t grad_offset) {
                nonfinite |= measure_part<Rule>(part, scalars, multiplier, grad_offset, squares);
            });
            add_squares(squares, norms);
        } else {
            const float scale = step_scale<Rule>(scalars, norm_of(*norms, OF_PARAM), norm_of(*norms, OF_CHANGE));
            each_part([&](const Part& part, uint64_t) { apply_part<Rule>(part, scalars, scale, is_first); });
        }
    } else {
        if (is_bfloat16_throughout(args) && has_bfloat16_loop<Rule>(scalars, multiplier) &&
            rounding.is_one_loop(tile.count)) {
            return step_bfloat16_tile<Rule>(args, tile, scalars, multiplier, rounding, ahead_bytes);
        }
#if INSTEP_HAS_VECTORS
        if constexpr (HasRounds<Rule>::value) {
            const bool is_split = are_split(args) && !rounding.stochastic && args.moments != INSTEP_MOMENTS_8BIT;
            if (is_split && has_vector_loop<Rule>(scalars, tile.count)) {
                const auto step = args.moments == INSTEP_MOMENTS_F32 ? step_split_tile<Rule, float> : step_split_tile<Rule, uint16_t>;
                return step(args, tile, scalars, multiplier, rounding.position, ahead_bytes);
            }
            if (is_coded) {
                return rounding.stochastic ? step_coded_tile<Rule, true>(args, scalars, multiplier, is_first, each_part)
                                           : step_coded_tile<Rule, false>(args, scalars, multiplier, is_first, each_part);
            }
        }
#endif
        each_part([&](const Part& part, uint64_t grad_offset) {
            nonfinite |= step_part<Rule>(part, scalars, multiplier, grad_offset, is_first);
        });
    }
    return nonfinite;
}

/* Steps tiles of one bucket that have the same scalars: one tile, or several of a plain launch. */
template <class Rule>
uint32_t step_alike(Placed& placed, const InstepStepArgs& args, const InstepTile* tiles, uint64_t count, bool plain,
                    uint64_t ahead_bytes) {
    if constexpr (!IsScaled<Rule>::value) {
        if (plain) {
            const InstepRecord& record = args.records[tiles->record];
            Run runs[MOST_TOGETHER];
            for (uint64_t k = 0; k < count; ++k) placed.set(&runs[k], tiles[k]);
            const float multiplier = gradient_multiplier(args, record, INSTEP_ACTION_STEP);
            return step_runs<Rule>(scalars_of<Rule>(record), multiplier, ahead_bytes, runs, static_cast<uint32_t>(count));
        }
    }
    uint32_t nonfinite = 0;
    for (const InstepTile* tile = tiles; tile < tiles + count; ++tile) {
        nonfinite |= step_tile<Rule>(placed.at(*tile), *tile, args.records[tile->record], ahead_bytes);
    }
    return nonfinite;
}

/* Picks the instantiation for the launch's number of states. */
template <template <int> class Rule, int MIN, int MAX, class... Rest>
uint32_t step_with_states(Placed& placed, const InstepStepArgs& args, Rest... rest) {
    if constexpr (MIN < MAX) {
        if (args.state_count < MAX) return step_with_states<Rule, MIN, MAX - 1>(placed, args, rest...);
    }
    return step_alike<Rule<MAX>>(placed, args, rest...);
}

uint32_t step_of_rule(Placed& placed, const InstepStepArgs& args, const InstepTile* tiles, uint64_t count, bool plain,
                      uint64_t ahead_bytes) {
    switch (args.optimizer) {
#define OPTIMIZER(name, Rule, min_states, max_states) \
    case INSTEP_OPTIMIZER_##name:                     \
        return step_with_states<Rule, min_states, max_states>(placed, args, tiles, count, plain, ahead_bytes);
#include "optimizers.def"
#undef OPTIMIZER
    }
    return 0;
}

__attribute__((noinline)) void step_tiles(const InstepStepArgs* args, const InstepBases* bases, uint64_t first, uint64_t last,
                                          uint64_t ahead_bytes) {
    Placed placed(*args, bases);
    const bool is_last = args->part != INSTEP_PART_MEASURE, rests = steps_nothing(*args);
    for (uint64_t t = first, count = 1; t < last; t += count) {
        const InstepTile& tile = args->tiles[t];
        const InstepStepArgs& own = placed.at(tile);
        const InstepRecord& record = args->records[tile.record];
        const uint32_t action = record_action(*args, record);
        const bool steps = action == INSTEP_ACTION_STEP && !rests;
        /* All stepped tiles of a launch have the same kinds of streams. */
        const bool plain = steps && is_plain(own);
        count = plain ? count_alike(*args, &tile, last - t) : 1;
        if (steps) {
            if (step_of_rule(placed, *args, &tile, count, plain, ahead_bytes)) {
                atomic_minimum(&args->control->first_nonfinite_bucket, args->bucket + tile.bucket);
            }
            for (uint64_t k = t; k < t + count; ++k) {
                if (args->tiles[k].first && is_last) args->records[args->tiles[k].record].stepped = 1;
            }
        }
        if (plain) continue;
        /* If a step has two launches, the one that reads the sums writes the means of stepped gradients. */
        const bool averages = args->gradients == INSTEP_GRADIENTS_AVERAGE && args->part != INSTEP_PART_APPLY;
        if (action == INSTEP_ACTION_STEP ? averages : action == INSTEP_ACTION_AVERAGE && is_last) {
            average_tile(own, tile, gradient_multiplier(*args, record, action));
        }
        const bool zeroes = args->gradients == INSTEP_GRADIENTS_ZERO && is_last;
        if (action == INSTEP_ACTION_STEP && zeroes) zero_tile(own, tile);
    }
}

}  // namespace

#endif
