//! The decisions of the device about one pass: norm, clip coefficient, loss scale, skipped or not.
//!
//! Read from what the kernels publish, but for the abandoned passes, which the stepper counts; nothing is computed here.

use crate::abi::{INSTEP_NO_BUCKET, InstepStatus};

/// The device's decisions about the last pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Status {
    /// Passes begun so far, this one included, abandoned ones too.
    pub pass: u64,
    /// Passes that this rank has [abandoned](crate::Stepper::abandon) so far, dropped ones included. In Eager, their first
    /// buckets may have been stepped; schedules did not advance.
    pub abandoned: u64,
    /// Whether the pass was skipped, because of a gradient that is not finite: it has changed nothing.
    pub skipped: bool,
    /// Norm of all averaged gradients, infinite or NaN if one of them is; `None` if neither mode nor option asked for
    /// it, or the pass was given up, or buckets are clipped one by one. Clipping [by the previous
    /// norm](crate::Clip::Previous) asks.
    pub norm: Option<f64>,
    /// Factor that clipping multiplied them by; 1 without clipping, in a skipped pass, and with
    /// [`Clip::PerBucket`](crate::Clip::PerBucket), where each bucket has its own.
    pub clip: f64,
    /// The factor in the loss that was divided out of them.
    pub loss_scale: f64,
    /// The first bucket with an infinite or NaN gradient among those stepped; its parameters are
    /// [`segments_of`](crate::layout::Plan::segments_of) it in the plan. Eager steps it all the same, and so does every
    /// mode that skips nothing. Where a pass decides, the mean counts, which a small loss scale may make infinite
    /// although the sum is finite; elsewhere the sum counts. With [sharded states](crate::Strategy) it is the first of
    /// all ranks. With [`shard_size`](crate::StepperBuilder::shard_size), each group finds that of its own ranks:
    /// groups have the same sums and agree, except about local parameters.
    pub first_nonfinite_bucket: Option<u32>,
}

impl Status {
    pub(crate) fn new(published: &InstepStatus, abandoned: u64) -> Status {
        let bucket = published.first_nonfinite_bucket;
        Status {
            pass: published.sequence,
            abandoned,
            skipped: published.skipped != 0,
            norm: (published.decided != 0).then_some(published.norm),
            clip: published.clip,
            loss_scale: published.loss_scale,
            first_nonfinite_bucket: (bucket != INSTEP_NO_BUCKET).then_some(bucket),
        }
    }
}
