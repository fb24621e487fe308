//! The GPU kernels in this build: their names, architectures and sizes, read from nvcc's fat binary.
//!
//! Feature `cuda` builds the kernels if it finds an nvcc (`build/cuda.rs`). Without kernels, [`built_kernels`] returns
//! [`Error::KernelsNotBuilt`]. This module needs no driver and no GPU. NVIDIA does not document the format of fat
//! binaries, so the parser follows the output of nvcc 13.0. The driver, not this file, decides which image is loaded.
//! Malformed input gives `None` and never a panic.

use std::fmt;

use crate::error::{Error, Result};

static FATBIN: &[u8] = include_bytes!(env!("INSTEP_KERNELS_FATBIN"));

/// The names of the kernels that do not belong to a single optimizer.
const COMMON: &str = "begin decide publish norm custom add cast";
const OPTIMIZERS: &str = include_str!("../../kernels/optimizers.def");

/// Result of [`built_kernels`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuiltKernels {
    /// Names of the kernels. Every image has all of these kernels.
    pub names: Vec<String>,
    /// One binary per architecture, the oldest first, and PTX last.
    pub images: Vec<Image>,
}

/// Lists the GPU kernels of this build.
///
/// # Errors
/// `KernelsNotBuilt` if there are no kernels. The error says how to build the kernels.
pub fn built_kernels() -> Result<BuiltKernels> {
    let images = images(embedded()?).ok_or_else(|| Error::KernelsNotBuilt {
        how: "the embedded binary is damaged; rebuild, without INSTEP_FATBIN if that was set".to_owned(),
    })?;
    let common = COMMON.split(' ').map(|name| format!("instep_{name}"));
    Ok(BuiltKernels { names: common.chain(step_names().flatten()).collect(), images })
}

/// Returns the fat binary that the driver loads.
pub(super) fn embedded() -> Result<&'static [u8]> {
    let missing = env!("INSTEP_KERNELS_MISSING");
    if missing.is_empty() { Ok(FATBIN) } else { Err(Error::KernelsNotBuilt { how: missing.to_owned() }) }
}

/// Returns the names of the step kernels, in the order of the optimizers' numbers. Each optimizer has two kernels, one
/// for float states and one for 8-bit states.
pub(super) fn step_names() -> impl Iterator<Item = [String; 2]> {
    let rows = OPTIMIZERS.lines().filter_map(|line| line.strip_prefix("OPTIMIZER("));
    let names = rows.filter_map(|row| Some(row.split_once(',')?.0));
    names.map(|name| [format!("instep_step_{name}"), format!("instep_step_{name}_8bit")])
}

impl fmt::Display for BuiltKernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |image: &Image| format!("{} ({} KB)", image.architecture, image.bytes.div_ceil(1000));
        let images: Vec<String> = self.images.iter().map(shown).collect();
        write!(f, "{} for {}", self.names.len(), images.join(", "))
    }
}

/// All kernels, compiled for one architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// nvcc's name: `sm_90` for machine code, `compute_90` for PTX that a driver compiles for newer GPUs.
    pub architecture: String,
    /// Compressed size in this build.
    pub bytes: u64,
}

const MAGIC: u64 = 0xba55_ed50;
const PTX: u64 = 1;
const MACHINE_CODE: u64 = 2;

/// Returns the images, PTX last, or `None` if this is not a fat binary.
pub(super) fn images(fatbin: &[u8]) -> Option<Vec<Image>> {
    if number(fatbin, 0, 4)? != MAGIC {
        return None;
    }
    let length = |data: &[u8], at: usize, bytes: usize| number(data, at, bytes)?.try_into().ok();
    let header: usize = length(fatbin, 6, 2)?;
    let end = header.checked_add(length(fatbin, 8, 8)?)?;
    let (mut at, mut found) = (header, Vec::new());
    while at < end {
        let entry = fatbin.get(at..end)?;
        let (header, bytes): (usize, usize) = (length(entry, 4, 4)?, length(entry, 8, 8)?);
        let prefix = match number(entry, 0, 2)? {
            PTX => "compute",
            MACHINE_CODE => "sm",
            _ => return None,
        };
        found
            .push(Image { architecture: format!("{prefix}_{}", number(entry, 28, 4)?), bytes: bytes as u64 });
        let next = at.checked_add(header)?.checked_add(bytes)?;
        at = if next > at { next } else { return None };
    }
    found.sort_by_key(|image| image.architecture.starts_with("compute"));
    (!found.is_empty()).then_some(found)
}

fn number(data: &[u8], at: usize, bytes: usize) -> Option<u64> {
    let mut whole = [0; 8];
    whole[..bytes].copy_from_slice(data.get(at..at.checked_add(bytes)?)?);
    Some(u64::from_le_bytes(whole))
}

#[cfg(test)]
#[path = "../../tests/unit/cuda/built.rs"]
mod tests;
