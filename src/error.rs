//! The crate's error type. The variant of an error shows what the caller can do next.
//!
//! After most errors, either the call was *refused*, or the stepper is *poisoned*. A refused call has changed nothing,
//! and can be repeated. A poisoned stepper has failed for good. The documentation of each variant says which of the two
//! applies, or what else has happened. Every error text has the form `<thing>: <what is wrong>; <what to do>`. Only
//! this module assembles error texts. `Error` implements `Clone`, because a poisoned device returns its first error
//! again in every later call. This module depends on no other module.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate. *Refused* means that nothing was changed. (If the refused call takes the pass or the stepper
/// by value, the pass or the stepper still ends.) *Poisons* means that the stepper and its group of ranks have failed
/// for good.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// Refused: an option or hyperparameter is out of range, or two options exclude each other.
    #[error("{field} = {value}: {wrong}; {remedy}")]
    Config {
        /// The name of the option.
        field: &'static str,
        /// The value given.
        value: String,
        /// The rule that the value breaks.
        wrong: String,
        /// What to use instead: a value or an option that is accepted.
        remedy: String,
    },
    /// Refused: a parameter is unknown, is named twice, belongs to another layout, or has another length.
    #[error("{0}")]
    Layout(Refusal),
    /// Refused: the tensor is sharded, and no rank has all of it.
    #[error("{tensor}: this rank keeps elements {first} to {end} of {len}; use Stepper::gather on all ranks")]
    Sharded {
        /// The tensor.
        tensor: String,
        /// The first element of this rank's shard.
        first: u64,
        /// One past the last element of this rank's shard. Equal to `first` if the shard is empty.
        end: u64,
        /// Number of elements of the tensor.
        len: u64,
    },
    /// Refused: the call comes at the wrong moment of a pass.
    #[error("{0}")]
    Order(Refusal),
    /// Refused: the call needs a feature that this machine, this build, or a component such as the collective does not
    /// support.
    #[error("{0}")]
    Unsupported(Refusal),
    /// Refused: this build has no GPU kernels.
    #[error("GPU kernels: not in this build; {how}")]
    KernelsNotBuilt {
        /// How to build the kernels.
        how: String,
    },
    /// Refused: there is no usable GPU driver on this machine.
    #[error("CUDA driver: not usable, {why}; install NVIDIA's driver, or step on the host")]
    DriverUnavailable {
        /// The attempts to load the library, and the result of each attempt.
        why: String,
    },
    /// Refused: there is no usable NCCL library on this machine.
    #[error("NCCL: not usable, {why}")]
    NcclUnavailable {
        /// The attempts to load the library, and the result of each attempt.
        why: String,
    },
    /// Poisons: a call into a GPU's driver failed. Refused if the call was part of building a stepper.
    #[error("{call}: failed with {name} ({code})")]
    Device {
        /// The driver's function.
        call: &'static str,
        /// The driver's error code.
        code: i32,
        /// The error code's name.
        name: String,
    },
    /// Poisons: a call into a communication library failed. Refused if the call was part of building a communicator.
    #[error("rank {rank}: {call} failed with {code}, {message}")]
    Collective {
        /// The rank that made the call.
        rank: u32,
        /// The library's function.
        call: &'static str,
        /// The library's error code.
        code: i32,
        /// The error in words.
        message: String,
    },
    /// Poisons: a communication hook failed, with this message.
    #[error("hook: {0}")]
    Hook(String),
    /// Refused: the compiled kernels fail a self-test of their arithmetic, so no result could be trusted.
    #[error(
        "{isa} kernels: self-test {property} fails; remove fast-math and contraction from CXXFLAGS and rebuild"
    )]
    Arithmetic {
        /// The instruction set for which the kernels were built.
        isa: &'static str,
        /// The number of the failed self-test, as listed in `kernels/cpu/self_test.h`.
        property: u32,
    },
    /// Poisons: ranks issued different collectives, or the same collective with different arguments.
    #[error(
        "rank {rank}: issued [{ours}] where rank {other_rank} issued [{theirs}], which differs in {differs}; {}",
        remedy(ours, theirs, differs)
    )]
    Mismatch {
        /// The rank that detected the difference.
        rank: u32,
        /// The call of `rank`.
        ours: String,
        /// The rank that issued the other call.
        other_rank: u32,
        /// The call of `other_rank`.
        theirs: String,
        /// The names of the fields in which the two calls differ, for example "pass and length".
        differs: String,
    },
    /// Poisons: a rank began its next pass while other ranks still waited for this rank in the previous pass.
    #[error(
        "rank {rank}: left pass {pass} before [{theirs}], which rank {other_rank} issued; abandon a pass on all ranks \
         or on none, and make the same sums in all hooks"
    )]
    LeftPass {
        /// The rank that is ahead.
        rank: u32,
        /// The pass that the rank left. The rank abandoned or dropped the pass, or its hook made fewer all-reduces than
        /// the hooks of other ranks.
        pass: u64,
        /// A rank that is still in that pass.
        other_rank: u32,
        /// The call of `other_rank`.
        theirs: String,
    },
    /// Poisons: a rank left, failed or panicked, so collectives can no longer complete.
    #[error("rank {rank}: lost, {why}; start all ranks again")]
    PeerLost {
        /// The rank that was lost.
        rank: u32,
        /// The reason, for example the last message of the lost rank.
        why: String,
    },
    /// Poisons: some ranks did not make a call before the deadline.
    #[error(
        "rank {rank}: waited {waited_ms} ms at [{call}] for {}; look there for the cause, or raise the deadline",
        named(missing)
    )]
    Deadline {
        /// The rank that gave up.
        rank: u32,
        /// The call in which the rank waited.
        call: String,
        /// Length of the wait.
        waited_ms: u64,
        /// The ranks that had not made the call. Empty if these ranks are unknown, for example for a sum on a GPU.
        missing: Vec<u32>,
    },
    /// Refused: a checkpoint is damaged, or belongs to another model.
    #[error("{0}")]
    Checkpoint(Refusal),
    /// A checkpoint was complete when it was checked, but could not be read to its end during the load. Each tensor has
    /// either its old or its new value. Load a complete checkpoint before the next pass.
    #[error(
        "checkpoint: broke off after {loaded} of {tensors} tensors, {why}; load a complete one before the next pass"
    )]
    PartlyLoaded {
        /// Number of tensors that were loaded.
        loaded: usize,
        /// Number of tensors that a complete load would set.
        tensors: usize,
        /// The error of the tensor that was not loaded.
        why: Arc<Error>,
    },
    /// Refused: a file could not be opened, read or written.
    #[error("{what}: {why}")]
    File {
        /// The file's path, or a description of the file.
        what: String,
        /// The kind of the system's error.
        kind: std::io::ErrorKind,
        /// The system's reason.
        why: String,
    },
    /// An earlier operation failed. Every later operation is skipped and reports this error.
    #[error("stepper: poisoned by [{op}]: {first}")]
    Poisoned {
        /// The operation that failed first.
        op: String,
        /// The error of that operation.
        first: Arc<Error>,
    },
    /// The thread of an in-process rank panicked or could not be started.
    #[error("rank {rank}: its thread failed, {message}")]
    Rank {
        /// The rank of the thread that failed.
        rank: u32,
        /// The panic's message, or the system's reason.
        message: String,
    },
}

/// Why a call was refused. The error's text has the form `<thing>: <what is wrong>; <what to do>`.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    /// The thing that the text is about: for example a parameter, a bucket, a pass, or a part of a file.
    pub thing: String,
    /// What is wrong with `thing`.
    pub wrong: String,
    /// What the caller can do. Empty if there is no advice.
    pub remedy: String,
}

impl Refusal {
    fn new(thing: impl ToString, wrong: impl ToString, remedy: impl ToString) -> Self {
        Refusal { thing: thing.to_string(), wrong: wrong.to_string(), remedy: remedy.to_string() }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refusal { thing, wrong, remedy } = self;
        write!(f, "{thing}: {wrong}")?;
        if remedy.is_empty() { Ok(()) } else { write!(f, "; {remedy}") }
    }
}

/// Writes a number that has many digits, such as 1e300, with an exponent.
fn readable(value: String) -> String {
    match value.parse::<f64>() {
        Ok(number) if value.len() > 24 => format!("{number:e}"),
        _ => value,
    }
}

impl Error {
    /// If this error is `Poisoned`, returns the error that poisoned the stepper. Otherwise returns this error.
    pub fn cause(&self) -> &Error {
        match self {
            Error::Poisoned { first, .. } => first.cause(),
            other => other,
        }
    }

    /// Makes a [`Config`](Error::Config).
    pub fn config(
        field: &'static str,
        value: impl ToString,
        wrong: impl ToString,
        remedy: impl ToString,
    ) -> Self {
        let [value, wrong, remedy] = [readable(value.to_string()), wrong.to_string(), remedy.to_string()];
        Error::Config { field, value, wrong, remedy }
    }

    /// Makes a [`Config`](Error::Config) for a value out of range. `allowed` follows "use", as in "use at least 0".
    pub fn range(field: &'static str, value: impl ToString, allowed: impl fmt::Display) -> Self {
        Error::config(field, value, "out of range", format_args!("use {allowed}"))
    }

    /// Makes a [`Layout`](Error::Layout).
    pub fn layout(thing: impl ToString, wrong: impl ToString, remedy: impl ToString) -> Self {
        Error::Layout(Refusal::new(thing, wrong, remedy))
    }

    /// Makes an [`Order`](Error::Order).
    pub fn order(thing: impl ToString, wrong: impl ToString, remedy: impl ToString) -> Self {
        Error::Order(Refusal::new(thing, wrong, remedy))
    }

    /// Makes an [`Unsupported`](Error::Unsupported).
    pub fn unsupported(thing: impl ToString, wrong: impl ToString, remedy: impl ToString) -> Self {
        Error::Unsupported(Refusal::new(thing, wrong, remedy))
    }

    pub(crate) fn deadline(rank: u32, call: impl ToString, waited: Duration, missing: Vec<u32>) -> Self {
        let (call, waited_ms) = (call.to_string(), waited.as_millis() as u64);
        Error::Deadline { rank, call, waited_ms, missing }
    }

    /// Makes a [`PeerLost`](Error::PeerLost) for a rank that sent an invalid `thing`, which no rank of this version
    /// sends.
    pub(crate) fn other_version(rank: u32, thing: &str) -> Self {
        let why = format!("it sent a {thing} that no rank makes; run the same version on all ranks");
        Error::PeerLost { rank, why }
    }

    pub(crate) fn checkpoint(place: impl ToString, wrong: impl ToString, remedy: impl ToString) -> Self {
        Error::Checkpoint(Refusal::new(place, wrong, remedy))
    }

    /// Returns a closure for `map_err` that reports the system's error about a file.
    pub(crate) fn file(what: impl ToString) -> impl FnOnce(std::io::Error) -> Self {
        move |error| Error::File { what: what.to_string(), kind: error.kind(), why: error.to_string() }
    }
}

/// Checks a table of options. Each row has an option, its value, and the condition under which the value is refused.
/// The row ends with two texts for the error: what is wrong, and what to do. If a row's condition is true, the calling
/// function returns the row's [`Config`](Error::Config) error.
macro_rules! refuse {
    ($($field:tt = $value:expr, if $condition:expr => $wrong:expr, $remedy:expr;)+) => {
        $(if $condition {
            return Err($crate::error::Error::config($field, $value, $wrong, $remedy));
        })+
    };
}
pub(crate) use refuse;

/// Returns the advice for ranks that made different calls. The advice depends on the calls' texts, because processes
/// exchange a mismatch only as text.
fn remedy(ours: &str, theirs: &str, differs: &str) -> &'static str {
    let gathers = |call: &str| call.starts_with("all-gather, ");
    // The texts of all-gathers in passes and in `unshard` name a bucket.
    let is_of_tensors = |call: &str| gathers(call) && !call.contains(", bucket ");
    match (is_of_tensors(ours), is_of_tensors(theirs)) {
        (true, true) => return "gather, fill, save and load the same tensors in the same order on all ranks",
        (false, false) => {}
        _ => {
            return "call gather, fill_params, and checkpoint's functions on all ranks or on none, in the same order";
        }
    }
    if gathers(ours) && gathers(theirs) && differs.starts_with("bucket") {
        return "unshard the same buckets in the same order on all ranks";
    }
    if differs.contains(" was written ") {
        return "write the same on all ranks";
    }
    if differs.contains("frozen, unused or written parameters, loaded values, or how many micro-batches") {
        return "freeze, name as unused, write and load the same on all ranks, with the same values, in as many micro-batches";
    }
    "make calls, layouts, options, learning rates, and frozen and written parameters equal on all ranks"
}

fn named(ranks: &[u32]) -> String {
    if ranks.is_empty() { "unknown ranks".to_owned() } else { format!("ranks {ranks:?}") }
}

/// The largest number of names that an error lists.
const LISTED: usize = 8;

/// Returns a text that lists the names that are accepted instead of `given`. If there are more than `LISTED` names, the
/// text has only the names that are most similar to `given`.
pub(crate) fn one_of<'a>(given: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    let mut names: Vec<&str> = names.into_iter().collect();
    match names.len() {
        0 => "no name, since none is known".to_owned(),
        1 => names[0].to_owned(),
        2..=LISTED => format!("one of {}", names.join(", ")),
        count => {
            // Names with equal distances keep their order in the list.
            let mut ranked: Vec<(usize, usize)> =
                names.iter().enumerate().map(|(place, name)| (distance(given, name), place)).collect();
            ranked.select_nth_unstable(LISTED);
            ranked.truncate(LISTED);
            ranked.sort_unstable();
            names = ranked.into_iter().map(|(_, place)| names[place]).collect();
            format!("one of {} or {} more", names.join(", "), count - LISTED)
        }
    }
}

/// Returns the distance of two names: the length of the longer name without their common prefix and suffix. Case is
/// ignored. The time is linear in the names' lengths, because a layout may have a million names.
fn distance(one: &str, other: &str) -> usize {
    let same = |(a, b): &(&u8, &u8)| a.eq_ignore_ascii_case(b);
    let (one, other) = (one.as_bytes(), other.as_bytes());
    let start = one.iter().zip(other).take_while(same).count();
    let end = one[start..].iter().rev().zip(other[start..].iter().rev()).take_while(same).count();
    one.len().max(other.len()) - start - end
}

/// Returns the whole number in an environment variable, or `None` if the variable is not set.
///
/// # Errors
/// `Config` if the value is not a whole number, or is less than `least`.
pub(crate) fn environment(name: &'static str, least: u64) -> Result<Option<u64>> {
    let Some(text) = std::env::var_os(name) else {
        return Ok(None);
    };
    let text = text.to_string_lossy();
    match text.parse() {
        Ok(value) if value >= least => Ok(Some(value)),
        _ if least == 0 => Err(Error::range(name, text, "a whole number")),
        _ => Err(Error::range(name, text, "a whole number above zero")),
    }
}

#[cfg(test)]
#[path = "../tests/unit/error.rs"]
mod tests;
