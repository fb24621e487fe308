//! Frozen parameters keep every bit, the others train as without them, and no op waits for a frozen parameter.
//!
//! The reference is a run whose layout lacks the frozen parameter. Parameters and gradients are painted by name, so
//! both runs see the same numbers. The recorded list shows that something does not happen.

use std::num::NonZeroU32;

use instep::hazard::Traced;
use instep::op::{Action, CollectiveKind, Memory, Op, Stream};
use instep::{
    Divisor, Error, Layout, Mode, ParamId, Pass, Result, SegmentAction, Sgd, Solo, Stepper, Unused,
    in_process,
};

use crate::support::waits::{assert_each_is_missed, middle_passes};
use crate::support::{
    MODES, Optim, Options, Outcome, Presummed, assert_same_bits, few_optimizers, layout, one_per_state_count,
    open, paint, paint_gradient, painted, pass, set_step_count,
};

const LENGTHS: [usize; 5] = [300, 17, 2050, 0, 5];
/// The frozen parameter is in the middle, so it has neighbours in its bucket.
const FROZEN: usize = 2;

/// One bucket, some buckets, one bucket each.
const CAPS: [Option<u64>; 3] = [None, Some(1500), Some(1)];

fn subset(params: &[usize]) -> Layout {
    let builder = params.iter().fold(Layout::builder(), |b, k| b.param(format!("p{k}"), LENGTHS[*k]));
    builder.build().unwrap()
}

/// Returns every parameter with the number in its name.
fn numbered(stepper: &Stepper) -> Vec<(usize, ParamId)> {
    let layout = stepper.layout();
    let number = |id| layout.parameter(id).unwrap().name[1..].parse().unwrap();
    layout.ids().map(|id| (number(id), id)).collect()
}

/// Fills values by number; the frozen parameter is already in the middle of a training.
fn start(layout: &Layout, optim: Optim, options: &Options) -> Stepper {
    let mut stepper = options.stepper(layout, optim, Presummed(options.world_size)).unwrap();
    for (number, id) in numbered(&stepper) {
        stepper.view_mut::<f32>(id).unwrap().iter_mut().enumerate().for_each(|(k, x)| *x = paint(number, k));
        if number == FROZEN {
            for name in stepper.state_names(id).unwrap() {
                stepper.view_mut::<f32>(id.state(&name)).unwrap().fill(0.5);
            }
            set_step_count(&mut stepper, id, 3).unwrap();
        }
    }
    stepper
}

/// Makes one pass with gradients by number for all parameters that are not frozen; reads every parameter before and
/// after its bucket.
fn step(stepper: &mut Stepper, options: &Options, at: usize) -> Result<()> {
    let params = numbered(stepper);
    let frozen: Vec<ParamId> =
        params.iter().filter(|(_, id)| stepper.is_frozen(*id).unwrap()).map(|(_, id)| *id).collect();
    let mut pass = stepper.begin()?;
    for (_, id) in &params {
        pass.params().get(*id)?;
    }
    for (number, id) in params.iter().rev().filter(|(_, id)| !frozen.contains(id)) {
        for (k, g) in pass.grads().get_mut(*id)?.iter_mut().enumerate() {
            *g = paint_gradient(at, *number, k) * options.divisor() as f32;
        }
        pass.grad_ready(*id)?;
        frozen.iter().try_for_each(|id| pass.params().get(*id).map(|_| ()))?;
    }
    pass.finish()
}

fn recorded(stepper: &mut Stepper) -> Vec<Traced> {
    let recording = stepper.take_recording().unwrap();
    assert_eq!(stepper.check(&recording), []);
    recording.list
}

fn actions(list: &[Traced]) -> impl Iterator<Item = Action> {
    list.iter().filter_map(|entry| if let Traced::Op(op) = entry { Some(op.action) } else { None })
}

/// Returns every mode that accepts the option, with every cap and every treatment of unused parameters.
fn ways() -> Vec<Options> {
    let mut ways = Vec::new();
    for mode in MODES {
        for cap in CAPS {
            for unused in [Unused::Skip, Unused::StepZero] {
                for max_norm in [None, Some(0.5)] {
                    if mode != Mode::Eager || max_norm.is_none() {
                        ways.push(Options {
                            mode,
                            cap,
                            unused,
                            max_norm,
                            record: true,
                            ..Options::default()
                        });
                    }
                }
            }
        }
    }
    ways
}

#[test]
fn a_frozen_parameter_keeps_every_bit_and_the_others_train_as_if_it_did_not_exist() {
    let (whole, without) = (layout(&LENGTHS), subset(&[0, 1, 3, 4]));
    for optim in one_per_state_count() {
        for options in ways() {
            let what = format!("{optim:?}, {options:?}");
            let mut stepper = start(&whole, optim, &options);
            let mut alone = start(&without, optim, &options);
            stepper.set_frozen(whole.id("p2").unwrap(), true).unwrap();
            let before = Outcome::of(&stepper).unwrap();
            for at in 0..3 {
                step(&mut stepper, &options, at).unwrap();
                step(&mut alone, &options, at).unwrap();
                let (status, expected) = (stepper.status().unwrap(), alone.status().unwrap());
                assert_eq!((status.norm, status.clip), (expected.norm, expected.clip), "{what}");
            }
            let (after, expected) = (Outcome::of(&stepper).unwrap(), Outcome::of(&alone).unwrap());
            after.assert_same_param(FROZEN, &before, FROZEN, &what);
            for (ours, theirs) in [(0, 0), (1, 1), (3, 2), (4, 3)] {
                after.assert_same_param(ours, &expected, theirs, &what);
            }
            recorded(&mut stepper);
        }
    }
}

#[test]
fn a_frozen_parameter_is_read_after_the_launch_of_its_bucket_without_a_wait() {
    for mode in MODES {
        let options = Options { mode, record: true, ..Options::default() };
        let mut stepper = start(&layout(&LENGTHS), few_optimizers()[1], &options);
        let frozen = stepper.layout().id("p2").unwrap();
        step(&mut stepper, &options, 0).unwrap();
        stepper.set_frozen(frozen, true).unwrap();
        step(&mut stepper, &options, 1).unwrap();
        let list = recorded(&mut stepper);
        let last = |of: &dyn Fn(&Traced) -> bool| list.iter().rposition(of).unwrap();
        let launched = last(&|entry| {
            matches!(entry, Traced::Op(Op { action: Action::Collective { bucket: Some(0), .. }, .. }))
        });
        let read =
            last(&|entry| matches!(entry, Traced::Trainer(access) if access.span.memory == Memory::Params));
        assert!(launched < read, "{mode:?}: the bucket was on its way");
        let waits = |entry: &Traced| {
            matches!(entry, Traced::Op(Op { stream: Stream::Compute, action: Action::Wait(_) }))
        };
        assert!(!list[launched..=read].iter().any(waits), "{mode:?}");
        let whole_span = stepper.plan().segment_of(FROZEN).len * 4;
        assert!(matches!(list[read], Traced::Trainer(access) if access.span.bytes() == whole_span));
    }
}

#[test]
fn freezing_in_turns_leaves_no_hazard_and_waits_for_nothing_that_could_be_left_out() {
    for (mode, cap) in MODES.into_iter().flat_map(|mode| CAPS.map(|cap| (mode, cap))) {
        let options = Options { mode, cap, record: true, ..Options::default() };
        // Without the empty one: its bucket would be stepped for nothing, and nothing would miss a wait for that.
        let layout = subset(&[0, 1, 2, 4]);
        let mut stepper = options.stepper(&layout, few_optimizers()[1], Solo::default()).unwrap();
        let ids: Vec<ParamId> = stepper.layout().ids().collect();
        for at in 0..7 {
            stepper.set_frozen(ids[FROZEN], at % 3 == 1).unwrap();
            step(&mut stepper, &options, at).unwrap();
        }
        stepper.status().unwrap();
        let list = recorded(&mut stepper);
        let what = format!("{mode:?}, cap {cap:?}");
        assert_each_is_missed(stepper.plan(), 1, &list, middle_passes(&list), 15, &what);
    }
}

#[test]
fn a_frozen_parameter_takes_no_gradient_and_refusals_leave_the_pass_as_it_was() {
    for cap in CAPS {
        let options = Options { mode: Mode::Eager, cap, ..Options::default() };
        let mut stepper = start(&layout(&LENGTHS), few_optimizers()[0], &options);
        let ids: Vec<ParamId> = stepper.layout().ids().collect();
        let (frozen, other) = (ids[FROZEN], ids[0]);
        let foreign = layout(&[1]).id("p0").unwrap();
        assert!(matches!(stepper.set_frozen(foreign, true), Err(Error::Layout(_))));
        assert!(matches!(stepper.is_frozen(foreign), Err(Error::Layout(_))));
        stepper.set_frozen(frozen, true).unwrap();
        assert!(stepper.is_frozen(frozen).unwrap() && !stepper.is_frozen(other).unwrap());
        std::mem::forget(stepper.begin().unwrap());
        assert!(matches!(stepper.set_frozen(other, true), Err(Error::Order(_))));
        assert!(!stepper.is_frozen(other).unwrap());
        stepper.abandon().unwrap();

        let before = Outcome::of(&stepper).unwrap();
        let values = vec![1.0f32; LENGTHS[FROZEN]];
        let is_order = |outcome: Result<()>| {
            assert!(
                matches!(&outcome, Err(Error::Order(why)) if why.wrong.contains("frozen")),
                "{outcome:?}"
            );
        };
        let mut pass = stepper.begin().unwrap();
        is_order(pass.grads().get_mut(frozen).map(|_| ()));
        is_order(pass.grads().write(frozen, &values));
        is_order(pass.grads().add(frozen, &values));
        is_order(pass.grads().get_disjoint_mut::<f32, 2>([other, frozen]).map(|_| ()));
        assert!(pass.is_first(other).unwrap(), "a refusal marks nothing as written");
        is_order(pass.grad_ready(frozen));
        for id in ids.iter().filter(|id| **id != frozen) {
            pass.grads().get_mut(*id).unwrap().fill(1.0);
        }
        // Also for the bucket in which nothing else is.
        for bucket in 0..stepper_buckets(&LENGTHS, cap) {
            pass.bucket_ready(bucket).unwrap();
        }
        assert!(pass.params().get(frozen).is_ok() && pass.params().get(other).is_err());
        pass.finish().unwrap();
        let after = Outcome::of(&stepper).unwrap();
        after.assert_same_param(FROZEN, &before, FROZEN, "refused");
        assert_eq!(after.step_counts, [1, 1, 3, 0, 1], "{cap:?}");
    }
}

fn stepper_buckets(lengths: &[usize], cap: Option<u64>) -> u32 {
    let options = Options { cap, ..Options::default() };
    open(&layout(lengths), few_optimizers()[0], &options).plan().buckets().len() as u32
}

#[test]
fn a_wholly_frozen_bucket_is_neither_reduced_nor_measured_nor_stepped() {
    for max_norm in [None, Some(0.5)] {
        for mode in MODES.into_iter().filter(|mode| *mode != Mode::Eager || max_norm.is_none()) {
            let options = Options { mode, max_norm, cap: Some(1), record: true, ..Options::default() };
            let mut stepper = start(&layout(&LENGTHS), few_optimizers()[1], &options);
            let (frozen, empty) = (stepper.layout().id("p2").unwrap(), stepper.layout().id("p3").unwrap());
            // The empty one has filled nothing, so it shares the bucket.
            let own = stepper.plan().segment_of(FROZEN).bucket;
            stepper.set_frozen(frozen, true).unwrap();
            stepper.set_frozen(empty, true).unwrap();
            for at in 0..3 {
                step(&mut stepper, &options, at).unwrap();
            }
            let list = recorded(&mut stepper);
            let buckets = |list: &[Traced]| -> Vec<u32> {
                let of = |action| match action {
                    Action::Norm { bucket } | Action::Step { bucket, .. } => Some(bucket),
                    Action::Collective { bucket, .. } => bucket,
                    _ => None,
                };
                actions(list).filter_map(of).collect()
            };
            assert!(!buckets(&list).contains(&own), "{mode:?}");
            assert!(buckets(&list).len() >= 3 * 2 * 3, "the others are");
            let count = stepper.step_count(frozen).unwrap();
            // With the empty one still frozen.
            stepper.set_frozen(frozen, false).unwrap();
            step(&mut stepper, &options, 3).unwrap();
            assert_eq!(stepper.step_count(frozen).unwrap(), count + 1, "{mode:?}");
        }
    }
}

#[test]
fn a_pass_of_nothing_but_frozen_parameters_does_nothing_and_can_be_asked_about() {
    for options in ways() {
        let mut stepper = start(&layout(&LENGTHS), few_optimizers()[2], &options);
        let ids: Vec<ParamId> = stepper.layout().ids().collect();
        ids.iter().for_each(|id| stepper.set_frozen(*id, true).unwrap());
        let before = Outcome::of(&stepper).unwrap();
        for at in 0..3 {
            step(&mut stepper, &options, at).unwrap();
            let status = stepper.status().unwrap();
            let norm = (options.mode == Mode::Normed || options.max_norm.is_some()).then_some(0.0);
            assert_eq!(
                (status.pass, status.skipped, status.norm),
                (at as u64 + 1, false, norm),
                "{options:?}"
            );
        }
        let after = Outcome::of(&stepper).unwrap();
        after.assert_same(&before, &format!("{options:?}"));
        let works = |action: &Action| {
            let reduces =
                matches!(action, Action::Collective { kind, .. } if *kind != CollectiveKind::Broadcast);
            reduces || matches!(action, Action::Norm { .. } | Action::Step { .. } | Action::Zero(_))
        };
        assert_eq!(actions(&recorded(&mut stepper)).find(works), None, "{options:?}");
        ids.iter().for_each(|id| stepper.set_frozen(*id, false).unwrap());
        step(&mut stepper, &options, 0).unwrap();
        assert_eq!(stepper.step_count(ids[0]).unwrap(), 1);
    }
}

#[test]
fn what_is_unfrozen_has_the_action_of_its_layout_again() {
    let names = [SegmentAction::Step, SegmentAction::Average, SegmentAction::Leave];
    let builder =
        names.iter().fold(Layout::builder(), |b, action| b.param(format!("{action:?}"), 300).action(*action));
    let layout = builder.build().unwrap();
    for (mode, cap) in MODES.into_iter().flat_map(|mode| CAPS.map(|cap| (mode, cap))) {
        let options = Options { mode, cap, world_size: 3, ..Options::default() };
        let what = format!("{mode:?}, cap {cap:?}");
        let mut frozen = open(&layout, few_optimizers()[2], &options);
        let mut plain = open(&layout, few_optimizers()[2], &options);
        let ids: Vec<ParamId> = layout.ids().collect();
        let paint = painted(&options);
        let before = Outcome::of(&frozen).unwrap();
        ids[1..].iter().for_each(|id| frozen.set_frozen(*id, true).unwrap());
        pass(&mut plain, &options, |param, values| paint(0, param, values)).unwrap();
        pass(&mut frozen, &options, |param, values| param == 0 && paint(0, param, values)).unwrap();
        assert!(frozen.view::<f32>(ids[1].grad()).unwrap().iter().all(|g| *g == 0.0), "{what}");
        ids[1..].iter().for_each(|id| frozen.set_frozen(*id, false).unwrap());
        for at in 1..3 {
            pass(&mut plain, &options, |param, values| paint(at, param, values)).unwrap();
            pass(&mut frozen, &options, |param, values| paint(at, param, values)).unwrap();
            let (after, expected) = (Outcome::of(&frozen).unwrap(), Outcome::of(&plain).unwrap());
            after.assert_same(&expected, &what);
            for (action, (ours, theirs)) in names.iter().zip(after.grads.iter().zip(&expected.grads)) {
                assert_same_bits(ours, theirs, &format!("gradient of {action:?}, {what}"));
            }
            (1..3).for_each(|param| after.assert_same_param(param, &before, param, &what));
        }
    }
}

/// Begins a pass with two micro-batches of ones for all parameters that are not frozen.
fn accumulated(stepper: &mut Stepper, frozen: Option<usize>) -> Pass<'_> {
    let ids: Vec<ParamId> = stepper.layout().ids().collect();
    let mut pass = stepper.begin_accumulating(NonZeroU32::new(2).unwrap()).unwrap();
    for micro_batch in 0..2 {
        if micro_batch == 1 {
            pass.next_micro_batch().unwrap();
        }
        for param in (0..ids.len()).rev() {
            let ones = vec![1.0; pass.params().get(ids[param]).unwrap().len()];
            if Some(param) == frozen {
                assert!(pass.grads().add(ids[param], &ones).is_err());
                continue;
            }
            pass.grads().add(ids[param], &ones).unwrap();
            pass.grad_ready(ids[param]).unwrap();
        }
        if let Some(frozen) = frozen {
            pass.params().get(ids[frozen]).unwrap();
        }
    }
    pass
}

/// There are two groups, accumulated gradients, and an abandoned pass in between.
#[test]
fn freezing_goes_with_groups_accumulation_and_abandoned_passes() {
    let sgd = Sgd { lr: 0.25, momentum: 0.5, ..Sgd::default() };
    let layout =
        Layout::builder().param("a", 300).param("b", 300).in_group("slow").param("c", 5).in_group("slow");
    let layout = layout.build().unwrap();
    let ids: Vec<ParamId> = layout.ids().collect();
    for (mode, cap) in MODES.into_iter().flat_map(|mode| [(mode, 1), (mode, 1 << 20)]) {
        let what = format!("{mode:?}, cap {cap}");
        let builder = Stepper::builder(&layout, sgd).group("slow", Sgd { lr: 0.125, ..sgd }).mode(mode);
        let mut stepper = builder.bucket_cap_bytes(cap).record(true).host(Solo::default()).unwrap();
        accumulated(&mut stepper, None).finish().unwrap();
        stepper.set_frozen(ids[1], true).unwrap();
        stepper.set_lr("slow", 0.5).unwrap();
        accumulated(&mut stepper, Some(1)).finish().unwrap();
        let given_up = accumulated(&mut stepper, Some(1)).abandon().unwrap();
        let kept = u64::from(!given_up.stepped_buckets.is_empty());
        assert_eq!(kept, u64::from(mode == Mode::Eager), "{what}");
        stepper.set_frozen(ids[1], false).unwrap();
        accumulated(&mut stepper, None).finish().unwrap();
        // Sums of 2 with momentum 1/2: buffers 2, 3, 3.5, 3.75.
        let counts: Vec<u64> = ids.iter().map(|id| stepper.step_count(*id).unwrap()).collect();
        assert_eq!(counts, [3 + kept, 2, 3 + kept], "{what}");
        let buffers = [2.0f32, 3.0, 3.5, 3.75];
        let steps = &buffers[..counts[0] as usize];
        let expected = [
            -0.25 * steps.iter().sum::<f32>(),
            -(0.125 * 2.0 + 0.5 * 3.0),
            -(0.125 * 2.0 + 0.5 * steps[1..].iter().sum::<f32>()),
        ];
        for (id, expected) in ids.iter().zip(expected) {
            let params = stepper.params();
            assert!(params.get(*id).unwrap().iter().all(|x| *x == expected), "{what}: {expected}");
        }
        recorded(&mut stepper);
    }
}

#[test]
fn what_rank_0_loads_reaches_frozen_parameters_of_all_ranks_also_of_one_that_has_joined() {
    let layout = layout(&LENGTHS);
    for (mode, cap) in MODES.into_iter().flat_map(|mode| CAPS.map(|cap| (mode, cap))) {
        let options =
            Options { mode, cap, uneven: Some(Divisor::WorldSize), record: true, ..Options::default() };
        let outcomes = in_process(3, |comm| {
            let rank = comm.rank();
            let mut stepper = options.stepper(&layout, few_optimizers()[1], comm)?;
            let frozen = layout.id("p2")?;
            stepper.set_frozen(frozen, true)?;
            for round in 0..2 {
                stepper.fill_params(|_, values| values.fill((rank + 10 * round) as f32))?;
                // In the second round rank 2 has nothing.
                if rank == 2 && round == 1 {
                    assert!(stepper.join()?);
                } else {
                    step(&mut stepper, &options, round as usize)?;
                }
                assert!(
                    stepper.view::<f32>(frozen)?.iter().all(|x| *x == 10.0 * round as f32),
                    "rank {rank}"
                );
            }
            recorded(&mut stepper);
            Outcome::of(&stepper)
        });
        let outcomes = outcomes.unwrap();
        assert_eq!(outcomes[0].step_counts, [2, 2, 0, 0, 2]);
        outcomes
            .iter()
            .for_each(|outcome| outcome.assert_same(&outcomes[0], &format!("{mode:?}, cap {cap:?}")));
    }
}

/// Makes two good passes, an action on one of three ranks, and one more pass.
fn disagree(
    mode: Mode,
    cap: Option<u64>,
    act: impl Fn(&mut Stepper) -> Result<()> + Sync,
) -> Result<Vec<()>> {
    let options = Options { mode, cap, ..Options::default() };
    let layout = layout(&LENGTHS);
    in_process(3, |comm| {
        let odd = comm.rank() == 1;
        let mut stepper = options.stepper(&layout, few_optimizers()[1], comm)?;
        for at in 0..3 {
            if at == 2 && odd {
                act(&mut stepper)?;
            }
            step(&mut stepper, &options, at)?;
        }
        stepper.close()
    })
}

#[test]
fn ranks_that_freeze_or_scale_differently_are_told_at_the_next_collective() {
    let freeze = |stepper: &mut Stepper| stepper.set_frozen(stepper.layout().id("p2")?, true);
    let thaw = |stepper: &mut Stepper| stepper.set_frozen(stepper.layout().id("p2")?, false);
    let rate = |stepper: &mut Stepper| stepper.set_lr(instep::layout::DEFAULT_GROUP, 0.125);
    let again = |stepper: &mut Stepper| stepper.set_lr(instep::layout::DEFAULT_GROUP, 0.05);
    for (mode, cap) in MODES.into_iter().flat_map(|mode| CAPS.map(|cap| (mode, cap))) {
        let differ = [disagree(mode, cap, freeze), disagree(mode, cap, rate)];
        for outcome in differ {
            let error = outcome.unwrap_err();
            assert!(matches!(error.cause(), Error::Mismatch { .. }), "{mode:?}, cap {cap:?}: {error}");
        }
        // What is back to what it was is no difference.
        disagree(mode, cap, |stepper| freeze(stepper).and_then(|()| thaw(stepper))).unwrap();
        disagree(mode, cap, |stepper| rate(stepper).and_then(|()| again(stepper))).unwrap();
    }
}
