/* The CPU's loop for 8-bit states: it decodes, steps and encodes whole blocks.
 *
 * A block's scale is known only after its last element. The loop therefore steps block b and encodes block b - 1, which
 * is still in the first-level cache. Encoding hides the latency of division and root. bf16 parameters are rounded
 * stochastically together with the codes, because both share most of their random bits. This loop serves the two most
 * common sets of flags. The general path serves the others and partial blocks. Both give the same bits. */
#ifndef INSTEP_CPU_EIGHT_BIT_H
#define INSTEP_CPU_EIGHT_BIT_H

#include "cpu/part.h"

#if INSTEP_HAS_VECTORS

namespace {

/* The parameters of a block before they are rounded to bf16. */
struct Unrounded {
    const float* values;
    uint16_t* to;
    bool alarmed; /* there may be a NaN */
};

/* A block that is stepped but not encoded yet. Only DrawnTensors have unrounded parameters. */
struct Stepped {
    Coding states[INSTEP_MAX_STATES];
    Unrounded params;
    bool is_open;
};

/* Encodes a block. A root takes long, so a vector is begun before the previous vector is ended. */
template <class Rule, bool STOCHASTIC, bool IS_DRAWN>
struct Coder {
    Coding states[Rule::STATES];
    Unrounded params;
    Begun begun[Rule::STATES];
    Words closest[Rule::STATES], numbers; /* `numbers` has the lower words of the elements' numbers */

    /* Copies member by member. A copy of the whole struct would load 16 bytes that smaller stores have just written,
     * and processors wait for such loads. */
    INSTEP_INLINE explicit Coder(const Stepped& block)
        : params(), begun(), closest(), numbers(lane_numbers() + block.states[0].position.low) {
        if (IS_DRAWN) params = {block.params.values, block.params.to, block.params.alarmed};
        each_state<Rule>([&](auto k) __attribute__((always_inline)) {
            const Coding& c = block.states[k];
            states[k] = {c.values, c.codes, c.scale, c.factor, c.position, c.stream};
        });
    }

    INSTEP_INLINE void begin(uint32_t i) {
        each_state<Rule>([&](auto k) __attribute__((always_inline)) {
            const Coding& c = states[k];
            begun[k] = begin_code<(Rule::SIGNED >> k & 1) != 0, STOCHASTIC>(c, load_floats(c.values + i)); /* unsigned states are never negative */
        });
    }
    INSTEP_INLINE void end(uint32_t i) {
        const RandomPosition& at = states[0].position;
        const Words mixed = STOCHASTIC ? at.mixed(numbers) : Words{}; /* the same for all streams */
        numbers += WIDTH;
        if (IS_DRAWN) store_upper_halves(params.to + i, bits_of(load_floats(params.values + i)) + (at.word(mixed, PARAM_STREAM) >> 16));
        each_state<Rule>([&](auto k) __attribute__((always_inline)) {
            constexpr bool SIGNED = (Rule::SIGNED >> k & 1) != 0;
            end_code<SIGNED, STOCHASTIC>(states[k], begun[k], i, mixed, closest[k]);
        });
    }
    /* Ends the last vector. If the scale has no codes, all codes of the block become zero. A carry may have made a NaN
     * finite, so NaNs are rounded again. */
    INSTEP_INLINE void finish() {
        end(INSTEP_QUANTUM - WIDTH);
        if (IS_DRAWN && params.alarmed) {
            const RandomPosition copy = states[0].position; /* so that the original may stay in registers */
            narrow_stochastically(copy, PARAM_STREAM, INSTEP_QUANTUM, params.values, params.to);
        }
        each_state<Rule>([&](auto k) __attribute__((always_inline)) {
            const Coding& c = states[k];
            if (!is_coded(c.scale)) {
                __builtin_memset(c.codes, 0, INSTEP_QUANTUM);
            } else if (HAS_THRESHOLDS<(Rule::SIGNED >> k & 1) != 0, STOCHASTIC> && is_close(closest[k])) {
                const Coding copy = c; /* so that the original may stay in registers */
                encode_close(copy, INSTEP_QUANTUM);
            }
        });
    }
};

template <class Rule, bool STOCHASTIC, bool IS_DRAWN>
__attribute__((noinline)) void encode_stepped(const Stepped& block) {
    Coder<Rule, STOCHASTIC, IS_DRAWN> coder(block);
    coder.begin(0);
    for (uint32_t i = WIDTH; i < INSTEP_QUANTUM; i += WIDTH) {
        coder.end(i - WIDTH);
        coder.begin(i);
    }
    coder.finish();
}

/* The parts of a rule's quotient, between the stages of the loop. */
template <class Rule>
struct Flight {
    Floats numerator, states[Rule::STATES], older_numerator, denominator;
};

/* Two blocks of a tile: one is stepped while the other is encoded. */
template <class Rule>
struct Blocks {
    alignas(64) float values[2][Rule::STATES][INSTEP_QUANTUM];
    Stepped stepped;
    uint32_t turn;
    alignas(64) float params[2][INSTEP_QUANTUM];
};

/* Steps the whole blocks of a part, and encodes all but the last. Root and division take long, so each
 * vector takes three rounds. The first round updates its states, the second computes its denominator, and
 * the third steps its parameters. */
template <class Rule, uint32_t FLAGS, bool STOCHASTIC, class Tensors>
__attribute__((noinline)) uint32_t step_blocks(const typename Rule::Scalars& scalars, float multiplier, const Part& part,
                                               const Tensors& tensors, Blocks<Rule>& blocks) {
    static_assert(Rule::HIDDEN == 0, "the parameter shows all that is infinite or NaN");
    const typename Rule::Scalars s = scalars;
    const float factor = Rule::factor(s, multiplier);
    const uint64_t ahead_bytes = part.ahead_bytes;
    uint32_t nonfinite = 0;
    Stepped stepped = blocks.stepped;
    for (uint32_t at = 0; at < part.count; at += INSTEP_QUANTUM) {
        const Tensors block = tensors.from(at, blocks.params[blocks.turn]);
        Coder<Rule, STOCHASTIC, Tensors::IS_DRAWN> coder(stepped);
        const bool codes = stepped.is_open;
        float(*const values)[INSTEP_QUANTUM] = blocks.values[blocks.turn];
        const uint8_t* from[Rule::STATES];
        float scales[Rule::STATES];
        for (int k = 0; k < Rule::STATES; ++k) {
            from[k] = part.placed<uint8_t>(part.args.states[k]) + at;
            scales[k] = part.scales(k)[at / INSTEP_QUANTUM];
        }
        Floats alarm = {};
        Words largest[Rule::STATES] = {};
        Flight<Rule> f = {};
        const auto land = [&](uint32_t i) __attribute__((always_inline)) {
            const Floats param = Rule::stepped(s, FLAGS, block.param(i), f.older_numerator / f.denominator);
            alarm += param;
            block.store(i, param);
        };
        const auto turn = [&]() __attribute__((always_inline)) {
            f.denominator = Rule::denominator(s, FLAGS, f.states);
            f.older_numerator = f.numerator;
        };
        /* Codes end before states are stored: compilers keep this order, and it takes the fewest cycles. */
        const auto round = [&](uint32_t i, bool has_codes) __attribute__((always_inline)) {
            block.fetch(i, ahead_bytes);
            if (i >= 2 * WIDTH) land(i - 2 * WIDTH);
            turn();
            each_state<Rule>([&](auto k) __attribute__((always_inline)) {
                f.states[k] = decoded(Rule::SIGNED >> k & 1, from[k] + i, scales[k]);
            });
            f.numerator = Rule::numerator(s, FLAGS, block.param(i), block.grad(i) * factor, f.states);
            if (has_codes && i > 0) coder.end(i - WIDTH);
            each_state<Rule>([&](auto k) __attribute__((always_inline)) {
                store_floats(values[k] + i, f.states[k]);
                largest[k] = larger(largest[k], Rule::SIGNED >> k & 1 ? bits_of(magnitude(f.states[k])) : bits_of(f.states[k]));
            });
            if (has_codes) coder.begin(i);
        };
        /* The first two rounds stand before the loop, so that the loop has no branch. */
        round(0, codes);
        round(WIDTH, codes);
        if (codes) {
#pragma GCC unroll 1
            for (uint32_t i = 2 * WIDTH; i < INSTEP_QUANTUM; i += WIDTH) round(i, true);
        } else {
#pragma GCC unroll 1
            for (uint32_t i = 2 * WIDTH; i < INSTEP_QUANTUM; i += WIDTH) round(i, false);
        }
        land(INSTEP_QUANTUM - 2 * WIDTH);
        turn();
        land(INSTEP_QUANTUM - WIDTH);
        if (codes) coder.finish();
        each_state<Rule>([&](auto k) __attribute__((always_inline)) {
            const float scale = block_scale(largest_lane(largest[k]));
            part.scales(k)[at / INSTEP_QUANTUM] = scale;
            stepped.states[k] = {values[k], part.placed<uint8_t>(part.args.states[k]) + at, scale,
                                        coding_factor(Rule::SIGNED >> k & 1, scale), part.rounding.position.advanced_by(at),
                                        FIRST_STATE_STREAM + k};
        });
        const bool alarmed = any_sign(special(alarm));
        if constexpr (Tensors::IS_DRAWN) stepped.params = {block.unrounded, block.params, alarmed};
        stepped.is_open = true;
        blocks.turn ^= 1;
        if (alarmed) nonfinite |= block.settle(INSTEP_QUANTUM);
    }
    blocks.stepped = stepped;
    return nonfinite;
}

/* The f32 values of a part that is not f32 in place. */
struct Buffers {
    float params[CHUNK], grads[CHUNK];
};

void open(const Part& part, uint64_t grad_offset, Buffers& buffers, WholeTensors& tensors) {
    tensors = {part.open_params(buffers.params), gradients(part.args, grad_offset, part.count, buffers.grads)};
}
void open(const Part& part, uint64_t grad_offset, Buffers&, SplitTensors& tensors) {
    tensors = {static_cast<uint16_t*>(part.param), static_cast<uint16_t*>(part.remainders()),
               static_cast<const uint16_t*>(part.args.grads) + grad_offset};
}
void open(const Part& part, uint64_t grad_offset, Buffers&, DrawnTensors& tensors) {
    tensors = {static_cast<uint16_t*>(part.param), static_cast<const uint16_t*>(part.args.grads) + grad_offset, nullptr};
}

/* Stores what the loop has not stored. */
void close(const Part& part, bool is_first, const WholeTensors& tensors) { part.finish(tensors.params, is_first); }
template <class Tensors>
void close(const Part&, bool, const Tensors&) {}

template <class Rule, bool STOCHASTIC, class Tensors, class EachPart>
uint32_t step_coded_parts(const typename Rule::Scalars& scalars, float multiplier, bool is_first, const EachPart& each_part) {
    constexpr uint32_t FIRST = Rule::COMMON[0], SECOND = Rule::COMMON[1];
    const auto step = Rule::flags(scalars) == FIRST ? step_blocks<Rule, FIRST, STOCHASTIC, Tensors>
                                                    : step_blocks<Rule, SECOND, STOCHASTIC, Tensors>;
    Blocks<Rule> blocks;
    blocks.stepped = {};
    blocks.turn = 0;
    uint32_t nonfinite = 0;
    each_part([&](const Part& part, uint64_t grad_offset) {
        Buffers buffers;
        Tensors tensors;
        open(part, grad_offset, buffers, tensors);
        nonfinite |= step(scalars, multiplier, part, tensors, blocks);
        close(part, is_first, tensors);
    });
    if (blocks.stepped.is_open) encode_stepped<Rule, STOCHASTIC, Tensors::IS_DRAWN>(blocks.stepped);
    return nonfinite;
}

/* Steps a tile of whole blocks. */
template <class Rule, bool STOCHASTIC, class EachPart>
uint32_t step_coded_tile(const InstepStepArgs& args, const typename Rule::Scalars& scalars, float multiplier, bool is_first,
                         const EachPart& each_part) {
    if constexpr (STOCHASTIC) {
        if (are_drawn(args)) return step_coded_parts<Rule, true, DrawnTensors>(scalars, multiplier, is_first, each_part);
    } else {
        if (are_split(args)) return step_coded_parts<Rule, false, SplitTensors>(scalars, multiplier, is_first, each_part);
    }
    return step_coded_parts<Rule, STOCHASTIC, WholeTensors>(scalars, multiplier, is_first, each_part);
}

}  // namespace

#endif

#endif
