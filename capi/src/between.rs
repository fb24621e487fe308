//! Calls between passes: joining a pass without data, rebuilding buckets, and exporting parameters for other programs.
//!
//! All ranks rebuild their buckets at the same point of the training. Only rank 0 writes an export.
#![allow(unsafe_code)]

use std::ffi::c_char;

use instep::checkpoint::{self, Export};

use crate::arguments::{Out, text};
use crate::codes::flag;
use crate::entry::call;
use crate::status::instep_status;
use crate::stepper::{STEPPERS, instep_stepper, on_any};

/// Takes part in one pass as a rank that has run out of data. Repeat this call until `*out_goes_on` is 0, which means
/// that no rank had data and nothing was stepped. With INSTEP_INPUTS_EVEN the call is refused.
///
/// Any thread may call this function between passes, one thread at a time per stepper. The call waits for the pass's
/// last sum.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_join(
    stepper: *mut instep_stepper,
    out_goes_on: *mut u32,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let out = unsafe { Out::new(out_goes_on, "out_goes_on")? };
        STEPPERS.with(stepper, |training| {
            let goes_on = on_any!(&mut training.engine, stepper => stepper.join())?;
            out.put(goes_on.into());
            Ok(())
        })
    })
}

/// Rebuilds the buckets that the stepper owns, in the order in which rank 0 handed over its gradients. The training's
/// results have the same bits with and without this call. `*out_is_rebuilt` is 0 if the buckets already have this
/// order. out_is_rebuilt may be null. After this call, addresses that were returned earlier are invalid. If the buckets
/// are in the caller's memory, rebuild them yourself and call instep_stepper_rebind.
///
/// Any thread may call this function between passes, one thread at a time per stepper. The call waits for all steps,
/// and for rank 0 to make this call too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_rebuild_buckets(
    stepper: *mut instep_stepper,
    out_is_rebuilt: *mut u32,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let out = unsafe { Out::optional(out_is_rebuilt, "out_is_rebuilt")? };
        STEPPERS.with(stepper, |training| {
            let is_rebuilt = on_any!(&mut training.engine, stepper => stepper.rebuild_buckets())?;
            out.into_iter().for_each(|out| out.put(is_rebuilt.into()));
            Ok(())
        })
    })
}

/// Writes only the parameters to a safetensors file for other programs. An existing file at `path` is replaced
/// atomically. If `averages` is 1, moving averages are written instead of parameters. If `is_f32` is 1, all values are
/// written as f32, and a parameter that has a master is written with the master's values. Only rank 0 writes.
///
/// Any thread may call this function between passes, one thread at a time per stepper. The call waits for all steps.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_export(
    stepper: *mut instep_stepper,
    path: *const c_char,
    averages: u32,
    is_f32: u32,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract.
        let path = unsafe { text(path, "path")? };
        let values = Export { averages: flag("averages", averages)?, f32: flag("is_f32", is_f32)? };
        STEPPERS.with(stepper, |training| {
            Ok(on_any!(&training.engine, stepper => checkpoint::export(stepper, values, path))?)
        })
    })
}
