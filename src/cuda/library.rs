//! Finds the driver's library. If `INSTEP_CUDA` names a file, only that is tried; otherwise it is `libcuda.so.1`.
//!
//! A driver that lacks a function is refused by the function's name, before any call. The library is never unloaded,
//! because it runs threads.
#![allow(unsafe_code)]

use std::ffi::OsString;
use std::mem;

use libloading::Library;

use super::functions::{CUresult, Functions, SUCCESS};
use crate::error::{Error, Result};

/// The oldest driver that has every function of the list.
const OLDEST: &str = "CUDA 12.0";

/// Loads the library and initialises the driver.
///
/// # Errors
/// `DriverUnavailable`: the library is missing, lacks a function, or does not start.
pub(super) fn load() -> Result<Functions> {
    open(std::env::var_os("INSTEP_CUDA")).map_err(|why| Error::DriverUnavailable { why })
}

fn open(named: Option<OsString>) -> Result<Functions, String> {
    let shown = named.as_ref().map(|path| format!("INSTEP_CUDA={}", path.display()));
    let path = named.unwrap_or_else(|| "libcuda.so.1".into());
    // SAFETY: it is NVIDIA's driver by name, or the user has named it.
    let library = unsafe { Library::new(&path) }.map_err(|error| match &shown {
        Some(shown) => format!("{shown}: {}", reason(&error)),
        None => "libcuda.so.1 was not found; it comes with NVIDIA's driver, not with the toolkit".to_owned(),
    })?;
    let functions = Functions::all(&library).map_err(|missing| {
        let (shown, version) = (shown.as_deref().unwrap_or("libcuda.so.1"), version(&library));
        format!("{shown}{version} has no {missing}, which every driver since {OLDEST} has")
    });
    mem::forget(library);
    let functions = functions?;
    // SAFETY: the call has no precondition.
    unsafe { functions.cuInit(0) }.map_err(|error| error.to_string())?;
    Ok(functions)
}

/// Returns the loader's own text; the error's says only which of its functions failed.
pub(super) fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Returns the version of a driver that lacks something, as a part of a sentence.
fn version(library: &Library) -> String {
    let mut version = 0;
    // SAFETY: the type is the one that `cuda.h` gives this symbol; writes one number.
    let answer = unsafe {
        let ask = library.get::<unsafe extern "C" fn(*mut i32) -> CUresult>(b"cuDriverGetVersion");
        ask.map(|ask| ask(&mut version))
    };
    match answer {
        Ok(SUCCESS) => format!(", of CUDA {}.{},", version / 1000, version % 1000 / 10),
        _ => String::new(),
    }
}
