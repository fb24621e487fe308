/* The threads of one block run as fibers of one thread: each runs until it must wait for others, then the next one
 * runs.
 *
 * Behavior that CUDA leaves undefined ends the program with a message: lanes that meet in different operations, threads
 * that leave while others wait for them. AddressSanitizer is told of every switch, because it would otherwise report
 * the stacks. Two threads must not use this header at a time: blocks run one after the other, as if each had the GPU
 * for itself. */
#ifndef INSTEP_FIBERS_H
#define INSTEP_FIBERS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#error "instep: say here how this architecture switches stacks"
#endif

/* Saves the callee-saved registers on the old stack, and returns on the new one. */
extern "C" void instep_switch_stack(void** save, void* target);
__asm__(
    ".text\n.globl instep_switch_stack\n.hidden instep_switch_stack\n.type instep_switch_stack, @function\n"
    "instep_switch_stack:\n"
    "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
    "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n"
    ".size instep_switch_stack, . - instep_switch_stack\n");

/* The code of the runner is not the kernels' code, so the race detector ignores it. */
#define INSTEP_RUNNER __attribute__((no_sanitize("thread")))

namespace fibers {

constexpr uint32_t MOST = 1024, WARP = 32;
constexpr size_t STACK_BYTES = 128 << 10, GUARD_BYTES = 4096;

[[noreturn]] inline void fail(const char* what) {
    fprintf(stderr, "host run: %s\n", what);
    abort();
}

/* Threads that wait for each other: a warp or a block. Values alternate between two rows, so that a fast lane's next
 * value does not overwrite a value that a slow lane has yet to read. */
struct Group {
    uint32_t size, arrived;
    uint64_t generation;
    const char* operation;
    int line;
    uint64_t values[2][WARP];
};

struct Fiber {
    void* stack_pointer;
    char* stack;
    void* fake_stack; /* AddressSanitizer's */
    Group* waits_for;
    uint64_t generation;
    uint32_t warp_barriers; /* passed by this thread, and by its warp */
    bool done;
};

inline Fiber all[MOST], scheduler;
inline Group warps[MOST / WARP], block;
inline uint32_t current, current_block;
inline char* shared_begin;
inline size_t shared_bytes;
inline void (*body)(const void*);
inline const void* argument;

/* Leaves `from` for good if it is done, or else until somebody switches to it. */
#if defined(__SANITIZE_ADDRESS__)
inline const void* scheduler_stack;
inline size_t scheduler_stack_bytes;

/* Runs first in a new fiber. */
inline void entered() { __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes); }

INSTEP_RUNNER inline void switch_to(Fiber& from, Fiber& to) {
    const bool back = &to == &scheduler;
    __sanitizer_start_switch_fiber(from.done ? nullptr : &from.fake_stack, back ? scheduler_stack : to.stack,
                                   back ? scheduler_stack_bytes : STACK_BYTES);
    instep_switch_stack(&from.stack_pointer, to.stack_pointer);
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
}
#else
INSTEP_RUNNER inline void switch_to(Fiber& from, Fiber& to) {
    instep_switch_stack(&from.stack_pointer, to.stack_pointer);
}
#endif

INSTEP_RUNNER inline uint64_t* values_of(Group& group, uint64_t generation) { return group.values[generation % 2]; }

/* Waits until the whole group has called this from the same line of a kernel; returns the number of the meeting. */
INSTEP_RUNNER inline uint64_t meet(Group& group, const char* operation, int line, uint32_t member, uint64_t value) {
    Fiber& self = all[current];
    const uint64_t generation = group.generation;
    if (group.arrived == 0) group.operation = operation, group.line = line;
    if (group.operation != operation || group.line != line) fail("threads of a group meet in different operations");
    if (member < WARP) values_of(group, generation)[member] = value;
    if (++group.arrived == group.size) {
        group.arrived = 0;
        ++group.generation;
        return generation;
    }
    self.waits_for = &group;
    self.generation = generation;
    switch_to(self, scheduler);
    return generation;
}

}  // namespace fibers

#endif
