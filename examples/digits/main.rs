//! Trains a network to read handwritten digits on several ranks, overlapped and one after the other, and compares.
//!
//! The same training runs twice, in the chosen mode and in one to compare with; every parameter and every optimizer
//! state of every rank must come out the same to the last bit. Must never pass on a close result: equal bits, no
//! hazards, and the minimum accuracy, or the exit status says so (1; 2 is for flags that cannot be followed).

mod data;
mod files;
#[cfg(test)]
mod gradient_check;
mod model;
#[cfg(test)]
mod precision_check;
mod report;
mod train;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use instep::{DType, Master, Mode, Moments, Precision, Rounding, in_process};

use data::{GLOBAL_BATCH, Samples};
use report::Progress;
use train::{Trained, train_rank};

/// Train a network to read handwritten digits, each optimizer step beside the backward pass.
#[derive(Parser)]
pub(crate) struct Flags {
    /// Ranks, each with its own copy of the network and its own part of every batch.
    #[arg(long, default_value_t = 4)]
    ranks: u32,
    /// What steps the parameters.
    #[arg(long, value_enum, default_value_t = OptimizerName::AdamW)]
    optimizer: OptimizerName,
    /// When buckets are stepped.
    #[arg(long, value_enum, default_value_t = ModeName::Eager)]
    mode: ModeName,
    /// How tensors are stored.
    #[arg(long, value_enum, default_value_t = PrecisionName::F32)]
    precision: PrecisionName,
    /// Times that every training image is seen.
    #[arg(long, default_value_t = 20)]
    epochs: u32,
    /// Bytes of gradients that a bucket gathers; with the default, each layer has its own.
    #[arg(long, default_value_t = 4096)]
    bucket_cap_bytes: u64,
    /// Kernel threads of each rank; unset, all ranks share as many as there are cores.
    #[arg(long)]
    threads: Option<usize>,
    /// Clip the norm of all gradients to this; not with eager, which steps before it knows the norm.
    #[arg(long)]
    max_norm: Option<f64>,
    /// Share of the held-out images that must be read correctly; 0 accepts any.
    #[arg(long, default_value_t = 0.95)]
    min_accuracy: f64,
    /// Write when everything ran in the chosen mode, on all ranks, to this file; ui.perfetto.dev opens it.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Draw two passes of rank 0 from the middle of training in the chosen mode, and write them to this SVG file.
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

/// The optimizers to choose from.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum OptimizerName {
    Sgd,
    Adam,
    #[value(name = "adamw")]
    AdamW,
    Adagrad,
    #[value(name = "rmsprop")]
    RmsProp,
    Adadelta,
    Adamax,
    Rprop,
    Lion,
    #[value(name = "nadam")]
    NAdam,
    #[value(name = "radam")]
    RAdam,
    Lamb,
}

/// The precisions to choose from.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum PrecisionName {
    /// All of it f32.
    F32,
    /// bf16 parameters and gradients, f32 master weights behind them.
    Master,
    /// bf16 parameters and gradients, 16-bit remainders behind them, states in 8 bits.
    Remainder,
    /// All of it bf16, rounded stochastically.
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

/// Trains twice; true if everything is as it must be.
fn run(flags: &Flags) -> Result<bool, Box<dyn Error>> {
    refuse(flags)?;
    let (training, held_out) = Samples::load()?.split();
    let train = |mode: Mode| -> instep::Result<Vec<Trained>> {
        let progress = Progress::new(flags, mode);
        in_process(flags.ranks, |comm| match flags.precision {
            PrecisionName::F32 => train_rank::<f32>(flags, mode, &training, &held_out, &progress, comm),
            _ => train_rank::<half::bf16>(flags, mode, &training, &held_out, &progress, comm),
        })
    };
    let mode = flags.mode.into();
    let chosen = train(mode)?;
    let counterpart = train(choose_counterpart(mode, flags.max_norm))?;
    let fine = report::judge(&chosen, &counterpart, flags.min_accuracy);
    files::write_files(flags, &chosen, training.labels.len())?;
    Ok(fine)
}

/// The mode to compare with: Sequential, or if that was chosen, one that overlaps and knows the norm if it must.
fn choose_counterpart(mode: Mode, max_norm: Option<f64>) -> Mode {
    match (mode, max_norm) {
        (Mode::Sequential, None) => Mode::Eager,
        (Mode::Sequential, Some(_)) => Mode::Normed,
        (Mode::Eager | Mode::Normed, _) => Mode::Sequential,
    }
}

/// Refuses what the library cannot know to be wrong; it refuses the rest itself.
fn refuse(flags: &Flags) -> instep::Result<()> {
    let refuse = |field, value: String, why| Err(instep::Error::Config { field, value, why });
    if flags.epochs == 0 {
        return refuse("epochs", flags.epochs.to_string(), "training takes at least one");
    }
    if flags.ranks as usize > GLOBAL_BATCH {
        return refuse(
            "ranks",
            flags.ranks.to_string(),
            "a batch has too few images to give each of them one",
        );
    }
    if !(0.0..=1.0).contains(&flags.min_accuracy) {
        return refuse("min_accuracy", flags.min_accuracy.to_string(), "must be between 0 and 1");
    }
    Ok(())
}
