//! Sorts the input file's tensors by parameter: value, gradients, states, step count.
//!
//! Unknown and missing tensors are refused. This module reads only the input's header. No value is read before the
//! whole header has been checked.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;

use crate::Failure;
use crate::replay::config::Config;
use crate::replay::gradients::{check_passes, in_no_group};
use crate::replay::place::{Companion, Place, whole_number};
use instep::checkpoint::safetensors::{Header, Tensor, quoted};

/// The prefix of the metadata keys of step counts. The parameter's name follows the prefix.
pub const COUNT_PREFIX: &str = "step.";
/// The prefix of the metadata keys of NAdam's products of momenta. The parameter's name follows the prefix.
pub const PRODUCT_PREFIX: &str = "mu_product.";

/// The only state that the input may lack at any step count. Without this state, the next step is a first step.
const MOMENTUM: &str = "momentum_buffer";

/// Step counts are below this limit, before the replay and after it.
pub(super) const COUNT_END: u64 = 1 << 63;

/// The tensors and counts of the input, sorted by parameter.
#[derive(Debug)]
pub struct Input {
    /// The parameters, in the configuration's order.
    pub params: Vec<Param>,
    /// Number of passes that have gradients.
    pub passes: u64,
    /// All metadata except step counts and products of momenta; copied to the output.
    pub remarks: BTreeMap<String, String>,
}

/// One parameter.
#[derive(Debug)]
pub struct Param {
    /// The parameter's name in the configuration.
    pub name: String,
    /// Index of the parameter's group.
    pub group: usize,
    /// Whether the parameter is frozen, so that no step changes it.
    pub frozen: bool,
    /// The parameter's value before the first pass.
    pub value: Tensor,
    /// The parameter's master, copy and moving average, if they are given.
    pub companions: BTreeMap<Companion, Tensor>,
    /// The parameter's states, if the file has them.
    pub states: BTreeMap<String, Tensor>,
    /// The number of updates so far, if the file has it.
    pub count: Option<u64>,
    /// NAdam's product of momenta, if the file has it.
    pub product: Option<f64>,
    /// The parameter's gradients, pass by pass.
    pub gradients: Vec<Tensor>,
}

impl Param {
    /// Returns the step count from which the stepper starts. For the stepper, the next step is a first step if the
    /// count is 0. For torch, the next step is a first step if the momentum buffer is missing. With the returned count,
    /// the stepper and torch agree on whether the next step is a first step.
    pub fn first_count(&self, kept: &[&str]) -> u64 {
        let count = self.count.unwrap_or(0);
        match (kept.contains(&MOMENTUM), self.states.contains_key(MOMENTUM)) {
            (false, _) => count,
            (true, true) => count.max(1),
            (true, false) => 0,
        }
    }
}

/// The tensors and counts that have been found so far for one parameter.
#[derive(Default)]
struct Found {
    value: Option<Tensor>,
    companions: BTreeMap<Companion, Tensor>,
    states: BTreeMap<String, Tensor>,
    count: Option<u64>,
    product: Option<f64>,
    gradients: BTreeMap<u64, Tensor>,
}

impl Input {
    /// Assigns the tensors and the counts of a header to their parameters.
    ///
    /// # Errors
    /// Returns `Tensors` with the name of the first tensor or count that is missing, has an unknown name, or is not
    /// allowed, for example because of its shape or value.
    pub fn sort(header: Header, config: &Config) -> Result<Input, Failure> {
        header.require_stepped()?;
        let names: HashMap<&str, usize> =
            config.params().enumerate().map(|(index, (name, _))| (name.as_str(), index)).collect();
        let mut found: Vec<Found> = names.iter().map(|_| Found::default()).collect();
        let index = |what: &str, name: &str| names.get(name).copied().ok_or_else(|| in_no_group(what, name));
        for (key, tensor) in header.tensors {
            match Place::of(&key) {
                Some(Place::Value(name)) => found[index(&key, name)?].value = Some(tensor),
                Some(Place::Companion(companion, name)) => {
                    found[index(&key, name)?].companions.insert(companion, tensor);
                }
                Some(Place::Gradient(pass, name)) => {
                    found[index(&key, name)?].gradients.insert(pass, tensor);
                }
                Some(Place::State(name, state)) => {
                    found[index(&key, name)?].states.insert(state.to_owned(), tensor);
                }
                None => {
                    let forms =
                        "param.NAME, grad.PASS.NAME, state.NAME.STATE, master.NAME, copy.NAME or ema.NAME";
                    return refuse(
                        format_args!("tensor {}", quoted(&key)),
                        "has an unknown kind of name",
                        format_args!("use {forms}"),
                    );
                }
            }
        }
        let mut remarks = BTreeMap::new();
        for (key, text) in header.metadata {
            if let Some(name) = key.strip_prefix(COUNT_PREFIX) {
                found[index(&key, name)?].count = Some(count(&key, &text)?);
            } else if let Some(name) = key.strip_prefix(PRODUCT_PREFIX) {
                found[index(&key, name)?].product = Some(product(&key, &text)?);
            } else {
                remarks.insert(key, text);
            }
        }
        let passes = found.iter().map(|param| param.gradients.len() as u64).max().unwrap_or(0);
        let params = config.params().zip(found);
        let params: Vec<Param> = params
            .map(|((name, group), found)| found.check(name, group, config, passes))
            .collect::<Result<_, _>>()?;
        check_averages(&params, config)?;
        Ok(Input { params, passes, remarks })
    }
}

impl Found {
    fn check(self, name: &str, group: usize, config: &Config, passes: u64) -> Result<Param, Failure> {
        let Found { value, companions, states, count, product, gradients } = self;
        let Some(value) = value else {
            return refuse(quoted(&format!("param.{name}")), "missing", "add the parameter's values");
        };
        let frozen = config.frozen.contains(name);
        check_passes(name, frozen, &gradients, passes)?;
        let fits = |key: String, tensor: &Tensor| {
            if tensor.shape == value.shape {
                Ok(())
            } else {
                let wrong =
                    format_args!("has shape {:?}, and {} {:?}", tensor.shape, quoted(name), value.shape);
                refuse(quoted(&key), wrong, "give it the parameter's shape")
            }
        };
        for (pass, gradient) in &gradients {
            fits(format!("grad.{pass}.{name}"), gradient)?;
        }
        for (companion, tensor) in &companions {
            let key = format!("{}.{name}", companion.prefix());
            if !Companion::kept(config).any(|kept| kept == *companion) {
                let remedy = format_args!("remove it, or set `{}`", companion.option());
                return refuse(quoted(&key), "the configuration asks for none", remedy);
            }
            fits(key, tensor)?;
        }
        let kept = config.groups[group].optimizer.state_names();
        for (state, tensor) in &states {
            let key = format!("state.{name}.{state}");
            if !kept.contains(&state.as_str()) {
                let wrong = format_args!("the group of {} keeps no such state", quoted(name));
                return refuse(quoted(&key), wrong, "remove it, or check the optimizer's options");
            }
            fits(key, tensor)?;
        }
        // torch counts no steps of SGD. A missing buffer says that the next step is the first.
        if !kept.is_empty() && kept != [MOMENTUM] {
            check_complete(name, kept, &states, count)?;
        }
        let descriptor = config.groups[group].optimizer.descriptor();
        let has_product = descriptor.is_some_and(|descriptor| descriptor.carried.is_some());
        match (has_product, product) {
            (true, None) if count.unwrap_or(0) > 0 => {
                let wrong = format_args!("missing, though {} has been stepped", quoted(name));
                return refuse(
                    metadata(PRODUCT_PREFIX, name),
                    wrong,
                    "add the product that the last run wrote",
                );
            }
            (true, Some(product)) if count.unwrap_or(0) == 0 && product != 1.0 => {
                let remedy = format_args!("use 1, or add the count {}", metadata(COUNT_PREFIX, name));
                return refuse(metadata(PRODUCT_PREFIX, name), "not 1 before the first step", remedy);
            }
            (true, Some(1.0)) if count.unwrap_or(0) > 0 && value.elements > 0 => {
                let remedy = "use the product that the last run wrote";
                return refuse(metadata(PRODUCT_PREFIX, name), "1 after the first step", remedy);
            }
            (false, Some(_)) => {
                let wrong = format_args!("the group of {} has none", quoted(name));
                return refuse(metadata(PRODUCT_PREFIX, name), wrong, "remove it");
            }
            _ => {}
        }
        if count.is_some_and(|count| count.saturating_add(passes) >= COUNT_END) {
            let wrong = format_args!("leaves no room for {passes} more steps below 2^63");
            return refuse(metadata(COUNT_PREFIX, name), wrong, "use a smaller count");
        }
        let gradients = gradients.into_values().collect();
        let name = name.to_owned();
        Ok(Param { name, group, frozen, value, companions, states, count, product, gradients })
    }
}

/// Refuses a file with the averages of only some stepped parameters. Also refuses an average of a parameter that was
/// never stepped, because the first update would replace the average.
fn check_averages(params: &[Param], config: &Config) -> Result<(), Failure> {
    let is_given = |param: &&Param| param.companions.contains_key(&Companion::Ema);
    let is_first =
        |param: &&Param| param.first_count(config.groups[param.group].optimizer.state_names()) == 0;
    if let Some(Param { name, .. }) = params.iter().filter(is_given).find(is_first) {
        let wrong = format_args!("given, though {} was never stepped", quoted(name));
        return refuse(quoted(&format!("ema.{name}")), wrong, "remove it, or add states and step count");
    }
    let missing = params.iter().find(|param| !is_given(param) && !is_first(param));
    match missing.filter(|_| params.iter().any(|param| is_given(&param))) {
        Some(Param { name, .. }) => {
            let wrong = format_args!("missing beside others, though {} has been stepped", quoted(name));
            refuse(quoted(&format!("ema.{name}")), wrong, "add it, or give none")
        }
        None => Ok(()),
    }
}

/// Refuses a parameter with only some of its states, with states but no step count, or with a step count above 0 but no
/// states. Otherwise Adam, for example, would silently step with a wrong bias correction.
fn check_complete(
    name: &str,
    kept: &[&str],
    states: &BTreeMap<String, Tensor>,
    count: Option<u64>,
) -> Result<(), Failure> {
    let missing = kept.iter().find(|state| !states.contains_key(**state));
    match (missing, count) {
        (Some(missing), _) if !states.is_empty() => {
            let wrong = format_args!("missing beside other states of {}", quoted(name));
            refuse(quoted(&format!("state.{name}.{missing}")), wrong, "add it")
        }
        (Some(missing), Some(1..)) => {
            let wrong = format_args!("missing, though {} has been stepped", quoted(name));
            refuse(quoted(&format!("state.{name}.{missing}")), wrong, "add it, or remove the count")
        }
        (None, None) => {
            let wrong = format_args!("missing beside states of {}", quoted(name));
            refuse(metadata(COUNT_PREFIX, name), wrong, "add the number of updates")
        }
        _ => Ok(()),
    }
}

fn count(key: &str, text: &str) -> Result<u64, Failure> {
    match whole_number(text) {
        Some(count) if count < COUNT_END => Ok(count),
        _ => {
            let thing = format_args!("metadata {} = {}", quoted(key), quoted(text));
            refuse(thing, "not a whole number below 2^63", "write the number of updates in digits")
        }
    }
}

/// Parses a product of momenta. The library accepts numbers from 0 to 1.
fn product(key: &str, text: &str) -> Result<f64, Failure> {
    match text.parse::<f64>() {
        Ok(product) if (0.0..=1.0).contains(&product) => Ok(product),
        _ => {
            let thing = format_args!("metadata {} = {}", quoted(key), quoted(text));
            refuse(thing, "not a number from 0 to 1", "use the product that the last run wrote")
        }
    }
}

/// Returns the text by which errors name a metadata key.
fn metadata(prefix: &str, name: &str) -> String {
    format!("metadata {}", quoted(&format!("{prefix}{name}")))
}

fn refuse<T>(thing: impl Display, wrong: impl Display, remedy: impl Display) -> Result<T, Failure> {
    Err(Failure::tensors(thing, wrong, remedy))
}
