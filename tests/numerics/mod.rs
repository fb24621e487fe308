//! The numbers: each optimizer against f64, and the same bits however the work is divided.
//!
//! `golden` compares the f64 reference with PyTorch's numbers; all other files compare the crate with the reference or
//! with itself.

pub(crate) mod bitexact;
pub(crate) mod digests;
pub(crate) mod drift;
pub(crate) mod golden;
pub(crate) mod lamb;
pub(crate) mod norms;
pub(crate) mod radam_slow_decay;
pub(crate) mod scaled_by_norms;
pub(crate) mod steps;
