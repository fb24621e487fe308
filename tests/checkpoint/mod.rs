//! Checkpoints: saved, loaded, imported, refused and killed in the middle.
//!
//! Each test goes through files or bytes, as a user would.

mod export;
mod hostile;
pub(crate) mod import;
pub(crate) mod kill;
mod nadam_product;
pub(crate) mod precision;
pub(crate) mod refusals;
pub(crate) mod round_trip;
pub(crate) mod scalars;
