//! Is every list free of races, and is every wait needed?
//!
//! The schedule runs without a device: a simulated trainer reads parameters, writes gradients and hands over, and the
//! checker judges ops and trainer together. If any Wait is deleted, it must report a hazard.

use std::sync::Arc;

use instep::hazard::{Hazard, Traced, check};
use instep::layout::{BucketCaps, Plan, Precision, Tails};
use instep::op::{Access, Action, Memory, Op, Phase, Span};
use instep::schedule::{Broadcast, Decision, Opening, Policy, Schedule};
use instep::{Layout, Mode, SegmentAction};

use crate::support::waits::{assert_each_is_missed, is_wait};

const MODES: [Mode; 3] = [Mode::Sequential, Mode::Eager, Mode::Normed];
const STATES: usize = 2;

/// In which order the trainer goes through the parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Order {
    /// Forward in registration order, backward in reverse: what buckets are laid out for.
    Natural,
    /// The other way round.
    Opposed,
    /// Neither: a stride through the list.
    Strided,
}

/// What happens to every third parameter in odd passes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Unused {
    /// Nothing special.
    Never,
    /// It is read, but gets no gradient.
    Ungraded,
    /// It is not even read.
    Untouched,
}

/// Which parameters are frozen: every third bucket wholly, and the first parameter of every third partly.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Freezing {
    Never,
    /// From the first pass on.
    Always,
    /// In odd passes.
    Toggled,
}

/// What ranks share out; this one is the second.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sharing {
    Nothing,
    States,
    /// Each bucket is brought together before it is read, in forward and in backward; every second one is given up between.
    Params,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    buckets: usize,
    params_per_bucket: usize,
    mode: Mode,
    norm: bool,
    tails: bool,
    order: Order,
    unused: Unused,
    /// Writes parameters before the third pass, so that ranks take rank 0's again, of every second bucket unless there
    /// are tails, sets learning rates after every one, and after every other one reads the status or sets step counts.
    reload: bool,
    freezing: Freezing,
    /// The trainer asks for the loss scale: before forward in even passes, after backward in odd ones.
    scaled: bool,
    /// Buckets are decided on one by one.
    per_bucket: bool,
    /// Passes that this rank makes without data; ranks are counted if there are any.
    joined: &'static [usize],
    sharing: Sharing,
    passes: usize,
}

struct Simulated {
    plan: Plan,
    list: Vec<Traced>,
    /// Where each pass starts in the list.
    starts: Vec<usize>,
}

fn simulate(case: Case) -> Simulated {
    let count = case.buckets * case.params_per_bucket;
    let mut builder = Layout::builder();
    for k in 0..count {
        // Zero-length parameters sit among the others; every bucket keeps bytes.
        let len =
            if case.params_per_bucket > 1 && k % case.params_per_bucket == 1 { 0 } else { 200 + k % 100 };
        builder = builder.param(format!("p{k}"), len);
        if k % 11 == 5 && case.sharing == Sharing::Nothing {
            builder = builder.action(SegmentAction::Average);
        }
    }
    let layout = builder.build().unwrap();
    let cap = 4 * 200 * case.params_per_bucket.saturating_sub(1).max(1) as u64;
    let caps = BucketCaps { first_bytes: cap, rest_bytes: cap };
    let tails = Tails { used: case.tails, contributors: !case.joined.is_empty() };
    let plan = Plan::new(&layout, 2, caps, tails, Precision::F32).unwrap();
    let plan = Arc::new(match case.sharing {
        Sharing::Nothing => plan,
        Sharing::States => plan.sharded(&layout, 1).unwrap(),
        Sharing::Params => plan.sharded(&layout, 1).unwrap().with_sharded_params(),
    });
    let decision = match case.norm {
        false => Decision::None,
        true if case.scaled => Decision::WholePassAndLossScale,
        true if case.per_bucket => Decision::EachBucket,
        true => Decision::WholePass,
    };
    let policy = Policy::new(case.mode, decision);
    let mut schedule = Schedule::new(&layout, Arc::clone(&plan), policy);
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

fn freeze(schedule: &mut Schedule, list: &mut Vec<Traced>, plan: &Plan, param: usize, frozen: bool) {
    schedule.touch_frozen(param, frozen);
    schedule.set_frozen(param, frozen);
    list.extend(schedule.drain().map(Traced::Op));
    list.push(Traced::Freeze { segment: plan.segment_index(param) as u32, frozen });
    list.push(Traced::Trainer(Access { span: Span::SETTINGS, writes: true }));
}

fn read_frozen(schedule: &mut Schedule, list: &mut Vec<Traced>, plan: &Plan, param: usize) {
    if schedule.is_frozen(param) && schedule.is_whole(plan.segment_of(param).bucket) {
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
    let span = Span::elements(Memory::Grads, plan, at, at + 1);
    list.push(Traced::Trainer(Access { span, writes: false }));
}

fn trainer(
    schedule: &mut Schedule,
    list: &mut Vec<Traced>,
    plan: &Plan,
    param: usize,
    memory: Memory,
    writes: bool,
) {
    let segment = plan.segment_of(param);
    schedule.touch(param);
    list.extend(schedule.drain().map(Traced::Op));
    // Of a bucket that is brought together, all: what lies in this rank's own shard would miss no wait.
    let is_whole = plan.shards_params() && memory == Memory::Params && segment.len > 0 && !schedule.is_frozen(param);
    let range = match is_whole {
        true => plan.buckets()[segment.bucket as usize].params.clone(),
        false => segment.start..segment.start + segment.len,
    };
    let span = Span::elements(memory, plan, range.start, range.end);
    list.push(Traced::Trainer(Access { span, writes }));
}

fn cases(buckets: &[usize], passes: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for &buckets in buckets {
        for mode in MODES {
            let (never, always, toggled) = (Freezing::Never, Freezing::Always, Freezing::Toggled);
            for (norm, tails, order, unused, reload, freezing, joined) in [
                (false, false, Order::Natural, Unused::Never, false, never, &[][..]),
                (true, true, Order::Natural, Unused::Ungraded, false, never, &[]),
                (true, true, Order::Opposed, Unused::Never, true, never, &[]),
                (false, true, Order::Strided, Unused::Ungraded, false, never, &[]),
                (false, true, Order::Natural, Unused::Untouched, false, never, &[]),
                (false, false, Order::Strided, Unused::Untouched, true, never, &[]),
                (true, false, Order::Natural, Unused::Untouched, false, never, &[]),
                (false, true, Order::Natural, Unused::Never, false, always, &[]),
                (true, false, Order::Opposed, Unused::Untouched, true, toggled, &[]),
                (false, true, Order::Strided, Unused::Ungraded, false, toggled, &[2]),
                (true, true, Order::Natural, Unused::Never, true, always, &[1]),
                (false, false, Order::Natural, Unused::Untouched, false, never, &[1, 2]),
                (true, true, Order::Strided, Unused::Untouched, true, toggled, &[1, 3]),
            ] {
                for (params_per_bucket, scaled, per_bucket) in
                    [(1, false, false), (3, false, false), (3, norm, false), (3, false, norm)]
                {
                    if scaled && mode == Mode::Eager {
                        continue;
                    }
                    cases.push(Case {
                        buckets,
                        params_per_bucket,
                        mode,
                        norm,
                        tails,
                        order,
                        unused,
                        reload,
                        freezing,
                        scaled,
                        per_bucket,
                        joined,
                        sharing: Sharing::Nothing,
                        passes,
                    });
                }
            }
        }
    }
    cases
}

#[test]
fn no_mode_and_no_arrival_order_has_a_hazard() {
    for case in cases(&[1, 2, 5, 17], 4) {
        let run = simulate(case);
        assert_eq!(run.plan.buckets().len(), case.buckets, "{case:?}");
        assert_eq!(check(&run.plan, STATES, &run.list), [], "{case:?}");
    }
}

fn assert_every_wait_is_needed(case: Case) {
    let run = simulate(case);
    let middle = run.starts[1]..run.starts[case.passes - 1];
    assert_each_is_missed(&run.plan, STATES, &run.list, middle, case.passes - 2, &format!("{case:?}"));
}

#[test]
fn every_wait_of_the_middle_passes_is_missed_when_deleted() {
    for case in cases(&[1, 2, 5], 4) {
        assert_every_wait_is_needed(case);
    }
}

#[test]
fn shards_have_no_hazard_in_any_mode_and_arrival_order() {
    for case in cases(&[1, 2, 5, 17], 4) {
        for sharing in [Sharing::States, Sharing::Params] {
            let case = Case { sharing, ..case };
            let run = simulate(case);
            assert_eq!(check(&run.plan, STATES, &run.list), [], "{case:?}");
        }
    }
}

#[test]
fn every_wait_of_the_middle_passes_is_missed_when_deleted_with_shards() {
    for case in cases(&[1, 2, 5], 4) {
        assert_every_wait_is_needed(Case { sharing: Sharing::States, ..case });
        // A rank without data would not know what to unshard.
        if case.joined.is_empty() {
            assert_every_wait_is_needed(Case { sharing: Sharing::Params, ..case });
        }
    }
}

/// Of the long lists only the plain ones. Each mode is a test of its own, so that they run side by side.
fn assert_every_wait_of_64_buckets_is_needed(mode: Mode) {
    let plain = |case: &Case| {
        let special = case.scaled || case.per_bucket || !case.joined.is_empty();
        case.buckets == 16 || (case.freezing == Freezing::Never && !special)
    };
    let of_mode = cases(&[16, 64], 5).into_iter().filter(|case| case.mode == mode);
    of_mode.filter(plain).for_each(assert_every_wait_is_needed);
}

#[test]
fn every_wait_of_64_buckets_is_missed_when_deleted_in_sequential() {
    assert_every_wait_of_64_buckets_is_needed(Mode::Sequential);
}

#[test]
fn every_wait_of_64_buckets_is_missed_when_deleted_in_eager() {
    assert_every_wait_of_64_buckets_is_needed(Mode::Eager);
}

#[test]
fn every_wait_of_64_buckets_is_missed_when_deleted_in_normed() {
    assert_every_wait_of_64_buckets_is_needed(Mode::Normed);
}

/// Steps are what Normed overlaps with the next forward, and a trainer that asks for its scale must not end that.
#[test]
fn the_loss_scale_waits_for_the_decision_and_for_no_step() {
    let layout = Layout::builder().param("a", 300).param("b", 300).build().unwrap();
    let caps = BucketCaps { first_bytes: 1, rest_bytes: 1 };
    let plan = Arc::new(Plan::new(&layout, 2, caps, Tails::default(), Precision::F32).unwrap());
    for mode in [Mode::Sequential, Mode::Normed] {
        let policy = Policy::new(mode, Decision::WholePassAndLossScale);
        let mut schedule = Schedule::new(&layout, Arc::clone(&plan), policy);
        for _ in 0..2 {
            schedule.begin(Opening::default()).unwrap();
            schedule.finish().unwrap();
        }
        schedule.begin(Opening::default()).unwrap();
        let ops: Vec<Op> = schedule.drain().collect();
        let decided = ops.iter().rposition(|op| op.action == Action::Control(Phase::Decide)).unwrap();
        let Action::Record(decision) = ops[decided + 1].action else {
            panic!("{mode:?}: {}", ops[decided + 1])
        };
        schedule.touch_loss_scale();
        let waits: Vec<Action> = schedule.drain().map(|op| op.action).collect();
        assert_eq!(waits, [Action::Wait(decision)], "{mode:?}");
    }
}

#[test]
fn a_wait_before_its_record_is_told_apart_from_a_missing_one() {
    let run = simulate(cases(&[2], 4)[0]);
    let at = run.list.iter().position(is_wait).unwrap();
    let mut list = run.list.clone();
    let wait = list.remove(at);
    list.insert(0, wait);
    assert!(check(&run.plan, STATES, &list).contains(&Hazard::UnrecordedWait { at: 0 }));
}

#[test]
fn four_thousand_buckets_are_checked_whole() {
    let case = Case {
        buckets: 4000,
        params_per_bucket: 1,
        mode: Mode::Normed,
        norm: true,
        tails: true,
        order: Order::Natural,
        unused: Unused::Never,
        reload: false,
        freezing: Freezing::Never,
        scaled: true,
        per_bucket: false,
        joined: &[],
        sharing: Sharing::Nothing,
        passes: 3,
    };
    let run = simulate(case);
    let start = std::time::Instant::now();
    assert_eq!(check(&run.plan, STATES, &run.list), []);
    println!("{} entries in {:?}", run.list.len(), start.elapsed());
}

#[test]
fn an_abandoned_pass_leaves_no_hazard_behind() {
    for (mode, tails) in MODES.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
        let layout = Layout::builder().param("a", 300).param("b", 300).param("c", 300).build().unwrap();
        let caps = BucketCaps { first_bytes: 1, rest_bytes: 1 };
        let plan = Arc::new(
            Plan::new(&layout, 2, caps, Tails { used: tails, contributors: false }, Precision::F32).unwrap(),
        );
        let mut schedule = Schedule::new(&layout, Arc::clone(&plan), Policy::new(mode, Decision::None));
        let mut list = Vec::new();
        for pass in 0..9 {
            let broadcast = if pass == 0 { Broadcast::All } else { Broadcast::Nothing };
            schedule.begin(Opening { broadcast, ..Opening::default() }).unwrap();
            for param in (0..3).rev() {
                if pass % 3 == 2 {
                    // Nothing is touched after the abandoned pass.
                    break;
                }
                trainer(&mut schedule, &mut list, &plan, param, Memory::Params, false);
                trainer(&mut schedule, &mut list, &plan, param, Memory::Grads, true);
                schedule.hand_over(param).unwrap();
                if pass % 3 == 1 && param == 1 {
                    break;
                }
            }
            if pass % 3 == 1 {
                let kept = schedule.abandon().unwrap();
                assert_eq!(kept, if mode == Mode::Eager { vec![0, 1] } else { Vec::new() });
            } else {
                schedule.finish().unwrap();
            }
            list.extend(schedule.drain().map(Traced::Op));
        }
        assert_eq!(check(&plan, STATES, &list), [], "{mode:?}, tails {tails}");
    }
}

#[test]
fn buckets_launch_in_index_order_whatever_arrives_first() {
    let layout = Layout::builder().param("a", 300).param("b", 300).param("c", 300).build().unwrap();
    let caps = BucketCaps { first_bytes: 1, rest_bytes: 1 };
    let plan = Arc::new(Plan::new(&layout, 1, caps, Tails::default(), Precision::F32).unwrap());
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut schedule =
            Schedule::new(&layout, Arc::clone(&plan), Policy::new(Mode::Eager, Decision::None));
        schedule.begin(Opening::default()).unwrap();
        order.iter().for_each(|&param| schedule.hand_over(param).unwrap());
        assert!(schedule.hand_over(0).is_err(), "handed over twice");
        schedule.finish().unwrap();
        let steps: Vec<u32> = schedule
            .drain()
            .filter_map(|op| if let Action::Step { bucket } = op.action { Some(bucket) } else { None })
            .collect();
        assert_eq!(steps, [0, 1, 2], "{order:?}");
    }
}

/// It is reduced in every pass, since it counts ranks, and nothing but that reduce is there to come after.
#[test]
fn a_frozen_bucket_that_counts_ranks_is_touched_after_its_reduce_only() {
    let layout = Layout::builder().param("a", 300).param("counts", 300).build().unwrap();
    let caps = BucketCaps { first_bytes: 1, rest_bytes: 1 };
    let plan = Arc::new(
        Plan::new(&layout, 2, caps, Tails { used: false, contributors: true }, Precision::F32).unwrap(),
    );
    for (mode, frozen) in MODES.into_iter().flat_map(|mode| [(mode, &[1][..]), (mode, &[0, 1])]) {
        for unfreeze in [false, true] {
            let mut schedule = Schedule::new(&layout, Arc::clone(&plan), Policy::new(mode, Decision::None));
            let mut list = Vec::new();
            frozen.iter().for_each(|&param| freeze(&mut schedule, &mut list, &plan, param, true));
            schedule.begin(Opening::default()).unwrap();
            schedule.finish().unwrap();
            if unfreeze {
                freeze(&mut schedule, &mut list, &plan, 1, false);
                schedule.begin(Opening::default()).unwrap();
            } else {
                schedule.touch_all();
            }
            trainer(&mut schedule, &mut list, &plan, 1, Memory::Grads, unfreeze);
            assert_eq!(check(&plan, STATES, &list), [], "{mode:?}, {frozen:?}");
        }
    }
}
