//! A configurable trainer, simulated on a schedule without a device.
//!
//! It announces every access, as a stepper does; the checker judges the resulting list.

use std::sync::Arc;

use instep::hazard::Traced;
use instep::layout::{BucketCaps, Plan, Precision, Tails};
use instep::op::{Access, Memory, Span};
use instep::schedule::{Broadcast, Decision, Opening, Policy, Schedule};
use instep::{Layout, Mode, SegmentAction};

/// The order in which the trainer goes through the parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Order {
    /// Forward in registration order and backward in reverse order, as the buckets expect.
    Natural,
    /// Forward in reverse order and backward in registration order.
    Opposed,
    /// A stride through the list.
    Strided,
}

/// The treatment of every third parameter in odd passes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Unused {
    /// No special treatment.
    Never,
    /// The parameter is read, but gets no gradient.
    Ungraded,
    /// The parameter is not even read.
    Untouched,
}

/// The frozen parameters: every third bucket completely, and the first parameter of every third bucket.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Freezing {
    Never,
    /// They are frozen from the first pass on.
    Always,
    /// They are frozen in odd passes.
    Toggled,
}

/// What ranks shard; this rank is the second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Sharing {
    Nothing,
    States,
    /// States are sharded among two of four ranks.
    StatesOfGroups,
    /// Each bucket is unsharded before it is read, in forward and in backward; every second one is resharded between.
    Params,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) buckets: usize,
    pub(super) params_per_bucket: usize,
    pub(super) mode: Mode,
    pub(super) norm: bool,
    pub(super) tails: bool,
    pub(super) order: Order,
    pub(super) unused: Unused,
    /// The trainer writes parameters before the third pass, so that ranks take those of rank 0 again. It writes those
    /// of every second bucket, or of all buckets if there are tails. It sets learning rates after every pass. After
    /// every second pass it reads the status or sets step counts.
    pub(super) reload: bool,
    pub(super) freezing: Freezing,
    /// The trainer asks for the loss scale: before forward in even passes, after backward in odd ones.
    pub(super) scaled: bool,
    /// Each bucket has its own decision.
    pub(super) per_bucket: bool,
    /// Passes that this rank makes without data; if there are any, ranks are counted.
    pub(super) joined: &'static [usize],
    pub(super) sharing: Sharing,
    /// The number of times that a bucket's step stops for norms of sharded parameters.
    pub(super) stops: usize,
    /// Steps run in the host's memory.
    pub(super) offloads: bool,
    /// Neighbouring buckets may share launches; no step stops then.
    pub(super) shares: bool,
    pub(super) passes: usize,
}

pub(super) struct Simulated {
    pub(super) plan: Plan,
    pub(super) list: Vec<Traced>,
    /// The start of each pass in the list.
    pub(super) starts: Vec<usize>,
}

pub(super) fn simulate(case: Case) -> Simulated {
    let count = case.buckets * case.params_per_bucket;
    let mut builder = Layout::builder();
    for k in 0..count {
        // Zero-length parameters sit among the others; every bucket keeps bytes.
        let len =
            if case.params_per_bucket > 1 && k % case.params_per_bucket == 1 { 0 } else { 200 + k % 100 };
        builder = builder.param(format!("p{k}"), len);
        if k % 11 == 5 && case.sharing == Sharing::Nothing && !case.offloads {
            builder = builder.action(SegmentAction::Average);
        }
    }
    let layout = builder.build().unwrap();
    let cap = 4 * 200 * case.params_per_bucket.saturating_sub(1).max(1) as u64;
    let caps = BucketCaps { first_bytes: cap, rest_bytes: cap };
    let tails = Tails { used: case.tails, contributors: !case.joined.is_empty() };
    let ranks = if case.sharing == Sharing::StatesOfGroups { 4 } else { 2 };
    let plan = Plan::new(&layout, ranks, caps, tails, Precision::F32).unwrap();
    let plan = match case.sharing {
        Sharing::Nothing => plan,
        Sharing::States => plan.sharded(&layout, 1).unwrap(),
        Sharing::StatesOfGroups => plan.sharded_among(&layout, 3, 2).unwrap(),
        Sharing::Params => plan.sharded(&layout, 1).unwrap().with_sharded_params(),
    };
    let plan = Arc::new(if case.offloads { plan.offloaded() } else { plan });
    let decision = match case.norm {
        false => Decision::None,
        true if case.scaled => Decision::WholePassAndLossScale,
        true if case.per_bucket => Decision::EachBucket,
        true => Decision::WholePass,
    };
    let policy = Policy::new(case.mode, decision);
    let mut schedule = Schedule::new(&layout, Arc::clone(&plan), policy);
    let norms = |bucket: usize| Span {
        memory: Memory::Control,
        start: 9000 + 80 * bucket as u64,
        end: 9080 + 80 * bucket as u64,
    };
    schedule
        .share_norms_of_parameters((0..plan.buckets().len()).map(|k| vec![norms(k); case.stops]).collect());
    if case.shares {
        schedule.share_launches(vec![true; plan.buckets().len()]);
    }
    let mut list = Vec::new();
    let mut starts = Vec::new();
    let forward: Vec<usize> = match case.order {
        Order::Natural => (0..count).collect(),
        Order::Opposed => (0..count).rev().collect(),
        // No count of these cases is a multiple of 7, so this visits every parameter once.
        Order::Strided => (0..count).map(|k| (k * 7 + 3) % count).collect(),
    };
    for pass in 0..case.passes {
        starts.push(list.len());
        // The trainer loads parameters before the first pass, and once more in the middle.
        let some: Vec<u32> = (0..plan.buckets().len() as u32).step_by(2).collect();
        let broadcast = match pass {
            _ if case.sharing == Sharing::Params => Broadcast::Nothing,
            0 => Broadcast::All,
            2 if case.reload && case.tails => Broadcast::All,
            2 if case.reload => Broadcast::Buckets(&some),
            _ => Broadcast::Nothing,
        };
        if broadcast != Broadcast::Nothing {
            schedule.touch_all();
            list.extend(schedule.drain().map(Traced::Op));
            let is_written = |k: u32| broadcast == Broadcast::All || some.contains(&k);
            for (_, bucket) in (0..).zip(plan.buckets()).filter(|(k, _)| is_written(*k)) {
                let span = Span::elements(Memory::Params, &plan, bucket.params.start, bucket.params.end);
                list.push(Traced::Trainer(Access { span, writes: true }));
            }
        }
        // What was stepped last first: its wait stands for the others', which nothing would miss.
        let mut freezable: Vec<usize> = (0..count).filter(|param| frozen_ever(case, *param)).collect();
        if case.mode != Mode::Eager {
            freezable.reverse();
        }
        for &param in &freezable {
            let frozen = case.freezing == Freezing::Always || pass % 2 == 1;
            if frozen != schedule.is_frozen(param) {
                freeze(&mut schedule, &mut list, &plan, param, frozen);
            }
        }
        let joined = case.joined.contains(&pass);
        schedule.begin(Opening { broadcast, joined, ..Opening::default() }).unwrap();
        if joined {
            schedule.finish().unwrap();
            read_contributors(&mut schedule, &mut list, &plan);
            continue;
        }
        let left_out =
            |param: usize| case.unused != Unused::Never && pass % 2 == 1 && param.is_multiple_of(3);
        if case.scaled && pass % 2 == 0 {
            read_loss_scale(&mut schedule, &mut list);
        }
        for (at, &param) in forward.iter().enumerate() {
            let bucket = plan.segment_of(param).bucket;
            schedule.unshard(bucket, 0);
            let is_last = forward.get(at + 1).is_none_or(|next| plan.segment_of(*next).bucket != bucket);
            if left_out(param) && case.unused == Unused::Untouched {
                continue;
            }
            trainer(&mut schedule, &mut list, &plan, param, Memory::Params, false);
            if is_last && bucket % 2 == 0 {
                schedule.reshard(bucket);
            }
        }
        for &param in forward.iter().rev() {
            if left_out(param) || schedule.is_frozen(param) {
                continue;
            }
            schedule.unshard(plan.segment_of(param).bucket, 0);
            trainer(&mut schedule, &mut list, &plan, param, Memory::Params, false);
            trainer(&mut schedule, &mut list, &plan, param, Memory::Grads, true);
            schedule.hand_over(param).unwrap();
            // What is frozen is read whether its bucket has launched or not.
            let bucket = param / case.params_per_bucket;
            for other in freezable.iter().filter(|other| *other / case.params_per_bucket == bucket) {
                read_frozen(&mut schedule, &mut list, &plan, *other);
            }
        }
        freezable.iter().for_each(|param| read_frozen(&mut schedule, &mut list, &plan, *param));
        if case.scaled && pass % 2 == 1 {
            read_loss_scale(&mut schedule, &mut list);
        }
        schedule.finish().unwrap();
        list.extend(schedule.drain().map(Traced::Op));
        if case.reload {
            schedule.touch_settings();
            list.extend(schedule.drain().map(Traced::Op));
            list.push(Traced::Trainer(Access { span: Span::SETTINGS, writes: true }));
        }
        if case.reload && pass % 2 == 0 {
            schedule.touch_control();
            list.extend(schedule.drain().map(Traced::Op));
            list.push(Traced::Trainer(Access { span: Span::CONTROL, writes: pass % 4 == 2 }));
        }
    }
    drop(schedule);
    Simulated { plan: Arc::into_inner(plan).unwrap(), list, starts }
}

fn frozen_ever(case: Case, param: usize) -> bool {
    let (bucket, place) = (param / case.params_per_bucket, param % case.params_per_bucket);
    let partly = bucket.is_multiple_of(3) && place == 0 && case.params_per_bucket > 1;
    case.freezing != Freezing::Never && (bucket % 3 == 1 || partly)
}

pub(super) fn freeze(
    schedule: &mut Schedule,
    list: &mut Vec<Traced>,
    plan: &Plan,
    param: usize,
    frozen: bool,
) {
    schedule.touch_frozen(param, frozen);
    schedule.set_frozen(param, frozen);
    list.extend(schedule.drain().map(Traced::Op));
    list.push(Traced::Freeze { segment: plan.segment_index(param) as u32, frozen });
    list.push(Traced::Trainer(Access { span: Span::SETTINGS, writes: true }));
}

fn read_frozen(schedule: &mut Schedule, list: &mut Vec<Traced>, plan: &Plan, param: usize) {
    if schedule.is_frozen(param) && schedule.is_full(plan.segment_of(param).bucket) {
        trainer(schedule, list, plan, param, Memory::Params, false);
    }
}

fn read_loss_scale(schedule: &mut Schedule, list: &mut Vec<Traced>) {
    schedule.touch_loss_scale();
    list.extend(schedule.drain().map(Traced::Op));
    list.push(Traced::Trainer(Access { span: Span::LOSS_SCALE, writes: false }));
}

fn read_contributors(schedule: &mut Schedule, list: &mut Vec<Traced>, plan: &Plan) {
    schedule.touch_contributors();
    list.extend(schedule.drain().map(Traced::Op));
    let at = plan.carrier().unwrap().contributors.unwrap();
    let memory = if plan.is_offloaded() { Memory::HostGrads } else { Memory::Grads };
    let span = Span::elements(memory, plan, at, at + 1);
    list.push(Traced::Trainer(Access { span, writes: false }));
}

pub(super) fn trainer(
    schedule: &mut Schedule,
    list: &mut Vec<Traced>,
    plan: &Plan,
    param: usize,
    memory: Memory,
    writes: bool,
) {
    let segment = plan.segment_of(param);
    match memory {
        Memory::Grads => schedule.touch_gradient(param),
        _ => schedule.touch(param),
    }
    list.extend(schedule.drain().map(Traced::Op));
    // Of a bucket that is brought together, all: what lies in this rank's own shard would miss no wait.
    let is_whole =
        plan.shards_params() && memory == Memory::Params && segment.len > 0 && !schedule.is_frozen(param);
    let range = if is_whole {
        plan.buckets()[segment.bucket as usize].params.clone()
    } else {
        segment.start..segment.start + segment.len
    };
    let span = Span::elements(memory, plan, range.start, range.end);
    list.push(Traced::Trainer(Access { span, writes }));
}
