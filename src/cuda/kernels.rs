//! The kernels of this build, loaded on one device.
//!
//! All steppers share one binary, and each takes the step kernels of the optimizers that it uses. Names come from the
//! table of optimizers, so a new optimizer changes nothing here.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::sync::Arc;

use super::built::step_names;
use super::driver::{Driver, Kernel, Module};
use crate::abi::INSTEP_OPTIMIZER_CUSTOM;
use crate::error::Result;
use crate::layout::Moments;

pub(super) struct Kernels {
    driver: Arc<dyn Driver>,
    module: Module,
    pub(super) begin: Kernel,
    pub(super) decide: Kernel,
    pub(super) publish: Kernel,
    pub(super) norm: Kernel,
    pub(super) custom: Kernel,
    /// The kernels in use, by the optimizer's row in the table.
    steps: Vec<Option<Kernel>>,
}

impl Kernels {
    /// # Errors
    /// `KernelsNotBuilt` if this build has none, `Device` if the driver cannot load them.
    pub(super) fn load(driver: &Arc<dyn Driver>, optimizers: &[u32], moments: Moments) -> Result<Kernels> {
        let module = driver.load(driver.image()?)?;
        let none = Kernel(0);
        let (begin, decide, publish, norm, custom) = (none, none, none, none, none);
        let (driver, steps) = (Arc::clone(driver), Vec::new());
        let mut kernels = Kernels { driver, module, begin, decide, publish, norm, custom, steps };
        let driver = Arc::clone(&kernels.driver);
        let named = |name: &str| {
            // These names contain no zero byte.
            let name = CString::new(name).unwrap_or_default();
            driver.kernel(module, &name)
        };
        kernels.begin = named("instep_begin")?;
        kernels.decide = named("instep_decide")?;
        kernels.publish = named("instep_publish")?;
        kernels.norm = named("instep_norm")?;
        for (optimizer, [floats, codes]) in step_names().enumerate() {
            let name = if moments == Moments::EightBit { codes } else { floats };
            let is_used = optimizers.contains(&(optimizer as u32));
            kernels.steps.push(if is_used { Some(named(&name)?) } else { None });
        }
        if optimizers.contains(&INSTEP_OPTIMIZER_CUSTOM) {
            kernels.custom = named("instep_custom")?;
        }
        Ok(kernels)
    }

    /// Returns the step kernel of an optimizer that `load` was given.
    pub(super) fn step(&self, optimizer: u32) -> Kernel {
        let known = self.steps.get(optimizer as usize).copied().flatten();
        known.unwrap_or(self.custom)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: loaded by `load`; the driver keeps the code of launches in flight.
        unsafe { self.driver.unload(self.module) }
    }
}
