//! Arguments of the control ops Begin and Decide, and the control block before the first pass.
//!
//! The same for every executor. Nothing here decides anything: the kernels do, from these arguments.

use std::ptr;

use crate::abi::{
    INSTEP_NO_BUCKET, INSTEP_NORM_LIMBS, InstepBeginArgs, InstepControl, InstepDecideArgs, InstepStatus,
};
use crate::launch::codes::dtype_code;
use crate::launch::constants::StepConstants;
use crate::launch::region::Regions;
use crate::layout::Plan;
use crate::optim::LossScaler;

/// Arguments of the decision: on the whole pass, or on one bucket.
pub(crate) fn decide_args(
    plan: &Plan,
    regions: &Regions,
    constants: &StepConstants,
    bucket: Option<u32>,
) -> InstepDecideArgs {
    let counting = bucket.map_or(plan.carrier(), |bucket| Some(&plan.buckets()[bucket as usize]));
    let count = counting.and_then(|bucket| bucket.contributors);
    let (scaler, largest_loss_scale) = constants.scaler.unwrap_or((LossScaler::CONSTANT, 0.0));
    InstepDecideArgs {
        control: bucket.map_or(regions.control(), |bucket| regions.control_of(bucket)),
        contributors: count.map_or(ptr::null(), |at| regions.gradient(plan, at).cast()),
        max_norm: constants.max_norm.or(constants.bucket_max_norm).unwrap_or(-1.0),
        growth_factor: scaler.growth_factor,
        backoff_factor: scaler.backoff_factor,
        largest_loss_scale,
        skip_nonfinite: constants.skip_nonfinite.into(),
        growth_interval: scaler.growth_interval,
        pass_control: bucket.map_or(ptr::null_mut(), |_| regions.control()),
        bucket: bucket.unwrap_or(INSTEP_NO_BUCKET),
        grad_dtype: dtype_code(plan.storage().precision.grad),
    }
}

/// Arguments of the opening of a pass, whose settings are where Begin looks for them.
pub(crate) fn begin_args(plan: &Plan, regions: &Regions, constants: &StepConstants) -> InstepBeginArgs {
    let (bucket_controls, bucket_count) = regions.bucket_controls();
    InstepBeginArgs {
        control: regions.control(),
        records: regions.records(),
        hypers: regions.hypers(),
        lr_multipliers: regions.multipliers(),
        actions: regions.actions(),
        norms: regions.norms(),
        record_count: regions.counts().records as u64,
        ring: ptr::null(),
        slot_words: 0,
        slot_count: 0,
        divisor: constants.divisor,
        loss_scale: constants.constant_loss_scale(),
        previous_max_norm: constants.previous_max_norm.unwrap_or(-1.0),
        bucket_controls,
        bucket_count: bucket_count as u64,
        grad_dtype: dtype_code(plan.storage().precision.grad),
        reserved: 0,
    }
}

/// The control block before the first pass.
pub(crate) fn first_control(constants: &StepConstants) -> InstepControl {
    let loss_scale = constants.scaler.map_or(constants.loss_scale, |(scaler, _)| scaler.initial_scale);
    InstepControl {
        next_loss_scale: loss_scale as f32,
        growth_tracker: 0,
        limbs: [0; INSTEP_NORM_LIMBS as usize],
        passes: 0,
        norm: 0.0,
        previous_norm: -1.0,
        clip: 1.0,
        divisor: 0.0,
        loss_scale,
        multiplier: 0.0,
        average_multiplier: 0.0,
        local_multiplier: 0.0,
        reserved: 0,
        max_abs_bits: 0,
        first_nonfinite_bucket: INSTEP_NO_BUCKET,
        skip: 0,
        decided: 0,
    }
}

/// The control block as another plan takes it over, whose buckets have other numbers.
pub(crate) fn without_bucket(control: InstepControl) -> InstepControl {
    InstepControl { first_nonfinite_bucket: INSTEP_NO_BUCKET, ..control }
}

/// The status of the pass that this control block belongs to.
pub(crate) fn status_of(control: &InstepControl) -> InstepStatus {
    InstepStatus {
        sequence: control.passes,
        norm: control.norm,
        clip: control.clip,
        loss_scale: control.loss_scale,
        decided: control.decided,
        skipped: control.skip,
        first_nonfinite_bucket: control.first_nonfinite_bucket,
        reserved: [0; 5],
    }
}
