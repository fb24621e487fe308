//! One replay: a stepper loads the input and steps once per pass. The stepper's tensors are then written under torch's
//! names.
//!
//! No value is written before the last step has succeeded.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::{self, Read, Seek, Write};
use std::time::Instant;

use instep::checkpoint::safetensors::{self, Data, Entry, Tensor};
use instep::{DType, Error, Layout, Moments, ParamId, Stepper};

use super::build::{group_name, stepper};
use super::checkpoint::refuse_without_checkpoint;
use super::gradients::{Gradients, Steps, step_all};
use super::load::{load, read_stored};
use super::summary::Summary;
use super::{COUNT_PREFIX, Companion, Config, Input, Options, PRODUCT_PREFIX, Param};
use crate::Failure;

/// The source of a tensor of the output.
enum Content<'a> {
    Param(ParamId),
    Master(ParamId),
    State(ParamId, &'static str),
    Copy(ParamId),
    Ema(ParamId),
    /// The input's own tensor. No step has changed it.
    Given(&'a Tensor),
}

pub(super) struct Run<R> {
    config: Config,
    input: Input,
    data: Data<R>,
    layout: Layout,
    stepper: Stepper,
    steps: Steps,
}

/// A replay after its last step.
pub(super) struct Stepped<R>(Run<R>);

impl<R: Read + Seek> Run<R> {
    /// Loads parameters, states and counts.
    pub(super) fn new(config: Config, source: R, options: &Options) -> Result<Self, Failure> {
        refuse_without_checkpoint(&config)?;
        let (header, data) = safetensors::open(source)?;
        let input = Input::sort(header, &config)?;
        let layout = layout(&input)?;
        let stepper = stepper(&config, &layout, options)?;
        let mut run = Run { config, input, data, layout, stepper, steps: Steps::default() };
        let Run { config, input, data, stepper, .. } = &mut run;
        load(config, input, data, stepper)?;
        Ok(run)
    }

    /// Makes all passes.
    pub(super) fn step_all(mut self) -> Result<Stepped<R>, Failure> {
        let Run { config, input, data, stepper, steps, .. } = &mut self;
        let gradients = input.params.iter();
        let gradients = gradients.map(|param| Gradients { name: &param.name, tensors: &param.gradients });
        *steps = step_all(config, stepper, input.passes, &gradients.collect::<Vec<_>>(), data)?;
        Ok(Stepped(self))
    }
}

impl<R: Read + Seek> Stepped<R> {
    /// Returns the summary of a replay that began at time `start`.
    pub(super) fn summary(&self, start: Instant) -> instep::Result<Summary> {
        Summary::new(&self.0.config, &self.0.stepper, self.0.steps, start)
    }

    /// Writes parameters, masters, copies, averages, states and counts.
    pub(super) fn write(&mut self, out: &mut impl Write) -> io::Result<()> {
        let Run { config, input, data, layout, stepper, steps } = &mut self.0;
        let mut all = BTreeMap::new();
        let mut metadata = input.remarks.clone();
        for (param, id) in input.params.iter().zip(layout.ids()) {
            let updates = if param.frozen { 0 } else { steps.updates };
            if param.count.is_some() || input.passes > 0 {
                let count = param.count.unwrap_or(0) + updates;
                metadata.insert(format!("{COUNT_PREFIX}{}", param.name), count.to_string());
                let only = stepper.optimizers_of(id).map_err(io::Error::other)?[0];
                // The shortest digits that read back to the same bits. The product of an empty parameter stays 1.
                if let Some(product) = stepper.carried((id, only)).map_err(io::Error::other)? {
                    metadata.insert(format!("{PRODUCT_PREFIX}{}", param.name), format!("{product:?}"));
                }
            }
            for (name, dtype, content) in contents(config, param, id, updates > 0) {
                // Wide elements first, so that every tensor is aligned to its elements; then by name.
                all.insert((Reverse(dtype.bytes()), name), (dtype, &param.value, content));
            }
        }
        let entries = all.iter().map(|((_, name), (dtype, value, _))| Entry {
            name: name.clone(),
            dtype: (*dtype).into(),
            shape: value.shape.clone(),
        });
        let header = safetensors::header(&entries.collect::<Vec<_>>(), &metadata);
        out.write_all(&header.map_err(io::Error::other)?)?;
        let mut values = Vec::new();
        for (dtype, value, content) in all.into_values() {
            values.resize(value.elements as usize, 0.0);
            let into = values.as_mut_slice();
            match content {
                Content::Param(id) => read_stored(stepper, id, dtype, into),
                Content::Master(id) => stepper.read(id, into),
                Content::State(id, name) => stepper.read(id.state(name), into),
                Content::Copy(id) => stepper.read(id.copy(), into),
                Content::Ema(id) => stepper.read(id.ema(), into),
                Content::Given(tensor) => data.read(tensor, 0, into),
            }
            .map_err(io::Error::other)?;
            safetensors::write_values(out, dtype, &values)?;
        }
        Ok(())
    }
}

/// Lists the tensors of a parameter in the output: name, type and source.
fn contents<'a>(
    config: &Config,
    param: &'a Param,
    id: ParamId,
    updated: bool,
) -> Vec<(String, DType, Content<'a>)> {
    let Param { name, group, companions, states, .. } = param;
    let kept = config.groups[*group].optimizer.state_names();
    let mut all = vec![(format!("param.{name}"), config.precision.param, Content::Param(id))];
    for companion in Companion::kept(config) {
        let content = match (companion, companions.get(&companion)) {
            (Companion::Master, _) => Content::Master(id),
            (Companion::Copy, _) if updated => Content::Copy(id),
            (Companion::Copy, Some(tensor)) => Content::Given(tensor),
            // A frozen parameter has an average too, which may have just begun.
            (Companion::Ema, _) if updated || param.first_count(kept) > 0 => Content::Ema(id),
            (Companion::Copy | Companion::Ema, _) => continue,
        };
        let dtype = config.copy.filter(|_| companion == Companion::Copy).unwrap_or(DType::F32);
        all.push((format!("{}.{name}", companion.prefix()), dtype, content));
    }
    let dtype = if config.precision.moments == Moments::BF16 { DType::BF16 } else { DType::F32 };
    // torch has no state before the first update, and a skipped pass is no update.
    for state in kept {
        if updated || states.contains_key(*state) {
            all.push((format!("state.{name}.{state}"), dtype, Content::State(id, state)));
        }
    }
    all
}

fn layout(input: &Input) -> Result<Layout, Error> {
    let mut builder = Layout::builder();
    for param in &input.params {
        // The file has at least as many bytes as elements. A length that does not fit a usize therefore needs a file
        // larger than the address space, and its arena is refused.
        builder = builder.param(&param.name, param.value.elements as usize).in_group(group_name(param.group));
        builder = builder.shape(param.value.shape.iter().map(|dimension| *dimension as usize));
    }
    builder.build()
}
