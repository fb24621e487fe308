/* Reads the descriptors of a warp's tiles before the warp needs them.
 *
 * An InstepTile describes a tile and names its record, and the record says how to step it. Two dependent loads
 * therefore come before the first element. While a warp steps one run of tiles, its lanes copy data ahead into
 * shared memory (cp.async, PTX ISA): the next run's record, and the first InstepTile after that run. Each warp has
 * its own slots, so no barrier of the block is needed. There is one slot more than needed, so no slot is written
 * while a slow lane may still read it.
 *
 * The member `stepped` of a record is not copied, because other blocks write it at that time. If a launch has no table
 * of records, its argument has the records. Plain stores then put them into shared memory. */
#ifndef INSTEP_GPU_PREFETCH_CUH
#define INSTEP_GPU_PREFETCH_CUH

#include <cuda_pipeline.h>
#include <stddef.h>

#include "gpu/vector.cuh"
#include "numeric/random.h"

namespace {

constexpr uint32_t WARPS = INSTEP_GPU_THREADS / 32;
constexpr uint32_t TILE_WORDS = sizeof(InstepTile) / 8, RECORD_WORDS = sizeof(InstepRecord) / 8;
constexpr uint32_t UNREAD_WORD = offsetof(InstepRecord, stepped) / 8;
static_assert(TILE_WORDS + RECORD_WORDS <= 32, "a lane per word");
static_assert(sizeof(InstepStepLaunch) <= 4096, "every driver takes as many bytes of arguments");

/* Shared memory for a run of tiles: the first tile and its record, as words. */
struct TileSlot {
    uint64_t words[TILE_WORDS + RECORD_WORDS];
    uint32_t count; /* elements of the run */
    uint32_t next;  /* number of the tile after the run */
    uint32_t place; /* number of this slot among the slots of its warp */
    float multiplier; /* of its gradients, if means are written or it differs between runs */
    RandomKey key;    /* of its parameter's update, if rounding is stochastic */

    INSTEP_DEVICE const InstepTile& tile() const { return *reinterpret_cast<const InstepTile*>(words); }
    INSTEP_DEVICE const InstepRecord& record() const {
        return *reinterpret_cast<const InstepRecord*>(words + TILE_WORDS);
    }
};

constexpr uint32_t SLOTS = 4;
using TileSlots = TileSlot[SLOTS]; /* of a warp */

/* The runs of a block's tiles. Full tiles that are adjacent in memory are one run, so a block of a large parameter
 * reads one descriptor and one record. A bucket has far fewer than 2^32 tiles. */
struct TilePrefetch {
    const InstepStepArgs& args;
    const InstepGiven* given; /* null for a kernel that always has records */
    TileSlot* slot; /* of the current run; nothing else is kept in registers */

    INSTEP_DEVICE const TileSlot& current() const { return *slot; }

    /* Issues the copy of the first tile. */
    INSTEP_DEVICE void ask() const {
        const uint32_t word = threadIdx.x % 32;
        if (word < TILE_WORDS && first() < end()) copy_word(*slot, word, &args.tiles[first()]);
    }

    /* Opens the first run, after `ask`. Returns whether the block has a run. */
    INSTEP_DEVICE bool open() const {
        const uint32_t word = threadIdx.x % 32;
        if (first() >= end()) return false;
        if (word < SLOTS) slot[word].place = word;
        arrive();
        const uint32_t next = after(*slot, first());
        set_run(*slot, first(), next);
        if (next < end() && word < TILE_WORDS) copy_word(slot[1], word, &args.tiles[next]);
        if (is_read(word)) copy_record_word(*slot, word);
        arrive();
        return true;
    }

    /* Issues the copies of the next run's record, and of the tile after that run. Nothing waits for them before
     * `advance`. */
    INSTEP_DEVICE void look_ahead() const {
        const uint32_t word = threadIdx.x % 32, next = slot->next;
        if (next >= end()) return;
        TileSlot& following = slot_of(1);
        const uint32_t second = after(following, next);
        set_run(following, next, second);
        if (word < TILE_WORDS) {
            if (second < end()) copy_word(slot_of(2), word, &args.tiles[second]);
        } else if (is_read(word)) {
            copy_record_word(following, word);
        }
    }

    /* Moves to the next run. Returns whether there is one. */
    INSTEP_DEVICE bool advance() {
        if (current().next >= end()) return false;
        arrive();
        slot = &slot_of(1);
        return true;
    }

    /* All lanes of a warp call this together. Afterwards every lane sees the multiplier. */
    INSTEP_DEVICE void set_multiplier(float multiplier) const {
        if (threadIdx.x % 32 == 0) slot->multiplier = multiplier;
        __syncwarp();
    }

    /* All lanes of a warp call this together. Afterwards every lane sees the key. */
    INSTEP_DEVICE void set_key(const RandomKey& key) const {
        if (threadIdx.x % 32 == 0) slot->key = key;
        __syncwarp();
    }

  private:
    INSTEP_DEVICE uint32_t share() const { return static_cast<uint32_t>(args.share); }

    /* The number of this block's first tile, and that of the next block's first tile. */
    INSTEP_DEVICE uint32_t first() const { return blockIdx.x * share(); }
    INSTEP_DEVICE uint32_t end() const {
        const uint32_t tiles = static_cast<uint32_t>(args.tile_count), end = (blockIdx.x + 1) * share();
        return end < tiles ? end : tiles;
    }

    INSTEP_DEVICE TileSlot& slot_of(uint32_t ahead) const {
        const uint32_t place = slot->place;
        return (slot - place)[(place + ahead) % SLOTS];
    }

    /* Returns the number of the tile after the run that begins with tile `first`. */
    INSTEP_DEVICE uint32_t after(const TileSlot& slot, uint32_t first) const {
        const uint32_t run = slot.tile().run, most = end() - first;
        return first + (run < most ? run : most);
    }

    /* Sets the run of a slot. The lanes must meet in `arrive` afterwards. */
    INSTEP_DEVICE static void set_run(TileSlot& slot, uint32_t first, uint32_t next) {
        if (threadIdx.x % 32 != 0) return;
        slot.count = slot.tile().count * (next - first);
        slot.next = next;
    }

    /* Returns whether the lane for this word copies a word of a record. */
    INSTEP_DEVICE static bool is_read(uint32_t word) {
        return word - TILE_WORDS < RECORD_WORDS && word - TILE_WORDS != UNREAD_WORD;
    }

    /* After this call every lane sees the writes of all lanes. */
    INSTEP_DEVICE static void arrive() {
        __pipeline_commit();
        __pipeline_wait_prior(0);
        __syncwarp();
    }

    /* Copies one word of the record of a slot's tile, from the table or from the argument. */
    INSTEP_DEVICE void copy_record_word(TileSlot& slot, uint32_t word) const {
        const uint32_t record = slot.tile().record;
        if (!given || args.records) return copy_word(slot, word, &args.records[record]);
        const InstepRecord& one = given->records[given->record_of[record]];
        slot.words[word] = reinterpret_cast<const uint64_t*>(&one)[word - TILE_WORDS];
    }

    /* Copies one word of a slot from its tile or from its record. */
    INSTEP_DEVICE static void copy_word(TileSlot& slot, uint32_t word, const void* from) {
        const uint32_t first = word < TILE_WORDS ? 0 : TILE_WORDS;
        __pipeline_memcpy_async(slot.words + word, static_cast<const uint64_t*>(from) + (word - first), 8);
    }
};

}  // namespace

#endif
