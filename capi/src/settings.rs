//! Settings and results of a stepper: hyperparameters, frozen parameters, step counts, loss scale, and the outcome of
//! the last pass.
//!
//! Each function calls one function of the Rust library.
#![allow(unsafe_code)]

use std::ffi::c_char;

use instep::optim::Value;

use crate::arguments::{Growing, Out, write_growing};
use crate::bucket_step::group_name;
use crate::codes::flag;
use crate::entry::call;
use crate::optimizer::{build, changes, instep_hyper, instep_optimizer, keywords, refuse_other};
use crate::status::instep_status;
use crate::stepper::{STEPPERS, instep_stepper, on_any};

/// The decisions about one pass, such as its clip coefficient and whether it was skipped.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_pass_status {
    /// sizeof(instep_pass_status), set by the caller.
    pub size: usize,
    /// The number of the pass, counted from 1. Abandoned passes count too. 0: no pass has ended.
    pub pass: u64,
    /// Number of passes abandoned so far.
    pub abandoned: u64,
    /// 1: the pass changed nothing, because a gradient was infinite or NaN.
    pub is_skipped: u32,
    /// 1: `norm` is known.
    pub has_norm: u32,
    /// The norm of all averaged gradients.
    pub norm: f64,
    /// The clip coefficient. It is 1 without clipping.
    pub clip: f64,
    /// The loss scale, by which the gradients were divided.
    pub loss_scale: f64,
    /// The first bucket with an infinite or NaN gradient, or -1.
    pub first_nonfinite_bucket: i64,
}

// SAFETY: all fields are numbers, for which zeros are valid.
unsafe impl Growing for instep_pass_status {
    const NAME: &'static str = "instep_pass_status";
}

/// Sets the learning rate of a group from the next pass on. A null `group` means the group "default". All other
/// hyperparameters stay as they are. All ranks must set the same value. Use this call for learning-rate schedules.
///
/// Any thread may call this function between passes, one thread at a time per stepper. The call does not wait for
/// steps, except after an abandoned pass.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_set_lr(
    stepper: *mut instep_stepper,
    group: *const c_char,
    lr: f64,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let group = unsafe { group_name(group)? };
        STEPPERS.with(stepper, |training| {
            Ok(on_any!(&mut training.engine, stepper => stepper.set_lr(group, lr))?)
        })
    })
}

/// Sets the given hyperparameters of a group from the next pass on. A null `group` means the group "default". If one
/// hyperparameter is refused, none is set. Other hyperparameters stay as they are. All ranks must set the same values.
///
/// Any thread may call this function between passes, one thread at a time per stepper. The call does not wait for
/// steps, except after an abandoned pass.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_set_hyper(
    stepper: *mut instep_stepper,
    group: *const c_char,
    hypers: *const instep_hyper,
    hyper_count: usize,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let (group, keywords) = unsafe { (group_name(group)?, keywords(hypers, hyper_count)?) };
        STEPPERS.with(stepper, |training| {
            on_any!(&mut training.engine, stepper => {
                let current = stepper.optimizers().find(|attached| attached.group == Some(group));
                let changes = current.map(|attached| changes(attached.optimizer, &keywords)).transpose()?;
                // If the group has no optimizer, `set_hyper` refuses it.
                Ok(stepper.set_hyper(group, &changes.unwrap_or_default())?)
            })
        })
    })
}

/// Replaces all hyperparameters of a group's optimizer from the next pass on. A null `group` means the group "default".
/// Hyperparameters that you leave out get their defaults, even if they were set before. To change only some
/// hyperparameters, call instep_stepper_set_lr or instep_stepper_set_hyper. The new optimizer must have the same name
/// as the old one. All ranks must set the same values.
///
/// Any thread may call this function between passes, one thread at a time per stepper. The call does not wait for
/// steps, except after an abandoned pass.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_set_optimizer(
    stepper: *mut instep_stepper,
    group: *const c_char,
    optimizer: *const instep_optimizer,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let (group, optimizer) = unsafe { (group_name(group)?, build(optimizer)?) };
        STEPPERS.with(stepper, |training| {
            if let Some((_, old)) = training.optimizers.iter().find(|(name, _)| name == group) {
                refuse_other(group, old, &*optimizer)?;
            }
            let fields = optimizer.descriptor().map(|descriptor| descriptor.fields).unwrap_or_default();
            let value = |name| optimizer.get(name).map(|value| (name, value));
            let all: Vec<(&str, Value)> = fields.iter().filter_map(|field| value(field.name)).collect();
            Ok(on_any!(&mut training.engine, stepper => stepper.set_hyper(group, &all))?)
        })
    })
}

/// Freezes a parameter from the next pass on, or unfreezes it. The gradient of a frozen parameter cannot be written,
/// and the parameter is not stepped. All ranks must freeze the same parameters.
///
/// Any thread may call this function between passes, one thread at a time per stepper. If `is_frozen` is 1, the call
/// waits for the last step of the parameter's bucket.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_set_frozen(
    stepper: *mut instep_stepper,
    param: u32,
    is_frozen: u32,
) -> instep_status {
    call(|| {
        let is_frozen = flag("is_frozen", is_frozen)?;
        STEPPERS.with(stepper, |training| {
            let id = training.ids.get(param)?;
            Ok(on_any!(&mut training.engine, stepper => stepper.set_frozen(id, is_frozen))?)
        })
    })
}

/// Writes a parameter's number of updates to `*out_count`, and NAdam's product of momenta to `*out_carried`. For other
/// optimizers, `*out_carried` is 1. Either pointer may be null.
///
/// Any thread may call this function between passes, one thread at a time per stepper. The call waits for all steps.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_progress(
    stepper: *mut instep_stepper,
    param: u32,
    out_count: *mut u64,
    out_carried: *mut f64,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let (to_count, to_carried) =
            unsafe { (Out::optional(out_count, "out_count")?, Out::optional(out_carried, "out_carried")?) };
        STEPPERS.with(stepper, |training| {
            let id = training.ids.get(param)?;
            let (count, carried) = on_any!(&training.engine, stepper => {
                let only = stepper.optimizers_of(id)?.first().copied();
                let carried = only.map(|only| stepper.carried((id, only))).transpose()?.flatten();
                (stepper.step_count(id)?, carried.unwrap_or(1.0))
            });
            to_count.into_iter().for_each(|out| out.put(count));
            to_carried.into_iter().for_each(|out| out.put(carried));
            Ok(())
        })
    })
}

/// Resumes a training without a checkpoint of this library: sets the numbers that instep_stepper_progress reads. For
/// NAdam with a count above 0, `carried` is the product of momenta. In all other cases, `carried` is 1. A count of 2^63
/// or more is refused. All ranks must set the same values.
///
/// Any thread may call this function between passes, one thread at a time per stepper. The call waits for all steps.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_set_progress(
    stepper: *mut instep_stepper,
    param: u32,
    count: u64,
    carried: f64,
) -> instep_status {
    call(|| {
        STEPPERS.with(stepper, |training| {
            let id = training.ids.get(param)?;
            Ok(on_any!(&mut training.engine, stepper => stepper.set_step_count(id, (count, carried)))?)
        })
    })
}

/// Reads the loss scale of the open pass, or, between passes, the scale of the next pass.
///
/// Any thread may call this function, one thread at a time per stepper. With the option loss_scaler, the call waits for
/// the decision of the previous pass, so make the call only after forward.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_loss_scale(
    stepper: *mut instep_stepper,
    out_loss_scale: *mut f64,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let out = unsafe { Out::new(out_loss_scale, "out_loss_scale")? };
        STEPPERS.with(stepper, |training| {
            out.put(on_any!(&training.engine, stepper => stepper.loss_scale())?);
            Ok(())
        })
    })
}

/// Reads a norm of the last pass's averaged gradients that belongs to a group, and whether this norm is known. A null
/// `group` means the group "default". If the group is clipped alone, the norm covers only this group. If the group is
/// not clipped, the norm covers all groups that are not clipped. For any other group, the norm is the one in
/// instep_pass_status. The norm is unknown while instep_pass_status has no norm, and from
/// instep_stepper_rebuild_buckets until the next pass.
///
/// Any thread may call this function between passes, one thread at a time per stepper. The call waits for all steps.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_group_norm(
    stepper: *mut instep_stepper,
    group: *const c_char,
    out_norm: *mut f64,
    out_has_norm: *mut u32,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let (group, to_norm, to_has_norm) = unsafe {
            (group_name(group)?, Out::new(out_norm, "out_norm")?, Out::new(out_has_norm, "out_has_norm")?)
        };
        STEPPERS.with(stepper, |training| {
            let norm = on_any!(&training.engine, stepper => stepper.group_norm(group))?;
            to_norm.put(norm.unwrap_or_default());
            to_has_norm.put(norm.is_some().into());
            Ok(())
        })
    })
}

/// Reads the decisions about a pass. If `waits` is 1, the call reads the decisions about the last pass. If `waits` is
/// 0, the call reads the decisions about the newest pass that is known to have ended.
///
/// Any thread may call this function, one thread at a time per stepper. If `waits` is 1, the call is allowed only
/// between passes, and waits for all steps. If `waits` is 0, the call never waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_status(
    stepper: *mut instep_stepper,
    waits: u32,
    out_status: *mut instep_pass_status,
) -> instep_status {
    call(|| {
        let waits = flag("waits", waits)?;
        STEPPERS.with(stepper, |training| {
            let found = on_any!(&training.engine, stepper => {
                if waits { Some(stepper.status()?) } else { stepper.latest_status() }
            });
            let known = found.map(|status| instep_pass_status {
                size: 0,
                pass: status.pass,
                abandoned: status.abandoned,
                is_skipped: status.skipped.into(),
                has_norm: status.norm.is_some().into(),
                norm: status.norm.unwrap_or_default(),
                clip: status.clip,
                loss_scale: status.loss_scale,
                first_nonfinite_bucket: status.first_nonfinite_bucket.map_or(-1, i64::from),
            });
            let none = instep_pass_status {
                size: 0,
                pass: 0,
                abandoned: 0,
                is_skipped: 0,
                has_norm: 0,
                norm: 0.0,
                clip: 1.0,
                loss_scale: 1.0,
                first_nonfinite_bucket: -1,
            };
            // SAFETY: the caller meets the header's contract.
            unsafe { write_growing(out_status, known.unwrap_or(none)) }
        })
    })
}
