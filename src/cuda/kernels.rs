//! The kernels of this build, loaded on one device.
//!
//! One binary for every stepper; which of its step kernels is taken follows from the optimizer's row in the table. Must
//! name kernels by the table, so that a new optimizer needs nothing here.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::sync::Arc;

use super::built::step_names;
use super::driver::{Driver, Kernel, Module};
use crate::error::Result;

pub(super) struct Kernels {
    driver: Arc<dyn Driver>,
    module: Module,
    pub(super) begin: Kernel,
    pub(super) decide: Kernel,
    pub(super) publish: Kernel,
    pub(super) norm: Kernel,
    pub(super) step: Kernel,
}

impl Kernels {
    /// # Errors
    /// `KernelsNotBuilt` if this build has none, `Device` if the driver takes none of them.
    pub(super) fn load(driver: &Arc<dyn Driver>, optimizer: u32) -> Result<Kernels> {
        let module = driver.load(driver.image()?)?;
        let none = Kernel(0);
        let (begin, decide, publish, norm, step) = (none, none, none, none, none);
        let mut kernels = Kernels { driver: Arc::clone(driver), module, begin, decide, publish, norm, step };
        let named = |name: &str| {
            // A name of our own holds no zero byte.
            let name = CString::new(name).unwrap_or_default();
            driver.kernel(module, &name)
        };
        kernels.begin = named("instep_begin")?;
        kernels.decide = named("instep_decide")?;
        kernels.publish = named("instep_publish")?;
        kernels.norm = named("instep_norm")?;
        kernels.step = named(&step_names().nth(optimizer as usize).unwrap_or_default())?;
        Ok(kernels)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: loaded by `load`; the driver keeps the code of what is in flight.
        unsafe { self.driver.unload(self.module) }
    }
}
