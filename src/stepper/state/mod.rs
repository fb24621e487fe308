//! The state of a stepper: data that does not depend on the interface above it.
//!
//! Nothing here imports a file of `stepper/` outside this folder.

pub(crate) mod agreement;
pub(crate) mod borrowed;
pub(crate) mod hypers;
pub(crate) mod optimizers;
pub(crate) mod options;
pub(crate) mod run;
pub(crate) mod written;
