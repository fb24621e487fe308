//! Lists of ops have no race and no wait too many, and give the same result in any order of a trainer's calls.
//!
//! `ordering` judges lists of a `simulated` trainer, `recorded` takes them from real runs, and `property` draws
//! complete trainings. `launches` tests which buckets share a launch. `forecast` compares predicted runs with real
//! ones, and `extreme_sizes` compares plans with unbounded arithmetic.

mod extreme_sizes;
mod forecast;
mod launches;
pub(crate) mod ordering;
pub(crate) mod property;
pub(crate) mod recorded;
mod simulated;
