//! Converts the library's errors to Python's own exceptions.
//!
//! A wrong value is a `ValueError`, and an unsupported request is a `NotImplementedError`. The text of the error does
//! not change.

use instep::Error;
use pyo3::PyErr;
use pyo3::exceptions::{PyNotImplementedError, PyRuntimeError, PyValueError};

/// Converts an error to the exception that a Python user expects.
pub(crate) fn raised(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Config { .. } | Error::Layout(_) => PyValueError::new_err(text),
        Error::Unsupported(_) | Error::KernelsNotBuilt { .. } => PyNotImplementedError::new_err(text),
        _ => PyRuntimeError::new_err(text),
    }
}
