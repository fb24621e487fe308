//! Options of `instep replay`: the files, and how steps run.
//!
//! The options that control how steps run do not change any bit of the output.

use std::path::PathBuf;

use clap::ValueEnum;
use instep::{Isa, Mode};

/// Apply the optimizer to parameters and gradients from a file
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// JSON file with the optimizer, parameter groups and scales; cli/README.md lists its keys
    #[arg(long)]
    pub config: PathBuf,
    /// safetensors file with parameters `param.NAME` and gradients `grad.PASS.NAME` (sums over the ranks). To resume,
    /// the file also has states `state.NAME.STATE`, masters `master.NAME`, copies `copy.NAME` and moving averages
    /// `ema.NAME`
    #[arg(long)]
    pub input: PathBuf,
    /// safetensors file with gradients `grad.PASS.NAME`, if the input is a checkpoint that `instep::checkpoint::save`
    /// wrote. The output is then the next checkpoint
    #[arg(long)]
    pub grads: Option<PathBuf>,
    /// safetensors file for parameters, states, masters, copies and moving averages after the last step, under the same
    /// names as in the input. The file is either replaced completely or left unchanged
    #[arg(long)]
    pub output: PathBuf,
    /// Device that runs the steps
    #[arg(long, value_enum, default_value_t = Device::Host)]
    pub device: Device,
    /// How steps run; these options change no bit of the output
    #[command(flatten)]
    pub options: Options,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// How steps run. These options change no bit of the output.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct Options {
    /// Instruction set: baseline, avx2 or avx512 [default: INSTEP_ISA, or the widest of this machine]
    #[arg(long)]
    pub isa: Option<Isa>,
    /// Bytes of gradients per bucket [default: 1 MiB for the first bucket, 25 MiB for all others]
    #[arg(long)]
    pub bucket_cap_bytes: Option<u64>,
    /// When steps run. eager refuses clip.global and skip_nonfinite
    #[arg(long, value_enum, default_value_t = Order::Sequential)]
    pub mode: Order,
    /// Number of kernel threads [default: INSTEP_THREADS, or one per core]
    #[arg(long)]
    pub threads: Option<usize>,
}

/// The device that runs the steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// The CPU
    Host,
}

/// When steps run. Each variant corresponds to the [`Mode`] of the same name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Order {
    /// All steps after the last gradient
    #[default]
    Sequential,
    /// Each bucket's step as soon as its gradients are complete
    Eager,
    /// First the norms of all gradients, then one decision, then all steps
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
