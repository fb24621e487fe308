//! Converts the trainer's own tensors to another element type, on the trainer's stream of a GPU.
//!
//! A stepper converts its own tensors inside its steps. This file converts the inputs and outputs of a forward pass,
//! which belong to no stepper.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use super::Cuda;
use super::driver::{Driver, Entered, Shape};
use super::kernels::Kernels;
use crate::abi::InstepCastArgs;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::handle::{DevicePtr, StreamHandle};

/// A kernel that copies values and converts them to another element type. The values are inputs or outputs of a forward
/// pass with a [`MixedPrecisionPolicy`](crate::MixedPrecisionPolicy).
///
/// ```no_run
/// use instep::cuda::{CastKernel, Cuda};
/// use instep::{DType, DevicePtr};
///
/// # let (inputs, narrow) = (DevicePtr(0), DevicePtr(0));
/// let cuda = Cuda::open(0)?;
/// let kernel = CastKernel::new(&cuda)?;
/// // SAFETY: 4,096 f32 and as many bf16 on this GPU, apart from each other.
/// unsafe { kernel.cast((inputs, DType::F32), (narrow, DType::BF16), 4096)? };
/// # Ok::<(), instep::Error>(())
/// ```
pub struct CastKernel {
    driver: Arc<dyn Driver>,
    kernels: Kernels,
    stream: StreamHandle,
    max_blocks: Option<u32>,
}

impl CastKernel {
    /// Loads the kernel for [the trainer's stream](Cuda::compute_stream).
    ///
    /// # Errors
    /// `KernelsNotBuilt` if this build has no kernels, `Device` if the driver cannot load them.
    pub fn new(cuda: &Cuda) -> Result<CastKernel> {
        let driver = Arc::clone(cuda.driver());
        let _entered = Entered::new(&*cuda.driver)?;
        let kernels = Kernels::load(&driver, &[])?;
        Ok(CastKernel { driver, kernels, stream: cuda.compute, max_blocks: cuda.max_blocks })
    }

    /// Copies `len` values. Each value is rounded to the nearest value of the destination's type, with ties to even. A
    /// NaN stays a NaN, but its bits may change. All other results are bit-identical to those of [`cast`](crate::cast).
    ///
    /// # Shapes
    /// Source and destination have `len` elements each. Both addresses are aligned to the size of an element.
    ///
    /// # Ordering
    /// The copy runs after the work that is already on the trainer's stream.
    ///
    /// # Errors
    /// `Layout` if an address is misaligned, `Device` if the driver refuses the launch.
    ///
    /// # Safety
    /// Each address points to `len` elements in this GPU's memory, and the two ranges do not overlap. Until the stream
    /// has passed the call, nothing else writes the source or touches the destination.
    pub unsafe fn cast(
        &self,
        (from, from_dtype): (DevicePtr, DType),
        (to, to_dtype): (DevicePtr, DType),
        len: u64,
    ) -> Result<()> {
        for (at, dtype) in [(from, from_dtype), (to, to_dtype)] {
            if !at.0.is_multiple_of(dtype.bytes()) {
                let wrong = format_args!("not aligned to {dtype}");
                return Err(Error::layout(format_args!("address {:#x}", at.0), wrong, "align it"));
            }
        }
        if len == 0 {
            return Ok(());
        }
        let pointer = |at: DevicePtr| ptr::with_exposed_provenance_mut::<c_void>(at.0 as usize);
        let args = InstepCastArgs {
            from: pointer(from),
            to: pointer(to),
            count: len,
            from_dtype: from_dtype as u32,
            to_dtype: to_dtype as u32,
        };
        let shape = Shape::of_elements(len, self.max_blocks);
        let _entered = Entered::new(&*self.driver)?;
        // SAFETY: the kernel takes this struct, and the caller guarantees the rest.
        unsafe { self.driver.launch(self.kernels.cast, shape, self.stream, ptr::from_ref(&args).cast()) }
    }
}

impl std::fmt::Debug for CastKernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CastKernel").field("stream", &self.stream).finish_non_exhaustive()
    }
}
