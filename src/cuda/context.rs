//! A GPU's primary context, which the CUDA runtime and every framework share.
//!
//! It is retained once per process and never released, because others may hold memory in it. Every call restores the
//! context that the thread had. cudarc's own `CudaContext` does not: it leaves its context current.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ptr;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::{CUcontext, CUdevice};

use super::library::{call, direct};
use crate::error::{Error, Result};

pub(super) use super::library::reason;

/// A device and its primary context, which any thread may make current.
#[derive(Clone, Copy)]
pub(super) struct Primary {
    pub(super) device: CUdevice,
    context: CUcontext,
}

// SAFETY: the driver's handles may be used by any thread.
unsafe impl Send for Primary {}
// SAFETY: no method changes it.
unsafe impl Sync for Primary {}

static RETAINED: Mutex<BTreeMap<u32, Primary>> = Mutex::new(BTreeMap::new());

/// Returns the number of devices.
///
/// # Errors
/// `DriverUnavailable` if there is no working driver.
pub(super) fn device_count() -> Result<u32> {
    direct()?;
    let mut count = 0;
    // SAFETY: the driver is initialised; writes one number.
    unsafe { call!(cuDeviceGetCount(&mut count))? };
    Ok(count as u32)
}

impl Primary {
    /// Returns the context of the device with this ordinal.
    ///
    /// # Errors
    /// Errors as for [`device_count`]; `Unsupported` if there is no such device, `Device` if the driver refuses the
    /// context.
    pub(super) fn of(ordinal: u32) -> Result<Primary> {
        let mut retained = RETAINED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(primary) = retained.get(&ordinal) {
            return Ok(*primary);
        }
        let count = device_count()?;
        if ordinal >= count {
            let (wrong, remedy) = match count {
                0 => ("this machine has no GPU that the driver shows", "step on the host".to_owned()),
                _ => ("no such GPU", format!("use cuda:0 to cuda:{}", count - 1)),
            };
            return Err(Error::unsupported(format_args!("cuda:{ordinal}"), wrong, remedy));
        }
        let mut primary = Primary { device: 0, context: ptr::null_mut() };
        // SAFETY: the ordinal is below the count; each call writes one handle.
        unsafe {
            call!(cuDeviceGet(&mut primary.device, ordinal as i32))?;
            call!(cuDevicePrimaryCtxRetain(&mut primary.context, primary.device))?;
        }
        retained.insert(ordinal, primary);
        Ok(primary)
    }

    /// Makes the context current on the calling thread, and returns whether another one or none was current. If so,
    /// [`leave`](Self::leave) has to follow. A trainer's thread usually has the context current already.
    pub(super) fn enter(&self) -> Result<bool> {
        let mut current = ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { direct()?.cuCtxGetCurrent(&mut current)? };
        if current == self.context {
            return Ok(false);
        }
        // SAFETY: a context that is never released.
        unsafe { call!(cuCtxPushCurrent_v2(self.context))? };
        Ok(true)
    }

    /// Restores the context that was current before [`enter`](Self::enter).
    pub(super) fn leave(&self) {
        let mut popped = ptr::null_mut();
        // SAFETY: writes one handle. It cannot fail after an `enter`.
        let _ = unsafe { call!(cuCtxPopCurrent_v2(&mut popped)) };
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
    let _entered = primary.enter()?.then(|| Entered(primary));
    call()
}
