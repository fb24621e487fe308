//! Copies of values in another type on a GPU, for the trainer's own tensors, on the trainer's stream.
//!
//! A stepper converts what it owns inside its steps. This is for inputs and outputs of a forward, which it never sees.
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

/// A kernel that copies values to memory of another type: inputs of a forward, or its outputs, as a
/// [`MixedPrecisionPolicy`](crate::MixedPrecisionPolicy) says.
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
    /// `KernelsNotBuilt` if this build has none, `Device` if the driver cannot load them.
    pub fn new(cuda: &Cuda) -> Result<CastKernel> {
        let driver = Arc::clone(cuda.driver());
        let _entered = Entered::new(&*cuda.driver)?;
        let kernels = Kernels::load(&driver, &[])?;
        Ok(CastKernel { driver, kernels, stream: cuda.compute, max_blocks: cuda.max_blocks })
    }

    /// Copies `len` values, each to the nearest of the other type, ties to even; a NaN stays a NaN, maybe of other bits. The
    /// bits are those of [`cast`](crate::cast) otherwise.
    ///
    /// # Shapes
    /// `len` elements each, at multiples of their size.
    ///
    /// # Ordering
    /// Comes after the work that is on the trainer's stream.
    ///
    /// # Errors
    /// `Layout` if an address is misaligned, `Device` if the driver refuses the launch.
    ///
    /// # Safety
    /// Both are memory of this GPU with `count` elements, which do not overlap. Until the stream has passed the call, nothing
    /// else writes the source or touches the destination.
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
        // SAFETY: the kernel takes this struct; the rest is the contract.
        unsafe { self.driver.launch(self.kernels.cast, shape, self.stream, ptr::from_ref(&args).cast()) }
    }
}

impl std::fmt::Debug for CastKernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CastKernel").field("stream", &self.stream).finish_non_exhaustive()
    }
}
