//! `instep replay`: reads parameters and gradients from files, and steps the parameters.
//!
//! The command repeats the optimizer steps of a training run, without forward and backward. The output can be used to
//! compare machines, versions and frameworks. The output is written only after every step has succeeded.

mod build;
mod checkpoint;
mod config;
mod dtypes;
mod gradients;
mod groups;
mod input;
mod load;
mod options;
mod output;
mod place;
mod run;
mod scales;
mod summary;

pub use config::Config;
pub(crate) use dtypes::{Dtypes, refused};
pub use groups::Group;
pub use input::{COUNT_PREFIX, Input, PRODUCT_PREFIX, Param};
pub use options::{Arguments, Device, Options, Order};
pub use place::Companion;

use std::io::{self, Read, Seek, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use instep::checkpoint::safetensors::regular_file;

use crate::Failure;
use crate::console::{print_json, print_line};
use checkpoint::{Resumed, is_checkpoint};
use run::Run;

/// The largest size of a configuration.
const MAX_CONFIG_BYTES: u64 = 64 << 20;

/// Runs the command.
///
/// # Errors
/// Returns an error if an input or option is refused, or if a file cannot be read or written. After any
/// error except a failed write to standard output, the output file is unchanged.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let start = Instant::now();
    let Arguments { config, input, grads, output, device: Device::Host, options, json } = arguments;
    let mut text = Vec::new();
    let file = regular_file(config)?;
    file.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut text).map_err(Failure::file(config))?;
    if text.len() as u64 > MAX_CONFIG_BYTES {
        return Err(Failure::Config(format!("longer than {MAX_CONFIG_BYTES} bytes")).configured(config));
    }
    let source = regular_file(input)?;
    let inputs: Vec<&PathBuf> = [config, input].into_iter().chain(grads).collect();
    let target = output::Target::new(output, &inputs)?;
    let parsed = Config::parse(&text).map_err(|failure| failure.configured(config))?;
    let named = |failure: Failure| failure.configured(config).inside(input);
    let summary = match (is_checkpoint(&source).map_err(named)?, grads) {
        (true, Some(grads)) => {
            let gradients = regular_file(grads)?;
            let mut resumed = Resumed::new(parsed, source, options).map_err(named)?;
            resumed.step_all(gradients).map_err(|failure| failure.inside(grads))?;
            target.replace(|file| resumed.write(file).map_err(io::Error::other))?;
            resumed.summary(start)?
        }
        (false, None) => {
            let run = Run::new(parsed, source, options).and_then(Run::step_all);
            let mut run = run.map_err(named)?;
            target.replace(|file| run.write(file))?;
            run.summary(start)?
        }
        (true, None) => {
            let remedy = "name a file of gradients with --grads";
            return Err(named(Failure::tensors("a checkpoint", "holds no gradients", remedy)));
        }
        (false, Some(_)) => {
            let wrong = "is for checkpoints, and the input is none";
            return Err(named(Failure::tensors("--grads", wrong, "put the gradients into the input")));
        }
    };
    if *json {
        print_json(&summary)?;
    } else {
        print_line(&summary.to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Steps the tensors of `input` and writes the result to `out`. Neither input nor output has to be a file.
///
/// # Errors
/// Returns an error if the configuration or the input is refused, or if writing fails. Only a failed write leaves a
/// part of the output in `out`.
pub fn replay(
    config: &[u8],
    input: impl Read + Seek,
    options: &Options,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let mut run = Run::new(Config::parse(config)?, input, options)?.step_all()?;
    run.write(out).map_err(|error| Failure::File { what: "output".into(), error })
}

/// Steps a checkpoint with gradients and writes the next checkpoint to `out`. Neither input nor output has to be a
/// file.
///
/// # Errors
/// Errors as for [`replay`].
pub fn replay_checkpoint(
    config: &[u8],
    checkpoint: impl Read + Seek,
    grads: impl Read + Seek,
    options: &Options,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let mut resumed = Resumed::new(Config::parse(config)?, checkpoint, options)?;
    resumed.step_all(grads)?;
    Ok(resumed.write(out)?)
}
