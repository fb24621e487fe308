//! All integration tests in one binary, so that they share helpers and link once.
//!
//! What is exhaustive is named `long_` and ignored here; `.ci/run` runs it as its own lane.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, unsafe_code)]

mod abi;
mod failures;
mod multirank;
mod ordering;
mod recorded;
#[allow(dead_code)]
mod reference;
mod tidy;
