//! The GPU kernels in this build: their names, architectures and sizes.
//!
//! Feature `cuda` builds them if it finds an nvcc (`build/cuda.rs`). Without them every function here returns
//! [`Error::KernelsNotBuilt`]. Nothing here needs a driver or a GPU.

use std::fmt;

use super::fatbin::{self, Image};
use crate::error::{Error, Result};

static FATBIN: &[u8] = include_bytes!(env!("INSTEP_KERNELS_FATBIN"));

/// The kernels that do not belong to one optimizer.
const COMMON: [&str; 7] = [
    "instep_begin",
    "instep_decide",
    "instep_publish",
    "instep_norm",
    "instep_custom",
    "instep_add",
    "instep_cast",
];
const OPTIMIZERS: &str = include_str!("../../kernels/optimizers.def");

/// Result of [`built_kernels`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuiltKernels {
    /// Names of the kernels; every image has all of them.
    pub names: Vec<String>,
    /// One per architecture, oldest first, PTX last.
    pub images: Vec<Image>,
}

/// Lists the GPU kernels of this build.
///
/// # Errors
/// `KernelsNotBuilt` if there are none; it says how to get them.
pub fn built_kernels() -> Result<BuiltKernels> {
    let images = fatbin::images(embedded()?).ok_or_else(|| Error::KernelsNotBuilt {
        how: "the embedded binary is damaged; rebuild, without INSTEP_FATBIN if that was set".to_owned(),
    })?;
    Ok(BuiltKernels {
        names: COMMON.map(str::to_owned).into_iter().chain(step_names().flatten()).collect(),
        images,
    })
}

/// Returns the fat binary that the driver loads.
pub(super) fn embedded() -> Result<&'static [u8]> {
    let missing = env!("INSTEP_KERNELS_MISSING");
    if missing.is_empty() { Ok(FATBIN) } else { Err(Error::KernelsNotBuilt { how: missing.to_owned() }) }
}

/// Returns the names of the step kernels by the optimizer's number: for float states, and for 8-bit states.
pub(super) fn step_names() -> impl Iterator<Item = [String; 2]> {
    let rows = OPTIMIZERS.lines().filter_map(|line| line.strip_prefix("OPTIMIZER("));
    let names = rows.filter_map(|row| Some(row.split_once(',')?.0));
    names.map(|name| [format!("instep_step_{name}"), format!("instep_step_{name}_8bit")])
}

impl fmt::Display for BuiltKernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for ", self.names.len())?;
        for (k, image) in self.images.iter().enumerate() {
            let separator = if k == 0 { "" } else { ", " };
            write!(f, "{separator}{} ({} KB)", image.architecture, image.bytes.div_ceil(1000))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_lists_its_kernels_or_says_how_to_get_them() {
        match built_kernels() {
            Ok(kernels) => {
                assert!(kernels.names.iter().any(|name| name == "instep_step_adam"));
                let last = kernels.images.last().unwrap();
                assert!(last.architecture.starts_with("compute_"), "{last:?}");
                assert!(kernels.images.iter().all(|image| image.bytes > 1_000));
            }
            Err(Error::KernelsNotBuilt { how }) => {
                assert_ne!(std::env::var("INSTEP_REQUIRE_KERNELS").as_deref(), Ok("1"), "not built: {how}");
                assert!(how.contains("rebuild"), "{how}");
                assert_eq!(cfg!(feature = "cuda"), !how.contains("--features cuda"), "{how}");
            }
            Err(other) => panic!("{other}"),
        }
    }
}
