//! Everything that was loaded or set by hand since the stepper was built, as numbers that ranks compare.
//!
//! Part of the agreement. It only grows, so ranks that loaded different things stay apart.

use crate::layout::fold;
use crate::optim::ScalerState;

/// The values that were loaded last, for ranks to compare.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Loaded {
    pub(crate) scaler: Option<ScalerState>,
    pub(crate) previous_norm: Option<Option<f64>>,
    /// Of step counts that were set, and states that were written.
    folded: u64,
}

impl Loaded {
    /// Something was set: ranks that set other things, or nothing, are to notice.
    pub(crate) fn note(&mut self, what: usize, value: u64) {
        self.folded = fold(fold(self.folded, &(what as u64).to_le_bytes()), &value.to_le_bytes());
    }
}
