//! Lists of ops: free of races, without a wait too many, and the same result in any order that a trainer takes.
//!
//! `ordering` judges lists of a `simulated` trainer, `recorded` takes them from real runs, and `property` draws whole trainings.
//! `launches` says which buckets share one.
//! `forecast` holds foreseen runs to real ones, and `extreme_sizes` the plans below them to arithmetic without a bound.

mod extreme_sizes;
mod forecast;
mod launches;
pub(crate) mod ordering;
pub(crate) mod property;
pub(crate) mod recorded;
mod simulated;
