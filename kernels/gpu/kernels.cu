/* This file makes all GPU code one translation unit, so that one compiler call makes one binary.
 *
 * Entries are extern "C" and take one struct of abi.h by value: instep_begin, instep_decide, instep_publish,
 * instep_norm, instep_custom, instep_add, instep_cast, and for every row of optimizers.def instep_step_<name> and
 * instep_step_<name>_8bit. A launch has INSTEP_GPU_THREADS threads per block, in one dimension, at least one block, and
 * no dynamic shared memory. A pass launches begin, norms, decide, steps and publish on one stream. Only some modes have
 * norms and decide. This file has only the includes. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "instep: the kernels need compute capability 8.0 or newer"
#endif

#include "abi_layout.h"
#include "gpu/add.cu"
#include "gpu/cast.cu"
#include "gpu/control.cu"
#include "gpu/norm.cu"
#include "gpu/step.cu"
