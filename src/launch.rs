//! What every executor hands to the kernels: a bucket cut into tiles, its arguments, and the records it starts with.
//!
//! Built once, before the first pass, so that a steady state only passes them on. Must take every address through
//! `Op::accesses`, so that the checker has judged exactly the bytes that are touched.

use std::ptr;

use crate::abi::{
    INSTEP_ACTION_AVERAGE, INSTEP_ACTION_LEAVE, INSTEP_ACTION_STEP, INSTEP_DTYPE_BF16, INSTEP_DTYPE_F16,
    INSTEP_DTYPE_F32, INSTEP_MASTER_F32, INSTEP_MASTER_NONE, INSTEP_MASTER_REMAINDER8,
    INSTEP_MASTER_REMAINDER16, INSTEP_MAX_STATES, INSTEP_MOMENTS_8BIT, INSTEP_MOMENTS_BF16,
    INSTEP_MOMENTS_F32, INSTEP_NO_BUCKET, INSTEP_NORM_LIMBS, INSTEP_PART_APPLY, INSTEP_PART_MEASURE,
    INSTEP_PART_WHOLE, INSTEP_TILE_ELEMENTS, InstepBeginArgs, InstepControl, InstepDecideArgs, InstepScalars,
    InstepSegment, InstepStatus, InstepStepArgs, InstepTile,
};
use crate::assignment::{Assignment, BucketLaunch};
use crate::dtype::DType;
use crate::layout::{
    Bucket, Gradients, Master, Moments, Plan, Precision, Rounding, Segment, SegmentAction, Storage,
};
use crate::op::{Action, Frozen, Memory, Op, Part, Span, Stream};
use crate::optim::LossScaler;
use crate::region::{Counts, Regions};

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
    /// Decay rate of the moving averages of parameters, if there are any.
    pub(crate) ema_decay: f64,
}

impl Rule {
    /// What Begin takes for the loss scale; 0 sends it to the control block.
    pub(crate) fn constant_loss_scale(&self) -> f64 {
        if self.scaler.is_some() { 0.0 } else { self.loss_scale }
    }

    /// What the memories of such a device hold.
    pub(crate) fn counts(&self, plan: &Plan, assignment: &Assignment) -> Counts {
        Counts {
            groups: assignment.hypers().len(),
            records: assignment.record_count(),
            norms: assignment.norm_count(),
            // One for each bucket, or none.
            bucket_controls: if self.bucket_max_norm.is_some() { plan.buckets().len() } else { 0 },
            states: assignment.state_count(),
        }
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
        (rule, assignment): (&Rule, &Assignment),
    ) -> Vec<Launch> {
        let of_bucket = match kind {
            Kind::Norm => {
                let segments = plan.buckets()[bucket as usize].segments.clone().collect();
                vec![BucketLaunch {
                    round: 0,
                    kernel: 0,
                    is_scaled: false,
                    states: 0,
                    first_state: 0,
                    is_last: false,
                    segments,
                }]
            }
            Kind::Step => assignment.launches(plan, bucket),
        };
        let mut launches = Vec::new();
        for launch in &of_bucket {
            for part in Part::all(launch.is_scaled) {
                let of_launch = (launch, *part);
                launches.push(Launch::new(kind, bucket, of_launch, plan, regions, (rule, assignment)));
            }
        }
        launches
    }

    fn new(
        kind: Kind,
        bucket: u32,
        (launch, part): (&BucketLaunch, Part),
        plan: &Plan,
        regions: &Regions,
        (rule, assignment): (&Rule, &Assignment),
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
            optimizer: launch.kernel,
            state_count: launch.states as u32,
            bucket,
            zero_grads: (plan.gradients() == Gradients::Zero && launch.is_last).into(),
            local: described.is_local.into(),
            norms: if part == Part::Whole { ptr::null_mut() } else { regions.norms() },
            part: part_code(part),
            seed: seed(plan.storage(), launch.round),
            ..stored_args(plan.storage(), rule.ema_decay)
        };
        // With nothing frozen: what is frozen later the kernels leave out by its action.
        let first = Span::bucket(plan, described).start;
        let (mut params, mut moved_bytes) = (None, 0);
        let op = Op { stream: Stream::Optim, action };
        op.accesses(plan, assignment.state_count(), &Frozen::default(), &mut |access| {
            let is_ours = match access.span.memory {
                Memory::Control => false,
                Memory::State(k) | Memory::Scales(k) => states.contains(&usize::from(k)),
                // Whoever steps a parameter last has its final value.
                Memory::Copy | Memory::Ema => launch.is_last,
                _ => true,
            };
            moved_bytes += if is_ours { access.moved_bytes(plan, part) } else { 0 };
            match access.span.memory {
                Memory::Grads if access.span.start == first => {
                    args.grads = regions.resolve(access.span).cast()
                }
                Memory::Params => params = Some(access.span),
                Memory::Master => args.master = regions.resolve(access.span).cast(),
                Memory::State(k) if is_ours => {
                    args.states[usize::from(k) - states.start] = regions.resolve(access.span).cast();
                }
                Memory::Scales(k) if is_ours => {
                    args.scales[usize::from(k) - states.start] = regions.resolve(access.span).cast();
                }
                Memory::Copy if is_ours => args.copy = regions.resolve(access.span).cast(),
                Memory::Ema if is_ours => args.ema = regions.resolve(access.span).cast(),
                _ => {}
            }
        });
        let record_in = |round, segment: u32| assignment.record(round, segment as usize) as u32;
        let records: [&dyn Fn(u32) -> u32; 2] =
            [&|segment| record_in(launch.round, segment), &|segment| record_in(0, segment)];
        let tiles = tiles(plan, described, &launch.segments, records, |segment| {
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

/// Segments of a bucket, cut into tiles; `param` gives a segment's address, `record` and `first_record` the places of
/// its records, offsets are relative to the bucket. Padding belongs to none.
fn tiles(
    plan: &Plan,
    bucket: &Bucket,
    segments: &[u32],
    [record, first_record]: [&dyn Fn(u32) -> u32; 2],
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
                param: if param == 0 { 0 } else { param + done * plan.storage().precision.param.bytes() },
                grad_offset: grad + done,
                state_offset: state + done,
                element: segment.element + done,
                count: count as u32,
                segment: record(*index),
                first: (done == 0).into(),
                first_record: first_record(*index),
                reserved: [0; 4],
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
        contributors: count.map_or(ptr::null(), |at| regions.gradient(plan, at).cast()),
        max_norm: rule.max_norm.or(rule.bucket_max_norm).unwrap_or(-1.0),
        growth_factor: scaler.growth_factor,
        backoff_factor: scaler.backoff_factor,
        largest_loss_scale,
        skip_nonfinite: rule.skip_nonfinite.into(),
        growth_interval: scaler.growth_interval,
        pass_control: bucket.map_or(ptr::null_mut(), |_| regions.control()),
        bucket: bucket.unwrap_or(INSTEP_NO_BUCKET),
        grad_dtype: dtype_code(plan.storage().precision.grad),
    }
}

/// Arguments of the opening of a pass, whose settings are where Begin looks for them.
pub(crate) fn begin_args(plan: &Plan, regions: &Regions, rule: &Rule) -> InstepBeginArgs {
    let (bucket_controls, bucket_count) = regions.bucket_controls();
    InstepBeginArgs {
        control: regions.control(),
        segments: regions.segments(),
        groups: regions.groups(),
        lr_multipliers: regions.multipliers(),
        actions: regions.actions(),
        norms: regions.norms(),
        segment_count: regions.counts().records as u64,
        ring: ptr::null(),
        slot_words: 0,
        slot_count: 0,
        divisor: rule.divisor,
        loss_scale: rule.constant_loss_scale(),
        previous_max_norm: rule.previous_max_norm.unwrap_or(-1.0),
        bucket_controls,
        bucket_count: bucket_count as u64,
        grad_dtype: dtype_code(plan.storage().precision.grad),
        reserved: 0,
    }
}

/// What every launch on such memories has in common.
fn stored_args(storage: &Storage, ema_decay: f64) -> InstepStepArgs {
    let Precision { param, grad, master, moments, rounding } = storage.precision;
    let (ema_from_sample, ema_weight) = average_weight(ema_decay);
    InstepStepArgs {
        control: ptr::null_mut(),
        segments: ptr::null_mut(),
        tiles: ptr::null(),
        tile_count: 0,
        param_base: ptr::null_mut(),
        grads: ptr::null_mut(),
        master: ptr::null_mut(),
        copy: ptr::null_mut(),
        ema: ptr::null_mut(),
        states: [ptr::null_mut(); INSTEP_MAX_STATES as usize],
        scales: [ptr::null_mut(); INSTEP_MAX_STATES as usize],
        seed: 0,
        optimizer: 0,
        state_count: 0,
        bucket: 0,
        param_dtype: dtype_code(param),
        grad_dtype: dtype_code(grad),
        copy_dtype: dtype_code(storage.copy.unwrap_or(DType::F32)),
        master_kind: master_code(master),
        moments: moments_code(moments),
        stochastic: (rounding != Rounding::Nearest).into(),
        zero_grads: 0,
        local: 0,
        ema_from_sample,
        ema_weight,
        norms: ptr::null_mut(),
        part: INSTEP_PART_WHOLE,
    }
}

/// What stochastic rounding draws by: another one in each round, whose updates are counted alike.
fn seed(storage: &Storage, round: usize) -> u64 {
    match storage.precision.rounding {
        Rounding::Nearest => 0,
        Rounding::Stochastic { seed } => seed ^ (round as u64) << 48,
    }
}

/// As `average_weight` in math.h.
fn average_weight(beta: f64) -> (u32, f32) {
    let from_sample = 1.0 - beta >= 0.5;
    (from_sample.into(), if from_sample { -beta as f32 } else { (1.0 - beta) as f32 })
}

/// What the kernels call a type.
pub(crate) fn dtype_code(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => INSTEP_DTYPE_F32,
        DType::BF16 => INSTEP_DTYPE_BF16,
        DType::F16 => INSTEP_DTYPE_F16,
    }
}

fn part_code(part: Part) -> u32 {
    match part {
        Part::Whole => INSTEP_PART_WHOLE,
        Part::Measure => INSTEP_PART_MEASURE,
        Part::Apply => INSTEP_PART_APPLY,
    }
}

pub(crate) fn master_code(master: Master) -> u32 {
    match master {
        Master::None => INSTEP_MASTER_NONE,
        Master::F32 => INSTEP_MASTER_F32,
        Master::Remainder16 => INSTEP_MASTER_REMAINDER16,
        Master::Remainder8 => INSTEP_MASTER_REMAINDER8,
    }
}

pub(crate) fn moments_code(moments: Moments) -> u32 {
    match moments {
        Moments::F32 => INSTEP_MOMENTS_F32,
        Moments::BF16 => INSTEP_MOMENTS_BF16,
        Moments::EightBit => INSTEP_MOMENTS_8BIT,
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
            carried: [1.0; 2],
            scalars: InstepScalars { words: [0; 12] },
        }
    })
}

/// What every record's learning rate is multiplied by before the first pass.
pub(crate) fn first_lr_multipliers(assignment: &Assignment) -> impl Iterator<Item = f64> + use<> {
    std::iter::repeat_n(1.0, assignment.record_count())
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
