//! One replay: a stepper loaded from the input, stepped once per pass, and read out in torch's terms.
//!
//! Gradients are read pass by pass, so memory is that of one pass however many there are. Must not hand values out
//! before the last step has succeeded.

use std::collections::BTreeMap;
use std::io::{self, Read, Seek, Write};

use instep::checkpoint::safetensors::{self, Data, Dtype, Entry};
use instep::{Error, Layout, Solo, Stepper, Unused};

use super::{COUNT_PREFIX, Config, Input, Options, Param};
use crate::Failure;

/// The only state whose absence means a first step, whatever the count says.
const MOMENTUM: &str = "momentum_buffer";

pub(super) struct Run<R> {
    config: Config,
    input: Input,
    data: Data<R>,
    layout: Layout,
    stepper: Stepper,
    /// Passes that have changed something.
    updates: u64,
}

/// All steps have been made.
pub(super) struct Stepped<R>(Run<R>);

impl<R: Read + Seek> Run<R> {
    /// Loads parameters, states and counts.
    pub(super) fn new(config: Config, source: R, options: &Options) -> Result<Self, Failure> {
        let (header, data) = safetensors::open(source)?;
        let input = Input::sort(header, &config)?;
        let layout = layout(&input)?;
        let stepper = stepper(&config, &layout, options)?;
        let mut run = Run { config, input, data, layout, stepper, updates: 0 };
        run.load()?;
        Ok(run)
    }

    fn load(&mut self) -> Result<(), Failure> {
        let Run { config, input, data, layout, stepper, .. } = self;
        for (param, id) in input.params.iter().zip(layout.ids()) {
            data.read(&param.value, 0, stepper.params_mut()?.get_mut(id)?)?;
            for (name, tensor) in &param.states {
                data.read(tensor, 0, stepper.state_mut(id, name)?)?;
            }
            let kept = config.groups[param.group].rule.state_names();
            stepper.set_step_count(id, count_to_load(param, kept))?;
        }
        Ok(())
    }

    /// Makes one pass after the other, gradients handed over from the last parameter to the first, as backward does.
    pub(super) fn step_all(mut self) -> Result<Stepped<R>, Failure> {
        let Run { config, input, data, layout, stepper, updates } = &mut self;
        for pass_index in 0..input.passes as usize {
            let mut pass = stepper.begin()?;
            for (param, id) in input.params.iter().zip(layout.ids()).rev() {
                data.read(&param.gradients[pass_index], 0, pass.grads().get_mut(id)?)?;
                pass.grad_ready(id)?;
            }
            pass.finish()?;
            // Every parameter has a gradient in every pass, so one number counts for all of them; the stepper would
            // not count those without elements.
            let skipped = config.skip_nonfinite && stepper.status()?.skipped;
            *updates += u64::from(!skipped);
        }
        stepper.params()?; // the last moment at which a queued step can fail
        Ok(Stepped(self))
    }
}

impl<R> Stepped<R> {
    /// Writes parameters, states and counts.
    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let Run { config, input, layout, stepper, updates, .. } = &self.0;
        let mut all = BTreeMap::new();
        let mut metadata = input.remarks.clone();
        for (param, id) in input.params.iter().zip(layout.ids()) {
            let Param { name, group, value, .. } = param;
            let shape = value.shape.as_slice();
            let values = stepper.params().and_then(|params| params.get(id)).map_err(io::Error::other)?;
            all.insert(format!("param.{name}"), (shape, values));
            if param.count.is_some() || input.passes > 0 {
                let count = param.count.unwrap_or(0) + updates;
                metadata.insert(format!("{COUNT_PREFIX}{name}"), count.to_string());
            }
            // torch has no state before the first update, and a skipped pass is none.
            for state in config.groups[*group].rule.state_names() {
                if *updates > 0 || param.states.contains_key(*state) {
                    let values = stepper.state(id, state).map_err(io::Error::other)?;
                    all.insert(format!("state.{name}.{state}"), (shape, values));
                }
            }
        }
        // In order of names.
        let entries = all.iter().map(|(name, (shape, _))| Entry {
            name: name.clone(),
            dtype: Dtype::F32,
            shape: shape.to_vec(),
        });
        let header = safetensors::header(&entries.collect::<Vec<_>>(), &metadata);
        out.write_all(&header.map_err(io::Error::other)?)?;
        all.values().try_for_each(|(_, values)| safetensors::write_values(out, values))
    }
}

/// The stepper takes its first-step rule from the count, torch from the buffer.
fn count_to_load(param: &Param, kept: &[&str]) -> u64 {
    let count = param.count.unwrap_or(0);
    match (kept.contains(&MOMENTUM), param.states.contains_key(MOMENTUM)) {
        (false, _) => count,
        (true, true) => count.max(1),
        (true, false) => 0,
    }
}

fn layout(input: &Input) -> Result<Layout, Error> {
    let mut builder = Layout::builder();
    for param in &input.params {
        // As many bytes are in the file, so it fits or the arena is refused.
        builder = builder.param(&param.name, param.value.elements as usize).in_group(group_name(param.group));
    }
    builder.build()
}

fn stepper(config: &Config, layout: &Layout, options: &Options) -> Result<Stepper, Failure> {
    // The mean over ranks is taken with the loss scale: 1/(1 * (n*s)) is the very f64 that 1/(n*s) is. With
    // `Solo::new(n)` buckets would be padded to n ranks, and n comes from a file.
    let scale = f64::from(config.world_size) * config.loss_scale;
    let builder = config.groups[0].rule.builder(layout).mode(options.mode.into());
    // No parameter goes without a gradient, and counting who has one would double the memory of small buckets.
    let mut builder = builder.unused(Unused::StepZero);
    for (index, group) in config.groups.iter().enumerate() {
        builder = group.rule.in_group(builder, &group_name(index));
    }
    builder = builder.loss_scale(scale).skip_nonfinite(config.skip_nonfinite);
    if let Some(max_norm) = config.max_norm {
        builder = builder.max_norm(max_norm);
    }
    if let Some(isa) = options.isa {
        builder = builder.isa(isa);
    }
    if let Some(bytes) = options.bucket_cap_bytes {
        builder = builder.bucket_cap_bytes(bytes);
    }
    if let Some(threads) = options.threads {
        builder = builder.threads(threads);
    }
    builder.host(Solo::default()).map_err(|error| match error {
        Error::Config { field: "loss_scale", why, .. } => {
            let Config { loss_scale, world_size, .. } = config;
            Failure::Config(format!("loss_scale = {loss_scale} with world_size = {world_size}: {why}"))
        }
        other => other.into(),
    })
}

fn group_name(index: usize) -> String {
    format!("groups[{index}]")
}
