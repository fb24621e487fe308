//! The functions and numbers of the driver that this crate uses, under the names of NVIDIA's `cuda.h`.
//!
//! An answer is a number until it has been checked, because a driver may be newer than any list of its answers. All
//! functions are looked up before the first call. Tests with feature `interop` compare both lists with cudarc's bindings
//! while they are compiled.
#![allow(unsafe_code, non_snake_case, non_camel_case_types)]

use std::ffi::{CStr, c_char, c_void};
use std::ptr;

use libloading::Library;

use super::judge::{Judge, Take};
use crate::error::{Error, Result};

/// The driver's answer: 0 is success.
pub(super) type CUresult = i32;
pub(super) type CUdevice = i32;
pub(super) type CUdeviceptr = u64;

pub(super) const SUCCESS: CUresult = 0;

macro_rules! numbers {
    ($($name:ident: $type:ty = $value:literal in $($path:ident)::+;)*) => {
        $(pub(super) const $name: $type = $value;)*

        #[cfg(all(test, feature = "interop"))]
        const _: () = {
            $(assert!($name as u32 == cudarc::driver::$($path)::+::$name as u32, stringify!($name));)*
        };
    };
}

numbers! {
    CUDA_ERROR_NOT_READY: CUresult = 600 in sys::CUresult;
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: i32 = 16 in sys::CUdevice_attribute;
    CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: i32 = 38 in sys::CUdevice_attribute;
    CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: i32 = 115 in sys::CUdevice_attribute;
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE: i32 = 2 in sys::CUpointer_attribute;
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: i32 = 9 in sys::CUpointer_attribute;
    CU_MEMORYTYPE_HOST: u32 = 1 in sys::CUmemorytype;
    CU_STREAM_NON_BLOCKING: u32 = 1 in sys::CUstream_flags;
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: i32 = 1 in sys::CUstreamCaptureMode;
    CU_EVENT_DEFAULT: u32 = 0 in sys::CUevent_flags;
    CU_EVENT_DISABLE_TIMING: u32 = 2 in sys::CUevent_flags;
    CU_MEMHOSTALLOC_PORTABLE: u32 = 1 in sys;
    CU_MEMHOSTALLOC_DEVICEMAP: u32 = 2 in sys;
}

/// Looks up what takes claims, if this build has checks of its own.
fn judge(library: &Library) -> Option<Judge> {
    if !cfg!(debug_assertions) {
        return None;
    }
    // SAFETY: the type is the one that the software GPU gives this symbol; no other driver has it.
    unsafe { library.get::<Take>(b"softwareGpuClaim") }.ok().map(|found| Judge(*found))
}

macro_rules! handles {
    ($($name:ident)*) => {
        $(
            /// A handle of the driver's.
            #[repr(transparent)]
            #[derive(Clone, Copy, PartialEq, Eq)]
            pub(super) struct $name(*mut c_void);

            #[allow(dead_code)] // A context is only passed on.
            impl $name {
                pub(super) const NULL: $name = $name(ptr::null_mut());

                pub(super) fn of(number: usize) -> $name {
                    $name(ptr::with_exposed_provenance_mut(number))
                }

                pub(super) fn number(self) -> usize {
                    self.0.expose_provenance()
                }
            }

            // SAFETY: the driver's handles may be used by any thread.
            unsafe impl Send for $name {}
            // SAFETY: as above.
            unsafe impl Sync for $name {}
        )*
    };
}

handles!(CUcontext CUmodule CUfunction CUstream CUevent CUgraph CUgraphExec);

/// One row per function: the name that errors give it, its symbol if that differs, an older symbol that serves as well,
/// and its arguments.
macro_rules! functions {
    ($($name:ident $(= $symbol:ident $(or $older:ident)?)? ($($argument:ident: $type:ty),*);)*) => {
        /// The functions; all of them exist.
        pub(super) struct Functions {
            $($name: unsafe extern "C" fn($($type),*) -> CUresult,)*
            /// No function of NVIDIA's driver: only the software GPU of the tests holds work to claims.
            pub(super) judge: Option<Judge>,
        }

        impl Functions {
            /// Looks every function up, and returns the name of the first that is missing otherwise.
            pub(super) fn all(library: &Library) -> Result<Functions, &'static str> {
                Ok(Functions {
                    $($name: {
                        let symbols = [stringify!($name) $(, stringify!($symbol) $(, stringify!($older))?)?];
                        // The function's own name is a symbol only if the row has no other.
                        let symbols = if symbols.len() > 1 { &symbols[1..] } else { &symbols[..] };
                        let found = symbols.iter().find_map(|symbol| {
                            // SAFETY: the type is the one that `cuda.h` gives this symbol.
                            unsafe { library.get(symbol.as_bytes()) }.ok().map(|found| *found)
                        });
                        found.ok_or(stringify!($name))?
                    },)*
                    judge: judge(library),
                })
            }

            $(
                /// Calls the driver's function of this name.
                ///
                /// # Safety
                /// As `cuda.h` documents it.
                #[allow(dead_code, clippy::too_many_arguments)]
                pub(super) unsafe fn $name(&self, $($argument: $type),*) -> Result<()> {
                    // SAFETY: by the contract.
                    self.check(stringify!($name), unsafe { (self.$name)($($argument),*) })
                }
            )*
        }

        /// Compiles only if each function has as many arguments, of the same sizes, as in cudarc's bindings.
        #[cfg(all(test, feature = "interop"))]
        #[allow(dead_code, clippy::useless_transmute, clippy::missing_transmute_annotations)]
        #[allow(clippy::too_many_arguments)]
        mod like_cudarc {
            use std::mem::transmute;

            use super::*;

            macro_rules! newest {
                ($own:ident) => { cudarc::driver::sys::$own };
                ($own:ident $other:ident) => { cudarc::driver::sys::$other };
            }

            $(
                unsafe fn $name($($argument: $type),*) -> CUresult {
                    // SAFETY: never called.
                    unsafe { transmute(newest!($name $($symbol)?)($(transmute($argument)),*)) }
                }
            )*
        }
    };
}

functions! {
    cuInit(flags: u32);
    cuGetErrorName(code: CUresult, name: *mut *const c_char);
    cuDeviceGetCount(count: *mut i32);
    cuDeviceGet(device: *mut CUdevice, ordinal: i32);
    cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: CUdevice);
    cuDeviceGetName(name: *mut c_char, bytes: i32, device: CUdevice);
    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    cuCtxPushCurrent = cuCtxPushCurrent_v2(context: CUcontext);
    cuCtxPopCurrent = cuCtxPopCurrent_v2(context: *mut CUcontext);
    cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    cuModuleUnload(module: CUmodule);
    cuStreamCreateWithPriority(stream: *mut CUstream, flags: u32, priority: i32);
    cuStreamDestroy = cuStreamDestroy_v2(stream: CUstream);
    cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
    cuStreamSynchronize(stream: CUstream);
    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32);
    cuStreamBeginCapture = cuStreamBeginCapture_v2(stream: CUstream, mode: i32);
    cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
    cuPointerGetAttribute(value: *mut c_void, attribute: i32, address: CUdeviceptr);
    cuEventCreate(event: *mut CUevent, flags: u32);
    cuEventDestroy = cuEventDestroy_v2(event: CUevent);
    cuEventRecord(event: CUevent, stream: CUstream);
    cuEventQuery(event: CUevent);
    // Drivers before CUDA 12.8 have only the older symbol.
    cuEventElapsedTime = cuEventElapsedTime_v2 or cuEventElapsedTime(ms: *mut f32, from: CUevent, to: CUevent);
    cuMemAllocAsync(address: *mut CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemFreeAsync(address: CUdeviceptr, stream: CUstream);
    cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: u32);
    cuMemHostGetDevicePointer = cuMemHostGetDevicePointer_v2(device: *mut CUdeviceptr, host: *mut c_void, flags: u32);
    cuMemFreeHost(address: *mut c_void);
    cuMemsetD8Async(address: CUdeviceptr, value: u8, bytes: usize, stream: CUstream);
    cuMemcpyDtoDAsync = cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemcpyHtoDAsync = cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
    cuMemcpyDtoHAsync = cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuLaunchKernel(
        function: CUfunction, blocks: u32, blocks_y: u32, blocks_z: u32, threads: u32, threads_y: u32, threads_z: u32,
        shared_bytes: u32, stream: CUstream, arguments: *mut *mut c_void, extra: *mut *mut c_void
    );
    cuLaunchHostFunc(stream: CUstream, function: unsafe extern "C" fn(*mut c_void), argument: *mut c_void);
    cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut i32, function: CUfunction, threads: i32, shared_bytes: usize
    );
    cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: u64);
    cuGraphDestroy(graph: CUgraph);
    cuGraphLaunch(exec: CUgraphExec, stream: CUstream);
    cuGraphExecDestroy(exec: CUgraphExec);
}

impl Functions {
    /// Returns whether the work before an event's latest record has ended. Polled, so the usual answer makes no error.
    ///
    /// # Safety
    /// A live event.
    pub(super) unsafe fn is_passed(&self, event: CUevent) -> Result<bool> {
        // SAFETY: by the contract.
        match unsafe { (self.cuEventQuery)(event) } {
            CUDA_ERROR_NOT_READY => Ok(false),
            code => self.check("cuEventQuery", code).map(|()| true),
        }
    }

    fn check(&self, call: &'static str, code: CUresult) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut name = ptr::null();
        // SAFETY: it takes every number, and writes the address of a string of its own, or null.
        let known = unsafe { (self.cuGetErrorName)(code, &mut name) };
        let name = match known == SUCCESS && !name.is_null() {
            // SAFETY: as above; the string is never freed.
            true => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
            false => "a code that the driver does not name".to_owned(),
        };
        Err(Error::Device { call, code, name })
    }
}
