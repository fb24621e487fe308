//! Options of `instep replay`: the files, and how steps run.
//!
//! No choice of how steps run changes a bit of the output.

use std::path::PathBuf;

use clap::ValueEnum;
use instep::{Isa, Mode};

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
