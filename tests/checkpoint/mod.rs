//! Checkpoints are saved, loaded, imported, refused, and killed in the middle of a save.
//!
//! Each test uses files or bytes only, as a user does.

mod export;
mod hostile;
pub(crate) mod import;
pub(crate) mod kill;
mod nadam_product;
pub(crate) mod precision;
pub(crate) mod refusals;
pub(crate) mod round_trip;
pub(crate) mod scalars;
