/* On a CPU, adds the tiles of a bucket to the norm of the pass.
 *
 * This file reads only gradients, because the arguments may have no parameters and no states. */
#ifndef INSTEP_CPU_NORM_H
#define INSTEP_CPU_NORM_H

#include "cpu/part.h"
#include "cpu/squares.h"
#include "numeric/control.h"

namespace {

__attribute__((noinline)) void norm_tiles(const InstepStepArgs* args, const InstepBases* bases, uint64_t first,
                                          uint64_t last) {
    Placed placed(*args, bases);
    Squares squares;
    for (uint64_t t = first; t < last; ++t) {
        const InstepTile& tile = args->tiles[t];
        if (record_action(*args, args->records[tile.record]) != INSTEP_ACTION_STEP) continue;
        float wide[INSTEP_TILE_ELEMENTS];
        squares.add(gradients(placed.at(tile), tile.grad_offset, tile.count, wide), tile.count);
    }
    squares.add_to(args->control->limbs);
    atomic_maximum(&args->control->max_abs_bits, squares.magnitude());
    const bool overflows = first < last && has_nonfinite_mean(*args, args->tiles[first], squares.magnitude());
    if (overflows) atomic_minimum(&args->control->first_nonfinite_bucket, args->bucket);
}

}  // namespace

#endif
