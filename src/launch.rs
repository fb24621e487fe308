//! What every executor hands to the kernels: a bucket cut into tiles, its arguments, and the records it starts with.
//!
//! Built once, before the first pass, so that a steady state only passes them on. Must take every address through
//! `Op::accesses`, so that the checker has judged exactly the bytes that are touched.

use std::ptr;

use crate::abi::{
    INSTEP_ACTION_AVERAGE, INSTEP_ACTION_LEAVE, INSTEP_ACTION_STEP, INSTEP_DTYPE_F32, INSTEP_MAX_STATES,
    INSTEP_NO_BUCKET, INSTEP_NORM_LIMBS, INSTEP_TILE_ELEMENTS, InstepControl, InstepDecideArgs,
    InstepScalars, InstepSegment, InstepStatus, InstepStepArgs, InstepTile,
};
use crate::assignment::{Assignment, BucketLaunch};
use crate::layout::{Bucket, Gradients, Plan, Segment, SegmentAction};
use crate::op::{Action, Frozen, Memory, Op, Span, Stream};
use crate::optim::LossScaler;
use crate::region::Regions;

/// The numbers of a step that no op carries.
#[derive(Clone, Copy)]
pub(crate) struct Rule {
    /// Ranks to take the mean over; 0: those that contributed.
    pub(crate) divisor: f64,
    pub(crate) loss_scale: f64,
    /// In the place of `loss_scale`, with the largest scale that divides out.
    pub(crate) scaler: Option<(LossScaler, f64)>,
    pub(crate) max_norm: Option<f64>,
    /// Clips by the norm of the pass before.
    pub(crate) previous_max_norm: Option<f64>,
    /// Clips each bucket by its own norm.
    pub(crate) bucket_max_norm: Option<f64>,
    pub(crate) skip_nonfinite: bool,
}

impl Rule {
    /// What Begin takes for the loss scale; 0 sends it to the control block.
    pub(crate) fn constant_loss_scale(&self) -> f64 {
        if self.scaler.is_some() { 0.0 } else { self.loss_scale }
    }

    /// How many buckets have a control block of their own.
    pub(crate) fn bucket_controls(&self, plan: &Plan) -> usize {
        if self.bucket_max_norm.is_some() { plan.buckets().len() } else { 0 }
    }
}

/// Which of the two passes over a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Norm,
    Step,
}

/// One launch for a bucket. Its arguments name no tiles yet: where those lie is the executor's business.
pub(crate) struct Launch {
    pub(crate) args: InstepStepArgs,
    pub(crate) tiles: Vec<InstepTile>,
    /// What goes over the memory bus, control memory left out.
    pub(crate) moved_bytes: u64,
}

impl Launch {
    /// The launches of a bucket's norm or step, in order.
    pub(crate) fn all(
        kind: Kind,
        bucket: u32,
        plan: &Plan,
        regions: &Regions,
        assignment: &Assignment,
    ) -> Vec<Launch> {
        let of_bucket = match kind {
            Kind::Norm => {
                let segments = plan.buckets()[bucket as usize].segments.clone().collect();
                vec![BucketLaunch {
                    round: 0,
                    kernel: 0,
                    states: 0,
                    first_state: 0,
                    is_last: false,
                    segments,
                }]
            }
            Kind::Step => assignment.launches(plan, bucket),
        };
        of_bucket.iter().map(|launch| Launch::new(kind, bucket, launch, plan, regions, assignment)).collect()
    }

    fn new(
        kind: Kind,
        bucket: u32,
        launch: &BucketLaunch,
        plan: &Plan,
        regions: &Regions,
        assignment: &Assignment,
    ) -> Launch {
        let action = match kind {
            Kind::Norm => Action::Norm { bucket },
            Kind::Step => Action::Step { bucket },
        };
        let described = &plan.buckets()[bucket as usize];
        let states = launch.first_state..launch.first_state + launch.states;
        let mut args = InstepStepArgs {
            // One that is not summed over ranks takes no part in norms and clips.
            control: if described.is_local { regions.control() } else { regions.control_of(bucket) },
            segments: regions.segments(),
            tiles: ptr::null(),
            tile_count: 0,
            param_base: ptr::null_mut(),
            grads: ptr::null_mut(),
            master: ptr::null_mut(),
            copy: ptr::null_mut(),
            states: [ptr::null_mut(); INSTEP_MAX_STATES as usize],
            optimizer: launch.kernel,
            state_count: launch.states as u32,
            bucket,
            param_dtype: INSTEP_DTYPE_F32,
            grad_dtype: INSTEP_DTYPE_F32,
            copy_dtype: INSTEP_DTYPE_F32,
            zero_grads: (plan.gradients() == Gradients::Zero && launch.is_last).into(),
            local: described.is_local.into(),
        };
        // With nothing frozen: what is frozen later the kernels leave out by its action.
        let first = Span::bucket(plan, described).start;
        let (mut params, mut moved_bytes) = (None, 0);
        let op = Op { stream: Stream::Optim, action };
        op.accesses(plan, assignment.state_count(), &Frozen::default(), &mut |access| {
            let is_ours = match access.span.memory {
                Memory::Control => false,
                Memory::State(k) => states.contains(&usize::from(k)),
                _ => true,
            };
            moved_bytes += if is_ours { access.moved_bytes() } else { 0 };
            match access.span.memory {
                Memory::Grads if access.span.start == first => {
                    args.grads = regions.resolve(access.span).cast()
                }
                Memory::Params => params = Some(access.span),
                Memory::State(k) if is_ours => {
                    args.states[usize::from(k) - states.start] = regions.resolve(access.span).cast();
                }
                Memory::Grads | Memory::Control | Memory::Settings | Memory::State(_) => {}
            }
        });
        let record = |segment: u32| assignment.record(launch.round, segment as usize) as u32;
        let tiles = tiles(plan, described, &launch.segments, record, |segment| {
            let span = Span::segment(Memory::Params, plan, segment);
            // A norm has no parameters, and its tiles an address of zero that is never read.
            params.map_or(0, |claimed: Span| {
                assert!(
                    claimed.start <= span.start && span.end <= claimed.end,
                    "a tile leaves its op's spans"
                );
                regions.resolve(span).expose_provenance() as u64
            })
        });
        args.tile_count = tiles.len() as u64;
        Launch { args, tiles, moved_bytes }
    }
}

/// Segments of a bucket, cut into tiles; `param` gives a segment's address, `record` the place of its record, offsets are
/// relative to the bucket. Padding belongs to none.
fn tiles(
    plan: &Plan,
    bucket: &Bucket,
    segments: &[u32],
    record: impl Fn(u32) -> u32,
    param: impl Fn(&Segment) -> u64,
) -> Vec<InstepTile> {
    let mut tiles = Vec::new();
    for index in segments {
        let segment = &plan.segments()[*index as usize];
        let param = param(segment);
        let (grad, state) = (segment.grad_start - bucket.start, segment.start - bucket.params.start);
        assert!(grad + segment.len <= bucket.len, "a segment leaves its bucket");
        let mut done = 0;
        while done < segment.len {
            let count = (segment.len - done).min(INSTEP_TILE_ELEMENTS.into());
            tiles.push(InstepTile {
                param: if param == 0 { 0 } else { param + done * plan.dtype().bytes() },
                grad_offset: grad + done,
                state_offset: state + done,
                count: count as u32,
                segment: record(*index),
                first: (done == 0).into(),
                reserved: [0; 7],
            });
            done += count;
        }
    }
    tiles
}

/// Arguments of the decision: on the whole pass, or on one bucket.
pub(crate) fn decide_args(
    plan: &Plan,
    regions: &Regions,
    rule: &Rule,
    bucket: Option<u32>,
) -> InstepDecideArgs {
    let counting = bucket.map_or(plan.carrier(), |bucket| Some(&plan.buckets()[bucket as usize]));
    let count = counting.and_then(|bucket| bucket.contributors);
    let (scaler, largest_loss_scale) = rule.scaler.unwrap_or((LossScaler::CONSTANT, 0.0));
    InstepDecideArgs {
        control: bucket.map_or(regions.control(), |bucket| regions.control_of(bucket)),
        contributors: count.map_or(ptr::null(), |at| regions.gradient(plan, at)),
        max_norm: rule.max_norm.or(rule.bucket_max_norm).unwrap_or(-1.0),
        growth_factor: scaler.growth_factor,
        backoff_factor: scaler.backoff_factor,
        largest_loss_scale,
        skip_nonfinite: rule.skip_nonfinite.into(),
        growth_interval: scaler.growth_interval,
        pass_control: bucket.map_or(ptr::null_mut(), |_| regions.control()),
        bucket: bucket.unwrap_or(INSTEP_NO_BUCKET),
        reserved: 0,
    }
}

/// The control block before the first pass.
pub(crate) fn first_control(rule: &Rule) -> InstepControl {
    let loss_scale = rule.scaler.map_or(rule.loss_scale, |(scaler, _)| scaler.initial_scale);
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

/// What came of the pass whose control block it is.
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

/// Every record before the first pass.
pub(crate) fn first_records<'a>(
    plan: &'a Plan,
    regions: &'a Regions,
    assignment: &'a Assignment,
) -> impl Iterator<Item = InstepSegment> + 'a {
    let address = |at: u64| regions.gradient(plan, at).expose_provenance() as u64;
    let segments =
        move |round| plan.segments().iter().enumerate().map(move |(k, segment)| (round, k, segment));
    (0..assignment.rounds()).flat_map(segments).map(move |(round, k, segment)| {
        let (group, optimizer) = assignment.optimizer(round, k);
        InstepSegment {
            steps: 0,
            stepped: 0,
            group,
            action: action_code(segment.action),
            optimizer,
            tail: segment.tail.map_or(0, address),
            contributors: plan.buckets()[segment.bucket as usize].contributors.map_or(0, address),
            scalars: InstepScalars { words: [0; 12] },
        }
    })
}

/// What steps do with each record's segment before the first pass.
pub(crate) fn first_actions<'a>(plan: &'a Plan, assignment: &Assignment) -> impl Iterator<Item = u32> + 'a {
    let all = (0..assignment.rounds()).flat_map(|_| plan.segments());
    all.map(|segment| action_code(segment.action))
}

/// What the kernels call an action.
pub(crate) fn action_code(action: SegmentAction) -> u32 {
    match action {
        SegmentAction::Step => INSTEP_ACTION_STEP,
        SegmentAction::Average => INSTEP_ACTION_AVERAGE,
        SegmentAction::Leave => INSTEP_ACTION_LEAVE,
    }
}
