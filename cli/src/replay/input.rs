//! What the input file says about each parameter of the configuration: value, gradients, state, step count.
//!
//! A tensor belongs to exactly one place or is refused by name; so is a place without a tensor. Must look at headers
//! only: no value is read before everything fits.

use std::collections::{BTreeMap, HashMap};

use crate::Failure;
use crate::replay::config::Config;
use instep::checkpoint::safetensors::{Header, Tensor};

/// Step counts are metadata under this prefix and the parameter's name.
pub const COUNT_PREFIX: &str = "step.";

/// Counts are below this, before and after.
const COUNT_END: u64 = 1 << 63;

/// The input, sorted.
#[derive(Debug)]
pub struct Input {
    /// In the configuration's order.
    pub params: Vec<Param>,
    /// How many passes there are gradients for.
    pub passes: u64,
    /// Metadata that are not step counts; the output keeps them.
    pub remarks: BTreeMap<String, String>,
}

/// One parameter.
#[derive(Debug)]
pub struct Param {
    /// As the configuration spells it.
    pub name: String,
    /// Index of its group.
    pub group: usize,
    /// Its value before the first pass.
    pub value: Tensor,
    /// Its states, if it comes from a checkpoint.
    pub states: BTreeMap<String, Tensor>,
    /// Updates that it has had, if the file says so.
    pub count: Option<u64>,
    /// Its gradients, pass by pass.
    pub gradients: Vec<Tensor>,
}

/// What has been found of a parameter.
#[derive(Default)]
struct Found {
    value: Option<Tensor>,
    states: BTreeMap<String, Tensor>,
    count: Option<u64>,
    gradients: BTreeMap<u64, Tensor>,
}

impl Input {
    /// Sorts a header's tensors and counts.
    ///
    /// # Errors
    /// `Tensors`, naming the first tensor or count that is missing, unexplained or of the wrong shape.
    pub fn sort(header: Header, config: &Config) -> Result<Input, Failure> {
        header.require_f32()?;
        let names: HashMap<&str, usize> =
            config.params().enumerate().map(|(index, (name, _))| (name.as_str(), index)).collect();
        let mut found: Vec<Found> = names.iter().map(|_| Found::default()).collect();
        let index = |what: &str, name: &str| match names.get(name) {
            Some(index) => Ok(*index),
            None => refuse(format!("`{what}` belongs to `{name}`, which is in no group")),
        };
        for (key, tensor) in header.tensors {
            match Place::of(&key) {
                Some(Place::Value(name)) => found[index(&key, name)?].value = Some(tensor),
                Some(Place::Gradient(pass, name)) => {
                    found[index(&key, name)?].gradients.insert(pass, tensor);
                }
                Some(Place::State(name, state)) => {
                    found[index(&key, name)?].states.insert(state.to_owned(), tensor);
                }
                None => {
                    let forms = "param.NAME, grad.PASS.NAME or state.NAME.STATE";
                    return refuse(format!("tensor `{key}` is none of {forms}"));
                }
            }
        }
        let mut remarks = BTreeMap::new();
        for (key, text) in header.metadata {
            match key.strip_prefix(COUNT_PREFIX) {
                Some(name) => found[index(&key, name)?].count = Some(count(&key, &text)?),
                None => {
                    remarks.insert(key, text);
                }
            }
        }
        let passes = found.iter().map(|param| param.gradients.len() as u64).max().unwrap_or(0);
        let params = config.params().zip(found);
        let params: Vec<Param> = params
            .map(|((name, group), found)| found.check(name, group, config, passes))
            .collect::<Result<_, _>>()?;
        Ok(Input { params, passes, remarks })
    }
}

impl Found {
    fn check(self, name: &str, group: usize, config: &Config, passes: u64) -> Result<Param, Failure> {
        let Found { value, states, count, gradients } = self;
        let Some(value) = value else {
            return refuse(format!("`param.{name}` is missing"));
        };
        // The first number that is not there; with none missing, it is the number of passes.
        let gap = (0..).zip(gradients.keys()).find(|(expected, pass)| expected != *pass);
        let gap = gap.map_or(gradients.len() as u64, |(expected, _)| expected);
        if gap < passes {
            return refuse(format!("`grad.{gap}.{name}` is missing, and there are {passes} passes or more"));
        }
        let fits = |key: String, tensor: &Tensor| match tensor.shape == value.shape {
            true => Ok(()),
            false => refuse(format!("`{key}` has shape {:?}, and `{name}` {:?}", tensor.shape, value.shape)),
        };
        for (pass, gradient) in &gradients {
            fits(format!("grad.{pass}.{name}"), gradient)?;
        }
        let kept = config.groups[group].rule.state_names();
        for (state, tensor) in &states {
            let key = format!("state.{name}.{state}");
            if !kept.contains(&state.as_str()) {
                return refuse(format!("`{key}`: the group of `{name}` keeps no such state"));
            }
            fits(key, tensor)?;
        }
        // SGD's buffer is not counted by torch, and its absence says "the first step".
        if !kept.is_empty() && kept != ["momentum_buffer"] {
            check_complete(name, kept, &states, count)?;
        }
        if count.is_some_and(|count| count.saturating_add(passes) >= COUNT_END) {
            return refuse(format!(
                "`{COUNT_PREFIX}{name}` leaves no room for {passes} more steps below 2^63"
            ));
        }
        let gradients = gradients.into_values().collect();
        Ok(Param { name: name.to_owned(), group, value, states, count, gradients })
    }
}

/// Half a checkpoint of Adam would be stepped with the wrong bias correction, and nobody would see it; others alike.
fn check_complete(
    name: &str,
    kept: &[&str],
    states: &BTreeMap<String, Tensor>,
    count: Option<u64>,
) -> Result<(), Failure> {
    let missing = kept.iter().find(|state| !states.contains_key(**state));
    match (missing, count) {
        (Some(missing), _) if !states.is_empty() => {
            refuse(format!("`state.{name}.{missing}` is missing beside other states of `{name}`"))
        }
        (Some(missing), Some(1..)) => {
            refuse(format!("`state.{name}.{missing}` is missing, though `{name}` has been stepped"))
        }
        (None, None) => {
            refuse(format!("metadata `{COUNT_PREFIX}{name}` is missing beside states of `{name}`"))
        }
        _ => Ok(()),
    }
}

/// Which place a tensor's name stands for.
enum Place<'a> {
    Value(&'a str),
    Gradient(u64, &'a str),
    State(&'a str, &'a str),
}

impl<'a> Place<'a> {
    /// Names may contain dots; pass numbers and states never do.
    fn of(key: &'a str) -> Option<Place<'a>> {
        let (kind, rest) = key.split_once('.')?;
        match kind {
            "param" => Some(Place::Value(rest)),
            "grad" => {
                let (pass, name) = rest.split_once('.')?;
                Some(Place::Gradient(whole_number(pass)?, name))
            }
            "state" => {
                let (name, state) = rest.rsplit_once('.')?;
                Some(Place::State(name, state))
            }
            _ => None,
        }
    }
}

fn count(key: &str, text: &str) -> Result<u64, Failure> {
    match whole_number(text) {
        Some(count) if count < COUNT_END => Ok(count),
        _ => refuse(format!("metadata `{key}` = {text:?} is no whole number below 2^63")),
    }
}

/// A number in the one spelling that it has, so that two names are never the same pass.
fn whole_number(text: &str) -> Option<u64> {
    let number: u64 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

fn refuse<T>(why: String) -> Result<T, Failure> {
    Err(Failure::Tensors(why))
}
