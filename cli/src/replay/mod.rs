//! `instep replay`: steps parameters that come from a file with gradients that come from a file.
//!
//! What a training run would have done to these numbers, without the training run: for comparing machines, versions
//! and frameworks. Must write nothing unless every step was made.

mod config;
mod dtypes;
mod groups;
mod input;
mod load;
mod options;
mod output;
mod place;
mod run;

pub use config::Config;
pub use groups::Group;
pub use input::{COUNT_PREFIX, Input, PRODUCT_PREFIX, Param};
pub use options::{Arguments, Device, Options, Order};
pub use place::Companion;

use std::io::{Read, Seek, Write};
use std::process::ExitCode;

use instep::checkpoint::safetensors::regular_file;

use crate::Failure;
use run::Run;

/// Longest configuration that is read.
const MAX_CONFIG_BYTES: u64 = 64 << 20;

/// Runs the command.
///
/// # Errors
/// Whatever was refused; the output file is as it was then.
pub fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let Arguments { config, input, output, device: Device::Host, options } = arguments;
    let mut text = Vec::new();
    let file = regular_file(config)?;
    file.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut text).map_err(Failure::file(config))?;
    if text.len() as u64 > MAX_CONFIG_BYTES {
        return Err(Failure::Config(format!("longer than {MAX_CONFIG_BYTES} bytes")));
    }
    let source = regular_file(input)?;
    let target = output::Target::new(output, &[config, input])?;
    let run = Run::new(Config::parse(&text)?, source, options).and_then(Run::step_all);
    let mut run = run.map_err(|failure| failure.inside(input))?;
    target.replace(|file| run.write(file))?;
    Ok(ExitCode::SUCCESS)
}

/// Steps what is in `input` and writes what comes out, without any file.
///
/// # Errors
/// Whatever was refused; nothing has been written then, unless writing itself failed.
pub fn replay(
    config: &[u8],
    input: impl Read + Seek,
    options: &Options,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let mut run = Run::new(Config::parse(config)?, input, options)?.step_all()?;
    run.write(out).map_err(|error| Failure::File { what: "output".into(), error })
}
