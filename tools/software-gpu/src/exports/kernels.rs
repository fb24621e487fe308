//! Modules, kernels and launches, and work of the software GPU's other library.
//!
//! A launch copies its arguments, by the sizes in the kernel's PTX, before it returns.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use super::{exported, handle, pointer, put};
use crate::claims::Claim;
pub use crate::claims::Claimed;
use crate::contexts::same;
use crate::entry;
use crate::foreign::{Foreign, ForeignWork};
use crate::header::{CUfunction, CUmodule, CUresult, CUstream, cudaError_enum as Code};
use crate::modules;
use crate::settings::Plant;
use crate::trace::{Call, Shown, Value};
use crate::work::{Launch, Work};

const MOST_THREADS: u64 = 1024;

exported! {
    call cuModuleLoadData(gpu, module: *mut CUmodule, image: *const c_void) {
        let image = modules::image(image)?;
        let made = gpu.load_module(&image)?;
        put(module, pointer(made))
    }

    call cuModuleGetFunction(gpu, function: *mut CUfunction, module: CUmodule, name: *const c_char) {
        let name = CStr::from_ptr(name).to_str().map_err(|_| Code::CUDA_ERROR_NOT_FOUND)?;
        let found = gpu.function(handle(module), name)?;
        put(function, pointer(found))
    }

    call cuModuleUnload(gpu, module: CUmodule) { gpu.unload_module(handle(module)) }

    call cuOccupancyMaxActiveBlocksPerMultiprocessor(
        gpu, blocks: *mut c_int, function: CUfunction, threads: c_int, _shared_bytes: usize
    ) {
        gpu.current()?;
        gpu.functions.get(handle(function))?;
        put(blocks, (2048 / threads.max(64)).min(4))
    }

    call cuLaunchKernel(
        gpu, function: CUfunction, blocks_x: c_uint, blocks_y: c_uint, blocks_z: c_uint, threads_x: c_uint,
        threads_y: c_uint, threads_z: c_uint, shared_bytes: c_uint, stream: CUstream, arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) {
        let stream = gpu.stream(handle(stream))?;
        let (blocks, threads) = ([blocks_x, blocks_y, blocks_z], [threads_x, threads_y, threads_z]);
        let count: u64 = threads.iter().map(|side| u64::from(*side)).product();
        if blocks.contains(&0) || count == 0 || count > MOST_THREADS || blocks[1].max(blocks[2]) > 65535 {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        if !extra.is_null() {
            return Err(Code::CUDA_ERROR_NOT_SUPPORTED);
        }
        let (context, kernel, variables) = {
            let function = gpu.functions.get(handle(function))?;
            (function.context, function.kernel.clone(), Arc::clone(&function.variables))
        };
        same(context, gpu.streams.get(stream)?.context, &format!("stream {stream:#x}, used by {},", kernel.name()))?;
        if arguments.is_null() && !kernel.params().is_empty() {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        let mut bytes = vec![0; kernel.param_bytes() as usize];
        for (k, param) in kernel.params().iter().enumerate() {
            let argument = arguments.add(k).read().cast::<u8>();
            let (offset, length) = (param.offset as usize, param.bytes as usize);
            bytes[offset..offset + length].copy_from_slice(std::slice::from_raw_parts(argument, length));
        }
        if gpu.planted(Plant::Short) {
            // What lies after a struct that is too short may be anything.
            bytes.iter_mut().rev().take(8).for_each(|byte| *byte = 0xa5);
        }
        gpu.launches += 1;
        let hangs = gpu.settings.hangs == Some(gpu.launches);
        let what = format!("kernel {}", kernel.name());
        let launch = Launch { kernel, blocks, threads, shared_bytes, arguments: bytes, variables, hangs };
        gpu.enqueue(stream, &what, Work::Kernel(Arc::new(launch)), &[]).map(drop)
    }
}

/// Enqueues work of another library on a stream. The real driver has no such function.
///
/// # Safety
/// The fields of [`ForeignWork`] meet their documented conditions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softwareGpuEnqueue(stream: usize, work: *const ForeignWork) -> CUresult {
    // SAFETY: by the contract.
    let (work, foreign) = unsafe { (work.read(), Foreign::new(work.read())) };
    let name = foreign.name.clone();
    let arguments = [
        ("stream", Value::Stream(stream)),
        ("source", Value::Device(work.source)),
        ("source_bytes", work.source_bytes.shown()),
        ("target", Value::Device(work.target)),
        ("target_bytes", work.target_bytes.shown()),
        ("together", if work.together > 1 { work.together.shown() } else { Value::Unseen }),
    ];
    let call = Call { name: &name, arguments: Some(&arguments) };
    entry::call(&call, |gpu| gpu.enqueue_foreign(stream, foreign))
}

/// Returns the handle of a stream, also of a default stream by its number; 0 if there is none. The real driver has no
/// such function.
#[unsafe(no_mangle)]
pub extern "C" fn softwareGpuResolve(stream: usize) -> usize {
    let mut found = 0;
    entry::call(&Call { name: "softwareGpuResolve", arguments: None }, |gpu| {
        found = gpu.stream(stream)?;
        Ok(())
    });
    found
}

/// Restricts the work that is enqueued on a stream from now on to these ranges. If `name` is null, the restriction
/// ends. The real driver has no such function.
///
/// # Safety
/// `name` is null, or a string that names the claimant, and there are `count` ranges.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softwareGpuClaim(
    stream: usize,
    name: *const c_char,
    ranges: *const Claimed,
    count: usize,
) -> CUresult {
    // SAFETY: by the contract.
    let claim = (!name.is_null()).then(|| unsafe { Claim::new(name, ranges, count) });
    entry::call(&Call { name: "softwareGpuClaim", arguments: None }, |gpu| gpu.claim(stream, claim))
}

/// Runs work that another process waits for. The real driver has no such function.
#[unsafe(no_mangle)]
pub extern "C" fn softwareGpuPump() {
    entry::pump();
}
