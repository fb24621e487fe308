/* The CPU's kernels: one table of C entries per instruction set.
 *
 * This file is compiled once per instruction set. INSTEP_KERNELS names the exported symbol; everything else has
 * internal linkage. Every entry opens the IEEE environment and calls the function that computes. That function is not
 * inlined. This file uses no C++ runtime, allocates nothing and keeps no state. */
#include "abi_layout.h"
#include "cpu/buffers.h"
#include "cpu/ceiling.h"
#include "cpu/environment.h"
#include "cpu/norm.h"
#include "cpu/self_test.h"
#include "cpu/step.h"

namespace {

/* Returns whether two records get equal scalars, because both are derived from equal numbers. */
bool have_same_scalars(const InstepBeginArgs& args, uint64_t index, uint64_t other) {
    const InstepRecord &a = args.records[index], &b = args.records[other];
    return a.steps == b.steps && a.hyper == b.hyper && bits_of(a.carried[0]) == bits_of(b.carried[0]) &&
           bits_of(args.lr_multipliers[index]) == bits_of(args.lr_multipliers[other]);
}

__attribute__((noinline)) void begin_all(const InstepBeginArgs* args) {
    begin_pass(*args, args->control);
    for (uint64_t b = 0; b < args->further_count; ++b) begin_pass(*args, &args->further_controls[b]);
    for (uint64_t k = 0, derived = 0; k < args->record_count; ++k) {
        open_record(*args, k);
        if (k > 0 && have_same_scalars(*args, k, derived)) {
            args->records[k].scalars = args->records[derived].scalars;
            args->records[k].carried[1] = args->records[derived].carried[1];
        } else {
            derive_scalars(*args, k);
            derived = k;
        }
    }
}

__attribute__((noinline)) void instruct_all(const InstepStepArgs* args) {
    for (uint64_t t = 0; t < args->tile_count; ++t) instruct(*args, args->tiles[t]);
}

__attribute__((noinline)) void decide_all(const InstepDecideArgs* args) { decide(*args); }

uint32_t entry_self_test() {
    IeeeEnvironment environment;
    return broken_property();
}
void entry_begin(const InstepBeginArgs* args) {
    IeeeEnvironment environment;
    begin_all(args);
}
void entry_decide(const InstepDecideArgs* args) {
    IeeeEnvironment environment;
    decide_all(args);
}
void entry_norm(const InstepStepArgs* args, const InstepBases* bases, uint64_t first_tile, uint64_t last_tile) {
    IeeeEnvironment environment;
    norm_tiles(args, bases, first_tile, last_tile);
}
void entry_step(const InstepStepArgs* args, const InstepBases* bases, uint64_t first_tile, uint64_t last_tile,
                uint64_t ahead_bytes) {
    IeeeEnvironment environment;
    step_tiles(args, bases, first_tile, last_tile, ahead_bytes);
}
void entry_custom(const InstepStepArgs* args) {
    IeeeEnvironment environment;
    instruct_all(args);
}
void entry_sum(void* const* ranks, uint64_t rank_count, uint32_t dtype, uint64_t first, uint64_t last, void* to) {
    IeeeEnvironment environment;
    sum_range(ranks, rank_count, dtype, first, last, to);
}
void entry_narrow(const float* from, uint16_t* to, uint32_t dtype, float factor, uint64_t count) {
    IeeeEnvironment environment;
    narrow_all(from, to, dtype, factor, count);
}
void entry_widen(const uint16_t* from, float* to, uint32_t dtype, float factor, uint64_t count) {
    IeeeEnvironment environment;
    widen_all(from, to, dtype, factor, count);
}

void entry_decode(const InstepStored* from, float* to) {
    IeeeEnvironment environment;
    decode_all(from, to);
}
void entry_encode(const float* from, const InstepStored* to) {
    IeeeEnvironment environment;
    encode_all(from, to);
}
void entry_ceiling(float* const* arrays, uint64_t array_count, float factor, uint64_t first, uint64_t last,
                   uint64_t ahead_bytes) {
    IeeeEnvironment environment;
    in_place_ceiling(arrays, array_count, factor, first, last, ahead_bytes);
}

}  // namespace

extern "C" const InstepKernels INSTEP_KERNELS = {
    entry_self_test, entry_begin,  entry_decide, entry_norm,   entry_step,   entry_custom,
    entry_sum,       entry_narrow, entry_widen,  entry_decode, entry_encode, entry_ceiling,
    {
#define OPTIMIZER(name, Rule, min_states, max_states) Rule<max_states>::SIGNED,
#include "optimizers.def"
#undef OPTIMIZER
    },
    {
#define OPTIMIZER(name, Rule, min_states, max_states) IsScaled<Rule<max_states>>::value,
#include "optimizers.def"
#undef OPTIMIZER
    },
};
