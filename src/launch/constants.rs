//! The numbers of a step that never change.
//!
//! The builder sets them once, so a captured graph may contain them.

use crate::optim::{Clip, LossScale};

/// The numbers of a step that are constant from pass to pass.
#[derive(Clone, Copy)]
pub(crate) struct StepConstants {
    /// The divisor of summed gradients; 0 stands for the number of ranks with data.
    pub(crate) divisor: f64,
    pub(crate) loss_scale: LossScale,
    /// The largest value of a dynamic loss scale.
    pub(crate) largest_loss_scale: f64,
    pub(crate) clip: Option<Clip>,
    pub(crate) skip_nonfinite: bool,
    /// Decay rate of the moving averages of parameters, if there are any.
    pub(crate) ema_decay: f64,
}

impl StepConstants {
    /// The constants of a step that takes gradients as they are.
    pub(crate) const PLAIN: StepConstants = StepConstants {
        divisor: 1.0,
        loss_scale: LossScale::Constant(1.0),
        largest_loss_scale: 0.0,
        clip: None,
        skip_nonfinite: false,
        ema_decay: 0.0,
    };

    /// Returns Begin's loss scale. With 0, Begin reads it from the control block, or from the address of the caller's
    /// scaler.
    pub(crate) fn constant_loss_scale(&self) -> f64 {
        match self.loss_scale {
            LossScale::Constant(loss_scale) => loss_scale,
            LossScale::Dynamic(_) | LossScale::External(_) => 0.0,
        }
    }

    /// Returns three maximum norms: for Begin, which clips by the previous pass's norm, for the pass's decision, and
    /// for a bucket's decision.
    pub(crate) fn max_norms(&self) -> [Option<f64>; 2] {
        match self.clip {
            Some(Clip::Previous(max_norm)) => [Some(max_norm), None],
            Some(Clip::Global(max_norm) | Clip::PerBucket(max_norm)) => [None, Some(max_norm)],
            None => [None, None],
        }
    }
}
