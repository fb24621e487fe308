/* Finds bytes that two threads of a launch touch, one of them writing, without a barrier between: a race on any GPU.
 *
 * Blocks run one after the other here, so a race need not change a bit. With -fsanitize=thread the kernels call these
 * hooks before every access, in place of ThreadSanitizer's runtime, which knows neither blocks nor shared memory. A
 * store that changes nothing is accepted, because it gives the same bits in any order. The hooks must see only accesses
 * of the kernels, so functions of the runner are marked INSTEP_RUNNER. */
#ifndef INSTEP_RACES_H
#define INSTEP_RACES_H

#include <string.h>

#include "fibers.h"

namespace races {

enum Kind { READ, WRITE, ATOMIC };

/* Without the hooks the detector would see only atomics and barriers, and could not judge accesses. */
#if defined(__SANITIZE_THREAD__)
constexpr bool HAS_HOOKS = true;
#else
constexpr bool HAS_HOOKS = false;
#endif

constexpr uint32_t NOBODY = 0, SEVERAL = 0xffffffffu, ATOMICS = 0xfffffffeu;

/* Threads of a launch count from 1; the other numbers are the barriers of the block and of the warp before the access.
 * Two accesses of one warp may lie between the same barriers of the block, and a barrier of the warp may order them. */
struct Access {
    uint32_t thread, block, barriers, warp, warp_barriers;
};

/* A byte. An access of another launch, or of another block's shared memory, is void. */
struct Place {
    uint64_t owner;
    Access written, read;
};

struct Page {
    uintptr_t number;
    Place places[4096];
};

constexpr uint64_t PAGES = 2048;
inline Page pages[PAGES];
inline uint64_t used_pages, owners, launch, shared; /* owners so far; that of the launch, and of shared memory */
inline bool watching;                               /* a thread of a kernel is running */

/* The last store, until the detector knows whether it changed anything. */
inline struct {
    uintptr_t address;
    size_t bytes;
    unsigned char before[64];
} store;

INSTEP_RUNNER inline Page& page_of(uintptr_t address) {
    const uintptr_t number = address / 4096 + 1;
    for (uint64_t k = number;; ++k) {
        Page& page = pages[k % PAGES];
        if (page.number == 0) {
            if (++used_pages == PAGES) fibers::fail("too much memory for the race detector");
            page.number = number;
        }
        if (page.number == number) return page;
    }
}

/* Returns whether `other` may happen at the same time as the current access. */
INSTEP_RUNNER inline bool is_concurrent(const Access& other, const Access& now) {
    if (other.thread == NOBODY || other.thread == now.thread) return false;
    if (other.block != now.block) return true;
    if (other.barriers != now.barriers) return false;
    return other.warp != now.warp || other.warp_barriers == now.warp_barriers;
}

INSTEP_RUNNER inline void judge(uintptr_t address, size_t bytes, Kind kind) {
    const uint32_t block = fibers::current_block;
    const bool is_shared = address - reinterpret_cast<uintptr_t>(fibers::shared_begin) < fibers::shared_bytes;
    Access now = {block * fibers::MOST + fibers::current + 1, block, static_cast<uint32_t>(fibers::block.generation),
                  fibers::current / fibers::WARP, fibers::all[fibers::current].warp_barriers};
    if (kind == ATOMIC) now.thread = ATOMICS, now.block = SEVERAL;
    Page* page = &page_of(address);
    for (uintptr_t at = address; at < address + bytes; ++at) {
        if (at % 4096 == 0) page = &page_of(at);
        Place& place = page->places[at % 4096];
        if (place.owner != (is_shared ? shared : launch)) place = {is_shared ? shared : launch, {}, {}};
        if (is_concurrent(place.written, now) || (kind != READ && is_concurrent(place.read, now))) {
            fibers::fail("a race: two threads touch the same bytes, one of them writes, and no barrier lies between");
        }
        if (kind != READ) {
            place.written = now;
        } else if (!is_concurrent(place.read, now)) {
            place.read = now;
        } else {
            place.read = {SEVERAL, place.read.block == block ? block : SEVERAL, now.barriers,
                          place.read.warp == now.warp ? now.warp : SEVERAL, now.warp_barriers};
        }
    }
}

/* Judges the last store before another thread runs. */
INSTEP_RUNNER inline void settle() {
    const size_t bytes = store.bytes;
    store.bytes = 0;
    if (bytes != 0 && memcmp(store.before, reinterpret_cast<void*>(store.address), bytes) != 0) {
        judge(store.address, bytes, WRITE);
    }
}

INSTEP_RUNNER inline bool is_local(uintptr_t address) {
    return address - reinterpret_cast<uintptr_t>(fibers::all[fibers::current].stack) < fibers::STACK_BYTES;
}

/* Another checker, in place of this detector. The checker is told of all accesses except those of shared memory and of
 * constants. */
inline void (*watcher)(const void*, size_t, int);
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start[], _end[];

INSTEP_RUNNER inline void tell(uintptr_t address, size_t bytes, Kind kind) {
    const uintptr_t own = reinterpret_cast<uintptr_t>(__ehdr_start);
    if (address - own >= reinterpret_cast<uintptr_t>(_end) - own) watcher(reinterpret_cast<void*>(address), bytes, kind);
}

INSTEP_RUNNER inline void access(const void* pointer, size_t bytes, Kind kind) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    if (!HAS_HOOKS || !watching || is_local(address)) return;
    if (watcher != nullptr) return tell(address, bytes, kind);
    settle();
    if (kind != WRITE || bytes > sizeof store.before) return judge(address, bytes, kind);
    store.address = address;
    store.bytes = bytes;
    memcpy(store.before, pointer, bytes);
}

INSTEP_RUNNER inline void open_launch() {
    if (used_pages > PAGES / 2) {
        for (Page& page : pages) page.number = 0;
        used_pages = 0;
    }
    launch = ++owners;
}

INSTEP_RUNNER inline void open_block() { shared = ++owners; }

}  // namespace races

/* g++ inserts calls of these functions. */
#define INSTEP_HOOK(name, bytes, kind)                                                                     \
    extern "C" INSTEP_RUNNER void __tsan_##name(const void* pointer) { \
        races::access(pointer, bytes, races::kind);                                                        \
    }
#define INSTEP_HOOKS(bytes)                            \
    INSTEP_HOOK(read##bytes, bytes, READ)              \
    INSTEP_HOOK(unaligned_read##bytes, bytes, READ)    \
    INSTEP_HOOK(volatile_read##bytes, bytes, READ)     \
    INSTEP_HOOK(write##bytes, bytes, WRITE)            \
    INSTEP_HOOK(unaligned_write##bytes, bytes, WRITE)  \
    INSTEP_HOOK(volatile_write##bytes, bytes, WRITE)
INSTEP_HOOKS(1)
INSTEP_HOOKS(2)
INSTEP_HOOKS(4)
INSTEP_HOOKS(8)
INSTEP_HOOKS(16)
extern "C" INSTEP_RUNNER void __tsan_read_range(const void* pointer, size_t bytes) {
    races::access(pointer, bytes, races::READ);
}
extern "C" INSTEP_RUNNER void __tsan_write_range(const void* pointer, size_t bytes) {
    races::access(pointer, bytes, races::WRITE);
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}

#endif
