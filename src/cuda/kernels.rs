//! The kernels of this build, loaded on one device.
//!
//! All steppers share one binary, and each takes the step kernels of the optimizers that it uses. Names come from the
//! table of optimizers, so a new optimizer changes nothing here.

use std::ffi::CString;
use std::sync::Arc;

use super::built::step_names;
use super::driver::{Driver, Kernel};
use super::owned::OwnedModule;
use crate::abi::INSTEP_OPTIMIZER_CUSTOM;
use crate::error::Result;

pub(super) struct Kernels {
    _module: OwnedModule,
    pub(super) begin: Kernel,
    pub(super) decide: Kernel,
    pub(super) publish: Kernel,
    pub(super) norm: Kernel,
    pub(super) custom: Kernel,
    pub(super) add: Kernel,
    pub(super) cast: Kernel,
    /// The kernels in use, by the optimizer's row in the table: on states of floats, and of 8-bit codes.
    steps: Vec<[Option<Kernel>; 2]>,
}

impl Kernels {
    /// `used` lists the optimizers, each with whether its states are 8-bit codes.
    ///
    /// # Errors
    /// `KernelsNotBuilt` if this build has none, `Device` if the driver cannot load them.
    pub(super) fn load(driver: &Arc<dyn Driver>, used: &[(u32, bool)]) -> Result<Kernels> {
        let module = driver.load(driver.image()?)?;
        let none = Kernel(0);
        let (begin, decide, publish, norm, custom) = (none, none, none, none, none);
        let (add, cast) = (none, none);
        let (_module, steps) = (OwnedModule::new(driver, module), Vec::new());
        let mut kernels = Kernels { _module, begin, decide, publish, norm, custom, add, cast, steps };
        let named = |name: &str| {
            // These names contain no zero byte.
            let name = CString::new(name).unwrap_or_default();
            driver.kernel(module, &name)
        };
        kernels.begin = named("instep_begin")?;
        kernels.decide = named("instep_decide")?;
        kernels.publish = named("instep_publish")?;
        kernels.norm = named("instep_norm")?;
        kernels.add = named("instep_add")?;
        kernels.cast = named("instep_cast")?;
        for (optimizer, names) in step_names().enumerate() {
            let mut of_optimizer = [None; 2];
            for ((kernel, name), has_codes) in of_optimizer.iter_mut().zip(&names).zip([false, true]) {
                if used.contains(&(optimizer as u32, has_codes)) {
                    *kernel = Some(named(name)?);
                }
            }
            kernels.steps.push(of_optimizer);
        }
        if used.iter().any(|(optimizer, _)| *optimizer == INSTEP_OPTIMIZER_CUSTOM) {
            kernels.custom = named("instep_custom")?;
        }
        Ok(kernels)
    }

    /// Returns the step kernel of an optimizer that `load` was given.
    pub(super) fn step(&self, optimizer: u32, has_codes: bool) -> Kernel {
        let known = self.steps.get(optimizer as usize).and_then(|kernels| kernels[usize::from(has_codes)]);
        known.unwrap_or(self.custom)
    }
}
