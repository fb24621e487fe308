/* CUDA's asynchronous copies into shared memory, for g++: the part of <cuda_pipeline.h> that the kernels use.
 *
 * This header must not be more lenient than a GPU: a copy moves nothing before its thread waits for it, and it then
 * moves the bytes that the source has at that time. A value that is used before the wait is therefore garbage, and a
 * source that changes meanwhile shows. */
#ifndef INSTEP_CUDA_PIPELINE_ON_CPU_H
#define INSTEP_CUDA_PIPELINE_ON_CPU_H

#include "fibers.h"
#include "races.h"

namespace fibers {

struct Copy {
    void* to;
    const void* from;
    size_t bytes;
};

constexpr uint32_t MOST_COPIES = 4;

/* The copies that a thread has started and not yet waited for. */
struct Copies {
    Copy list[MOST_COPIES];
    uint32_t asked, committed;
};

inline Copies copies[MOST];

}  // namespace fibers

INSTEP_RUNNER inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
    fibers::Copies& mine = fibers::copies[fibers::current];
    const uintptr_t both = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
    if (bytes != 4 && bytes != 8 && bytes != 16) fibers::fail("an asynchronous copy of another size than 4, 8 or 16 bytes");
    if (both % bytes != 0) fibers::fail("an asynchronous copy that is misaligned");
    if (mine.asked == fibers::MOST_COPIES) fibers::fail("more asynchronous copies than this runner keeps");
    mine.list[mine.asked++] = {to, from, bytes};
}

INSTEP_RUNNER inline void __pipeline_commit() {
    fibers::Copies& mine = fibers::copies[fibers::current];
    mine.committed = mine.asked;
}

INSTEP_RUNNER inline void __pipeline_wait_prior(size_t groups) {
    fibers::Copies& mine = fibers::copies[fibers::current];
    if (groups != 0) fibers::fail("a wait for only some copies, which this runner does not know");
    if (mine.committed != mine.asked) fibers::fail("a wait for copies that were not committed");
    for (uint32_t k = 0; k < mine.asked; ++k) {
        const fibers::Copy& copy = mine.list[k];
        races::access(copy.from, copy.bytes, races::READ);
        races::access(copy.to, copy.bytes, races::WRITE);
        memcpy(copy.to, copy.from, copy.bytes);
    }
    mine.asked = mine.committed = 0;
}

#endif
