//! The one error type, its variants named by what the caller can do about them.
//!
//! Three kinds, told apart by what is left behind: *refused* (nothing was changed, call again), *abandoned* (a pass
//! was given up), *poisoned* (sticky: the stepper is over). Must stay cloneable, because a poisoned device repeats
//! its first error, and must not know any other module.

use std::sync::Arc;

/// What every fallible call of this crate returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong. *Refused*: nothing was changed, but by calls that take the pass or the stepper by
/// value, which end it. *Poisons*: the stepper is over, and so is its group.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// Refused: an option or hyperparameter is out of range, or two options exclude each other.
    #[error("{field} = {value}: {why}")]
    Config {
        /// The option as the caller spells it.
        field: &'static str,
        /// The value given.
        value: String,
        /// The rule it breaks.
        why: &'static str,
    },
    /// Refused: a parameter is unknown, named twice, of another layout, or of another length.
    #[error("layout: {0}")]
    Layout(String),
    /// Refused: the call comes at the wrong moment of a pass.
    #[error("order: {0}")]
    Order(String),
    /// Refused: this machine or build lacks what was asked for.
    #[error("{what} is not available here; there is {have}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// What exists instead.
        have: String,
    },
    /// Refused: this build carries no GPU kernels.
    #[error("this build has no GPU kernels: {how}")]
    KernelsNotBuilt {
        /// What to do to get them.
        how: String,
    },
    /// Refused: there is no usable GPU driver on this machine.
    #[error("no usable CUDA driver: {why}")]
    DriverUnavailable {
        /// What was tried, and what came of it.
        why: String,
    },
    /// Refused: there is no usable NCCL library on this machine.
    #[error("no usable NCCL: {why}")]
    NcclUnavailable {
        /// What was tried, and what came of it.
        why: String,
    },
    /// Poisons: a call into a GPU's driver failed. Refused, where it was made to build a stepper.
    #[error("{call} failed with {name} ({code})")]
    Device {
        /// The driver's function.
        call: &'static str,
        /// Its answer.
        code: i32,
        /// The answer's name.
        name: String,
    },
    /// Poisons: a call into a communication library failed. Refused, where it was made to build a communicator.
    #[error("rank {rank}: {call} failed with {code}: {message}")]
    Collective {
        /// The rank that made the call.
        rank: u32,
        /// The library's function.
        call: &'static str,
        /// Its answer.
        code: i32,
        /// The answer in words.
        message: String,
    },
    /// Poisons: a communication hook gave up, in its own words.
    #[error("hook: {0}")]
    Hook(String),
    /// Refused: the compiled kernels break the numerics contract, so no result could be trusted.
    #[error("the {isa} kernels fail self-test {property}: check CXXFLAGS for fast-math or contraction")]
    Arithmetic {
        /// The instruction set they were built for.
        isa: &'static str,
        /// Number of the property, as listed in `kernels/cpu/self_test.h`.
        property: u32,
    },
    /// Poisons: ranks issued different collectives, or the same ones about different things.
    #[error(
        "rank {rank} issued [{ours}] where rank {other_rank} issued [{theirs}] (where only the agreement differs, ranks have \
         different layouts, options, learning rates or factors of them, or frozen parameters)"
    )]
    Mismatch {
        /// The rank that noticed.
        rank: u32,
        /// Its call.
        ours: String,
        /// The rank it disagrees with.
        other_rank: u32,
        /// That rank's call.
        theirs: String,
    },
    /// Poisons: a rank left, failed or panicked, so collectives can no longer complete.
    #[error("rank {rank} is lost: {why}")]
    PeerLost {
        /// The rank that is gone.
        rank: u32,
        /// What it said last.
        why: String,
    },
    /// Poisons: not all ranks arrived in time.
    #[error("rank {rank} waited {waited_ms} ms at [{call}] for {}", named(missing))]
    Deadline {
        /// The rank that gave up.
        rank: u32,
        /// The call it waited in.
        call: String,
        /// How long it waited.
        waited_ms: u64,
        /// Who had not arrived; empty where nobody can tell, as of a sum on a GPU.
        missing: Vec<u32>,
    },
    /// Refused: a checkpoint is damaged, or is none of this model.
    #[error("checkpoint: {place} {why}")]
    Checkpoint {
        /// The tensor or the part of the file, with its bytes where they matter.
        place: String,
        /// What is wrong there.
        why: String,
    },
    /// A checkpoint that was whole when it was checked broke off while it was loaded. Each tensor is the old or the new
    /// one; load a whole checkpoint before the next pass.
    #[error("checkpoint: {loaded} of {tensors} tensors have been loaded: {why}")]
    PartlyLoaded {
        /// Tensors that are new.
        loaded: usize,
        /// Tensors of the checkpoint that go into the stepper.
        tensors: usize,
        /// What was wrong with the next one.
        why: Arc<Error>,
    },
    /// Refused: a file could not be opened, read or written.
    #[error("{what}: {why}")]
    File {
        /// Which one.
        what: String,
        /// The kind of the system's error.
        kind: std::io::ErrorKind,
        /// The system's reason.
        why: String,
    },
    /// Sticky: an earlier operation failed, and everything after it is skipped.
    #[error("poisoned by [{op}]: {first}")]
    Poisoned {
        /// The operation that failed first.
        op: String,
        /// Its error.
        first: Arc<Error>,
    },
    /// A rank's own thread panicked or could not be started.
    #[error("rank {rank}: {message}")]
    Rank {
        /// Which one.
        rank: u32,
        /// The panic's message, or the system's reason.
        message: String,
    },
}

impl Error {
    /// The error that started it all, if this one is an echo of it.
    pub fn cause(&self) -> &Error {
        match self {
            Error::Poisoned { first, .. } => first.cause(),
            other => other,
        }
    }

    pub(crate) fn checkpoint(place: impl ToString, why: impl ToString) -> Self {
        Error::Checkpoint { place: place.to_string(), why: why.to_string() }
    }

    /// For `map_err`: what the system says about a file.
    pub(crate) fn file(what: impl ToString) -> impl FnOnce(std::io::Error) -> Self {
        move |error| Error::File { what: what.to_string(), kind: error.kind(), why: error.to_string() }
    }

    pub(crate) fn config(field: &'static str, value: impl ToString, why: &'static str) -> Self {
        Error::Config { field, value: value.to_string(), why }
    }
}

fn named(ranks: &[u32]) -> String {
    if ranks.is_empty() { "ranks that it cannot name".to_owned() } else { format!("ranks {ranks:?}") }
}

/// A positive whole number from the environment, if the variable is set.
pub(crate) fn environment(name: &'static str) -> Result<Option<u64>> {
    let Some(text) = std::env::var_os(name) else {
        return Ok(None);
    };
    let text = text.to_string_lossy();
    match text.parse() {
        Ok(value) if value > 0 => Ok(Some(value)),
        _ => Err(Error::config(name, text, "must be a whole number above zero")),
    }
}
