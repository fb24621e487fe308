//! Optimizers by name, and their descriptors as Python values.
//!
//! The library's descriptors are the only list: names, defaults and states come from there.

use instep::optim::{ALL, Descriptor, Value};
use instep::{BucketStep, Layout, Optimizer};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::raised;

/// A descriptor as Python sees it: name, key, hyperparameters with their defaults, name of the carried number,
/// hyperparameter that needs states of f32, whether norms of the whole parameter scale its change, source.
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

/// Returns the names of the states that an optimizer keeps with these hyperparameters, whose ranges it checks.
#[pyfunction]
pub(crate) fn state_names(name: &str, hyper: &Bound<'_, PyDict>) -> PyResult<Vec<&'static str>> {
    let optimizer = optimizer(name, hyper)?;
    let names = optimizer.state_names().to_vec();
    // A builder checks them, as for every step.
    let layout = Layout::builder().param("any", 1).build().map_err(raised)?;
    BucketStep::builder(&layout, optimizer).host().map_err(raised)?;
    Ok(names)
}

/// Makes an optimizer of its key and hyperparameters. The step that it is for checks their ranges.
pub(crate) fn optimizer(name: &str, hyper: &Bound<'_, PyDict>) -> PyResult<Box<dyn Optimizer>> {
    let Some(descriptor) = ALL.iter().find(|descriptor| descriptor.key() == name) else {
        let known: Vec<String> = ALL.iter().map(|descriptor| descriptor.key()).collect();
        let text = format!("optimizer `{name}`: not known; use one of {}", known.join(", "));
        return Err(pyo3::exceptions::PyValueError::new_err(text));
    };
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
