//! Sorts gradients by parameter and pass, and makes steps with them.
//!
//! Gradients are read pass by pass, so memory does not grow with the number of passes. Every parameter that is not
//! frozen has a gradient in every pass.

use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Seek};

use instep::checkpoint::safetensors::{Data, Header, Tensor, quoted};
use instep::{Layout, Stepper};

use super::Config;
use super::dtypes::refuse_rounded;
use super::place::Place;
use crate::Failure;

/// One parameter's gradients, one per pass. A frozen parameter has none.
pub(super) struct Gradients<'a> {
    pub(super) name: &'a str,
    pub(super) tensors: &'a [Tensor],
}

/// Takes the tensors of a file that has only gradients, and sorts them into the layout's order.
///
/// # Errors
/// Returns `Tensors` with the name of the first tensor that is missing, has an unknown name, differs in length from its
/// parameter, or belongs to a frozen parameter. Also returns `Tensors` if the file has no gradients.
pub(super) fn sort(header: Header, config: &Config, layout: &Layout) -> Result<Vec<Vec<Tensor>>, Failure> {
    header.require_stepped()?;
    let mut parameters = Vec::new();
    for id in layout.ids() {
        parameters.push(layout.parameter(id)?);
    }
    let names: HashMap<&str, usize> =
        parameters.iter().enumerate().map(|(index, parameter)| (parameter.name.as_str(), index)).collect();
    let mut found: Vec<BTreeMap<u64, Tensor>> = parameters.iter().map(|_| BTreeMap::new()).collect();
    for (key, tensor) in header.tensors {
        let Some(Place::Gradient(pass, name)) = Place::of(&key) else {
            let thing = format_args!("tensor {}", quoted(&key));
            return Err(Failure::tensors(thing, "no gradient", "use grad.PASS.NAME"));
        };
        let index = *names.get(name).ok_or_else(|| in_no_group(&key, name))?;
        let expected = parameters[index].len;
        if tensor.elements != expected {
            let wrong = format_args!("has {} elements, and {} {expected}", tensor.elements, quoted(name));
            return Err(Failure::tensors(quoted(&key), wrong, "give it as many as the parameter has"));
        }
        found[index].insert(pass, tensor);
    }
    let passes = found.iter().map(|of| of.len() as u64).max().unwrap_or(0);
    if passes == 0 {
        return Err(Failure::tensors("the file", "holds no gradient", "add grad.0.NAME for every parameter"));
    }
    for (parameter, of) in parameters.iter().zip(&found) {
        check_passes(&parameter.name, config.frozen.contains(&parameter.name), of, passes)?;
    }
    Ok(found.into_iter().map(|of| of.into_values().collect()).collect())
}

/// Refuses a gradient of a frozen parameter, and a missing gradient of any other parameter.
pub(super) fn check_passes(
    name: &str,
    frozen: bool,
    gradients: &BTreeMap<u64, Tensor>,
    passes: u64,
) -> Result<(), Failure> {
    if let (true, Some(pass)) = (frozen, gradients.keys().next()) {
        let wrong = format_args!("{} is frozen and takes no gradient", quoted(name));
        return Err(Failure::tensors(
            quoted(&format!("grad.{pass}.{name}")),
            wrong,
            "remove it, or do not freeze the parameter",
        ));
    }
    // The first pass without a gradient of this parameter: a gap, or the pass after the last gradient.
    let gap = (0..).zip(gradients.keys()).find(|(expected, pass)| expected != *pass);
    let gap = gap.map_or(gradients.len() as u64, |(expected, _)| expected);
    if gap < passes && !frozen {
        let remedy = "give it one in every pass, numbered from 0 without gaps";
        return Err(Failure::tensors(quoted(&format!("grad.{gap}.{name}")), "missing", remedy));
    }
    Ok(())
}

/// Returns the error about a tensor of a parameter that the configuration does not name.
pub(super) fn in_no_group(what: &str, name: &str) -> Failure {
    let wrong = format_args!("belongs to {}, which is in no group", quoted(name));
    Failure::tensors(quoted(what), wrong, "add the parameter to a group, or remove this")
}

/// The number of passes of a replay, and the number of passes that were not skipped.
#[derive(Clone, Copy, Default)]
pub(super) struct Steps {
    pub(super) passes: u64,
    pub(super) updates: u64,
}

/// Makes all passes. The entries of `gradients` have the order of the layout's parameters.
///
/// Each pass hands gradients over from the last parameter to the first, as in backward.
pub(super) fn step_all<R: Read + Seek>(
    config: &Config,
    stepper: &mut Stepper,
    passes: u64,
    gradients: &[Gradients<'_>],
    data: &mut Data<R>,
) -> Result<Steps, Failure> {
    let dtype = config.precision.grad;
    let layout = stepper.layout().clone();
    let (mut values, mut updates) = (Vec::new(), 0);
    for pass_index in 0..passes as usize {
        let mut pass = stepper.begin()?;
        let used = gradients.iter().zip(layout.ids()).rev();
        for (Gradients { name, tensors }, id) in used.filter(|(of, _)| !config.frozen.contains(of.name)) {
            let tensor = &tensors[pass_index];
            values.resize(tensor.elements as usize, 0.0);
            data.read(tensor, 0, &mut values)?;
            let key = format!("grad.{pass_index}.{name}");
            refuse_rounded(&key, &values, values.iter().map(|value| dtype.round(*value)))?;
            pass.write(id.grad(), &values)?;
            pass.grad_ready(id)?;
        }
        pass.finish()?;
        // Every parameter that is not frozen has a gradient in every pass, so all of them have the same number of
        // updates. The stepper would not count parameters without elements.
        let skipped = config.skip_nonfinite && stepper.status()?.skipped;
        updates += u64::from(!skipped);
    }
    stepper.status()?; // waits, so that no queued step can fail later
    Ok(Steps { passes, updates })
}
