//! What a trainer does between passes: join in without data, lay buckets out anew, export parameters for other programs.
//!
//! Every rank makes these calls at the same place, but for the export, which rank 0 alone writes.
#![allow(unsafe_code)]

use std::ffi::c_char;

use instep::checkpoint::{self, Export};

use crate::arguments::{Out, text};
use crate::codes::flag;
use crate::entry::call;
use crate::status::instep_status;
use crate::stepper::{STEPPERS, instep_stepper, on_any};

/// Takes part in one pass without data of its own: a rank that has no more data calls this until `*out_goes_on` is 0, which
/// says that no rank had any, and that nothing was stepped. Needs `inputs` in the options.
///
/// Any thread, one at a time, between passes. Waits for the pass's last sum.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_join(
    stepper: *mut instep_stepper,
    out_goes_on: *mut u32,
) -> instep_status {
    call(|| {
        // SAFETY: the header's contract.
        let out = unsafe { Out::new(out_goes_on, "out_goes_on")? };
        STEPPERS.with(stepper, |training| {
            let goes_on = on_any!(&mut training.engine, stepper => stepper.join())?;
            out.put(goes_on.into());
            Ok(())
        })
    })
}

/// Lays the stepper's own buckets out anew, in the order in which rank 0 handed its gradients over; no bit of the training
/// changes. `*out_is_rebuilt` is 0 if the order is the buckets' already; it may be null. Addresses of before are void. Borrowed
/// buckets are the caller's to cut: instep_stepper_rebind takes them.
///
/// Any thread, one at a time, between passes. Waits for all steps, and for rank 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_rebuild_buckets(
    stepper: *mut instep_stepper,
    out_is_rebuilt: *mut u32,
) -> instep_status {
    call(|| {
        // SAFETY: the header's contract.
        let out = unsafe { Out::optional(out_is_rebuilt, "out_is_rebuilt")? };
        STEPPERS.with(stepper, |training| {
            let is_rebuilt = on_any!(&mut training.engine, stepper => stepper.rebuild_buckets())?;
            out.into_iter().for_each(|out| out.put(is_rebuilt.into()));
            Ok(())
        })
    })
}

/// Writes the parameters alone to a safetensors file for other programs, which replaces the one at the path as a whole. With
/// `averages` of 1 the moving averages take their place; with `is_f32` of 1 everything is f32, and a master takes the place of
/// its parameter. Only rank 0 writes.
///
/// Any thread, one at a time, between passes. Waits for all steps.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_export(
    stepper: *mut instep_stepper,
    path: *const c_char,
    averages: u32,
    is_f32: u32,
) -> instep_status {
    call(|| {
        // SAFETY: the header's contract.
        let path = unsafe { text(path, "path")? };
        let values = Export { averages: flag("averages", averages)?, f32: flag("is_f32", is_f32)? };
        STEPPERS.with(stepper, |training| {
            Ok(on_any!(&training.engine, stepper => checkpoint::export(stepper, values, path))?)
        })
    })
}
