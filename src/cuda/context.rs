//! The driver's library, and a GPU's primary context, which the CUDA runtime and every framework share.
//!
//! The library is loaded at the first call, and what comes of that is kept. If `INSTEP_CUDA` names a file, only that is
//! tried; otherwise it is `libcuda.so.1`. It is never unloaded, because it runs threads. A driver that lacks a function is
//! refused by the function's name, before any call. The context is retained once per process and never released, because
//! others may hold memory in it. Every call restores the context that the thread had.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::mem;
use std::sync::{Mutex, OnceLock, PoisonError};

use libloading::Library;

use super::functions::{CUcontext, CUdevice, CUresult, Functions, SUCCESS};
use crate::error::{Error, Result};

/// The oldest driver that has every function of the list.
const OLDEST: &str = "CUDA 12.0";

/// A device and its primary context, which any thread may make current.
#[derive(Clone, Copy)]
pub(super) struct Primary {
    pub(super) functions: &'static Functions,
    pub(super) device: CUdevice,
    context: CUcontext,
}

static DRIVER: OnceLock<Result<Functions>> = OnceLock::new();
static RETAINED: Mutex<BTreeMap<u32, Primary>> = Mutex::new(BTreeMap::new());

fn functions() -> Result<&'static Functions> {
    DRIVER.get_or_init(load).as_ref().map_err(Clone::clone)
}

/// Loads the library and initialises the driver.
///
/// # Errors
/// `DriverUnavailable`: the library is missing, lacks a function, or does not start.
fn load() -> Result<Functions> {
    open(std::env::var_os("INSTEP_CUDA")).map_err(|why| Error::DriverUnavailable { why })
}

fn open(named: Option<OsString>) -> Result<Functions, String> {
    let shown = named.as_ref().map(|path| format!("INSTEP_CUDA={}", path.display()));
    let path = named.unwrap_or_else(|| "libcuda.so.1".into());
    // SAFETY: it is NVIDIA's driver by name, or the user has named it.
    let library = unsafe { Library::new(&path) }.map_err(|error| match &shown {
        Some(shown) => format!("{shown}: {}", reason(&error)),
        None => "libcuda.so.1 was not found; it comes with NVIDIA's driver, not with the toolkit".to_owned(),
    })?;
    let functions = Functions::all(&library).map_err(|missing| {
        let (shown, version) = (shown.as_deref().unwrap_or("libcuda.so.1"), version(&library));
        format!("{shown}{version} has no {missing}, which every driver since {OLDEST} has")
    });
    mem::forget(library);
    let functions = functions?;
    // SAFETY: the call has no precondition.
    unsafe { functions.cuInit(0) }.map_err(|error| error.to_string())?;
    Ok(functions)
}

/// Returns the loader's own text; the error's says only which of its functions failed.
pub(super) fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Returns the version of a driver that lacks something, as a part of a sentence.
fn version(library: &Library) -> String {
    let mut version = 0;
    // SAFETY: the type is the one that `cuda.h` gives this symbol; writes one number.
    let answer = unsafe {
        let ask = library.get::<unsafe extern "C" fn(*mut i32) -> CUresult>(b"cuDriverGetVersion");
        ask.map(|ask| ask(&mut version))
    };
    match answer {
        Ok(SUCCESS) => format!(", of CUDA {}.{},", version / 1000, version % 1000 / 10),
        _ => String::new(),
    }
}

/// Returns the number of devices.
///
/// # Errors
/// `DriverUnavailable` if there is no working driver.
pub(super) fn device_count() -> Result<u32> {
    let mut count = 0;
    // SAFETY: the driver is initialised; writes one number.
    unsafe { functions()?.cuDeviceGetCount(&mut count)? };
    Ok(count as u32)
}

impl Primary {
    /// Returns the context of the device with this ordinal.
    ///
    /// # Errors
    /// Errors as for [`device_count`]; `Unsupported` if there is no such device, `Device` if the driver refuses the
    /// context.
    pub(super) fn of(ordinal: u32) -> Result<Primary> {
        let count = device_count()?;
        if ordinal >= count {
            let (wrong, remedy) = match count {
                0 => ("this machine has no GPU that the driver shows", "step on the host".to_owned()),
                _ => ("no such GPU", format!("use cuda:0 to cuda:{}", count - 1)),
            };
            return Err(Error::unsupported(format_args!("cuda:{ordinal}"), wrong, remedy));
        }
        let mut retained = RETAINED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(primary) = retained.get(&ordinal) {
            return Ok(*primary);
        }
        let functions = functions()?;
        let mut primary = Primary { functions, device: 0, context: CUcontext::NULL };
        // SAFETY: the ordinal is below the count; each call writes one handle.
        unsafe {
            functions.cuDeviceGet(&mut primary.device, ordinal as i32)?;
            functions.cuDevicePrimaryCtxRetain(&mut primary.context, primary.device)?;
        }
        retained.insert(ordinal, primary);
        Ok(primary)
    }

    /// Makes it current on the calling thread; pairs with [`leave`](Self::leave).
    pub(super) fn enter(&self) -> Result<()> {
        // SAFETY: a context that is never released.
        unsafe { self.functions.cuCtxPushCurrent(self.context) }
    }

    /// Restores the context that was current before.
    pub(super) fn leave(&self) {
        let mut popped = CUcontext::NULL;
        // SAFETY: writes one handle. It cannot fail after an `enter`.
        let _ = unsafe { self.functions.cuCtxPopCurrent(&mut popped) };
    }

    /// Returns whether a context is this one.
    pub(super) fn is(&self, context: CUcontext) -> bool {
        self.context == context
    }
}

/// Calls `call` with the device current on this thread.
///
/// # Errors
/// The call's own; otherwise as for [`Primary::of`].
pub(super) fn with_device<T>(ordinal: u32, call: impl FnOnce() -> Result<T>) -> Result<T> {
    struct Entered(Primary);
    impl Drop for Entered {
        fn drop(&mut self) {
            self.0.leave();
        }
    }
    let primary = Primary::of(ordinal)?;
    primary.enter()?;
    let _entered = Entered(primary);
    call()
}
