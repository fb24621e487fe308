/* The descriptors of a warp's tiles, read before the warp comes to them.
 *
 * What a tile is depends on its InstepTile, and how it is stepped on the record that this names: two loads, one after
 * the other, before the first element. While a warp steps one tile, its lanes copy the next tile's record and the
 * InstepTile after that into shared memory (cp.async, PTX ISA). Slots are a warp's own, so no barrier of the block is
 * needed. There is one more than are in use, so none is written while a slow lane may still read it.
 *
 * `stepped` of a record is not copied: other blocks write it meanwhile. */
#ifndef INSTEP_GPU_PREFETCH_CUH
#define INSTEP_GPU_PREFETCH_CUH

#include <cuda_pipeline.h>
#include <stddef.h>

#include "gpu/vector.cuh"

namespace {

constexpr uint32_t WARPS = INSTEP_GPU_THREADS / 32;
constexpr uint32_t TILE_WORDS = sizeof(InstepTile) / 8, RECORD_WORDS = sizeof(InstepRecord) / 8;
constexpr uint32_t UNREAD_WORD = offsetof(InstepRecord, stepped) / 8;
static_assert(TILE_WORDS <= 32 && RECORD_WORDS <= 32, "a lane per word");

/* Shared memory: a tile and its record, as words. */
struct TileSlot {
    uint64_t words[TILE_WORDS + RECORD_WORDS];

    INSTEP_DEVICE const InstepTile& tile() const { return *reinterpret_cast<const InstepTile*>(words); }
    INSTEP_DEVICE const InstepRecord& record() const {
        return *reinterpret_cast<const InstepRecord*>(words + TILE_WORDS);
    }
};

constexpr uint32_t SLOTS = 4;
using TileSlots = TileSlot[WARPS][SLOTS];

/* The tiles of a block: the first is its own number, and each next is gridDim further. */
struct TilePrefetch {
    const InstepStepArgs& args;
    TileSlots& slots;
    uint32_t number, turn; /* of the current tile, and of its slot */

    INSTEP_DEVICE bool has_tile() const { return number < args.tile_count; }
    INSTEP_DEVICE const TileSlot& current() const { return slot_of(0); }

    INSTEP_DEVICE void open() const {
        copy_tile(0);
        copy_tile(1);
        arrive();
        copy_record(0);
        arrive();
    }

    /* Issues the copies for the next two tiles. Nothing waits for them before `advance`. */
    INSTEP_DEVICE void look_ahead() const {
        copy_record(1);
        copy_tile(2);
    }

    INSTEP_DEVICE void advance() {
        arrive();
        number += gridDim.x;
        turn = (turn + 1) % SLOTS;
    }

  private:
    /* Of the tile that is `ahead` of the current one. A bucket has far fewer tiles than 2^32, and a grid no more blocks
     * than tiles. */
    INSTEP_DEVICE uint32_t number_of(uint32_t ahead) const { return number + ahead * gridDim.x; }
    INSTEP_DEVICE TileSlot& slot_of(uint32_t ahead) const { return slots[threadIdx.x / 32][(turn + ahead) % SLOTS]; }

    /* After it every lane sees what any lane has copied. */
    INSTEP_DEVICE static void arrive() {
        __pipeline_commit();
        __pipeline_wait_prior(0);
        __syncwarp();
    }

    INSTEP_DEVICE void copy_tile(uint32_t ahead) const {
        const uint32_t lane = threadIdx.x % 32;
        const uint32_t tile = number_of(ahead);
        if (lane < TILE_WORDS && tile < args.tile_count) {
            copy_word(slot_of(ahead).words + lane, reinterpret_cast<const uint64_t*>(&args.tiles[tile]) + lane);
        }
    }

    INSTEP_DEVICE void copy_record(uint32_t ahead) const {
        const uint32_t lane = threadIdx.x % 32;
        if (lane < RECORD_WORDS && lane != UNREAD_WORD && number_of(ahead) < args.tile_count) {
            TileSlot& slot = slot_of(ahead);
            copy_word(slot.words + TILE_WORDS + lane,
                      reinterpret_cast<const uint64_t*>(&args.records[slot.tile().record]) + lane);
        }
    }

    INSTEP_DEVICE static void copy_word(uint64_t* to, const uint64_t* from) {
        __pipeline_memcpy_async(to, from, sizeof *to);
    }
};

}  // namespace

#endif
