/* Sets the IEEE default floating-point environment while an entry of the CPU's kernels runs.
 *
 * Every entry opens an environment and then calls the function that computes. That function is not inlined, because the
 * compiler could move arithmetic out of the environment. An entry always restores the caller's environment. */
#ifndef INSTEP_CPU_ENVIRONMENT_H
#define INSTEP_CPU_ENVIRONMENT_H

#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

/* Threads inherit flush-to-zero and rounding modes. A library linked with -ffast-math is enough to set these modes.
 * Each entry therefore runs in the IEEE default environment. */
class IeeeEnvironment {
  public:
#if defined(__x86_64__)
    IeeeEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~IeeeEnvironment() { _mm_setcsr(saved_); }

  private:
    uint32_t saved_;
#elif defined(__aarch64__)
    IeeeEnvironment() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
        __asm__ volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
    }
    ~IeeeEnvironment() { __asm__ volatile("msr fpcr, %0" ::"r"(saved_)); }

  private:
    uint64_t saved_;
#else
#error "instep: say here how this architecture selects the IEEE environment"
#endif
};

}  // namespace

#endif
