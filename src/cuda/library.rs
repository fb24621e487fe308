//! Finds NVIDIA's driver library and looks up its functions, before cudarc makes its first call.
//!
//! cudarc opens `libcuda.so`, or a versioned name such as `libcuda.so.1`. cudarc panics if the library or a function is
//! missing. This module therefore looks for the library and for each function first, and returns an error that names
//! the missing part. If `INSTEP_CUDA` names a file, this module opens that file first. cudarc then finds the file by
//! its soname, the name inside the file. If cudarc finds another library instead, this module returns an error. A
//! driver that has been started is never closed, because it runs threads.
//!
//! cudarc returns the driver's result codes as a Rust enum. The enum has only the codes of the CUDA release for which
//! cudarc was built. If the driver returns another code, the behaviour is undefined. [`Direct`] therefore declares some
//! functions itself, so that they return the result code as a number. Among them are the functions that start the
//! driver, launch kernels or graphs, order streams, wait for work or query whether it has ended, or allocate
//! stream-ordered memory. If the device has a fault, usually one of these functions is the first to return the error.
//! The other functions describe the device or an address, change the current context, load kernels, make or free an
//! object, copy or fill memory, enqueue a host function, or capture a stream. This module calls the other functions
//! through cudarc, so one risk remains: a driver newer than the enum may return a code that the enum lacks. [`call`]
//! converts the results to numbers at once, and never matches on the enum.
#![allow(unsafe_code, non_snake_case)]

use std::ffi::{CStr, OsString, c_char, c_void};
use std::sync::OnceLock;
use std::{mem, ptr};

use cudarc::driver::sys::{
    self, CUcontext, CUdeviceptr, CUevent, CUfunction, CUgraphExec, CUmemoryPool, CUresult, CUstream,
};
use libloading::Library;

use super::judge::{Judge, Take};
use crate::error::{Error, Result};

/// The oldest driver with all functions that this file lists.
const OLDEST: &str = "CUDA 12.0";

macro_rules! symbols {
    ($($name:ident)*) => {
        /// The names of the functions that are called through cudarc.
        #[allow(non_upper_case_globals)]
        pub(super) mod symbols {
            $(pub(in crate::cuda) const $name: &str = stringify!($name);)*
            pub(super) const ALL: &[&str] = &[$($name),*];
        }
    };
}

symbols! {
    cuDeviceGetCount cuDeviceGet cuDeviceGetAttribute cuDeviceGetName
    cuDevicePrimaryCtxRetain cuCtxPushCurrent_v2 cuCtxPopCurrent_v2
    cuModuleLoadData cuModuleGetFunction cuModuleUnload cuOccupancyMaxActiveBlocksPerMultiprocessor
    cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamGetCtx cuLaunchHostFunc
    cuStreamBeginCapture_v2 cuStreamEndCapture cuGraphInstantiateWithFlags cuGraphDestroy cuGraphExecDestroy
    cuEventCreate cuEventDestroy_v2 cuPointerGetAttribute
    cuMemFreeAsync cuMemHostAlloc cuMemFreeHost
    cuMemsetD8Async cuMemsetD16Async cuMemsetD32Async
    cuMemcpyDtoDAsync_v2 cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2
}

/// Calls cudarc's function of this name, which must be in [`symbols`].
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {
        $crate::cuda::library::check(
            $crate::cuda::library::symbols::$name,
            cudarc::driver::sys::$name($($argument),*) as i32,
        )
    };
}
pub(super) use call;

/// Compiles only if cudarc's function takes arguments of these types.
macro_rules! takes_the_same {
    (() $types:tt) => {};
    (($cudarc:ident) ($($type:ty),*)) => { const _: unsafe fn($($type),*) -> CUresult = sys::$cudarc; };
}

/// Declares [`Direct`]. Each row has a function's symbol and its arguments, and may have an older symbol that works
/// too. A row names cudarc's function if that function takes the same arguments for every CUDA release.
macro_rules! direct {
    ($($name:ident $(or $older:ident)? ($($argument:ident: $type:ty),*) $(as $cudarc:ident)?;)*) => {
        /// The driver's functions that this file declares itself. They return result codes as numbers.
        pub(super) struct Direct {
            $($name: unsafe extern "C" fn($($type),*) -> i32,)*
            /// `cuStreamGetCtx_v2`, since CUDA 12.5. For a stream of a green context, this function returns the primary
            /// context.
            stream_contexts: Option<unsafe extern "C" fn(CUstream, *mut CUcontext, *mut CUcontext) -> i32>,
            capture_info: CaptureInfo,
            /// Checks work against claims. Only the software GPU of the tests has this function.
            pub(super) judge: Option<Judge>,
        }

        impl Direct {
            fn of(library: &Library) -> Result<Direct, &'static str> {
                Ok(Direct {
                    $($name: {
                        let symbols = [stringify!($name) $(, stringify!($older))?];
                        let found = symbols.iter().find_map(|symbol| {
                            // SAFETY: `cuda.h` gives this symbol this type.
                            unsafe { library.get(symbol.as_bytes()) }.ok().map(|found| *found)
                        });
                        found.ok_or(stringify!($name))?
                    },)*
                    // SAFETY: `cuda.h` gives this symbol this type. A green context is a pointer too.
                    stream_contexts: unsafe { library.get(b"cuStreamGetCtx_v2") }.ok().map(|found| *found),
                    capture_info: CaptureInfo::of(library).ok_or("cuStreamGetCaptureInfo")?,
                    judge: judge(library),
                })
            }

            $(
                /// # Safety
                /// The call meets the conditions that `cuda.h` documents for the function.
                #[allow(dead_code, clippy::too_many_arguments)]
                pub(super) unsafe fn $name(&self, $($argument: $type),*) -> Result<()> {
                    // SAFETY: the caller guarantees the conditions that `cuda.h` documents.
                    match unsafe { (self.$name)($($argument),*) } {
                        0 => Ok(()),
                        code => Err(self.error(stringify!($name), code)),
                    }
                }
            )*
        }

        $(takes_the_same!(($($cudarc)?) ($($type),*));)*
    };
}

direct! {
    cuInit(flags: u32) as cuInit;
    cuGetErrorName(code: i32, name: *mut *const c_char);
    cuCtxGetCurrent(context: *mut CUcontext) as cuCtxGetCurrent;
    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32) as cuStreamWaitEvent;
    cuStreamSynchronize(stream: CUstream) as cuStreamSynchronize;
    cuEventRecord(event: CUevent, stream: CUstream) as cuEventRecord;
    cuEventQuery(event: CUevent) as cuEventQuery;
    // Drivers before CUDA 12.8 have only the older symbol, and cudarc declares only one of the two.
    cuEventElapsedTime_v2 or cuEventElapsedTime (ms: *mut f32, from: CUevent, to: CUevent);
    cuLaunchKernel(
        function: CUfunction, blocks: u32, blocks_y: u32, blocks_z: u32, threads: u32, threads_y: u32, threads_z: u32,
        shared_bytes: u32, stream: CUstream, arguments: *mut *mut c_void, extra: *mut *mut c_void
    ) as cuLaunchKernel;
    cuGraphLaunch(exec: CUgraphExec, stream: CUstream) as cuGraphLaunch;
    cuMemPoolCreate(pool: *mut CUmemoryPool, props: *const PoolProps);
    cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: i32, value: *mut c_void);
    cuMemPoolDestroy(pool: CUmemoryPool) as cuMemPoolDestroy;
    cuMemAllocFromPoolAsync(address: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream)
        as cuMemAllocFromPoolAsync;
}

/// No CUDA release has changed the size of `CUmemPoolProps`, but cudarc's struct differs between its features.
#[repr(C)]
pub(super) struct PoolProps {
    pub(super) kind: u32,
    pub(super) handles: u32,
    pub(super) location: u32,
    pub(super) ordinal: i32,
    pub(super) rest: [u64; 9],
}

/// `cuStreamGetCaptureInfo`. The results after the id are optional. A null pointer omits a result.
enum CaptureInfo {
    V3(unsafe extern "C" fn(CUstream, *mut u32, *mut u64, Unused, Unused, Unused, Unused) -> i32),
    /// Drivers before CUDA 12.3 have only this function.
    V2(unsafe extern "C" fn(CUstream, *mut u32, *mut u64, Unused, Unused, Unused) -> i32),
}

type Unused = *mut c_void;

impl CaptureInfo {
    fn of(library: &Library) -> Option<CaptureInfo> {
        // SAFETY: `cuda.h` gives these symbols these types, but with typed pointers for the results that are unused
        // here.
        unsafe {
            let v3 = library.get(b"cuStreamGetCaptureInfo_v3").map(|found| CaptureInfo::V3(*found));
            v3.or_else(|_| library.get(b"cuStreamGetCaptureInfo_v2").map(|found| CaptureInfo::V2(*found)))
                .ok()
        }
    }
}

impl Direct {
    /// Returns the id of the capture that a stream takes part in.
    ///
    /// # Safety
    /// The stream is alive.
    pub(super) unsafe fn capture_of(&self, stream: CUstream) -> Result<Option<u64>> {
        let (mut status, mut id, none) = (0, 0, ptr::null_mut());
        // SAFETY: the stream is alive by the contract, and each place takes one value.
        let code = unsafe {
            match self.capture_info {
                CaptureInfo::V3(ask) => ask(stream, &mut status, &mut id, none, none, none, none),
                CaptureInfo::V2(ask) => ask(stream, &mut status, &mut id, none, none, none),
            }
        };
        match code {
            0 => Ok((status != 0).then_some(id)),
            code => Err(self.error("cuStreamGetCaptureInfo", code)),
        }
    }

    /// Returns the context of a stream. For a stream of a green context, this is the device's primary context.
    ///
    /// # Safety
    /// The stream is alive.
    pub(super) unsafe fn context_of(&self, stream: CUstream) -> Result<CUcontext> {
        let (mut context, mut green) = (ptr::null_mut(), ptr::null_mut());
        let Some(stream_contexts) = self.stream_contexts else {
            // SAFETY: the stream is alive by the contract, and the place takes one value.
            unsafe { call!(cuStreamGetCtx(stream, &mut context))? };
            return Ok(context);
        };
        // SAFETY: the stream is alive by the contract, and each place takes one value.
        match unsafe { stream_contexts(stream, &mut context, &mut green) } {
            0 => Ok(context),
            code => Err(self.error("cuStreamGetCtx_v2", code)),
        }
    }

    /// Returns whether the stream has finished all work that was enqueued before the event was last recorded. The host
    /// polls this function, so no error value is made for the usual result, "not ready".
    ///
    /// # Safety
    /// The event is alive.
    pub(super) unsafe fn is_passed(&self, event: CUevent) -> Result<bool> {
        const NOT_READY: i32 = CUresult::CUDA_ERROR_NOT_READY as i32;
        // SAFETY: the event is alive by the contract.
        match unsafe { (self.cuEventQuery)(event) } {
            0 => Ok(true),
            NOT_READY => Ok(false),
            code => Err(self.error("cuEventQuery", code)),
        }
    }

    fn error(&self, symbol: &'static str, code: i32) -> Error {
        let mut name = ptr::null();
        // SAFETY: the function takes every number, and writes the address of a string of the driver, or null.
        let known = unsafe { (self.cuGetErrorName)(code, &mut name) };
        let name = if known == 0 && !name.is_null() {
            // SAFETY: this is a string of the driver, and the driver never frees it.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        } else {
            "a code that the driver does not name".to_owned()
        };
        Error::Device { call: documented(symbol), code, name }
    }
}

/// Returns the name under which NVIDIA documents a symbol's function.
fn documented(symbol: &'static str) -> &'static str {
    symbol.trim_end_matches("_v2")
}

pub(super) fn check(symbol: &'static str, code: i32) -> Result<()> {
    match code {
        0 => Ok(()),
        code => Err(direct()?.error(symbol, code)),
    }
}

/// Returns the functions of the driver. The first call starts the driver.
///
/// # Errors
/// `DriverUnavailable` if the library is missing, is not the library that cudarc calls, lacks a function, or does not
/// start.
pub(super) fn direct() -> Result<&'static Direct> {
    static DRIVER: OnceLock<Result<Direct>> = OnceLock::new();
    let load = || {
        let table = find(std::env::var_os("INSTEP_CUDA"))?;
        // SAFETY: the call has no precondition.
        unsafe { table.cuInit(0) }.map_err(|error| error.to_string())?;
        Ok(table)
    };
    let driver = DRIVER.get_or_init(|| load().map_err(|why| Error::DriverUnavailable { why }));
    driver.as_ref().map_err(Clone::clone)
}

fn find(named: Option<OsString>) -> Result<Direct, String> {
    let shown = match &named {
        Some(path) => format!("INSTEP_CUDA={}", path.display()),
        None => "libcuda.so".to_owned(),
    };
    // SAFETY: the user has named the file as NVIDIA's driver.
    let named = named.map(|path| unsafe { Library::new(path) }).transpose();
    let named = named.map_err(|error| format!("{shown}: {}", reason(&error)))?;
    let found = cudarcs_library();
    if let Some(named) = named {
        if found.map(address_of_start) != Some(address_of_start(&named)) {
            return Err(format!(
                "{shown} is not the driver that cudarc finds by the names libcuda.so and libcuda.so.1; \
                 give the file one of these names in a folder of LD_LIBRARY_PATH"
            ));
        }
        mem::forget(named);
    }
    let library =
        found.ok_or("libcuda.so was not found; it comes with NVIDIA's driver, not with the toolkit")?;
    let lacks = |symbol| {
        let (missing, version) = (documented(symbol), version(library));
        format!("{shown}{version} has no {missing}, which every driver since {OLDEST} has")
    };
    // SAFETY: the symbol is only looked up, not used.
    let exists = |symbol: &&str| unsafe { library.get::<*const c_void>(symbol.as_bytes()) }.is_ok();
    if let Some(missing) = symbols::ALL.iter().find(|symbol| !exists(symbol)) {
        return Err(lacks(missing));
    }
    Direct::of(library).map_err(lacks)
}

fn cudarcs_library() -> Option<&'static Library> {
    // cudarc has `is_culib_present` and `culib`, unless another crate of the program makes cudarc link the driver. In
    // that case, the functions of these names below are used.
    #[allow(unused_imports)]
    use cudarc::driver::sys::*;
    // SAFETY: both functions open NVIDIA's driver by name. The second panics only if the first finds nothing.
    unsafe { is_culib_present().then(|| culib()) }
}

/// Returns true, because a program that is linked with the driver always has the driver's functions.
#[allow(dead_code)]
unsafe fn is_culib_present() -> bool {
    true
}

/// Returns the program itself. The program's symbols include the symbols of a linked driver.
#[allow(dead_code)]
unsafe fn culib() -> &'static Library {
    Box::leak(Box::new(libloading::os::unix::Library::this().into()))
}

fn address_of_start(library: &Library) -> Option<usize> {
    // SAFETY: only the address of the function is used.
    unsafe { library.get::<unsafe extern "C" fn(u32) -> i32>(b"cuInit") }.ok().map(|start| *start as usize)
}

/// Returns the loader's message. The error's own text says only which function of the loader has failed.
pub(super) fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Returns the version of a driver that lacks a function, as a part of an error message.
fn version(library: &Library) -> String {
    let mut version = 0;
    // SAFETY: `cuda.h` gives this symbol this type. The call writes one number.
    let answer = unsafe {
        let ask = library.get::<unsafe extern "C" fn(*mut i32) -> i32>(b"cuDriverGetVersion");
        ask.map(|ask| ask(&mut version))
    };
    match answer {
        Ok(0) => format!(", of CUDA {}.{},", version / 1000, version % 1000 / 10),
        _ => String::new(),
    }
}

/// Looks up the function that receives claims, if this build has debug assertions.
fn judge(library: &Library) -> Option<Judge> {
    if !cfg!(debug_assertions) {
        return None;
    }
    // SAFETY: the software GPU gives this symbol this type, and no other driver has the symbol.
    unsafe { library.get::<Take>(b"softwareGpuClaim") }.ok().map(|found| Judge(*found))
}
