//! Tests of faults that all other tests once let through, each of which `scripts/mutate-sources.py` plants again.
//!
//! A binary of its own and without helpers, because each planted fault builds it anew. A module checks one promise for
//! everything that makes it, and not only for what was once broken.
#![allow(clippy::unwrap_used, missing_docs)]

mod agreement;
mod clips;
mod gradients;
mod local;
mod uneven;
