//! The native half of the Python package `instep`. It steps a bucket at given addresses, adds a bucket's gradients to a
//! norm, and steps lists of tensors.
//!
//! For a bucket, `instep.torch` passes the addresses and lengths of tensors, and keeps these tensors alive during each
//! call. This module is useless without the Python half of the package, and its names are private.

mod arguments;
mod device;
mod errors;
mod lists;
mod norm;
mod openmp;
mod optimizers;
mod same;
mod step;
mod tensors;

/// The native module of the package.
#[pyo3::pymodule]
mod _native {
    use instep::cuda::built_kernels;
    use pyo3::prelude::*;
    use pyo3::types::PyTuple;

    #[pymodule_export]
    use super::lists::{Lists, Prepared};
    #[pymodule_export]
    use super::norm::Norm;
    #[pymodule_export]
    use super::optimizers::{all_state_names, descriptors, state_names};
    #[pymodule_export]
    use super::same::{has_objects, objects_of};
    #[pymodule_export]
    use super::step::Step;

    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
    #[pymodule_export]
    const NORM_LIMBS: usize = instep::bucket_step::NORM_LIMBS;
    #[pymodule_export]
    const MAX_THREADS: usize = instep::Pool::MAX_THREADS;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let images = built_kernels().map(|kernels| kernels.images).unwrap_or_default();
        let architectures = images.into_iter().map(|image| image.architecture);
        module.add("GPU_ARCHITECTURES", PyTuple::new(module.py(), architectures.collect::<Vec<_>>())?)
    }
}
