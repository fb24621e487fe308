//! One rank of a phase, and its log of events for the model.
//!
//! Every event has the number of the action that it belongs to. The files above this one have the actions of a rank.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use instep::{Element, Error, ParamId, Result, Stepper, TensorId, bf16, f16};

use super::build;
use super::program::*;

/// A tensor of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Value,
    State(usize),
    Ema,
    Copy,
    Gradient,
}

/// An event that a rank saw.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// The parameters of each bucket.
    Buckets(Vec<Vec<usize>>),
    Tensor {
        what: What,
        param: usize,
        values: Vec<f32>,
    },
    /// A parameter as it is stored, read inside a pass.
    Seen {
        param: usize,
        values: Vec<f32>,
    },
    Count {
        param: usize,
        count: u64,
        carried: Option<f64>,
    },
    Status(instep::Status),
    Settings {
        schedule_step: u64,
        scaler: Option<(f64, u32)>,
        previous_norm: Option<Option<f64>>,
    },
    /// The buckets that an abandoned pass leaves stepped.
    Abandoned(Vec<u32>),
    /// Whether any rank had data.
    Joined(bool),
    /// The loss scale of a pass.
    Scale(f64),
    /// The first value other than 0 that a gradient had before it was written.
    Stale {
        param: usize,
        micro_batch: u32,
        value: f32,
    },
    /// The kind of an error, if a call was refused.
    Answered {
        call: &'static str,
        error: Option<&'static str>,
    },
    /// The error of a pass that had to fail.
    Doomed {
        kinds: Vec<&'static str>,
        schedule_step: u64,
    },
    Wrong(String),
}

/// Events, each with the number of its action. The events of entry and exit have separate numbers.
pub(crate) type Log = Vec<(usize, Event)>;

pub(crate) const ENTRY: usize = usize::MAX - 1;
pub(crate) const EXIT: usize = usize::MAX;

/// One rank of a phase.
pub(crate) struct Rank<'p> {
    pub(crate) program: &'p Program,
    pub(crate) config: &'p Config,
    pub(crate) stepper: Stepper,
    pub(crate) ids: Vec<ParamId>,
    pub(crate) rank: u32,
    pub(crate) log: Log,
    /// The number of the action.
    pub(crate) at: usize,
    pub(crate) frozen: Vec<bool>,
    pub(crate) passes: u64,
    /// The recording since the buckets were built.
    pub(crate) recorded: instep::Recording,
    pub(crate) together: &'p Together,
}

/// The meeting point of ranks before a pass that has to fail. This pass then ends no earlier call.
#[derive(Default)]
pub(crate) struct Together {
    arrived: AtomicU32,
}

impl Together {
    /// Waits for all ranks, for a limited time, because one of them may have failed.
    pub(crate) fn meet(&self, ranks: u32) {
        self.arrived.fetch_add(1, Ordering::SeqCst);
        let since = Instant::now();
        while self.arrived.load(Ordering::SeqCst) < ranks && since.elapsed() < build::DEADLINE {
            std::thread::yield_now();
        }
    }
}

impl Rank<'_> {
    pub(crate) fn note(&mut self, event: Event) {
        self.log.push((self.at, event));
    }

    pub(crate) fn wrong(&mut self, what: String) {
        self.note(Event::Wrong(what));
    }

    pub(crate) fn answered<T>(&mut self, call: &'static str, answer: &Result<T>) {
        self.note(Event::Answered { call, error: answer.as_ref().err().map(kind) });
    }

    /// Notes a call that must be refused at this moment.
    pub(crate) fn refused<T>(&mut self, call: &str, expected: &str, answer: Result<T>) {
        match answer {
            Err(error) if kind(&error) == expected => {}
            Err(error) => self.wrong(format!("{call}: refused as {error:?}, not as {expected}")),
            Ok(_) => self.wrong(format!("{call}: accepted, though it had to be refused as {expected}")),
        }
    }

    /// Reads a tensor as it is stored.
    pub(crate) fn view<'n>(stepper: &Stepper, of: Type, tensor: impl Into<TensorId<'n>>) -> Result<Vec<f32>> {
        fn widened<'n, T: Element>(stepper: &Stepper, tensor: TensorId<'n>) -> Result<Vec<f32>> {
            Ok(stepper.view::<T>(tensor)?.iter().map(|x| x.to_f32()).collect())
        }
        let tensor = tensor.into();
        match of {
            Type::F32 => widened::<f32>(stepper, tensor),
            Type::Bf16 => widened::<bf16>(stepper, tensor),
            Type::F16 => widened::<f16>(stepper, tensor),
        }
    }
}

/// Returns the name of an error's variant.
pub(crate) fn kind(error: &Error) -> &'static str {
    match error {
        Error::Config { .. } => "Config",
        Error::Layout(_) => "Layout",
        Error::Sharded { .. } => "Sharded",
        Error::Order(_) => "Order",
        Error::Unsupported(_) => "Unsupported",
        Error::Mismatch { .. } => "Mismatch",
        Error::LeftPass { .. } => "LeftPass",
        Error::PeerLost { .. } => "PeerLost",
        Error::Deadline { .. } => "Deadline",
        Error::Checkpoint(_) => "Checkpoint",
        Error::Poisoned { .. } => "Poisoned",
        Error::Rank { .. } => "Rank",
        _ => "another",
    }
}
