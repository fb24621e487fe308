//! Saves a stepper and named numbers of the trainer to one file, and loads such a file.
//!
//! The file is a checkpoint of the Rust library. Its format is safetensors.
#![allow(unsafe_code)]

use std::ffi::c_char;

use instep::checkpoint::{self, Extras, Scalar};

use crate::arguments::{list, list_mut, text};
use crate::codes::code;
use crate::entry::call;
use crate::status::{Fault, instep_status};
use crate::stepper::{STEPPERS, instep_stepper, on_any};

/// A kind of instep_scalar: a real number.
pub const INSTEP_NUMBER: u32 = 0;
/// A kind of instep_scalar: a whole number, such as an epoch or a seed.
pub const INSTEP_INTEGER: u32 = 1;
/// A load sets an instep_scalar to this kind if the checkpoint has no number with the scalar's name.
pub const INSTEP_ABSENT: u32 = 2;

/// A named number of the caller, such as the epoch. A checkpoint stores such numbers together with the stepper's
/// values.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct instep_scalar {
    /// The number's name, such as "epoch". Names that begin with "param.", "state." or "ema." are reserved.
    pub name: *const c_char,
    /// INSTEP_NUMBER or INSTEP_INTEGER. A load changes this field to INSTEP_ABSENT if the file does not have the
    /// number.
    pub kind: u32,
    /// Zero.
    pub reserved: u32,
    /// The value of an INSTEP_NUMBER.
    pub number: f64,
    /// The value of an INSTEP_INTEGER.
    pub integer: u64,
}

/// Saves parameters, states, step counts and `scalars` to a file, which is replaced atomically. Only rank 0 writes. On
/// any other rank the call does nothing and returns at once. `scalars` may be null if `scalar_count` is 0.
///
/// Any thread may call this function between passes, one thread at a time per stepper. The call waits for all steps.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_save(
    stepper: *mut instep_stepper,
    path: *const c_char,
    scalars: *const instep_scalar,
    scalar_count: usize,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract, here and below.
        let (path, scalars) = unsafe { (text(path, "path")?, list(scalars, scalar_count, "scalars")?) };
        let mut extras = Extras::default();
        for scalar in scalars {
            let kinds =
                [(INSTEP_NUMBER, Scalar::F64(scalar.number)), (INSTEP_INTEGER, Scalar::U64(scalar.integer))];
            let value = code("kind of a scalar", scalar.kind, &kinds)?;
            // SAFETY: the caller meets the header's contract.
            let name = unsafe { text(scalar.name, "scalar's name")? };
            if extras.scalars.insert(name.to_owned(), value).is_some() {
                return Err(Fault::argument(
                    "scalars",
                    format_args!("`{name}` is named twice"),
                    "name each once",
                ));
            }
        }
        STEPPERS.with(stepper, |training| {
            Ok(on_any!(&training.engine, stepper => checkpoint::save_with(stepper, &extras, path))?)
        })
    })
}

/// Loads a checkpoint into a stepper of the same parameters and optimizers, and sets the values of `scalars` from the
/// checkpoint. Every rank loads the same file. Nothing changes before the whole file has been checked.
///
/// Any thread may call this function between passes, one thread at a time per stepper. The call waits for all steps.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn instep_stepper_load(
    stepper: *mut instep_stepper,
    path: *const c_char,
    scalars: *mut instep_scalar,
    scalar_count: usize,
) -> instep_status {
    call(|| {
        // SAFETY: the caller meets the header's contract, here and below.
        let (path, scalars) = unsafe { (text(path, "path")?, list_mut(scalars, scalar_count, "scalars")?) };
        let mut names = Vec::with_capacity(scalars.len());
        for scalar in &*scalars {
            // SAFETY: the caller meets the header's contract.
            names.push(unsafe { text(scalar.name, "scalar's name")? });
        }
        STEPPERS.with(stepper, |training| {
            let extras = on_any!(&mut training.engine, stepper => checkpoint::load(stepper, path))?;
            for (scalar, name) in scalars.iter_mut().zip(names) {
                let (kind, number, integer) = match extras.scalars.get(name) {
                    Some(Scalar::F64(number)) => (INSTEP_NUMBER, *number, 0),
                    Some(Scalar::U64(integer)) => (INSTEP_INTEGER, 0.0, *integer),
                    None => (INSTEP_ABSENT, 0.0, 0),
                };
                *scalar = instep_scalar { kind, number, integer, ..*scalar };
            }
            Ok(())
        })
    })
}
