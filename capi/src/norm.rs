//! The norm of the gradients of several buckets, and the decision that follows from it.
//!
//! A handle stands for a `GradNorm` on the host or on a GPU.
#![allow(unsafe_code)]

use std::ffi::c_void;

use instep::GradNorm;
use instep::bucket_step::{Decision, NormOnGpu};

use crate::arguments::{Growing, Out, write_growing};
use crate::codes::flag;
use crate::entry::call;
use crate::handles::{Kind, Table};
use crate::options::{cuda, instep_cuda, refuse_stream, stream as stream_of};
use crate::status::instep_status;
use crate::tensors::{instep_scaling, scaling as factors};

/// The norm over the gradients of any number of buckets. The norm decides whether the steps of these buckets are
/// clipped or skipped.
///
/// The caller owns the norm until instep_norm_free. Any thread may use the norm, but only one thread at a time: a
/// second thread gets INSTEP_BUSY.
pub struct instep_norm;

/// The decision that follows from a norm.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_decision {
    /// sizeof(instep_decision), set by the caller.
    pub size: usize,
    /// The norm of all averaged gradients. The norm is infinite or NaN if a gradient is infinite or NaN.
    pub norm: f64,
    /// The clip coefficient. The coefficient is 1 if nothing is clipped or all steps are skipped.
    pub clip: f64,
    /// 1 if no gradient is infinite or NaN.
    pub is_finite: u32,
    /// 1 if steps with this decision are skipped. They then change nothing.
    pub is_skipped: u32,
}

// SAFETY: all fields are numbers, for which zeros are valid.
unsafe impl Growing for instep_decision {
    const NAME: &'static str = "instep_decision";
}

pub(crate) static NORMS: Table<Norm> = Table::new(Kind::Norm);

pub(crate) enum Norm {
    Host(GradNorm),
    Cuda(GradNorm<NormOnGpu>),
}

/// Creates a norm for buckets on a GPU, or on the CPU if `on` is null. If the call succeeds, it writes the handle to
/// `*out_norm`.
///
/// Any thread may call this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_norm_create(
    on: *const instep_cuda,
    out_norm: *mut *mut instep_norm,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let (on, out) = unsafe { (cuda(on)?, Out::new(out_norm, "out_norm")?) };
        let norm = match on {
            None => Norm::Host(GradNorm::host()?),
            Some(gpu) => Norm::Cuda(GradNorm::cuda(&gpu)?),
        };
        out.put(NORMS.insert(norm)?);
        Ok(())
    })
}

/// Begins a new norm. `scaling` gives the numbers by which the norm and its steps divide the gradients, such as the
/// number of ranks. If `scaling` is null, they do not divide the gradients. A clip in `scaling` is refused, because the
/// norm decides the clip.
///
/// Any thread may call this function, one thread at a time per norm. On a GPU, the work of each call on a norm is
/// enqueued on the `stream` of that call. This work runs after the work of the previous call on this norm, even if the
/// two calls have different streams. `stream` must meet the conditions that instep_bucket_step_step names.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_norm_begin(
    norm: *mut instep_norm,
    scaling: *const instep_scaling,
    stream: *mut c_void,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let scaling = unsafe { factors(scaling)? };
        NORMS.with(norm, |norm| match norm {
            Norm::Host(host) => {
                refuse_stream(stream)?;
                Ok(host.begin(scaling)?)
            }
            Norm::Cuda(gpu) => {
                // SAFETY: the caller meets the header's contract.
                unsafe { gpu.enqueue_begin(scaling, stream_of(stream))? };
                Ok(())
            }
        })
    })
}

/// Decides the clip coefficient, and whether the steps are skipped. Gradients with a norm above `max_norm` are clipped
/// to `max_norm`. If `max_norm` is 0, nothing is clipped. If `skip_nonfinite` is 1 and a gradient is infinite or NaN,
/// all steps are skipped. After this call, step each added bucket once with this norm. The call is refused if no bucket
/// was added.
///
/// Any thread may call this function, one thread at a time per norm.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_norm_decide(
    norm: *mut instep_norm,
    max_norm: f64,
    skip_nonfinite: u32,
    stream: *mut c_void,
) -> instep_status {
    call(|| {
        let (max_norm, skips) =
            ((max_norm != 0.0).then_some(max_norm), flag("skip_nonfinite", skip_nonfinite)?);
        NORMS.with(norm, |norm| match norm {
            Norm::Host(host) => {
                refuse_stream(stream)?;
                Ok(host.decide(max_norm, skips).map(drop)?)
            }
            Norm::Cuda(gpu) => {
                // SAFETY: the caller meets the header's contract.
                unsafe { gpu.enqueue_decide(max_norm, skips, stream_of(stream))? };
                Ok(())
            }
        })
    })
}

/// Reads the decision.
///
/// Any thread may call this function, one thread at a time per norm. On a GPU, the call waits for the work of the last
/// call on this norm.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_norm_read(
    norm: *mut instep_norm,
    out_decision: *mut instep_decision,
) -> instep_status {
    call(|| {
        NORMS.with(norm, |norm| {
            let Decision { norm, clip, is_finite, skipped } = match norm {
                Norm::Host(host) => host.decision()?,
                Norm::Cuda(gpu) => gpu.decision()?,
            };
            let (is_finite, is_skipped) = (is_finite.into(), skipped.into());
            // SAFETY: the caller meets the header's contract.
            unsafe {
                write_growing(out_decision, instep_decision { size: 0, norm, clip, is_finite, is_skipped })
            }
        })
    })
}

/// Frees a norm. If the handle is null, the call does nothing.
///
/// Any thread may call this function, one thread at a time per norm. If another thread is using the norm, the call
/// returns INSTEP_BUSY and does not free the norm.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_norm_free(norm: *mut instep_norm) -> instep_status {
    call(|| if norm.is_null() { Ok(()) } else { NORMS.remove(norm).map(drop) })
}
