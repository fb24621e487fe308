//! Lists of ops: free of races, without a wait too many, and the same result in any order that a trainer takes.
//!
//! `ordering` simulates lists, `recorded` takes them from real runs, and `property` draws whole trainings.
//! `extreme_sizes` compares the plans below them with arithmetic that has no bound.

mod extreme_sizes;
pub(crate) mod ordering;
pub(crate) mod property;
pub(crate) mod recorded;
