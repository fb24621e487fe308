/* The tile that is stepped, and the formats of its streams (gradients, parameters, states and others).
 *
 * A launch's arguments say which streams it has and in which formats, so the general loop branches in the same way
 * for all threads. In a loop for one known format these conditions are constants. No branch, address or scalar for
 * them is then left in the loop. The formats that frameworks use most have such loops. With 8-bit states, only F32
 * and BF16 have such loops. */
#ifndef INSTEP_GPU_PLACE_CUH
#define INSTEP_GPU_PLACE_CUH

#include "gpu/prefetch.cuh"
#include "numeric/control.h"

namespace {

enum class Format : uint32_t {
    ANY,           /* known only from the arguments */
    F32,           /* in every stream */
    F32_SHIFTED,   /* in every stream, and the gradients are misaligned */
    BF16,          /* in every stream, rounded to the nearest */
    BF16_STOCHASTIC,
    MASTER,        /* parameters and gradients in bf16, master weights and states in f32 */
    REMAINDER16,   /* the same with a remainder in place of a master */
    REMAINDER8,
};

/* The number of elements of each stream that a lane has in a round. They are 16 bytes if all streams have the same
 * width. Eight elements of five streams do not fit into the registers. With 8-bit codes a lane has four elements,
 * because two warps share a block. */
template <Format FORMAT, int STATES, bool IS_CODED>
constexpr uint32_t LANE_ELEMENTS =
    (FORMAT == Format::BF16 || FORMAT == Format::BF16_STOCHASTIC) && STATES <= 2 && !IS_CODED ? 8 : 4;

/* Returns the format of a launch with aligned streams. `is_coded` says that the kernel is for 8-bit states. */
INSTEP_DEVICE Format format_of(const InstepStepArgs& args, bool is_coded) {
    if (args.copy || args.ema || args.param_dtype != args.grad_dtype) return Format::ANY;
    if (is_coded && (args.stochastic || args.master_kind != INSTEP_MASTER_NONE)) return Format::ANY;
    const bool has_states = args.state_count > 0;
    const bool has_f32_states = is_coded || !has_states || args.moments == INSTEP_MOMENTS_F32;
    if (args.param_dtype == INSTEP_DTYPE_F32) return has_f32_states ? Format::F32 : Format::ANY;
    if (args.param_dtype != INSTEP_DTYPE_BF16) return Format::ANY;
    if (args.master_kind == INSTEP_MASTER_NONE) {
        const bool has_bf16_states = is_coded || !has_states || args.moments == INSTEP_MOMENTS_BF16;
        if (!has_bf16_states) return Format::ANY;
        return args.stochastic ? Format::BF16_STOCHASTIC : Format::BF16;
    }
    if (!has_f32_states) return Format::ANY;
    if (args.master_kind == INSTEP_MASTER_F32) return Format::MASTER;
    if (args.master_kind == INSTEP_MASTER_REMAINDER16) return Format::REMAINDER16;
    return args.stochastic ? Format::ANY : Format::REMAINDER8;
}

struct Place {
    const InstepStepArgs& args;
    const TileSlot& slot;
    /* These members are constants in the code where the struct is inlined: */
    bool is_full;    /* tiles are full and streams aligned; in a known format, gradients may be misaligned */
    Format format;
    uint32_t states; /* number of the launch's states, if the format is known */

    INSTEP_DEVICE const InstepTile& tile() const { return slot.tile(); }
    INSTEP_DEVICE const InstepRecord& record() const { return slot.record(); }
    INSTEP_DEVICE uint32_t count() const { return slot.count; }
    INSTEP_DEVICE Extent extent() const { return {count(), is_full}; }
    /* A full tile is a whole number of rounds, so every thread has elements. */
    INSTEP_DEVICE bool has(uint32_t at) const { return is_full || at < count(); }

    INSTEP_DEVICE bool is_any() const { return format == Format::ANY; }
    INSTEP_DEVICE bool is_f32() const { return format == Format::F32 || format == Format::F32_SHIFTED; }
    INSTEP_DEVICE uint32_t known_dtype() const { return is_f32() ? INSTEP_DTYPE_F32 : INSTEP_DTYPE_BF16; }
    INSTEP_DEVICE uint32_t param_dtype() const { return is_any() ? args.param_dtype : known_dtype(); }
    INSTEP_DEVICE uint32_t grad_dtype() const { return is_any() ? args.grad_dtype : known_dtype(); }
    INSTEP_DEVICE bool is_stochastic() const { return is_any() ? args.stochastic != 0 : format == Format::BF16_STOCHASTIC; }
    INSTEP_DEVICE bool has_copy() const { return is_any() && args.copy; }
    INSTEP_DEVICE bool has_ema() const { return is_any() && args.ema; }
    INSTEP_DEVICE uint32_t state_count() const { return is_any() ? args.state_count : states; }

    INSTEP_DEVICE uint32_t moments() const {
        if (is_any()) return args.moments;
        return format == Format::BF16 || format == Format::BF16_STOCHASTIC ? INSTEP_MOMENTS_BF16 : INSTEP_MOMENTS_F32;
    }

    INSTEP_DEVICE uint32_t master_kind() const {
        switch (format) {
            case Format::ANY: return args.master_kind;
            case Format::MASTER: return INSTEP_MASTER_F32;
            case Format::REMAINDER16: return INSTEP_MASTER_REMAINDER16;
            case Format::REMAINDER8: return INSTEP_MASTER_REMAINDER8;
            default: return INSTEP_MASTER_NONE;
        }
    }

    INSTEP_DEVICE Run gradients() const {
        const bool is_aligned = is_full && format != Format::F32_SHIFTED;
        return {args.grads, tile().grad_offset, grad_dtype(), {count(), is_aligned}};
    }

    template <class T>
    INSTEP_DEVICE T* params() const {
        return static_cast<T*>(param_of(args, tile()));
    }

    /* Returns the tile's run in a stream with the offsets of the states. */
    template <class T>
    INSTEP_DEVICE T* of(void* base) const {
        return static_cast<T*>(base) + tile().state_offset;
    }

    INSTEP_DEVICE uint32_t random(uint32_t at, uint32_t stream) const {
        return RandomPosition(slot.key, tile().element + at).bits(0u, stream);
    }
};

}  // namespace

#endif
