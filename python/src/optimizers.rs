//! Makes optimizers from their names, and converts their descriptors to Python values.
//!
//! All names, defaults and states come from the library's descriptors.

use instep::optim::{ALL, Descriptor, Value};
use instep::{BucketStep, Layout, Optimizer};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::raised;

/// An optimizer's descriptor as a Python tuple. The tuple has the name, the key, the hyperparameters with their
/// defaults, and the name of the carried number. It also has the name of the hyperparameter that requires f32 states, a
/// flag that is true if norms of full parameters scale the update, and the optimizer's source.
type Described = (
    &'static str,
    String,
    Vec<(&'static str, Py<PyAny>)>,
    Option<&'static str>,
    Option<&'static str>,
    bool,
    &'static str,
);

/// Returns every optimizer of the library.
#[pyfunction]
pub(crate) fn descriptors(py: Python<'_>) -> PyResult<Vec<Described>> {
    let described = |descriptor: &&Descriptor| {
        let fields = descriptor.fields.iter().map(|field| Ok((field.name, python(py, field.default)?)));
        let fields = fields.collect::<PyResult<_>>()?;
        let needs_f32 = descriptor.needs_f32_states.map(|(field, _)| field);
        Ok((
            descriptor.name,
            descriptor.key(),
            fields,
            descriptor.carried,
            needs_f32,
            descriptor.is_scaled,
            descriptor.source,
        ))
    };
    ALL.iter().map(described).collect()
}

/// Checks the ranges of these hyperparameters, and returns the names of the states that the optimizer has with them.
#[pyfunction]
pub(crate) fn state_names(name: &str, hyper: &Bound<'_, PyDict>) -> PyResult<Vec<&'static str>> {
    let optimizer = optimizer(name, hyper)?;
    let names = optimizer.state_names().to_vec();
    // The builder checks the hyperparameters, as it does for every step.
    let layout = Layout::builder().param("any", 1).build().map_err(raised)?;
    BucketStep::builder(&layout, optimizer).host().map_err(raised)?;
    Ok(names)
}

/// Returns the names of all states that an optimizer can have. The states that the optimizer always has are listed
/// first.
#[pyfunction]
pub(crate) fn all_state_names(name: &str) -> PyResult<Vec<&'static str>> {
    let mut names = Vec::new();
    for name in descriptor(name)?.states.iter().flat_map(|states| states.names) {
        if !names.contains(name) {
            names.push(*name);
        }
    }
    Ok(names)
}

/// Finds an optimizer by its key.
pub(crate) fn descriptor(name: &str) -> PyResult<&'static Descriptor> {
    ALL.iter().copied().find(|descriptor| descriptor.key() == name).ok_or_else(|| {
        let known: Vec<String> = ALL.iter().map(|descriptor| descriptor.key()).collect();
        let text = format!("optimizer `{name}`: not known; use one of {}", known.join(", "));
        pyo3::exceptions::PyValueError::new_err(text)
    })
}

/// Makes the optimizer with this key and these hyperparameters. The ranges of the hyperparameters are checked when a
/// step is built.
pub(crate) fn optimizer(name: &str, hyper: &Bound<'_, PyDict>) -> PyResult<Box<dyn Optimizer>> {
    let descriptor = descriptor(name)?;
    let mut optimizer = descriptor.build();
    for (key, value) in hyper {
        let key: String = key.extract()?;
        let value = match descriptor.field(&key).map(|field| field.default) {
            Some(Value::Pair(_)) => Value::Pair(value.extract()?),
            Some(Value::Flag(_)) => Value::Flag(value.is_truthy()?),
            // An unknown name is refused below, by a text that lists the known ones.
            _ => Value::Number(value.extract()?),
        };
        optimizer.set(&key, value).map_err(raised)?;
    }
    Ok(optimizer)
}

fn python(py: Python<'_>, value: Value) -> PyResult<Py<PyAny>> {
    Ok(match value {
        Value::Number(number) => number.into_pyobject(py)?.into_any().unbind(),
        Value::Pair(pair) => pair.into_pyobject(py)?.into_any().unbind(),
        Value::Flag(flag) => flag.into_pyobject(py)?.to_owned().into_any().unbind(),
    })
}
