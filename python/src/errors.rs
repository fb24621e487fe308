//! Errors as Python's own exceptions: a wrong value is a `ValueError`, a missing ability a `NotImplementedError`.
//!
//! The text stays as the library wrote it.

use instep::Error;
use pyo3::PyErr;
use pyo3::exceptions::{PyNotImplementedError, PyRuntimeError, PyValueError};

/// Turns an error into the exception that a Python user expects, with its text.
pub(crate) fn raised(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Config { .. } | Error::Layout(_) => PyValueError::new_err(text),
        Error::Unsupported(_) | Error::KernelsNotBuilt { .. } => PyNotImplementedError::new_err(text),
        _ => PyRuntimeError::new_err(text),
    }
}
