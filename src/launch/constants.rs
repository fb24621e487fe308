//! The numbers that every step of a stepper shares and no op carries.
//!
//! Set once by the builder. Control and step arguments are computed from them, so a captured graph has them baked in.

use crate::launch::assignment::Assignment;
use crate::launch::region::Counts;
use crate::layout::Plan;
use crate::optim::{Clip, LossScale};

/// The numbers of a step that no op carries.
#[derive(Clone, Copy)]
pub(crate) struct StepConstants {
    /// Ranks to take the mean over; 0: those that contributed.
    pub(crate) divisor: f64,
    pub(crate) loss_scale: LossScale,
    /// The largest scale that a dynamic one may use.
    pub(crate) largest_loss_scale: f64,
    pub(crate) clip: Option<Clip>,
    pub(crate) skip_nonfinite: bool,
    /// Decay rate of the moving averages of parameters, if there are any.
    pub(crate) ema_decay: f64,
}

impl StepConstants {
    /// Gradients that are stepped as they are.
    pub(crate) const PLAIN: StepConstants = StepConstants {
        divisor: 1.0,
        loss_scale: LossScale::Constant(1.0),
        largest_loss_scale: 0.0,
        clip: None,
        skip_nonfinite: false,
        ema_decay: 0.0,
    };

    /// Begin's loss scale; 0 sends Begin to the control block, or to the address of another program's.
    pub(crate) fn constant_loss_scale(&self) -> f64 {
        match self.loss_scale {
            LossScale::Constant(loss_scale) => loss_scale,
            LossScale::Dynamic(_) | LossScale::External(_) => 0.0,
        }
    }

    /// The norm that decisions clip to: those on the whole pass, or those on one bucket.
    pub(crate) fn decided_max_norm(&self) -> Option<f64> {
        match self.clip? {
            Clip::Global(max_norm) | Clip::PerBucket(max_norm) => Some(max_norm),
            Clip::Previous(_) => None,
        }
    }

    /// The norm that Begin clips to, by the norm of the pass before.
    pub(crate) fn previous_max_norm(&self) -> Option<f64> {
        match self.clip? {
            Clip::Previous(max_norm) => Some(max_norm),
            Clip::Global(_) | Clip::PerBucket(_) => None,
        }
    }

    fn clips_per_bucket(&self) -> bool {
        matches!(self.clip, Some(Clip::PerBucket(_)))
    }

    /// The sizes of the device's control memory, settings and states.
    pub(crate) fn counts(&self, plan: &Plan, assignment: &Assignment) -> Counts {
        Counts {
            hypers: assignment.hypers().len(),
            records: assignment.record_count(),
            norms: assignment.norm_count(),
            // One for each bucket, or none.
            bucket_controls: if self.clips_per_bucket() { plan.buckets().len() } else { 0 },
            states: assignment.state_count(),
        }
    }
}
