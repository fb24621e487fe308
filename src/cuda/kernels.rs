//! The kernels of this build, loaded on one device.
//!
//! All steppers load the same binary, and each looks up the step kernels of its own optimizers. The kernels' names come
//! from the table of optimizers, so a new optimizer needs no change here.

use std::ffi::CString;
use std::sync::Arc;

use super::built::step_names;
use super::driver::{Driver, Kernel};
use super::owned::OwnedModule;
use crate::abi::INSTEP_OPTIMIZER_CUSTOM;
use crate::error::Result;

pub(super) struct Kernels {
    pub(super) begin: Kernel,
    pub(super) decide: Kernel,
    pub(super) publish: Kernel,
    pub(super) norm: Kernel,
    pub(super) add: Kernel,
    pub(super) cast: Kernel,
    /// The step kernels. A key has the optimizer's row in the table of optimizers, and a flag: whether the states are
    /// 8-bit codes.
    steps: Vec<((u32, bool), Kernel)>,
    _module: OwnedModule,
}

impl Kernels {
    /// Loads the kernels. `used` lists the optimizers by row, each with a flag: whether its states are 8-bit codes.
    ///
    /// # Errors
    /// `KernelsNotBuilt` if this build has no kernels. `Device` if the driver cannot load them.
    pub(super) fn load(driver: &Arc<dyn Driver>, used: &[(u32, bool)]) -> Result<Kernels> {
        let module = OwnedModule::load(driver)?;
        // These names contain no zero byte.
        let named = |name: &str| driver.kernel(module.handle(), &CString::new(name).unwrap_or_default());
        let rows: Vec<[String; 2]> = step_names().collect();
        let step = |&(optimizer, has_codes): &(u32, bool)| {
            let name = match optimizer {
                INSTEP_OPTIMIZER_CUSTOM => "instep_custom",
                row => &rows[row as usize][usize::from(has_codes)],
            };
            Ok(((optimizer, has_codes), named(name)?))
        };
        Ok(Kernels {
            begin: named("instep_begin")?,
            decide: named("instep_decide")?,
            publish: named("instep_publish")?,
            norm: named("instep_norm")?,
            add: named("instep_add")?,
            cast: named("instep_cast")?,
            steps: used.iter().map(step).collect::<Result<_>>()?,
            _module: module,
        })
    }

    pub(super) fn step(&self, optimizer: u32, has_codes: bool) -> Kernel {
        let found = self.steps.iter().find(|(used, _)| *used == (optimizer, has_codes));
        found.map_or(Kernel(0), |(_, kernel)| *kernel)
    }
}
