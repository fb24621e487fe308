/* A driver's library for tests: every function that the crate looks up, on a device that does nothing.
 *
 * ELAPSED_V1 and ELAPSED_V2 give it the older and the newer way to time events, which answer 1 and 2 ms. NO_POOLS is a
 * driver before stream-ordered memory. INIT and QUERY are the answers of cuInit and cuEventQuery. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;

#ifndef INIT
#define INIT 0
#endif
#ifndef QUERY
#define QUERY 0
#endif

static int handle;

CUresult cuInit(unsigned flags) { return INIT; }
CUresult cuDriverGetVersion(int *version) { *version = 12020; return 0; }
CUresult cuGetErrorName(CUresult error, const char **name) {
    if (error == 700) {
        *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
        return 0;
    }
    *name = NULL;
    return 1;
}
CUresult cuDeviceGetCount(int *count) { *count = 1; return 0; }
CUresult cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute; return 0; }
CUresult cuDeviceGetName(char *name, int bytes, int device) { strncpy(name, "a test", bytes); return 0; }
CUresult cuDevicePrimaryCtxRetain(void **context, int device) { *context = &handle; return 0; }
CUresult cuCtxGetCurrent(void **context) { *context = 0; return 0; }
CUresult cuCtxPushCurrent_v2(void *context) { return 0; }
CUresult cuCtxPopCurrent_v2(void **context) { *context = &handle; return 0; }
CUresult cuModuleLoadData(void **module, const void *image) { *module = &handle; return 0; }
CUresult cuModuleGetFunction(void **function, void *module, const char *name) { *function = &handle; return 0; }
CUresult cuModuleUnload(void *module) { return 0; }
CUresult cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) { *stream = &handle; return 0; }
CUresult cuStreamDestroy_v2(void *stream) { return 0; }
CUresult cuStreamGetCtx(void *stream, void **context) { *context = &handle; return 0; }
CUresult cuStreamSynchronize(void *stream) { return 0; }
CUresult cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return 0; }
CUresult cuStreamBeginCapture_v2(void *stream, int mode) { return 0; }
CUresult cuStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id, void **graph, const void **nodes,
                                   size_t *count) {
    if (graph || nodes || count) return 1;
    *status = 0;
    return 0;
}
CUresult cuStreamEndCapture(void *stream, void **graph) { *graph = &handle; return 0; }
CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address) { return 1; }
CUresult cuEventCreate(void **event, unsigned flags) { *event = &handle; return 0; }
CUresult cuEventDestroy_v2(void *event) { return 0; }
/* The legacy default stream is broken. */
CUresult cuEventRecord(void *event, void *stream) { return stream ? 0 : 700; }
CUresult cuEventQuery(void *event) { return QUERY; }
#ifdef ELAPSED_V1
CUresult cuEventElapsedTime(float *ms, void *from, void *to) { *ms = 1; return 0; }
#endif
#ifdef ELAPSED_V2
CUresult cuEventElapsedTime_v2(float *ms, void *from, void *to) { *ms = 2; return 0; }
#endif
#ifndef NO_POOLS
CUresult cuMemPoolCreate(void **pool, const void *props) { *pool = &handle; return 0; }
CUresult cuMemPoolSetAttribute(void *pool, int attribute, void *value) { return 0; }
CUresult cuMemPoolDestroy(void *pool) { return 0; }
CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, void *pool, void *stream) { *address = 256; return 0; }
#endif
CUresult cuMemFreeAsync(CUdeviceptr address, void *stream) { return 0; }
CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags) { *address = malloc(bytes); return 0; }
CUresult cuMemFreeHost(void *address) { free(address); return 0; }
CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t bytes, void *stream) { return 0; }
CUresult cuMemsetD16Async(CUdeviceptr address, unsigned short value, size_t count, void *stream) { return 0; }
CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, void *stream) { return 0; }
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, void *stream) { return 0; }
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, void *stream) { return 0; }
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, void *stream) { return 0; }
CUresult cuLaunchKernel(void *function, unsigned bx, unsigned by, unsigned bz, unsigned tx, unsigned ty, unsigned tz,
                        unsigned shared, void *stream, void **arguments, void **extra) { return 0; }
CUresult cuLaunchHostFunc(void *stream, void (*function)(void *), void *argument) { return 0; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
    *blocks = 4;
    return 0;
}
CUresult cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) { *exec = &handle; return 0; }
CUresult cuGraphDestroy(void *graph) { return 0; }
CUresult cuGraphLaunch(void *exec, void *stream) { return 0; }
CUresult cuGraphExecDestroy(void *exec) { return 0; }
