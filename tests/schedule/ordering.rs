//! Every list must be free of races, and every wait must be needed.
//!
//! The schedule runs without a device: a simulated trainer reads parameters, writes gradients and hands over, and the
//! checker judges ops and trainer together. If any Wait is deleted, the checker must report a hazard.

use std::sync::Arc;

use instep::hazard::{Hazard, Traced, check};
use instep::layout::{BucketCaps, Plan, Precision, Tails};
use instep::op::{Action, Memory, Op, Phase};
use instep::schedule::{Broadcast, Decision, Opening, Policy, Schedule};
use instep::{Layout, Mode};

use crate::schedule::simulated::{Case, Freezing, Order, Sharing, Unused, freeze, simulate, trainer};
use crate::support::waits::{assert_each_is_missed, is_wait};

const MODES: [Mode; 3] = [Mode::Sequential, Mode::Eager, Mode::Normed];
const STATES: usize = 2;

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
                        stops: 0,
                        offloads: false,
                        shares: false,
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
        for (sharing, stops) in
            [(Sharing::States, 0), (Sharing::Params, 0), (Sharing::StatesOfGroups, 1), (Sharing::Params, 2)]
        {
            let case = Case { sharing, stops, ..case };
            let run = simulate(case);
            assert_eq!(check(&run.plan, STATES, &run.list), [], "{case:?}");
        }
    }
}

#[test]
fn every_wait_of_the_middle_passes_is_missed_when_deleted_with_shards() {
    for case in cases(&[1, 2, 5], 4) {
        for stops in [0, 1, 2] {
            let sharing = if stops == 1 { Sharing::StatesOfGroups } else { Sharing::States };
            assert_every_wait_is_needed(Case { sharing, stops, ..case });
            // A rank without data would not know what to unshard.
            if case.joined.is_empty() {
                assert_every_wait_is_needed(Case { sharing: Sharing::Params, stops, ..case });
            }
        }
    }
}

#[test]
fn steps_on_the_host_have_no_hazard_in_any_mode_and_arrival_order() {
    for case in cases(&[1, 2, 5, 17], 4) {
        for sharing in [Sharing::Nothing, Sharing::States, Sharing::Params] {
            let case = Case { sharing, offloads: true, ..case };
            let run = simulate(case);
            assert_eq!(check(&run.plan, STATES, &run.list), [], "{case:?}");
        }
    }
}

#[test]
fn every_wait_of_the_middle_passes_is_missed_when_deleted_with_steps_on_the_host() {
    for case in cases(&[1, 2, 5], 4) {
        assert_every_wait_is_needed(Case { offloads: true, ..case });
        for stops in [0, 1] {
            assert_every_wait_is_needed(Case { sharing: Sharing::States, stops, offloads: true, ..case });
            if case.joined.is_empty() {
                assert_every_wait_is_needed(Case { sharing: Sharing::Params, stops, offloads: true, ..case });
            }
        }
    }
}

#[test]
fn shared_launches_have_no_hazard_and_every_wait_beside_them_is_missed_when_deleted() {
    let mut shared = 0;
    for case in cases(&[3, 5], 4) {
        for sharing in [Sharing::Nothing, Sharing::States, Sharing::Params] {
            let case = Case { sharing, shares: true, ..case };
            let run = simulate(case);
            assert_eq!(check(&run.plan, STATES, &run.list), [], "{case:?}");
            let several = |entry: &&Traced| {
                matches!(entry, Traced::Op(Op { action: Action::Step { count: 2.., .. }, .. }))
            };
            shared += run.list.iter().filter(several).count();
            if sharing != Sharing::Params || case.joined.is_empty() {
                assert_every_wait_is_needed(case);
            }
        }
    }
    assert!(shared > 100, "{shared} launches are shared");
}

/// Of the long lists the test checks only the plain ones. Each mode is a separate test, so that they run in parallel.
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

/// Normed overlaps steps with the next forward, and a trainer that asks for its scale must not end that.
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
        stops: 0,
        offloads: false,
        shares: true,
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
            .filter_map(|op| if let Action::Step { bucket, .. } = op.action { Some(bucket) } else { None })
            .collect();
        assert_eq!(steps, [0, 1, 2], "{order:?}");
    }
}

/// The bucket is reduced in every pass, because it counts ranks, and its touch comes after that reduce only.
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
