/* All kernels of the GPU's benches as one module, because a launcher loads one image.
 *
 * scripts/bench-kernels.sh compiles this file. It must hold nothing but includes. */
#include "backward.cu"
#include "copy.cu"
