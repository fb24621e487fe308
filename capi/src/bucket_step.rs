//! Bucket steps: a call steps one bucket immediately, on tensors that are passed with the call.
//!
//! A handle stands for a `BucketStep` on the host or on a GPU. Each function works for both, except
//! instep_bucket_step_step_again, which requires the host.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_void};

use crate::arguments::{Out, list, read, text};
use crate::bucket_options::{Engine, Step, create, instep_bucket_step_options, on_any};
use crate::entry::call;
use crate::handles::{Kind, Table};
use crate::norm::{NORMS, Norm, instep_norm};
use crate::optimizer::{build, changes, instep_hyper, instep_optimizer, keywords, refuse_other};
use crate::options::{refuse_stream, stream as stream_of};
use crate::status::{Fault, INSTEP_UNSUPPORTED, Result, instep_status};
use crate::tensors::{gradients, instep_scaling, instep_tensor, instep_tensors, scaling, tensors as lent};

/// The step of one bucket, with its step counts and hyperparameters. A bucket step has no tensors: they are passed with
/// each call.
///
/// The caller owns the bucket step until instep_bucket_step_free. Any thread may use the bucket step, but only one
/// thread at a time: a second thread gets INSTEP_BUSY. Different bucket steps may be used at the same time.
pub struct instep_bucket_step;

pub(crate) static BUCKET_STEPS: Table<Step> = Table::new(Kind::BucketStep);

/// Creates a bucket step. If the call succeeds, it writes the handle to `*out_step`.
///
/// Any thread may call this function. No other thread may use the layout during the call. The library starts no thread
/// before the first step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_bucket_step_create(
    options: *const instep_bucket_step_options,
    out_step: *mut *mut instep_bucket_step,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let (options, out) = unsafe { (read(options)?, Out::new(out_step, "out_step")?) };
        // SAFETY: the caller meets the header's contract.
        let step = unsafe { create(&options)? };
        out.put(BUCKET_STEPS.insert(step)?);
        Ok(())
    })
}

/// Steps the bucket. On the CPU the step is complete when the call returns. On a GPU the call launches the step on
/// `stream`. In stream order, the sum of the gradients must come before the step. If the call is refused, nothing is
/// written.
///
/// If `norm` is not null, call instep_norm_decide on it first. The decision of that call then applies to the step, and
/// `scaling` must be null. If `norm` is null, `scaling` gives the numbers by which the step divides the gradients, such
/// as the number of ranks. If `norm` and `scaling` are both null, the step uses the gradients as they are.
///
/// Any thread may call this function, but only one thread at a time may use the bucket step or the norm. `stream`
/// (cudaStream_t or CUstream) must belong to the bucket step's GPU, must stay valid until the step has ended, and must
/// not be capturing. A null `stream` means the legacy default stream. For the CPU, pass null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_bucket_step_step(
    step: *mut instep_bucket_step,
    tensors: *const instep_tensors,
    scaling: *const instep_scaling,
    norm: *mut instep_norm,
    stream: *mut c_void,
) -> instep_status {
    call(|| {
        BUCKET_STEPS.with(step, |step| {
            // SAFETY: the caller meets the header's contract, here and below.
            let (tensors, factors) = unsafe { (lent(tensors, step.is_empty)?, self::scaling(scaling)?) };
            if norm.is_null() {
                return match &mut step.engine {
                    Engine::Host(host) => {
                        refuse_stream(stream)?;
                        Ok(host.step(&tensors, factors)?)
                    }
                    Engine::Cuda(gpu) => {
                        // SAFETY: the caller meets the header's contract.
                        unsafe { gpu.enqueue(&tensors, factors, stream_of(stream))? };
                        Ok(())
                    }
                };
            }
            if !scaling.is_null() {
                let remedy = "pass null; the norm has the factors since instep_norm_begin";
                return Err(Fault::argument("scaling", "given beside a norm", remedy));
            }
            NORMS.with(norm, |norm| match (&mut step.engine, norm) {
                (Engine::Host(host), Norm::Host(norm)) => {
                    refuse_stream(stream)?;
                    Ok(host.step_decided(&tensors, norm)?)
                }
                (Engine::Cuda(gpu), Norm::Cuda(norm)) => {
                    // SAFETY: the caller meets the header's contract.
                    unsafe { gpu.enqueue_decided(&tensors, norm, stream_of(stream))? };
                    Ok(())
                }
                _ => Err(other_device()),
            })
        })
    })
}

/// Repeats the step of the last call of instep_bucket_step_step that was not refused, on the same tensors, but with
/// `scaling` and without a norm. The call does not read or check the list of tensors again, which saves much of the
/// time of a small step. The call returns INSTEP_ORDER if no call of instep_bucket_step_step has succeeded since the
/// bucket step was created, or since the last call of instep_norm_add for this bucket step. The tensors must still be
/// valid and must not overlap.
///
/// Any thread may call this function, one thread at a time per bucket step. The function works only on the CPU. On a
/// GPU it returns INSTEP_UNSUPPORTED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_bucket_step_step_again(
    step: *mut instep_bucket_step,
    scaling: *const instep_scaling,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let factors = unsafe { self::scaling(scaling)? };
        BUCKET_STEPS.with(step, |step| match &mut step.engine {
            Engine::Host(host) => {
                // SAFETY: the caller meets the header's contract.
                unsafe { host.step_again(factors)? };
                Ok(())
            }
            Engine::Cuda(_) => {
                let text =
                    "bucket step: on a GPU, where every step takes its tensors; call instep_bucket_step_step";
                Err(Fault::new(INSTEP_UNSUPPORTED, text))
            }
        })
    })
}

/// Sets the learning rate of a group from the next step on. A null `group` means the group "default". All other
/// hyperparameters stay as they are. Use this call for learning-rate schedules.
///
/// Any thread may call this function, one thread at a time per bucket step. The call never waits for a GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_bucket_step_set_lr(
    step: *mut instep_bucket_step,
    group: *const c_char,
    lr: f64,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let group = unsafe { group_name(group)? };
        BUCKET_STEPS.with(step, |step| Ok(on_any!(&mut step.engine, step => step.set_lr(group, lr))?))
    })
}

/// Sets the given hyperparameters of a group from the next step on. A null `group` means the group "default". If one
/// hyperparameter is refused, none is set. Other hyperparameters stay as they are. The new hyperparameters must need
/// the same states as the hyperparameters at creation.
///
/// Any thread may call this function, one thread at a time per bucket step. The call never waits for a GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_bucket_step_set_hyper(
    step: *mut instep_bucket_step,
    group: *const c_char,
    hypers: *const instep_hyper,
    hyper_count: usize,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let (group, keywords) = unsafe { (group_name(group)?, keywords(hypers, hyper_count)?) };
        BUCKET_STEPS.with(step, |step| {
            on_any!(&mut step.engine, step => {
                let changes = changes(step.optimizer(group)?, &keywords)?;
                Ok(step.set_hyper(group, &changes)?)
            })
        })
    })
}

/// Replaces all hyperparameters of a group's optimizer from the next step on. A null `group` means the group "default".
/// Hyperparameters that you leave out get their defaults, even if they were set before. To change only some
/// hyperparameters, call instep_bucket_step_set_lr or instep_bucket_step_set_hyper. The new optimizer must have the
/// same name and the same states as the old one. Step counts and states do not change.
///
/// Any thread may call this function, one thread at a time per bucket step. The call never waits for a GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_bucket_step_set_optimizer(
    step: *mut instep_bucket_step,
    group: *const c_char,
    optimizer: *const instep_optimizer,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let (group, optimizer) = unsafe { (group_name(group)?, build(optimizer)?) };
        BUCKET_STEPS.with(step, |step| {
            if let Some((_, old)) = step.optimizers.iter().find(|(name, _)| name == group) {
                refuse_other(group, old, &*optimizer)?;
            }
            Ok(on_any!(&mut step.engine, step => step.set_optimizer(group, &*optimizer))?)
        })
    })
}

/// Writes a parameter's number of updates to `*out_count`, and NAdam's product of momenta to `*out_carried`. For other
/// optimizers, `*out_carried` is 1. Either pointer may be null.
///
/// Any thread may call this function, one thread at a time per bucket step. On a GPU, the call may wait for the last
/// step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_bucket_step_progress(
    step: *mut instep_bucket_step,
    param: u32,
    out_count: *mut u64,
    out_carried: *mut f64,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let (to_count, to_carried) =
            unsafe { (Out::optional(out_count, "out_count")?, Out::optional(out_carried, "out_carried")?) };
        BUCKET_STEPS.with(step, |step| {
            let id = step.ids.get(param)?;
            let (count, carried) =
                on_any!(&mut step.engine, step => (step.step_count(id)?, step.carried(id)?.unwrap_or(1.0)));
            to_count.into_iter().for_each(|out| out.put(count));
            to_carried.into_iter().for_each(|out| out.put(carried));
            Ok(())
        })
    })
}

/// Resumes a training: sets the numbers that instep_bucket_step_progress reads. For NAdam with a count above 0,
/// `carried` is the product of momenta. In all other cases, `carried` is 1. A count of 2^63 or more is refused.
///
/// Any thread may call this function, one thread at a time per bucket step. On a GPU, the call may wait for the last
/// step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_bucket_step_set_progress(
    step: *mut instep_bucket_step,
    param: u32,
    count: u64,
    carried: f64,
) -> instep_status {
    call(|| {
        BUCKET_STEPS.with(step, |step| {
            let id = step.ids.get(param)?;
            Ok(on_any!(&mut step.engine, step => step.set_step_count(id, (count, carried)))?)
        })
    })
}

/// Adds the summed gradients of a bucket to a norm. Add each bucket once between instep_norm_begin and
/// instep_norm_decide, in any order. The norm leaves out parameters that have no gradient. A bucket without any
/// gradient still counts as added.
///
/// Any thread may call this function, but only one thread at a time may use the norm or the bucket step. The gradients
/// are only read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_norm_add(
    norm: *mut instep_norm,
    step: *mut instep_bucket_step,
    grads: *const instep_tensor,
    stream: *mut c_void,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract, here and below.
        let grads = unsafe { list(grads, 1, "grads")? }[0];
        NORMS.with(norm, |norm| {
            // SAFETY: the caller meets the header's contract.
            BUCKET_STEPS.with(step, |step| unsafe { step.add_norm(&grads, norm, stream) })
        })
    })
}

/// Frees a bucket step. If the handle is null, the call does nothing.
///
/// Any thread may call this function, one thread at a time per bucket step. If another thread is using the bucket step,
/// the call returns INSTEP_BUSY and does not free the bucket step. On a GPU, the call waits for the last step, but only
/// for up to 20 ms. After 20 ms, the memory that the step may still use is leaked.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_bucket_step_free(step: *mut instep_bucket_step) -> instep_status {
    call(|| if step.is_null() { Ok(()) } else { BUCKET_STEPS.remove(step).map(drop) })
}

impl Step {
    /// Adds the bucket's gradients to a norm.
    ///
    /// # Safety
    /// The gradients meet the header's contract.
    pub(crate) unsafe fn add_norm(
        &mut self,
        grads: &instep_tensor,
        norm: &mut Norm,
        stream: *mut c_void,
    ) -> Result<()> {
        // SAFETY: guaranteed by the caller, here and below.
        let grads = unsafe { gradients(grads, self.is_empty)? };
        match (&mut self.engine, norm) {
            (Engine::Host(host), Norm::Host(norm)) => {
                refuse_stream(stream)?;
                Ok(host.add_norm(&grads, norm)?)
            }
            (Engine::Cuda(gpu), Norm::Cuda(norm)) => {
                // SAFETY: guaranteed by the caller.
                unsafe { gpu.enqueue_norm(&grads, norm, stream_of(stream))? };
                Ok(())
            }
            _ => Err(other_device()),
        }
    }
}

/// Returns the name of a group. Null means the default group.
///
/// # Safety
/// `group` is null, or a text that meets the header's contract for `'a`.
pub(crate) unsafe fn group_name<'a>(group: *const c_char) -> Result<&'a str> {
    // SAFETY: guaranteed by the caller.
    if group.is_null() { Ok(instep::DEFAULT_GROUP) } else { unsafe { text(group, "group") } }
}

fn other_device() -> Fault {
    Fault::new(INSTEP_UNSUPPORTED, "norm: of another device than the bucket step; create both on one device")
}
