//! Makes the arguments of the control ops `Begin` and `Decide`, and the contents of control memory before the first
//! pass.
//!
//! The arguments are the same for every executor. From these arguments, the kernels decide whether to clip the
//! gradients, and whether to skip the step. Control memory has control blocks and records. Records are in the
//! assignment's order: round by round, and in each round in the order of the plan's segments. Only this file checks the
//! step counts that a caller sets. This file refuses a count that is too large. For NAdam, this file also refuses a
//! count above 0 without the product of momenta.

use std::ptr;

use bytemuck::Zeroable;

use crate::abi::{
    INSTEP_NO_BUCKET, InstepBeginArgs, InstepControl, InstepDecideArgs, InstepRecord, InstepStatus,
};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::launch::assignment::{Assignment, StepConstants};
use crate::launch::region::Regions;
use crate::layout::Plan;
use crate::optim::{LossScale, LossScaler};

/// Returns the arguments of `Decide` for the whole pass, or for one bucket.
pub(crate) fn decide_args(
    plan: &Plan,
    regions: &Regions,
    constants: &StepConstants,
    bucket: Option<u32>,
) -> InstepDecideArgs {
    let counting = bucket.map_or(plan.carrier(), |bucket| Some(&plan.buckets()[bucket as usize]));
    let count = counting.and_then(|bucket| Some((bucket, bucket.contributors?)));
    let (scaler, largest_loss_scale) = match constants.loss_scale {
        LossScale::Constant(_) | LossScale::External(_) => (LossScaler::CONSTANT, 0.0),
        LossScale::Dynamic(scaler) => (scaler, constants.largest_loss_scale),
    };
    let external = constants.loss_scale.external();
    let control = bucket.map_or(regions.control(), |bucket| regions.control_of(plan, bucket));
    let (set_controls, set_count) = (regions.further_controls().0, plan.max_norms().len() as u64);
    InstepDecideArgs {
        contributors: count.map_or(ptr::null(), |(bucket, at)| regions.gradient(plan, bucket, at).cast()),
        growth_factor: scaler.growth_factor,
        backoff_factor: scaler.backoff_factor,
        largest_loss_scale,
        growth_interval: scaler.growth_interval,
        pass_control: bucket.map_or(ptr::null_mut(), |_| regions.control()),
        bucket: bucket.unwrap_or(INSTEP_NO_BUCKET),
        grad_dtype: counting.map_or(DType::F32, |bucket| bucket.storage.precision.grad) as u32,
        found_inf: external.map_or(ptr::null_mut(), |scaler| scaler.found_inf.as_ptr().cast()),
        set_controls,
        set_count,
        ..decide_block(control, constants.max_norms()[1], constants.skip_nonfinite)
    }
}

/// Returns the arguments of a `Begin` on a single control block without records.
pub(crate) fn begin_block(control: *mut InstepControl) -> InstepBeginArgs {
    InstepBeginArgs {
        control,
        divisor: 1.0,
        loss_scale: 1.0,
        previous_max_norm: -1.0,
        clip: 1.0,
        ..InstepBeginArgs::zeroed()
    }
}

/// Returns the arguments of a `Decide` on a single control block.
pub(crate) fn decide_block(
    control: *mut InstepControl,
    max_norm: Option<f64>,
    skip_nonfinite: bool,
) -> InstepDecideArgs {
    InstepDecideArgs {
        control,
        max_norm: max_norm.unwrap_or(-1.0),
        growth_factor: LossScaler::CONSTANT.growth_factor,
        backoff_factor: LossScaler::CONSTANT.backoff_factor,
        skip_nonfinite: skip_nonfinite.into(),
        growth_interval: LossScaler::CONSTANT.growth_interval,
        bucket: INSTEP_NO_BUCKET,
        grad_dtype: DType::F32 as u32,
        ..InstepDecideArgs::zeroed()
    }
}

/// Returns the arguments of a pass's `Begin`. The op reads the settings from settings memory.
pub(crate) fn begin_args(regions: &Regions, constants: &StepConstants) -> InstepBeginArgs {
    let (further_controls, further_count) = regions.further_controls();
    let external = constants.loss_scale.external();
    InstepBeginArgs {
        records: regions.records(),
        hypers: regions.hypers(),
        lr_multipliers: regions.multipliers(),
        actions: regions.actions(),
        record_count: regions.counts().records as u64,
        norms: regions.norms(),
        divisor: constants.divisor,
        loss_scale: constants.constant_loss_scale(),
        grad_scale: external.map_or(ptr::null(), |scaler| scaler.scale.as_ptr().cast_const().cast()),
        previous_max_norm: constants.max_norms()[0].unwrap_or(-1.0),
        further_controls,
        further_count: further_count as u64,
        ..begin_block(regions.control())
    }
}

/// Returns the control block as it is before the first pass.
pub(crate) fn first_control(constants: &StepConstants) -> InstepControl {
    let loss_scale = constants.loss_scale.initial();
    InstepControl {
        next_loss_scale: loss_scale as f32,
        previous_norm: -1.0,
        clip: 1.0,
        max_norm: -1.0,
        loss_scale,
        first_nonfinite_bucket: INSTEP_NO_BUCKET,
        ..InstepControl::zeroed()
    }
}

/// Returns the control blocks of all clip sets except the first, as they are before the first pass.
pub(crate) fn first_sets<'a>(
    plan: &'a Plan,
    constants: &StepConstants,
) -> impl Iterator<Item = InstepControl> + use<'a> {
    let first = first_control(constants);
    plan.max_norms().iter().map(move |max_norm| InstepControl { max_norm: max_norm.unwrap_or(-1.0), ..first })
}

/// Returns a copy of the control block that names no first non-finite bucket. A device for another plan starts with
/// this copy, because the other plan numbers buckets differently.
pub(crate) fn without_bucket(control: InstepControl) -> InstepControl {
    InstepControl { first_nonfinite_bucket: INSTEP_NO_BUCKET, ..control }
}

/// Returns the status of the pass that this control block belongs to.
pub(crate) fn status_of(control: &InstepControl) -> InstepStatus {
    InstepStatus {
        sequence: control.passes,
        norm: control.norm,
        clip: control.clip,
        loss_scale: control.loss_scale,
        decided: control.decided,
        skipped: control.skip,
        first_nonfinite_bucket: control.first_nonfinite_bucket,
        ..InstepStatus::zeroed()
    }
}

/// Returns every record as it is before the first pass.
pub(crate) fn first_records<'a>(
    plan: &'a Plan,
    regions: &'a Regions,
    assignment: &'a Assignment,
) -> impl Iterator<Item = InstepRecord> + 'a {
    let address = |bucket, at| regions.gradient(plan, bucket, at).expose_provenance() as u64;
    let segments =
        move |round| plan.segments().iter().enumerate().map(move |(k, segment)| (round, k, segment));
    (0..assignment.rounds()).flat_map(segments).map(move |(round, k, segment)| {
        let ((hyper, optimizer), bucket) = (assignment.optimizer(round, k), plan.bucket_of(segment));
        InstepRecord {
            hyper,
            action: segment.action as u32,
            // The table of optimizers has few rows, so an index fits 16 bits.
            optimizer: optimizer as u16,
            grad_dtype: bucket.storage.precision.grad as u16,
            tail: segment.tail.map_or(0, |at| address(bucket, at)),
            contributors: bucket.contributors.map_or(0, |at| address(bucket, at)),
            carried: [1.0; 2],
            ..InstepRecord::zeroed()
        }
    })
}

/// Returns the records of a segment, one per round.
pub(crate) fn records_of(plan: &Plan, regions: &Regions, segment: u32) -> impl Iterator<Item = usize> {
    (segment as usize..regions.counts().records).step_by(plan.segments().len())
}

/// The progress of a record: its number of updates, and a number that its optimizer carries from update to update. For
/// NAdam, the carried number is the product of momenta. If the optimizer carries no number, `carried` is 1.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    pub(crate) count: u64,
    pub(crate) carried: f64,
}

impl Progress {
    /// Returns a record's progress, including the update of the last pass. The record itself includes this update only
    /// after the next `Begin`.
    pub(crate) fn of(record: &InstepRecord) -> Progress {
        let carried = record.carried[usize::from(record.stepped != 0)];
        Progress { count: record.steps + u64::from(record.stepped), carried }
    }

    pub(crate) fn set(self, record: &mut InstepRecord) {
        (record.steps, record.stepped) = (self.count, 0);
        record.carried = [self.carried; 2];
    }
}

/// A parameter's number of updates. For an optimizer such as NAdam, this struct also has the number that the optimizer
/// carries from update to update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCount {
    pub(crate) count: u64,
    pub(crate) carried: Option<f64>,
}

impl From<u64> for StepCount {
    fn from(count: u64) -> Self {
        StepCount { count, carried: None }
    }
}

impl From<(u64, f64)> for StepCount {
    fn from((count, carried): (u64, f64)) -> Self {
        StepCount { count, carried: Some(carried) }
    }
}

impl StepCount {
    /// Counts must be below this number, so that they cannot overflow later.
    const END: u64 = 1 << 63;

    /// Converts the count to a record's progress. `carries` is true if the parameter's optimizers need a scalar from
    /// earlier passes, such as NAdam's product of momenta.
    ///
    /// # Errors
    /// `Config` for a count of 2^63 or more. If the optimizers carry a number: `Config` for a count above 0 without a
    /// number, and for a number that cannot be the product of `count` momenta. If the optimizers carry no number:
    /// `Config` for any number except 1.
    pub(crate) fn progress(self, carries: bool) -> Result<Progress> {
        let StepCount { count, carried } = self;
        if count >= StepCount::END {
            return Err(Error::range("step_count", count, "a count below 2^63"));
        }
        match carried {
            Some(carried) if !carries && carried != 1.0 => {
                let wrong = "this optimizer carries nothing";
                Err(Error::config("carried", carried, wrong, "leave it out, or set 1"))
            }
            Some(carried) if carries && !carried_fits(count, carried) => {
                Err(Error::range("carried", carried, CARRIED_RANGE))
            }
            None if carries && count > 0 => {
                let wrong = "the optimizer carries a product of momenta too";
                Err(Error::config("step_count", count, wrong, "set count and carried together"))
            }
            _ => Ok(Progress { count, carried: carried.unwrap_or(1.0) }),
        }
    }
}

/// Describes, for error texts, which values a carried number may have.
pub(crate) const CARRIED_RANGE: &str =
    "1 before the first update, and a number of at least 0 and below 1 after it";

/// Returns whether a number can be the product of `count` momenta, each of which is below 1.
pub(crate) fn carried_fits(count: u64, carried: f64) -> bool {
    if count == 0 { carried == 1.0 } else { (0.0..1.0).contains(&carried) }
}
