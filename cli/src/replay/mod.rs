//! `instep replay`: steps parameters that come from a file with gradients that come from a file.
//!
//! What a training run would have done to these numbers, without the training run: for comparing machines, versions
//! and frameworks. Must write nothing unless every step was made.

mod config;
mod dtypes;
mod input;
mod load;
mod output;
mod place;
mod run;

pub use config::{Config, Group, Rule};
pub use input::{COUNT_PREFIX, Input, PRODUCT_PREFIX, Param};
pub use place::Companion;

use std::io::{Read, Seek, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::ValueEnum;
use instep::checkpoint::safetensors::regular_file;
use instep::{Isa, Mode};

use crate::Failure;
use run::Run;

/// Longest configuration that is read.
const MAX_CONFIG_BYTES: u64 = 64 << 20;

/// Apply the optimizer to parameters and gradients from a file
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Optimizer, parameter groups and scales, as JSON
    #[arg(long)]
    pub config: PathBuf,
    /// Parameters `param.NAME`, gradients `grad.PASS.NAME` (sums over the ranks), states `state.NAME.STATE`
    #[arg(long)]
    pub input: PathBuf,
    /// Parameters and states after the last step; replaced as a whole or not at all
    #[arg(long)]
    pub output: PathBuf,
    /// Where steps run
    #[arg(long, value_enum, default_value_t = Device::Host)]
    pub device: Device,
    /// How steps run; no choice changes a bit of the output
    #[command(flatten)]
    pub options: Options,
}

/// How steps run. The result is the same bits whatever is chosen.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct Options {
    /// Instruction set: baseline, avx2 or avx512 [default: INSTEP_ISA, else the widest of this machine]
    #[arg(long)]
    pub isa: Option<Isa>,
    /// Bytes of gradients per bucket [default: 1 MiB, then 25 MiB]
    #[arg(long)]
    pub bucket_cap_bytes: Option<u64>,
    /// When steps run; eager refuses max_norm and skip_nonfinite, the others take every configuration
    #[arg(long, value_enum, default_value_t = Order::Sequential)]
    pub mode: Order,
    /// Kernel threads [default: INSTEP_THREADS, else one per core]
    #[arg(long)]
    pub threads: Option<usize>,
}

/// Where steps run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// The CPU
    Host,
}

/// When steps run, as [`Mode`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Order {
    /// All steps behind the last gradient
    #[default]
    Sequential,
    /// Each bucket's step as soon as its gradients are there
    Eager,
    /// All norms, one decision, then all steps
    Normed,
}

impl From<Order> for Mode {
    fn from(order: Order) -> Mode {
        match order {
            Order::Sequential => Mode::Sequential,
            Order::Eager => Mode::Eager,
            Order::Normed => Mode::Normed,
        }
    }
}

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
