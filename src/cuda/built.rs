//! The GPU kernels that this build carries: which, for what architectures, of what size.
//!
//! Built by feature `cuda` if an nvcc is found (`build/cuda.rs`); without them everything here answers
//! [`Error::KernelsNotBuilt`]. Must not need a driver: a machine without a GPU can ask.

use std::fmt;

use super::fatbin::{self, Image};
use crate::error::{Error, Result};

static FATBIN: &[u8] = include_bytes!(env!("INSTEP_KERNELS_FATBIN"));

/// Besides one step kernel per row of the table of optimizers.
const COMMON: [&str; 5] = ["instep_begin", "instep_decide", "instep_publish", "instep_norm", "instep_custom"];
const OPTIMIZERS: &str = include_str!("../../kernels/optimizers.def");

/// What [`built_kernels`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuiltKernels {
    /// Entry names, each present in every image.
    pub names: Vec<String>,
    /// One per architecture, oldest first, PTX last.
    pub images: Vec<Image>,
}

/// The GPU kernels of this build.
///
/// # Errors
/// `KernelsNotBuilt` if there are none, with what to do about it.
pub fn built_kernels() -> Result<BuiltKernels> {
    let images = fatbin::images(embedded()?).ok_or_else(|| Error::KernelsNotBuilt {
        how: "the embedded binary is damaged; rebuild, without INSTEP_FATBIN if that was set".to_owned(),
    })?;
    Ok(BuiltKernels {
        names: COMMON.map(str::to_owned).into_iter().chain(step_names().flatten()).collect(),
        images,
    })
}

/// The binary, as a driver takes it.
pub(super) fn embedded() -> Result<&'static [u8]> {
    let missing = env!("INSTEP_KERNELS_MISSING");
    if missing.is_empty() { Ok(FATBIN) } else { Err(Error::KernelsNotBuilt { how: missing.to_owned() }) }
}

/// The step kernels, by the optimizer's number: for states in floats, and in codes.
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
                assert!(kernels.images.iter().all(|image| (1_000..1_000_000).contains(&image.bytes)));
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
