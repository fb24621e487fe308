//! Tests of faults that all other tests once missed, each of which `scripts/mutate-sources.py` plants again.
//!
//! This is a separate binary without helpers, because each planted fault builds it again. A module checks one promise
//! for all code that makes it, not only for the code that once broke it.
#![allow(clippy::unwrap_used, missing_docs)]

mod agreement;
mod clips;
mod gradients;
mod local;
mod uneven;
