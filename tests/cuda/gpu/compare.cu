/* Conversions by instruction against the same by integers, as math.h has both, for a range of inputs; and what a step
 * stores by integers alone against what it must be.
 *
 * scripts/gpu-bundle.sh compiles this for tests/cuda/gpu/conversions.rs, with the library's own flags. Must count every
 * difference, and name the lowest input of each kind. */
#include "numeric/math.h"
#include "numeric/remainder.h"

namespace {

/* In memory of the host's: to bf16, to f16, from f16, to bf16 by chance, to 24 bits, through 16-bit remainders, through
 * 8-bit ones. */
struct Differences {
    unsigned long long count[7];
    unsigned long long lowest[7]; /* input */
};

struct CompareArgs {
    Differences* differences;
    uint64_t first, count; /* inputs: bits of an f32, and its lower half those of an f16 */
};

__device__ void note(Differences* differences, int kind, uint64_t input) {
    atomicAdd(&differences->count[kind], 1ull);
    atomicMin(&differences->lowest[kind], static_cast<unsigned long long>(input));
}

}  // namespace

extern "C" __global__ void instep_compare_conversions(const __grid_constant__ CompareArgs args) {
    const uint64_t stride = static_cast<uint64_t>(gridDim.x) * blockDim.x;
    for (uint64_t k = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; k < args.count; k += stride) {
        const uint64_t input = args.first + k;
        const float x = float_of(static_cast<uint32_t>(input));
        if (bfloat16_of(x) != bfloat16_by_integers(x)) note(args.differences, 0, input);
        if (half_of(x) != half_by_integers(x)) note(args.differences, 1, input);
        /* Draws of a half, or just below it where a tie goes to the lower neighbour, round to the nearest. */
        const uint32_t bits = bits_of(x);
        if (bfloat16_stochastic(x, 0x7fffu + (bits >> 16 & 1u)) != bfloat16_of(x)) note(args.differences, 3, input);
        const float master = canonical(x), rounded = rounded_to_24(master);
        if (bits_of(rounded_to_24(master, 0x7fu + (bits >> 8 & 1u))) != bits_of(rounded)) {
            note(args.differences, 4, input);
        }
        const Split wide_split = split_to_16(master), split = split_to_8(rounded);
        const float joined = joined_with_16(wide_split.param, wide_split.remainder);
        if (bits_of(joined) != bits_of(master)) note(args.differences, 5, input);
        const float joined_of_24 = joined_with_8(split.param, static_cast<uint8_t>(split.remainder));
        if (bits_of(joined_of_24) != bits_of(rounded)) note(args.differences, 6, input);
        if (input > 0xffffu) continue;
        /* A NaN's payload is the instruction's business: it is one value wherever it is stored. */
        const float wide = canonical(from_half(static_cast<uint16_t>(input)));
        const float expected = canonical(from_half_by_integers(static_cast<uint16_t>(input)));
        if (bits_of(wide) != bits_of(expected)) note(args.differences, 2, input);
    }
}
