//! Properties of all that a trainer may do: random trainings, random schedules, fixed seed.
//!
//! `PROPTEST_CASES` raises the number of cases. Each property compares two runs of the library or asks the checker; a
//! failing case is shrunk and printed completely. Cases depend on no clock and leave no files, so a failure repeats on
//! any machine.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::Arc;

use instep::hazard::{Traced, check};
use instep::layout::{BucketCaps, Plan, Precision, Tails};
use instep::op::{Access, Memory, Span};
use instep::schedule::{Broadcast, Decision, Opening, Policy, Schedule};
use instep::{Error, Layout, Mode, SegmentAction, Unused, in_process};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::support::MODES;
use crate::support::arbitrary::{Setup, Training, setup, training};
use crate::support::training::Feed;

/// Runs `property` on the number of cases in `PROPTEST_CASES`, or else on `cases`.
pub(crate) fn for_all<S: Strategy>(cases: u32, strategy: S, property: impl Fn(S::Value)) {
    let mut config = Config { failure_persistence: None, max_shrink_iters: 2000, ..Config::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = cases;
    }
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let outcome = runner.run(&strategy, |case| {
        property(case);
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
}

/// Bucket sizes, threads, instruction sets, modes and orders change nothing; an abandoned pass changes only the buckets
/// that Eager names.
#[test]
fn every_way_to_carry_out_a_training_gives_the_bits_of_the_plainest_one() {
    for_all(400, (training(), vec(setup(), 2)), |(training, setups)| {
        for setup in setups {
            let mut training = training.clone();
            if setup.mode(&training) == Mode::Eager && training.unused == Unused::StepZero {
                // What an abandoned pass left unstepped could not be left alone by the plain run.
                abandon_early(&mut training);
            }
            let trained = training.run_alone(&setup, None).unwrap();
            let plain = training.run_alone(&Setup::plain(), Some(&trained.kept)).unwrap();
            trained.assert_same(&plain, &format!("{setup:?}"));
        }
    });
}

#[test]
fn ranks_in_any_setup_give_the_bits_of_one_plain_rank_that_is_fed_their_sums() {
    for_all(400, (training(), setup()), |(mut training, setup)| {
        // Ranks must give up after the same bucket, and their orders differ.
        abandon_early(&mut training);
        let ranks = in_process(training.world_size, |comm| {
            let rank = comm.rank() as usize;
            training.run(&setup, comm, Feed::Rank(rank), None)
        });
        let ranks = ranks.unwrap();
        let plain = training.run_alone(&Setup::plain(), Some(&ranks[0].kept)).unwrap();
        for (rank, trained) in ranks.iter().enumerate() {
            trained.assert_same(&plain, &format!("rank {rank}, {setup:?}"));
        }
    });
}

pub(crate) fn abandon_early(training: &mut Training) {
    for pass in &mut training.passes {
        pass.abandon = pass.abandon.map(|_| 0);
    }
}

/// A trainer's action inside a pass. Parameters wrap.
#[derive(Clone, Copy, Debug)]
enum Event {
    Touch(usize, Memory, bool),
    HandOver(usize),
    Complete(usize),
    NextMicroBatch,
}

/// A trainer's action after a pass.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Between {
    Status,
    SetCounts,
    SetRates,
    ReadAll,
    Load,
    /// Writes one parameter. The index wraps.
    Write(usize),
    Synchronize,
    /// The index wraps.
    Freeze(usize),
    Unfreeze(usize),
}

#[derive(Clone, Debug)]
enum Inside {
    Events(Vec<Event>),
    /// Joins a pass on a rank without data, and does nothing else.
    Joined,
}

#[derive(Clone, Debug)]
struct Events {
    /// Length, number of uses, and whether it is averaged.
    params: Vec<(usize, u32, bool)>,
    cap: u64,
    world_size: u32,
    used: bool,
    contributors: bool,
    sharded: bool,
    /// Whether each micro-batch is summed.
    summed: bool,
    /// Whether neighbouring buckets share launches.
    shares: bool,
    mode: Mode,
    norm: bool,
    /// Each pass, whether it is abandoned, and the actions after it.
    passes: Vec<(Inside, bool, Vec<Between>)>,
    /// Micro-batches of each pass that is not joined.
    micro_batches: u32,
}

fn events() -> impl Strategy<Value = Events> {
    let event = prop_oneof![
        (0..6usize, any::<bool>()).prop_map(|(param, writes)| Event::Touch(param, Memory::Grads, writes)),
        (0..6usize).prop_map(|param| Event::Touch(param, Memory::Params, false)),
        (0..6usize).prop_map(Event::HandOver),
        (0..6usize).prop_map(Event::Complete),
        Just(Event::NextMicroBatch),
    ];
    let plain = vec![
        Between::Status,
        Between::SetCounts,
        Between::SetRates,
        Between::ReadAll,
        Between::Load,
        Between::Synchronize,
    ];
    let between = prop_oneof![
        2 => select(plain),
        1 => (0..6usize).prop_map(Between::Write),
        1 => (0..6usize).prop_map(Between::Freeze),
        1 => (0..6usize).prop_map(Between::Unfreeze),
    ];
    // Passes and pauses without anything are as likely as long ones.
    let inside = prop_oneof![
        Just(Inside::Events(Vec::new())),
        Just(Inside::Joined),
        vec(event.clone(), 0..4).prop_map(Inside::Events),
        vec(event, 4..20).prop_map(Inside::Events),
    ];
    let pause = prop_oneof![2 => Just(Vec::new()), 1 => vec(between, 1..4)];
    let passes = vec((inside, prop::bool::weighted(0.25), pause), 1..7);
    let params = vec((select(vec![0, 1, 100, 300]), 1..3u32, prop::bool::weighted(0.2)), 1..6);
    let sharing = (any::<bool>(), any::<bool>(), any::<bool>(), 1..4u32);
    let options = (any::<bool>(), any::<bool>(), sharing, select(MODES.to_vec()), any::<bool>());
    (params, select(vec![1, 1500]), 1..4u32, options, passes).prop_map(
        |(params, cap, world_size, (used, contributors, sharing, mode, norm), passes)| {
            let (sharded, summed, shares, micro_batches) = sharing;
            let norm = norm && mode != Mode::Eager;
            Events {
                params,
                cap,
                world_size,
                used,
                contributors,
                sharded,
                summed,
                shares,
                mode,
                norm,
                passes,
                micro_batches,
            }
        },
    )
}

/// Replays the events on a schedule, without a device, and returns its plan and the recorded list.
fn play(events: &Events) -> (Arc<Plan>, Vec<Traced>) {
    let mut builder = Layout::builder();
    for (k, (len, uses, averaged)) in events.params.iter().enumerate() {
        let action = if *averaged { SegmentAction::Average } else { SegmentAction::Step };
        builder = builder.param(format!("p{k}"), *len).uses(*uses).action(action);
    }
    let layout = builder.build().unwrap();
    let caps = BucketCaps { first_bytes: events.cap, rest_bytes: events.cap };
    let tails = Tails { used: events.used, contributors: events.contributors };
    let mut plan = Plan::new(&layout, events.world_size, caps, tails, Precision::F32).unwrap();
    if events.sharded {
        plan = plan.sharded(&layout, events.world_size / 2).unwrap();
        plan = if events.summed { plan.with_summed_micro_batches() } else { plan };
    }
    let plan = Arc::new(plan);
    let policy = Policy::new(events.mode, if events.norm { Decision::WholePass } else { Decision::None });
    let mut schedule = Schedule::new(&layout, Arc::clone(&plan), policy);
    if events.shares {
        schedule.share_launches(vec![true; plan.buckets().len()]);
    }
    let mut list = Vec::new();
    let (mut load, mut written) = (true, BTreeSet::new());
    for (inside, abandoned, afterwards) in &events.passes {
        // Without a count to end on a rank cannot join, so it makes a pass in which it touches nothing.
        let joined =
            matches!(inside, Inside::Joined) && plan.carrier().is_some_and(|b| b.contributors.is_some());
        let buckets: Vec<u32> = std::mem::take(&mut written).into_iter().collect();
        let broadcast = match (std::mem::take(&mut load), &*buckets) {
            (true, _) => Broadcast::All,
            (false, []) => Broadcast::Nothing,
            (false, buckets) => Broadcast::Buckets(buckets),
        };
        let micro_batches = NonZeroU32::new(if joined { 1 } else { events.micro_batches }).unwrap();
        schedule.begin(Opening { broadcast, joined, micro_batches, ..Opening::default() }).unwrap();
        if let Inside::Events(inside) = inside {
            inside.iter().for_each(|event| play_event(*event, &mut schedule, &plan, &mut list));
        }
        if *abandoned && !joined {
            schedule.abandon().unwrap();
        } else {
            while schedule.next_micro_batch().is_ok() {}
            schedule.finish().unwrap();
        }
        if let (true, Some(at)) = (joined, plan.carrier().and_then(|bucket| bucket.contributors)) {
            schedule.touch_contributors();
            note(&mut schedule, &mut list, Span::elements(Memory::Grads, &plan, at, at + 1), false);
        }
        for between in afterwards {
            load |= *between == Between::Load;
            if let Between::Write(param) = between {
                written.insert(plan.segment_of(param % plan.segments().len()).bucket);
            }
            play_between(*between, &mut schedule, &plan, &mut list);
        }
    }
    list.extend(schedule.drain().map(Traced::Op));
    (plan, list)
}

fn play_event(event: Event, schedule: &mut Schedule, plan: &Plan, list: &mut Vec<Traced>) {
    let (Event::Touch(param, ..) | Event::HandOver(param) | Event::Complete(param)) = event else {
        // Refused in the last one.
        let _ = schedule.next_micro_batch();
        return;
    };
    let param = param % plan.segments().len();
    if schedule.is_handed_over(param) || (schedule.is_frozen(param) && !matches!(event, Event::Touch(..))) {
        for refused in [schedule.hand_over(param), schedule.complete(param)] {
            assert!(matches!(refused, Err(Error::Order(_))), "handed over twice or frozen");
        }
        return;
    }
    match event {
        Event::Touch(_, memory, writes) => {
            // Of a frozen parameter only the value is in reach, at any moment.
            let (memory, writes) =
                if schedule.is_frozen(param) { (Memory::Params, false) } else { (memory, writes) };
            match memory {
                Memory::Grads => schedule.touch_gradient(param),
                _ => schedule.touch(param),
            }
            let segment = plan.segment_of(param);
            let span = Span::elements(memory, plan, segment.start, segment.start + segment.len);
            note(schedule, list, span, writes);
        }
        Event::HandOver(_) => schedule.hand_over(param).unwrap(),
        Event::Complete(_) => schedule.complete(param).unwrap(),
        Event::NextMicroBatch => {}
    }
}

fn play_between(between: Between, schedule: &mut Schedule, plan: &Plan, list: &mut Vec<Traced>) {
    match between {
        Between::Status | Between::SetCounts => {
            schedule.touch_control();
            note(schedule, list, Span::CONTROL, between == Between::SetCounts);
        }
        Between::SetRates => {
            schedule.touch_settings();
            note(schedule, list, Span::SETTINGS, true);
        }
        Between::ReadAll | Between::Load => {
            schedule.touch_all();
            // By segment: what lies between them, tails above all, is not the trainer's.
            for segment in plan.segments() {
                let span = |memory| Span::elements(memory, plan, segment.start, segment.start + segment.len);
                for memory in [Memory::Grads, Memory::State(0), Memory::State(1)] {
                    note(schedule, list, span(memory), false);
                }
                note(schedule, list, span(Memory::Params), between == Between::Load);
            }
        }
        Between::Write(param) => {
            schedule.touch_all();
            let segment = plan.segment_of(param % plan.segments().len());
            note(schedule, list, Span::segment(Memory::Params, plan, segment), true);
        }
        Between::Synchronize => schedule.synchronize(),
        Between::Freeze(param) | Between::Unfreeze(param) => {
            let (param, frozen) = (param % plan.segments().len(), matches!(between, Between::Freeze(_)));
            schedule.touch_frozen(param, frozen);
            schedule.set_frozen(param, frozen);
            list.extend(schedule.drain().map(Traced::Op));
            list.push(Traced::Freeze { segment: plan.segment_index(param) as u32, frozen });
            note(schedule, list, Span::SETTINGS, true);
        }
    }
}

fn note(schedule: &mut Schedule, list: &mut Vec<Traced>, span: Span, writes: bool) {
    list.extend(schedule.drain().map(Traced::Op));
    list.push(Traced::Trainer(Access { span, writes }));
}

#[test]
fn no_sequence_of_events_makes_a_schedule_with_a_hazard() {
    for_all(4000, events(), |events| {
        let (plan, list) = play(&events);
        assert_eq!(check(&plan, 2, &list), []);
    });
}
