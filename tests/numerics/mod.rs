//! The numbers: each optimizer against f64, and the same bits however the work is cut.
//!
//! `golden` holds the f64 reference to PyTorch's numbers; all other files hold the crate to the reference or to itself.

pub(crate) mod bitexact;
pub(crate) mod digests;
pub(crate) mod drift;
pub(crate) mod golden;
pub(crate) mod lamb;
pub(crate) mod norms;
pub(crate) mod radam_slow_decay;
pub(crate) mod scaled_by_norms;
pub(crate) mod steps;
