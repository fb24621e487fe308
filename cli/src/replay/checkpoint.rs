//! A replay that reads a checkpoint and writes the next checkpoint.
//!
//! The library reads and writes the checkpoints, so the output is the file that the training itself would save after
//! the same steps. The configuration supplies the values that a checkpoint lacks.

use std::collections::HashMap;
use std::io::{Read, Seek, Write};
use std::time::Instant;

use instep::checkpoint::safetensors::{self, Header};
use instep::checkpoint::{self, Extras, VERSION_KEY};
use instep::{Clip, Layout, LossScale, Stepper};

use super::build::{group_name, set_exceptions, stepper};
use super::dtypes::refuse_rounded;
use super::gradients::{Gradients, Steps, in_no_group, sort, step_all};
use super::input::COUNT_END;
use super::place::Place;
use super::summary::Summary;
use super::{Config, Options};
use crate::Failure;

/// Names of tensors that only some checkpoints have: the loss scale of a scaler, and the norm by which the next pass is
/// clipped.
const SCALE: &str = "scaler.scale";
const PREVIOUS_NORM: &str = "clip.previous_norm";

/// A stepper that resumes from a checkpoint.
pub(super) struct Resumed {
    config: Config,
    stepper: Stepper,
    extras: Extras,
    steps: Steps,
}

/// Returns whether a file is marked as a checkpoint of this library.
pub(super) fn is_checkpoint(source: impl Read + Seek) -> Result<bool, Failure> {
    Ok(safetensors::open(source)?.0.metadata.contains_key(VERSION_KEY))
}

impl Resumed {
    /// Builds the stepper and loads the checkpoint.
    ///
    /// # Errors
    /// `Config` if the configuration has the key `copy`, or a dynamic loss scale that the checkpoint lacks. `Tensors`
    /// if the file is damaged, or if it was saved with another optimizer, another precision, another model or another
    /// kind of loss scale or clipping.
    pub(super) fn new<R: Read + Seek>(
        config: Config,
        mut source: R,
        options: &Options,
    ) -> Result<Resumed, Failure> {
        let header = safetensors::open(&mut source)?.0;
        refuse_unheld(&header, &config)?;
        let layout = layout(&header, &config)?;
        let mut stepper = stepper(&config, &layout, options)?;
        set_exceptions(&config, &mut stepper)?;
        let extras = checkpoint::read(&mut stepper, &mut source)?;
        refuse_rounded_tensors(&config, &stepper, &mut source)?;
        Ok(Resumed { config, stepper, extras, steps: Steps::default() })
    }

    /// Runs all passes with the gradients of a file.
    ///
    /// # Errors
    /// `Tensors` if a gradient is missing, has an unknown name or would be rounded.
    pub(super) fn step_all<R: Read + Seek>(&mut self, source: R) -> Result<(), Failure> {
        let Resumed { config, stepper, steps, .. } = self;
        let layout = stepper.layout().clone();
        let (header, mut data) = safetensors::open(source)?;
        let tensors = sort(header, config, &layout)?;
        let passes = tensors.iter().map(|of| of.len() as u64).max().unwrap_or(0);
        let mut gradients = Vec::new();
        for (id, tensors) in layout.ids().zip(&tensors) {
            let name = &layout.parameter(id)?.name;
            if stepper.step_count(id)?.saturating_add(passes) >= COUNT_END {
                let wrong = format_args!("leaves no room for {passes} more steps below 2^63");
                return Err(Failure::tensors(format_args!("`state.{name}.step`"), wrong, "use fewer passes"));
            }
            gradients.push(Gradients { name, tensors });
        }
        *steps = step_all(config, stepper, passes, &gradients, &mut data)?;
        Ok(())
    }

    /// Returns the summary of a replay that began at time `start`.
    pub(super) fn summary(&self, start: Instant) -> instep::Result<Summary> {
        Summary::new(&self.config, &self.stepper, self.steps, start)
    }

    /// Writes the next checkpoint. The trainer's own scalars and texts are copied from the first checkpoint.
    ///
    /// # Errors
    /// The error that `out` returns.
    pub(super) fn write(&self, out: &mut impl Write) -> instep::Result<()> {
        checkpoint::write_with(&self.stepper, &self.extras, out)
    }
}

/// Refuses a configuration that needs a missing tensor, or that would ignore a tensor of the checkpoint.
fn refuse_unheld(header: &Header, config: &Config) -> Result<(), Failure> {
    if config.copy.is_some() {
        return Err(Failure::config("copy", "a checkpoint keeps no copies", "leave it out"));
    }
    match (header.tensors.contains_key(SCALE), config.loss_scale) {
        (true, LossScale::Constant(_)) => {
            let wrong = "the run scaled its loss dynamically, and the configuration does not";
            let remedy = "make `loss_scale` an object, which may be {}";
            return Err(Failure::tensors(format_args!("tensor `{SCALE}`"), wrong, remedy));
        }
        (false, LossScale::Dynamic(_)) => {
            let wrong = format_args!("the checkpoint has no `{SCALE}`");
            return Err(Failure::config("dynamic loss_scale", wrong, "use a number"));
        }
        _ => {}
    }
    if header.tensors.contains_key(PREVIOUS_NORM) && !matches!(config.clip, Some(Clip::Previous(_))) {
        let wrong = "the run clipped by the norm of the pass before, and this replay would not";
        let remedy = "set `clip` as the run did";
        return Err(Failure::tensors(format_args!("tensor `{PREVIOUS_NORM}`"), wrong, remedy));
    }
    Ok(())
}

/// Refuses options that need a state from a checkpoint.
pub(super) fn refuse_without_checkpoint(config: &Config) -> Result<(), Failure> {
    let needs = [
        ("dynamic loss_scale", matches!(config.loss_scale, LossScale::Dynamic(_)), "use a number"),
        ("clip.previous", matches!(config.clip, Some(Clip::Previous(_))), "use clip.global"),
    ];
    match needs.into_iter().find(|(_, is_set, _)| *is_set) {
        Some((key, _, remedy)) => {
            let wrong = "an input that is no checkpoint does not hold its state";
            Err(Failure::config(key, wrong, format_args!("{remedy}, or start from a checkpoint")))
        }
        None => Ok(()),
    }
}

/// Returns the layout, with the parameters in the file's order. In a checkpoint, parameters are in the order of
/// registration.
fn layout(header: &Header, config: &Config) -> Result<Layout, Failure> {
    let groups: HashMap<&str, usize> = config.params().map(|(name, group)| (name.as_str(), group)).collect();
    let mut found = Vec::new();
    for (key, tensor) in &header.tensors {
        let Some(Place::Value(name)) = Place::of(key) else { continue };
        let group = *groups.get(name).ok_or_else(|| in_no_group(key, name))?;
        found.push((tensor.start_bytes(), tensor, group, name));
    }
    if found.len() < groups.len() {
        let missing = config.params().map(|(name, _)| format!("param.{name}"));
        let missing = missing.into_iter().find(|key| !header.tensors.contains_key(key)).unwrap_or_default();
        let remedy = "remove the parameter from its group, or use the checkpoint of this model";
        return Err(Failure::tensors(safetensors::quoted(&missing), "missing", remedy));
    }
    found.sort_unstable_by_key(|(start_bytes, tensor, group, name)| {
        (*start_bytes, tensor.elements, *group, *name)
    });
    let mut builder = Layout::builder();
    for (_, tensor, group, name) in found {
        builder = builder.param(name, tensor.elements as usize).in_group(group_name(group));
        builder = builder.shape(tensor.shape.iter().map(|dimension| *dimension as usize));
    }
    Ok(builder.build()?)
}

/// Refuses a checkpoint with wider types than those of the configuration, because the replay would silently continue
/// from rounded values.
fn refuse_rounded_tensors<R: Read + Seek>(
    config: &Config,
    stepper: &Stepper,
    source: R,
) -> Result<(), Failure> {
    let (header, mut data) = safetensors::open(source)?;
    let (mut given, mut stored) = (Vec::new(), Vec::new());
    let layout = stepper.layout();
    for id in layout.ids() {
        let parameter = layout.parameter(id)?;
        let name = &parameter.name;
        given.resize(parameter.len as usize, 0.0);
        stored.resize(parameter.len as usize, 0.0);
        let mut compare = |key: String, stored: &[f32]| match header.tensors.get(&key) {
            Some(tensor) => {
                data.read(tensor, 0, &mut given)?;
                refuse_rounded(&key, &given, stored.iter().copied())
            }
            None => Ok(()),
        };
        stepper.read(id, &mut stored)?;
        compare(format!("param.{name}"), &stored)?;
        for state in stepper.state_names(id)? {
            stepper.read(id.state(&state), &mut stored)?;
            compare(format!("state.{name}.{state}"), &stored)?;
        }
        if config.ema.is_some() {
            stepper.read(id.ema(), &mut stored)?;
            compare(format!("ema.{name}"), &stored)?;
        }
    }
    Ok(())
}
