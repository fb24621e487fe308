//! Trains a network to read handwritten digits twice, with and without overlapped steps, and compares the results.
//!
//! Every parameter and every optimizer state of every rank must have the same bits after both runs. The exit status is
//! 2 if the flags are refused. The exit status is 1 if a bit differs, if a race is found, if the accuracy is too low,
//! or after any other error.

mod data;
mod files;
#[cfg(test)]
mod gradient_check;
mod machine;
mod model;
mod neighbours;
#[cfg(test)]
mod precision_check;
#[cfg(feature = "mpi")]
mod processes;
mod report;
mod stages;
mod train;

use std::error::Error;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use instep::optim::{ALL, Descriptor};
use instep::{DType, Master, Mode, Moments, Precision, Rounding, Strategy, in_process};

use data::{GLOBAL_BATCH, Samples};
use machine::choose_ranks;
use neighbours::Neighbours;
use report::Progress;
use train::{Trained, train_rank};

/// Train a network to read handwritten digits while optimizer steps overlap with backward.
///
/// The training runs twice, in the chosen mode and in a mode to compare with. Both runs must end with the same bits.
#[derive(Clone, Parser)]
pub(crate) struct Flags {
    /// Ranks, each with its own copy of the network and its own part of every batch; by default 1 for every 3 cores,
    /// at most 4.
    #[arg(long, default_value_t = choose_ranks())]
    ranks: u32,
    /// Optimizer.
    #[arg(long, value_parser = optimizer, default_value = "adamw")]
    optimizer: &'static Descriptor,
    /// When buckets are stepped.
    #[arg(long, value_enum, default_value_t = ModeName::Eager)]
    mode: ModeName,
    /// Which tensors the ranks shard; the comparison run shards nothing.
    #[arg(long, value_enum, default_value_t = StrategyName::Ddp)]
    strategy: StrategyName,
    /// With zero and fsdp: number of neighbouring ranks that form a group and shard tensors among them; every group has
    /// the same shards [default: all ranks form one group]. Both runs add up the gradients of each group first.
    #[arg(long)]
    shard_size: Option<NonZeroU32>,
    /// Copy gradients to other host memory, step there, and copy parameters back (offload). The run for comparison
    /// makes its steps in place.
    #[arg(long)]
    offload: bool,
    /// Types of parameters, gradients and states.
    #[arg(long, value_enum, default_value_t = PrecisionName::F32)]
    precision: PrecisionName,
    /// Number of times that every training image is seen.
    #[arg(long, default_value_t = 20)]
    epochs: u32,
    /// Largest size of a bucket of gradients; with the default, each layer has its own bucket.
    #[arg(long, default_value_t = 4096)]
    bucket_cap_bytes: u64,
    /// Kernel threads of each rank [default: INSTEP_THREADS, or the cores that trainers and all-reduces do not use].
    #[arg(long)]
    threads: Option<usize>,
    /// Clip the global gradient norm to this value; not with eager, because eager steps before the norm is known.
    #[arg(long)]
    max_norm: Option<f64>,
    /// Share of the held-out images that must be read correctly; 0 accepts any.
    #[arg(long, default_value_t = 0.95)]
    min_accuracy: f64,
    /// Write a trace of all ranks in the chosen mode to this file; ui.perfetto.dev opens it.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Draw two passes of rank 0 in the middle of training in the chosen mode, as an SVG file.
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
    /// Train one rank in each process that mpirun has started, and compare with ranks in one process.
    #[cfg(feature = "mpi")]
    #[arg(long, conflicts_with_all = ["ranks", "trace", "picture"])]
    mpi: bool,
}

fn optimizer(name: &str) -> Result<&'static Descriptor, String> {
    let names = || ALL.iter().map(|one| one.key()).collect::<Vec<String>>().join(", ");
    ALL.iter().find(|one| one.key() == name).copied().ok_or_else(|| format!("choose one of {}", names()))
}

/// The precisions to choose from.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum PrecisionName {
    /// Everything in f32.
    F32,
    /// bf16 parameters and gradients, f32 master weights.
    Master,
    /// bf16 parameters and gradients, 16-bit remainders, states in 8 bits.
    Remainder,
    /// Everything in bf16, rounded stochastically.
    Stochastic,
}

impl From<PrecisionName> for Precision {
    fn from(name: PrecisionName) -> Precision {
        let bf16 = Precision { param: DType::BF16, grad: DType::BF16, ..Precision::F32 };
        match name {
            PrecisionName::F32 => Precision::F32,
            PrecisionName::Master => Precision { master: Master::F32, ..bf16 },
            PrecisionName::Remainder => {
                Precision { master: Master::Remainder16, moments: Moments::EightBit, ..bf16 }
            }
            PrecisionName::Stochastic => {
                Precision { moments: Moments::BF16, rounding: Rounding::Stochastic { seed: 1 }, ..bf16 }
            }
        }
    }
}

/// The strategies to choose from.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum StrategyName {
    /// Every rank steps everything.
    Ddp,
    /// Every rank steps its shard.
    Zero,
    /// Every rank steps its shard, and keeps only its shard of the parameters.
    Fsdp,
}

impl From<StrategyName> for Strategy {
    fn from(name: StrategyName) -> Strategy {
        match name {
            StrategyName::Ddp => Strategy::Replicated,
            StrategyName::Zero => Strategy::Zero,
            StrategyName::Fsdp => Strategy::Fsdp,
        }
    }
}

/// The modes to choose from.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ModeName {
    Sequential,
    Eager,
    Normed,
}

impl From<ModeName> for Mode {
    fn from(name: ModeName) -> Mode {
        match name {
            ModeName::Sequential => Mode::Sequential,
            ModeName::Eager => Mode::Eager,
            ModeName::Normed => Mode::Normed,
        }
    }
}

fn main() -> ExitCode {
    match run(&Flags::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {error}");
            let refused = matches!(
                error.downcast_ref(),
                Some(instep::Error::Config { .. } | instep::Error::Unsupported { .. })
            );
            ExitCode::from(if refused { 2 } else { 1 })
        }
    }
}

/// Trains twice. Returns true if both runs agree, the accuracy is high enough, and no race was found. With `--mpi`,
/// races are not checked.
fn run(flags: &Flags) -> Result<bool, Box<dyn Error>> {
    let (training, held_out) = Samples::load()?.split();
    #[cfg(feature = "mpi")]
    if flags.mpi {
        return processes::run(flags.clone(), &training, &held_out);
    }
    refuse(flags)?;
    let mode = flags.mode.into();
    let chosen = train_in_process(flags, mode, &training, &held_out)?;
    let other_mode = choose_counterpart(mode, flags.max_norm);
    let whole = Flags { strategy: StrategyName::Ddp, offload: false, ..flags.clone() };
    let counterpart = train_in_process(&whole, other_mode, &training, &held_out)?;
    let fine = report::judge((mode, &chosen), (other_mode, &counterpart), flags.min_accuracy);
    files::write_files(flags, &chosen, training.labels.len())?;
    Ok(fine)
}

/// Trains all ranks as threads.
fn train_in_process(
    flags: &Flags,
    mode: Mode,
    training: &Samples,
    held_out: &Samples,
) -> instep::Result<Vec<Trained>> {
    let progress = Progress::new(flags, mode);
    in_process(flags.ranks, |comm| match flags.shard_size {
        Some(ranks) if flags.strategy == StrategyName::Ddp => {
            let comm = Neighbours::new(comm, ranks.get())?;
            train_rank(flags, mode, training, held_out, &progress, comm)
        }
        _ => train_rank(flags, mode, training, held_out, &progress, comm),
    })
}

/// Returns the mode of the comparison run: Sequential, or an overlapped mode if Sequential was chosen. With a maximum
/// norm, the overlapped mode is Normed, because Eager cannot clip globally.
fn choose_counterpart(mode: Mode, max_norm: Option<f64>) -> Mode {
    match (mode, max_norm) {
        (Mode::Sequential, None) => Mode::Eager,
        (Mode::Sequential, Some(_)) => Mode::Normed,
        (Mode::Eager | Mode::Normed, _) => Mode::Sequential,
    }
}

/// Refuses invalid flags that the library would not refuse.
fn refuse(flags: &Flags) -> instep::Result<()> {
    if flags.epochs == 0 {
        return Err(instep::Error::range("epochs", flags.epochs, "1 or more"));
    }
    if let Some(ranks) = flags.shard_size
        && flags.strategy == StrategyName::Ddp
    {
        let wrong = "every rank has all values";
        return Err(instep::Error::config("shard_size", ranks, wrong, "use --strategy zero or fsdp"));
    }
    if flags.ranks as usize > GLOBAL_BATCH {
        return Err(instep::Error::range(
            "ranks",
            flags.ranks,
            format_args!("at most {GLOBAL_BATCH}, one image each"),
        ));
    }
    if !(0.0..=1.0).contains(&flags.min_accuracy) {
        return Err(instep::Error::range("min_accuracy", flags.min_accuracy, "a share from 0 to 1"));
    }
    Ok(())
}
