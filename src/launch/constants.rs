//! The numbers that every step of a stepper shares and no op carries.
//!
//! Set once by the builder. Control and step arguments are computed from them, so a captured graph has them baked in.

use crate::launch::assignment::Assignment;
use crate::launch::region::Counts;
use crate::layout::Plan;
use crate::optim::LossScaler;

/// The numbers of a step that no op carries.
#[derive(Clone, Copy)]
pub(crate) struct StepConstants {
    /// Ranks to take the mean over; 0: those that contributed.
    pub(crate) divisor: f64,
    pub(crate) loss_scale: f64,
    /// Dynamic scaler that replaces `loss_scale`, and the largest scale it may use.
    pub(crate) scaler: Option<(LossScaler, f64)>,
    pub(crate) max_norm: Option<f64>,
    /// Clips by the norm of the pass before.
    pub(crate) previous_max_norm: Option<f64>,
    /// Clips each bucket by its own norm.
    pub(crate) bucket_max_norm: Option<f64>,
    pub(crate) skip_nonfinite: bool,
    /// Decay rate of the moving averages of parameters, if there are any.
    pub(crate) ema_decay: f64,
}

impl StepConstants {
    /// Gradients that are stepped as they are.
    pub(crate) const PLAIN: StepConstants = StepConstants {
        divisor: 1.0,
        loss_scale: 1.0,
        scaler: None,
        max_norm: None,
        previous_max_norm: None,
        bucket_max_norm: None,
        skip_nonfinite: false,
        ema_decay: 0.0,
    };

    /// Begin's loss scale; 0 sends Begin to the control block.
    pub(crate) fn constant_loss_scale(&self) -> f64 {
        if self.scaler.is_some() { 0.0 } else { self.loss_scale }
    }

    /// The sizes of the device's control memory, settings and states.
    pub(crate) fn counts(&self, plan: &Plan, assignment: &Assignment) -> Counts {
        Counts {
            hypers: assignment.hypers().len(),
            records: assignment.record_count(),
            norms: assignment.norm_count(),
            // One for each bucket, or none.
            bucket_controls: if self.bucket_max_norm.is_some() { plan.buckets().len() } else { 0 },
            states: assignment.state_count(),
        }
    }
}
