//! Checks whether an optimizer's `state` still consists of the same objects as at the last step.
//!
//! The check compares only identities. It never calls the objects' `__eq__` or `__hash__`.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// Returns the keys and values of a dict, in order. If a value is a dict itself, its own keys and values follow it.
///
/// # Errors
/// Returns Python's own error if memory is exhausted.
#[pyfunction]
pub(crate) fn objects_of<'py>(py: Python<'py>, state: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyList>> {
    let objects = PyList::empty(py);
    for (key, value) in state {
        objects.append(key)?;
        objects.append(&value)?;
        if let Ok(entries) = value.cast::<PyDict>() {
            for (name, entry) in entries {
                objects.append(name)?;
                objects.append(entry)?;
            }
        }
    }
    Ok(objects)
}

/// Returns whether [`objects_of`] would return exactly these objects for this dict.
#[pyfunction]
pub(crate) fn has_objects(state: &Bound<'_, PyDict>, objects: &Bound<'_, PyList>) -> bool {
    let mut known = objects.iter();
    let mut follows = |object: &Bound<'_, PyAny>| known.next().is_some_and(|known| known.is(object));
    for (key, value) in state {
        if !(follows(&key) && follows(&value)) {
            return false;
        }
        if let Ok(entries) = value.cast::<PyDict>()
            && !entries.iter().all(|(name, entry)| follows(&name) && follows(&entry))
        {
            return false;
        }
    }
    known.next().is_none()
}
