//! Copies values to another type by the kernels' conversions.
//!
//! A cast rounds each value once, to the nearest, ties to even.

use std::sync::LazyLock;

use bytemuck::{cast_slice, cast_slice_mut};

use crate::dtype::{DType, Element};
use crate::host::kernels::{Isa, Kernels};

/// The widest kernels that this machine runs, if they pass their self-test.
static KERNELS: LazyLock<Option<Kernels>> = LazyLock::new(|| Kernels::load(Isa::best()).ok());

/// The number of elements that a cast between two 16-bit types converts through f32 at a time. These elements fit in
/// the L1 cache.
const RUN: usize = 1024;

/// Copies values to a slice of another type, rounded to the nearest, ties to even. Use it for the inputs and outputs of
/// forward under a [`MixedPrecisionPolicy`](crate::MixedPrecisionPolicy). A NaN stays a NaN, but its other bits may
/// change. On a GPU, [`CastKernel`](crate::cuda::CastKernel) does the same.
///
/// ```
/// use instep::{bf16, cast};
///
/// let mut narrow = [bf16::ZERO; 2];
/// cast(&[1.0f32, 1.0 + 1.0 / 1024.0], &mut narrow);
/// assert_eq!(narrow, [bf16::ONE; 2]);
/// ```
///
/// # Panics
/// If the lengths differ.
pub fn cast<S: Element, T: Element>(from: &[S], into: &mut [T]) {
    assert_eq!(from.len(), into.len(), "slices of the same length");
    match (S::DTYPE, T::DTYPE, &*KERNELS) {
        (s, t, _) if s == t => cast_slice_mut::<T, u8>(into).copy_from_slice(cast_slice(from)),
        (_, _, None) => from.iter().zip(into).for_each(|(from, into)| *into = T::from_f32(from.to_f32())),
        (DType::F32, t, Some(kernels)) => kernels.narrow(cast_slice(from), cast_slice_mut(into), t, 1.0),
        (s, DType::F32, Some(kernels)) => kernels.widen(cast_slice(from), cast_slice_mut(into), s, 1.0),
        (s, t, Some(kernels)) => {
            let mut wide = [0.0; RUN];
            for (from, into) in from.chunks(RUN).zip(into.chunks_mut(RUN)) {
                let wide = &mut wide[..from.len()];
                kernels.widen(cast_slice(from), wide, s, 1.0);
                kernels.narrow(wide, cast_slice_mut(into), t, 1.0);
            }
        }
    }
}
