//! Builds the stepper that a configuration describes.
//!
//! The stepper divides gradients by the number of ranks over which they were summed. With a constant loss scale, the
//! stepper has one rank. With a dynamic loss scale, the stepper is rank 0 of that number of ranks. The mode, threads
//! and instruction set change no bit of the result.

use instep::checkpoint::safetensors::quoted;
use instep::{Error, Layout, LossScale, Solo, Stepper, Sums, Unused};

use super::dtypes::refused;
use super::{Config, Options};
use crate::Failure;

/// Builds the stepper of a configuration.
///
/// # Errors
/// Returns `Failure::Config`, with the names that the configuration file uses, if the element types or the constant
/// loss scale are refused. Returns `Failure::Library` for any other error of the library.
pub(super) fn stepper(config: &Config, layout: &Layout, options: &Options) -> Result<Stepper, Failure> {
    let builder = Stepper::builder(layout, config.groups[0].optimizer.clone()).mode(options.mode.into());
    // Every parameter has a gradient, so the stepper need not count the used parameters. The counts would double the
    // memory of small buckets.
    let mut builder = builder.unused(Unused::StepZero);
    for (index, group) in config.groups.iter().enumerate() {
        builder = builder.group(group_name(index), group.optimizer.clone());
        if let Some(max_norm) = group.max_norm {
            builder = builder.group_clip(group_name(index), max_norm);
        }
    }
    // With n ranks, a constant loss scale s becomes n*s, so the stepper of one rank also divides by n. Its factor
    // 1/(1 * (n*s)) is the same f64 as the factor 1/(n*s) of a stepper of n ranks. A stepper of n ranks would pad
    // buckets to n ranks, and n comes from a file, so it may be huge.
    let sums = match config.loss_scale {
        LossScale::Dynamic(_) | LossScale::External(_) => {
            builder = builder.loss_scale(config.loss_scale);
            Sums::by_caller(0, config.world_size)
        }
        LossScale::Constant(loss_scale) => {
            builder = builder.loss_scale(f64::from(config.world_size) * loss_scale);
            Solo::default().into()
        }
    };
    builder = builder.skip_nonfinite(config.skip_nonfinite).precision(config.precision);
    if let Some(dtype) = config.copy {
        builder = builder.copy_params(dtype);
    }
    if let Some(decay) = config.ema {
        builder = builder.ema(decay);
    }
    if let Some(clip) = config.clip {
        builder = builder.clip(clip);
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
    builder.host(sums).map_err(|error| match (error, config.loss_scale) {
        (Error::Config { field: "loss_scale", wrong, remedy, .. }, LossScale::Constant(loss_scale)) => {
            let thing = format_args!("loss_scale = {loss_scale} with world_size = {}", config.world_size);
            Failure::config(thing, wrong, remedy)
        }
        (other, _) => refused(other),
    })
}

/// Returns the name of a group in the layout.
pub(super) fn group_name(index: usize) -> String {
    format!("groups[{index}]")
}

/// Freezes parameters and sets learning-rate multipliers, as the configuration says.
///
/// # Errors
/// `Config` if a multiplier is out of range.
pub(super) fn set_exceptions(config: &Config, stepper: &mut Stepper) -> Result<(), Failure> {
    let layout = stepper.layout().clone();
    for id in layout.ids() {
        let name = &layout.parameter(id)?.name;
        stepper.set_frozen(id, config.frozen.contains(name))?;
        if let Some(multiplier) = config.lr_multipliers.get(name) {
            let refused = |error| Failure::Config(format!("lr_multipliers.{}: {error}", quoted(name)));
            stepper.set_lr_multiplier(id, *multiplier).map_err(refused)?;
        }
    }
    Ok(())
}
