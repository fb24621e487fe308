/* The parameters and gradients of the loop for 8-bit states: f32, bf16 with 16-bit remainders, or bf16.
 *
 * A NaN need not be canonical when it is read, because its step raises the alarm, and `settle` then makes it canonical.
 * The bits equal those of streams.h, which converts other formats through buffers. */
#ifndef INSTEP_CPU_TENSORS_H
#define INSTEP_CPU_TENSORS_H

#include "cpu/part.h"

namespace {

/* Returns whether a loop can read and write a launch's bf16 tensors without buffers. It can if remainders make the
 * parameters exact, or if it rounds them stochastically. A copy or an average needs the stepped parameters as f32. */
bool is_bfloat16_in_place(const InstepStepArgs& args) {
    const uint32_t master_kind = args.stochastic ? INSTEP_MASTER_NONE : INSTEP_MASTER_REMAINDER16;
    return args.master_kind == master_kind && args.param_dtype == INSTEP_DTYPE_BF16 && args.grad_dtype == INSTEP_DTYPE_BF16 &&
           !args.copy && !args.ema;
}

#if INSTEP_HAS_VECTORS

/* f32 values of a part that is not f32 in place. */
struct Buffers {
    float params[CHUNK], grads[CHUNK];
};

/* f32 in place, or in buffers. */
struct WholeTensors {
    static constexpr bool IS_DRAWN = false;
    float* params;
    const float* grads;

    static WholeTensors of(const Part& part, uint64_t grad_offset, Buffers& buffers) {
        return {part.open_params(buffers.params), gradients(part.args, grad_offset, part.count, buffers.grads)};
    }
    void finish(const Part& part, bool is_first) const { part.finish(params, is_first); }
    INSTEP_INLINE WholeTensors from(uint32_t at, float*) const { return {params + at, grads + at}; }
    INSTEP_INLINE void fetch(uint32_t i, uint64_t ahead_bytes) const {
        prefetch(params + i, ahead_bytes);
        prefetch(grads + i, ahead_bytes);
    }
    INSTEP_INLINE Floats param(uint32_t i) const { return load_floats(params + i); }
    INSTEP_INLINE Floats grad(uint32_t i) const { return load_floats(grads + i); }
    INSTEP_INLINE void store(uint32_t i, Floats param) const { store_floats(params + i, param); }
    /* After an alarm, makes NaNs canonical. Returns whether a gradient is infinite or NaN. */
    bool settle(uint32_t count) const {
        make_canonical(params, count);
        return any_special(grads, count);
    }
};

const uint16_t* narrow_grads(const Part& part, uint64_t offset) { return static_cast<const uint16_t*>(part.args.grads) + offset; }

/* bf16 gradients, and bf16 parameters with 16-bit remainders. `store` may carry a NaN's bits into the parameter's sign,
 * but joining takes the carry back. */
struct SplitTensors {
    static constexpr bool IS_DRAWN = false;
    uint16_t *params, *remainders;
    const uint16_t* grads;

    static SplitTensors of(const Part& part, uint64_t grad_offset, Buffers&) {
        return {static_cast<uint16_t*>(part.param), static_cast<uint16_t*>(part.remainders()), narrow_grads(part, grad_offset)};
    }
    void finish(const Part&, bool) const {}
    INSTEP_INLINE SplitTensors from(uint32_t at, float*) const { return {params + at, remainders + at, grads + at}; }
    INSTEP_INLINE void fetch(uint32_t i, uint64_t ahead_bytes) const {
        prefetch(params + i, ahead_bytes);
        prefetch(remainders + i, ahead_bytes);
        prefetch(grads + i, ahead_bytes);
    }
    INSTEP_INLINE Floats param(uint32_t i) const { return float_of(load_upper_halves(params + i) + load_signed_halves(remainders + i)); }
    INSTEP_INLINE Floats grad(uint32_t i) const { return float_of(load_upper_halves(grads + i)); }
    INSTEP_INLINE void store(uint32_t i, Floats param) const {
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

/* bf16 gradients and parameters. The loop rounds the parameters stochastically later, from `stepped`. */
struct DrawnTensors {
    static constexpr bool IS_DRAWN = true;
    uint16_t* params;
    const uint16_t* grads;
    float* stepped;

    static DrawnTensors of(const Part& part, uint64_t grad_offset, Buffers&) {
        return {static_cast<uint16_t*>(part.param), narrow_grads(part, grad_offset), nullptr};
    }
    void finish(const Part&, bool) const {}
    INSTEP_INLINE DrawnTensors from(uint32_t at, float* to) const { return {params + at, grads + at, to}; }
    INSTEP_INLINE void fetch(uint32_t i, uint64_t ahead_bytes) const {
        prefetch(params + i, ahead_bytes);
        prefetch(grads + i, ahead_bytes);
    }
    INSTEP_INLINE Floats param(uint32_t i) const { return float_of(load_upper_halves(params + i)); }
    INSTEP_INLINE Floats grad(uint32_t i) const { return float_of(load_upper_halves(grads + i)); }
    INSTEP_INLINE void store(uint32_t i, Floats param) const { store_floats(stepped + i, param); }
    bool settle(uint32_t count) const { return any_special(grads, count); }
};

/* The tensors of is_bfloat16_in_place. */
template <bool STOCHASTIC>
struct Bfloat16 {
    using Tensors = SplitTensors;
};

template <>
struct Bfloat16<true> {
    using Tensors = DrawnTensors;
};

#endif

}  // namespace

#endif
