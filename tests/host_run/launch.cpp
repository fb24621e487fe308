/* Launches a GPU kernel on the CPU: blocks one by one, the threads of each block as fibers, in a requested order.
 *
 * scripts/host-run-lane.py compiles kernels.cu and this file into a shared object with one symbol, `instep_host_run`,
 * which tests/host_run/launch.rs opens. A fault must show in the result or end the program: no function here returns an
 * error. */
#include "cuda_on_cpu.h"
#include "cuda_pipeline.h"
/* The kernels as nvcc compiles them, and those that only tests run. */
#include "gpu/kernels.cu"
#include "gpu/naive.cu"

#include <string.h>

extern char __start_instep_shared[], __stop_instep_shared[];

namespace {

enum Order : uint32_t { FORWARD, BACKWARD, SHUFFLED };

/* Returns the k-th of `count` in this order. A stride without a common factor with `count` visits each number once. */
uint32_t pick(uint32_t order, uint32_t k, uint32_t count) {
    if (order == FORWARD) return k;
    if (order == BACKWARD) return count - 1 - k;
    uint64_t stride = count / 2 + count / 8 + 1;
    const auto divides = [](uint64_t a, uint64_t b) {
        while (b != 0) {
            const uint64_t rest = a % b;
            a = b;
            b = rest;
        }
        return a != 1;
    };
    while (divides(stride, count)) ++stride;
    return static_cast<uint32_t>((k * stride + count / 3) % count);
}

/* A fiber begins here. The function never returns, so it must have no frame that a sanitizer would unwind. */
__attribute__((no_sanitize("address", "undefined", "thread"), noinline)) void enter() {
    fibers::Fiber& self = fibers::all[fibers::current];
#if defined(__SANITIZE_ADDRESS__)
    fibers::entered();
#endif
    fibers::body(fibers::argument);
    if (fibers::copies[fibers::current].asked != 0) fibers::fail("a thread leaves before its copies have arrived");
    self.done = true;
    fibers::switch_to(self, fibers::scheduler);
    fibers::fail("a fiber that is done goes on");
}

INSTEP_RUNNER void open_fiber(fibers::Fiber& fiber) {
    if (fiber.stack == nullptr) {
        const size_t bytes = fibers::STACK_BYTES + fibers::GUARD_BYTES;
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) fibers::fail("no memory for stacks");
        if (mprotect(memory, fibers::GUARD_BYTES, PROT_NONE) != 0) fibers::fail("no guard below a stack");
        fiber.stack = static_cast<char*>(memory) + fibers::GUARD_BYTES;
    }
    /* Six registers and the address to return to; the callee expects the stack 8 bytes after a multiple of 16. */
    void** top = reinterpret_cast<void**>(fiber.stack + fibers::STACK_BYTES) - 8;
    memset(top, 0, 8 * sizeof(void*));
    top[6] = reinterpret_cast<void*>(enter);
    fiber.stack_pointer = top;
    fiber.fake_stack = nullptr;
    fiber.waits_for = nullptr;
    fiber.warp_barriers = 0;
    fiber.done = false;
}

INSTEP_RUNNER bool is_runnable(const fibers::Fiber& fiber) {
    return !fiber.done && (fiber.waits_for == nullptr || fiber.waits_for->generation != fiber.generation);
}

/* The order in which the runner asks threads whether they can continue. */
uint32_t turns[fibers::MOST];

INSTEP_RUNNER void run_block(uint32_t threads) {
    memset(__start_instep_shared, 0xa5, static_cast<size_t>(__stop_instep_shared - __start_instep_shared));
    fibers::block = {threads, 0, 0, nullptr, 0, {}};
    for (uint32_t w = 0; w < threads / fibers::WARP; ++w) fibers::warps[w] = {fibers::WARP, 0, 0, nullptr, 0, {}};
    races::open_block();
    for (uint32_t t = 0; t < threads; ++t) open_fiber(fibers::all[t]);
    for (uint32_t left = threads; left != 0;) {
        bool progress = false;
        for (uint32_t k = 0; k < threads; ++k) {
            const uint32_t t = turns[k];
            fibers::Fiber& fiber = fibers::all[t];
            if (!is_runnable(fiber)) continue;
            progress = true;
            fiber.waits_for = nullptr;
            fibers::current = threadIdx.x = t;
            races::watching = true;
            fibers::switch_to(fibers::scheduler, fiber);
            races::settle();
            races::watching = false;
            left -= fiber.done;
        }
        if (!progress) fibers::fail("threads wait for others that have left or wait elsewhere");
    }
}

template <class Args, void (*kernel)(Args)>
void call(const void* args) {
    kernel(*static_cast<const Args*>(args));
}

struct Entry {
    const char* name;
    void (*call)(const void*);
};

const Entry ENTRIES[] = {
    {"instep_begin", call<InstepBeginArgs, instep_begin>},
    {"instep_decide", call<InstepDecideArgs, instep_decide>},
    {"instep_publish", call<InstepPublishArgs, instep_publish>},
    {"instep_norm", call<InstepStepArgs, instep_norm>},
    {"instep_custom", call<InstepStepArgs, instep_custom>},
    {"instep_add", call<InstepAddArgs, instep_add>},
    {"instep_cast", call<InstepCastArgs, instep_cast>},
#define OPTIMIZER(name, Rule, min_states, max_states) \
    {"instep_step_" #name, call<InstepStepLaunch, instep_step_##name>}, \
    {"instep_step_" #name "_8bit", call<InstepStepLaunch, instep_step_##name##_8bit>}, \
    {"instep_naive_" #name, call<InstepStepArgs, instep_naive_##name>},
#include "optimizers.def"
#undef OPTIMIZER
};

}  // namespace

/* `args` is the kernel's struct in abi.h; `threads` is a multiple of 32. */
extern "C" __attribute__((visibility("default"))) void instep_host_run(const char* kernel, const void* args,
                                                                       uint32_t blocks, uint32_t threads,
                                                                       uint32_t order) {
    for (const Entry& entry : ENTRIES) {
        if (strcmp(entry.name, kernel) != 0) continue;
        if (threads == 0 || threads % fibers::WARP != 0 || threads > fibers::MOST) fibers::fail("a launch that fails");
        fibers::body = entry.call;
        fibers::argument = args;
        fibers::shared_begin = __start_instep_shared;
        fibers::shared_bytes = static_cast<size_t>(__stop_instep_shared - __start_instep_shared);
        races::open_launch();
        gridDim.x = blocks;
        blockDim.x = threads;
        for (uint32_t k = 0; k < threads; ++k) turns[k] = pick(order, k, threads);
        for (uint32_t k = 0; k < blocks; ++k) {
            fibers::current_block = blockIdx.x = pick(order, k, blocks);
            run_block(threads);
        }
        return;
    }
    fibers::fail("no such kernel");
}

/* Lets another checker see every access before it happens: the address, the bytes, and the kind in races.h. */
extern "C" __attribute__((visibility("default"))) void instep_host_run_watch(void (*watcher)(const void*, size_t, int)) {
    if (!races::HAS_HOOKS) fibers::fail("compiled without hooks: nothing can be watched");
    races::watcher = watcher;
}
