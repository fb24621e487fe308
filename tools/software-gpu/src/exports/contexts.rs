//! Contexts: the primary context of each device, other contexts, and which one is current.
//!
//! A thread has a stack of contexts; `cuCtxSetCurrent` replaces its top. A green context has all processors of its
//! device.

use std::ffi::{c_int, c_uint};

use super::{exported, handle, pointer, put};
use crate::contexts::current_handle;
use crate::header::{
    CUcontext, CUctxCreateParams, CUdevResource, CUdevResourceDesc, CUdevResourceType, CUdevice, CUgreenCtx,
    cudaError_enum as Code,
};

exported! {
    call cuDevicePrimaryCtxRetain(gpu, context: *mut CUcontext, device: CUdevice) {
        let retained = gpu.retain_primary(device)?;
        put(context, pointer(retained))
    }

    call cuDevicePrimaryCtxRelease_v2(gpu, device: CUdevice) { gpu.release_primary(device) }

    call cuCtxCreate_v4(
        gpu, context: *mut CUcontext, _parameters: *mut CUctxCreateParams, _flags: c_uint, device: CUdevice
    ) {
        let made = gpu.create_context(device, false)?;
        gpu.push_current(made)?;
        put(context, pointer(made))
    }

    call cuCtxDestroy_v2(gpu, context: CUcontext) { gpu.destroy_context(handle(context)) }

    call cuCtxGetCurrent(_gpu, context: *mut CUcontext) { put(context, pointer(current_handle())) }

    call cuCtxSetCurrent(gpu, context: CUcontext) { gpu.set_current(handle(context)) }

    call cuCtxPushCurrent_v2(gpu, context: CUcontext) { gpu.push_current(handle(context)) }

    call cuCtxPopCurrent_v2(gpu, context: *mut CUcontext) {
        let popped = gpu.pop_current()?;
        // The caller may not want to know.
        if context.is_null() { Ok(()) } else { put(context, pointer(popped)) }
    }

    call cuCtxGetDevice(gpu, device: *mut CUdevice) {
        let current = gpu.current()?;
        put(device, gpu.contexts.get(current)?.device)
    }

    call cuDeviceGetDevResource(gpu, device: CUdevice, resource: *mut CUdevResource, _kind: CUdevResourceType) {
        gpu.device(device)?;
        put(resource, std::mem::zeroed())
    }

    call cuDevResourceGenerateDesc(
        _gpu, resources: *mut CUdevResourceDesc, _first: *mut CUdevResource, _count: c_uint
    ) {
        put(resources, pointer(1))
    }

    call cuGreenCtxCreate(
        gpu, context: *mut CUgreenCtx, resources: CUdevResourceDesc, device: CUdevice, flags: c_uint
    ) {
        if resources.is_null() || flags != 1 {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        let made = gpu.create_context(device, false)?;
        put(context, pointer(made))
    }

    wait cuCtxSynchronize(gpu) {
        gpu.forbid_unsafe_calls()?;
        gpu.ends()
    }

    call cuCtxGetStreamPriorityRange(gpu, least: *mut c_int, greatest: *mut c_int) {
        gpu.current()?;
        put(least, 0)?;
        put(greatest, -5)
    }
}
