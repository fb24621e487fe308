//! Copies and fills. A call without a stream uses the default stream and waits.
//!
//! Pageable memory is read in the call, and written before the call returns, as the real driver does.

use std::ffi::{c_uchar, c_uint, c_ushort, c_void};

use super::{exported, handle};
use crate::header::{CUdeviceptr, CUstream};

exported! {
    wait cuMemcpyHtoD_v2(gpu, to: CUdeviceptr, from: *const c_void, bytes: usize) {
        gpu.forbid_unsafe_calls()?;
        let (to, from) = (gpu.known(to), gpu.read_host(from, bytes));
        gpu.copy(0, "copy to the GPU", to, from, bytes, true)
    }

    wait cuMemcpyDtoH_v2(gpu, to: *mut c_void, from: CUdeviceptr, bytes: usize) {
        gpu.forbid_unsafe_calls()?;
        let (to, from) = (gpu.written_host(to), gpu.known(from));
        gpu.copy(0, "copy to the host", to, from, bytes, true)
    }

    wait cuMemcpyDtoD_v2(gpu, to: CUdeviceptr, from: CUdeviceptr, bytes: usize) {
        gpu.forbid_unsafe_calls()?;
        let (to, from) = (gpu.known(to), gpu.known(from));
        gpu.copy(0, "copy", to, from, bytes, false)
    }

    wait cuMemcpyHtoDAsync_v2(gpu, to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream) {
        let (to, from) = (gpu.known(to), gpu.read_host(from, bytes));
        gpu.copy(handle(stream), "copy to the GPU", to, from, bytes, false)
    }

    wait cuMemcpyDtoHAsync_v2(gpu, to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) {
        let (to, from) = (gpu.written_host(to), gpu.known(from));
        gpu.copy(handle(stream), "copy to the host", to, from, bytes, false)
    }

    wait cuMemcpyDtoDAsync_v2(gpu, to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) {
        let (to, from) = (gpu.known(to), gpu.known(from));
        gpu.copy(handle(stream), "copy", to, from, bytes, false)
    }

    call cuMemsetD8_v2(gpu, to: CUdeviceptr, value: c_uchar, count: usize) {
        gpu.forbid_unsafe_calls()?;
        gpu.fill(0, to, &[value], count)
    }

    call cuMemsetD8Async(gpu, to: CUdeviceptr, value: c_uchar, count: usize, stream: CUstream) {
        gpu.fill(handle(stream), to, &[value], count)
    }

    call cuMemsetD16Async(gpu, to: CUdeviceptr, value: c_ushort, count: usize, stream: CUstream) {
        gpu.fill(handle(stream), to, &value.to_ne_bytes(), count)
    }

    call cuMemsetD32Async(gpu, to: CUdeviceptr, value: c_uint, count: usize, stream: CUstream) {
        gpu.fill(handle(stream), to, &value.to_ne_bytes(), count)
    }
}
