/* The parameters and gradients of a loop over vectors: f32, bf16 with 16-bit remainders, or bf16.
 *
 * A NaN need not be canonical when it is read, because its step raises the alarm, and `settle` then makes it canonical.
 * The bits equal those of streams.h, which converts other formats through buffers. */
#ifndef INSTEP_CPU_TENSORS_H
#define INSTEP_CPU_TENSORS_H

#include "cpu/streams.h"

namespace {

/* Prefetches the cache line that a later round will read. A prefetch past the end of an array does nothing.
 * The loop for 8-bit states prefetches by 0 bytes too: compilers move no instruction across a branch. */
INSTEP_INLINE void prefetch(const void* x, uint64_t ahead_bytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(x) + ahead_bytes));
}

/* Returns a word with its top bit set if x is infinite or NaN: only an exponent of all ones carries into the sign. */
template <class F>
INSTEP_INLINE auto special(F x) { return (bits_of(x) + 0x00800000u) ^ bits_of(x); }

/* Whether an element is infinite or NaN. */
__attribute__((noinline, cold)) bool any_special(const float* x, uint32_t count) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < count; ++i) found |= special(x[i]);
    return found >> 31 != 0;
}

__attribute__((noinline, cold)) bool any_special(const uint16_t* x, uint32_t count) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < count; ++i) found |= (x[i] & 0x7f80u) == 0x7f80u;
    return found != 0;
}

__attribute__((noinline)) void make_canonical(uint16_t* x, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) x[i] = static_cast<uint16_t>((x[i] & 0x7fffu) > 0x7f80u ? 0x7fffu : x[i]);
}

/* Returns whether SplitTensors can be the parameters and gradients of a launch. A copy or an average needs the stepped
 * parameters as f32. */
bool are_split(const InstepStepArgs& args) {
    return args.master_kind == INSTEP_MASTER_REMAINDER16 && args.grad_dtype == INSTEP_DTYPE_BF16 && !args.copy && !args.ema;
}
/* The same for DrawnTensors. */
bool are_drawn(const InstepStepArgs& args) {
    const bool is_bfloat16 = args.param_dtype == INSTEP_DTYPE_BF16 && args.grad_dtype == INSTEP_DTYPE_BF16;
    return args.stochastic && is_bfloat16 && args.master_kind == INSTEP_MASTER_NONE && !args.copy && !args.ema;
}

#if INSTEP_HAS_VECTORS

/* f32 in place, or in buffers. */
struct WholeTensors {
    static constexpr bool IS_DRAWN = false;
    float* params;
    const float* grads;

    INSTEP_INLINE WholeTensors from(uint64_t at, float*) const { return {params + at, grads + at}; }
    INSTEP_INLINE void fetch(uint64_t i, uint64_t ahead_bytes) const {
        prefetch(params + i, ahead_bytes);
        prefetch(grads + i, ahead_bytes);
    }
    INSTEP_INLINE Floats param(uint64_t i) const { return load_floats(params + i); }
    INSTEP_INLINE Floats grad(uint64_t i) const { return load_floats(grads + i); }
    INSTEP_INLINE void store(uint64_t i, Floats param) const { store_floats(params + i, param); }
    /* After an alarm, makes NaNs canonical. Returns whether a gradient is infinite or NaN. */
    bool settle(uint32_t count) const {
        make_canonical(params, count);
        return any_special(grads, count);
    }
};

/* bf16 gradients, and bf16 parameters with 16-bit remainders. `store` may carry a NaN's bits into the parameter's sign,
 * but joining takes the carry back. */
struct SplitTensors {
    static constexpr bool IS_DRAWN = false;
    uint16_t *params, *remainders;
    const uint16_t* grads;

    INSTEP_INLINE SplitTensors from(uint64_t at, float*) const { return {params + at, remainders + at, grads + at}; }
    INSTEP_INLINE void fetch(uint64_t i, uint64_t ahead_bytes) const {
        prefetch(params + i, ahead_bytes);
        prefetch(remainders + i, ahead_bytes);
        prefetch(grads + i, ahead_bytes);
    }
    INSTEP_INLINE Floats param(uint64_t i) const { return float_of(load_upper_halves(params + i) + load_signed_halves(remainders + i)); }
    INSTEP_INLINE Floats grad(uint64_t i) const { return float_of(load_upper_halves(grads + i)); }
    INSTEP_INLINE void store(uint64_t i, Floats param) const {
        store_halves(params + i, remainders + i, bits_of(param) + 0x8000u, bits_of(param));
    }
    bool settle(uint32_t count) const {
        for (uint32_t i = 0; i < count; ++i) {
            const Split split = split_to_16(joined_with_16(params[i], remainders[i]));
            params[i] = split.param;
            remainders[i] = split.remainder;
        }
        return any_special(grads, count);
    }
};

/* bf16 gradients and parameters. The loop rounds the parameters stochastically later, from `unrounded`, and then also
 * makes their NaNs canonical. */
struct DrawnTensors {
    static constexpr bool IS_DRAWN = true;
    uint16_t* params;
    const uint16_t* grads;
    float* unrounded;

    INSTEP_INLINE DrawnTensors from(uint64_t at, float* to) const { return {params + at, grads + at, to}; }
    INSTEP_INLINE void fetch(uint64_t i, uint64_t ahead_bytes) const {
        prefetch(params + i, ahead_bytes);
        prefetch(grads + i, ahead_bytes);
    }
    INSTEP_INLINE Floats param(uint64_t i) const { return float_of(load_upper_halves(params + i)); }
    INSTEP_INLINE Floats grad(uint64_t i) const { return float_of(load_upper_halves(grads + i)); }
    INSTEP_INLINE void store(uint64_t i, Floats param) const { store_floats(unrounded + i, param); }
    bool settle(uint32_t count) const { return any_special(grads, count); }
};

#endif

}  // namespace

#endif
