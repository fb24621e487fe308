//! Everything that was loaded or set by hand since the stepper was built, as numbers that ranks compare.
//!
//! Part of the agreement. It only grows, so ranks that loaded different things stay apart.

use std::fmt;

use crate::layout::fold;
use crate::optim::ScalerState;

/// The values that were loaded last, for ranks to compare.
#[derive(Clone, Copy, Default)]
pub(crate) struct Loaded {
    pub(crate) scaler: Option<ScalerState>,
    pub(crate) previous_norm: Option<Option<f64>>,
    /// Of step counts that were set, and states that were written.
    folded: u64,
    /// Of parameters that were written and that no broadcast makes equal, in any order.
    params: u64,
}

impl Loaded {
    /// Something was set: ranks that set other things, or nothing, are to notice.
    pub(crate) fn note(&mut self, what: usize, value: u64) {
        self.folded = fold(fold(self.folded, &(what as u64).to_le_bytes()), &value.to_le_bytes());
    }

    /// A parameter was written: ranks that wrote other values, or nothing, are to notice, now and in later passes.
    pub(crate) fn note_param(&mut self, param: usize, hash: u64) {
        let written = fold(fold(0, &(param as u64).to_le_bytes()), &hash.to_le_bytes());
        self.params = self.params.wrapping_add(written);
    }
}

/// A line for each, in the words of an error.
impl fmt::Debug for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Loaded { scaler, previous_norm, folded, params } = self;
        write!(f, "loss scaler: {scaler:?}\nprevious norm: {previous_norm:?}")?;
        write!(f, "\nset step counts and written states, as one number: {folded:016x}")?;
        write!(f, "\nvalues written to parameters so far, as one number: {params:016x}")
    }
}
