//! Passes that do more than step: parameters are left out, averaged, skipped, or get infinities.
//!
//! Bits are compared with a run without the pass in question, or with the reference; nearly equal values fail.

use instep::hazard::Traced;
use instep::op::{Action, Op, Stream};
use instep::{Adam, Layout, Mode, SegmentAction, Solo, Unused};

use crate::numerics::steps::assert_one_step;
use crate::support::reference::Scalar;
use crate::support::{
    MODES, Optim, Options, Outcome, assert_same_bits, few_optimizers, layout, one_per_state_count, open,
    paint, painted, pass, run,
};

const LENGTHS: [usize; 4] = [300, 17, 2050, 5];
/// The parameter that tests leave out or poison; it is in the middle, so it has neighbours in its bucket.
const ODD: usize = 2;

/// All parameters in one bucket, and one bucket each.
const CAPS: [Option<u64>; 2] = [None, Some(1)];

#[test]
fn a_parameter_left_out_of_a_pass_keeps_every_bit_and_continues_as_if_it_had_not_been() {
    let layout = layout(&LENGTHS);
    for (optim, mode, cap) in combinations(&MODES) {
        // World 3: with Solo the whole group left it out.
        let options = Options { mode, cap, world_size: 3, ..Options::default() };
        let paint = painted(&options);
        let what = format!("{optim:?}, {mode:?}, cap {cap:?}");
        let mut stepper = open(&layout, optim, &options);
        let mut used = 0;
        for step in 0..6 {
            let before = Outcome::of(&stepper).unwrap();
            // In the very first pass, and several times in a row.
            let leave_out = [0, 2, 3, 4].contains(&step);
            let feed = |param: usize, values: &mut [f32]| {
                // Its gradients are numbered by its own steps: bias correction must be, too.
                paint(if param == ODD { used } else { step }, param, values);
                !(param == ODD && leave_out)
            };
            pass(&mut stepper, &options, feed).unwrap();
            used += usize::from(!leave_out);
            let after = Outcome::of(&stepper).unwrap();
            if leave_out {
                after.assert_same_param(ODD, &before, ODD, &format!("left out of pass {step}, {what}"));
            }
            assert_eq!(after.step_counts, [step as u64 + 1, step as u64 + 1, used as u64, step as u64 + 1]);
        }
        let mixed = Outcome::of(&stepper).unwrap();
        let steady = run(&layout, optim, &options, used, &paint);
        mixed.assert_same_param(ODD, &steady, ODD, &format!("never left out, {what}"));
        let whole = run(&layout, optim, &options, 6, &paint);
        for other in [0, 1, 3] {
            mixed.assert_same_param(other, &whole, other, &format!("beside one that was left out, {what}"));
        }
    }
}

#[test]
fn a_parameter_that_is_never_handed_over_keeps_its_first_value_and_empty_states() {
    let layout = layout(&LENGTHS);
    for (optim, mode, cap) in combinations(&MODES) {
        let options = Options { mode, cap, ..Options::default() };
        let paint = painted(&options);
        let never =
            |step: usize, param: usize, values: &mut [f32]| paint(step, param, values) && param != ODD;
        let outcome = run(&layout, optim, &options, 3, never);
        let untouched = run(&layout, optim, &options, 0, never);
        outcome.assert_same_param(ODD, &untouched, ODD, &format!("{optim:?}, {mode:?}, cap {cap:?}"));
        assert!(outcome.states[ODD].iter().flatten().all(|state| state.to_bits() == 0));
        assert_eq!(outcome.step_counts, [3, 3, 0, 3]);
    }
}

#[test]
fn step_zero_steps_what_is_left_out_with_a_zero_gradient() {
    let layout = layout(&LENGTHS);
    for (optim, mode, cap) in combinations(&MODES) {
        let options = Options { mode, cap, unused: Unused::StepZero, ..Options::default() };
        let paint = painted(&options);
        let left_out = |step: usize, param: usize, values: &mut [f32]| {
            paint(step, param, values) && (param != ODD || step.is_multiple_of(2))
        };
        let zeroed = |step: usize, param: usize, values: &mut [f32]| {
            paint(step, param, values);
            if param == ODD && !step.is_multiple_of(2) {
                values.fill(0.0);
            }
            true
        };
        let what = format!("{optim:?}, {mode:?}, cap {cap:?}");
        let outcome = run(&layout, optim, &options, 4, left_out);
        outcome.assert_same(&run(&layout, optim, &options, 4, zeroed), &what);
        assert_eq!(outcome.step_counts, [4; 4], "{what}");

        // And against the reference: the last pass left it out.
        let mut stepper = open(&layout, optim, &options);
        for step in 0..3 {
            pass(&mut stepper, &options, |param, values| left_out(step, param, values)).unwrap();
        }
        let before = Outcome::of(&stepper).unwrap();
        pass(&mut stepper, &options, |param, values| left_out(3, param, values)).unwrap();
        let after = Outcome::of(&stepper).unwrap();
        assert!(after.grads[ODD].iter().all(|g| *g == 0.0), "not what the pass before left there");
        assert_one_step(&optim.rule(), &before, &after, 1.0, &what);
    }
}

#[test]
fn average_and_leave_touch_no_parameter_and_only_average_touches_the_gradient() {
    let actions = [SegmentAction::Step, SegmentAction::Average, SegmentAction::Leave];
    let builder = actions.iter().fold(Layout::builder(), |builder, action| {
        builder.param(format!("{action:?}"), 2100).action(*action)
    });
    let layout = builder.build().unwrap();
    for (optim, mode, cap) in combinations(&MODES) {
        // The loss scale stays in an average: whoever steps that parameter knows it.
        let options = Options { mode, cap, world_size: 3, loss_scale: 8.0, ..Options::default() };
        let paint = painted(&options);
        let what = format!("{optim:?}, {mode:?}, cap {cap:?}");
        let outcome = run(&layout, optim, &options, 3, &paint);
        let untouched = run(&layout, optim, &options, 0, &paint);
        let mut fed = vec![0.0f32; 2100];
        for (param, action) in actions.into_iter().enumerate() {
            paint(2, param, &mut fed);
            if action == SegmentAction::Average {
                fed.iter_mut().for_each(|sum| *sum *= 1.0 / 3.0);
            }
            assert_same_bits(&outcome.grads[param], &fed, &format!("gradient of {action:?}, {what}"));
            if action != SegmentAction::Step {
                outcome.assert_same_param(param, &untouched, param, &format!("{action:?}, {what}"));
            }
        }
        assert_eq!(outcome.step_counts, [3, 0, 0], "{what}");
    }
}

#[test]
fn only_stepped_gradients_count_for_the_norm_and_for_skipping() {
    let actions = [SegmentAction::Step, SegmentAction::Average, SegmentAction::Leave];
    let builder = actions
        .iter()
        .fold(Layout::builder(), |builder, action| builder.param(format!("{action:?}"), 5).action(*action));
    let layout = builder.build().unwrap();
    for mode in [Mode::Sequential, Mode::Normed] {
        let options = Options { mode, skip_nonfinite: true, ..Options::default() };
        let feed = |_: usize, param: usize, values: &mut [f32]| {
            values.fill([2.0, f32::NAN, f32::INFINITY][param]);
            true
        };
        let status = run(&layout, Optim::of(Adam::default()), &options, 1, feed).status;
        assert_eq!((status.norm, status.skipped), (Some(20f64.sqrt()), false), "{mode:?}");
    }
}

#[test]
fn a_skipped_pass_changes_no_bit_and_the_next_goes_on_as_if_it_had_not_been() {
    let layout = layout(&LENGTHS);
    for (optim, mode, cap) in combinations(&[Mode::Sequential, Mode::Normed]) {
        for (bad_step, bad) in [(0, f32::NAN), (2, f32::INFINITY), (3, -f32::NAN), (0, f32::NEG_INFINITY)] {
            for max_norm in [None, Some(0.5)] {
                let options = Options {
                    mode,
                    cap,
                    max_norm,
                    skip_nonfinite: true,
                    world_size: 3,
                    ..Options::default()
                };
                let paint = painted(&options);
                let what = format!("{optim:?}, {mode:?}, cap {cap:?}, {bad} in pass {bad_step}");
                let mut stepper = open(&layout, optim, &options);
                for step in 0..4 {
                    let before = Outcome::of(&stepper).unwrap();
                    if step == bad_step {
                        let poison = |param: usize, values: &mut [f32]| {
                            paint(step, param, values);
                            if param == ODD {
                                values[values.len() - 1] = bad;
                            }
                            true
                        };
                        pass(&mut stepper, &options, poison).unwrap();
                        let after = Outcome::of(&stepper).unwrap();
                        after.assert_same(&before, &what);
                        // Buckets fill from the last parameter, so with one each p2 lies in the second.
                        let bucket = if cap.is_none() { 0 } else { 1 };
                        assert_eq!(after.status.first_nonfinite_bucket, Some(bucket), "{what}");
                        assert!(after.status.skipped && !after.status.norm.unwrap().is_finite(), "{what}");
                    }
                    pass(&mut stepper, &options, |param, values| paint(step, param, values)).unwrap();
                    let status = stepper.status().unwrap();
                    assert_eq!((status.skipped, status.first_nonfinite_bucket), (false, None), "{what}");
                }
                let undisturbed = run(&layout, optim, &options, 4, &paint);
                Outcome::of(&stepper).unwrap().assert_same(&undisturbed, &what);
            }
        }
    }
}

/// Special gradients give the results of IEEE 754, and stored NaNs are canonical.
#[test]
fn without_skipping_infinities_and_nans_are_stepped_as_ieee_says() {
    let special = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0, 0.0, -0.0];
    let layout = layout(&[special.len()]);
    for (optim, mode, _) in combinations(&MODES) {
        let options = Options { mode, world_size: 8, ..Options::default() };
        let feed = |_: usize, _: usize, values: &mut [f32]| {
            values.copy_from_slice(&special);
            true
        };
        let before = run(&layout, optim, &options, 0, feed);
        let after = run(&layout, optim, &options, 1, feed);
        let start = |param: &f32| Scalar { param: f64::from(*param), ..Scalar::default() };
        let mut ends: Vec<Scalar> = before.params[0].iter().map(start).collect();
        optim.rule().step(&mut ends, &special.map(|gradient| f64::from(gradient) / 8.0));
        for ((element, gradient), expected) in special.into_iter().enumerate().zip(ends) {
            let states =
                after.states[0].iter().zip(expected.states).map(|(state, wide)| (state[element], wide));
            for (got, wide) in states.chain([(after.params[0][element], expected.param)]) {
                let what = format!("{got} is not {wide} for {gradient}, {optim:?}, {mode:?}");
                if wide.is_nan() {
                    assert_eq!(got.to_bits(), 0x7fff_ffff, "{what}");
                } else if wide.is_infinite() {
                    assert_eq!(f64::from(got), wide, "{what}");
                } else {
                    assert!((f64::from(got) - wide).abs() <= 1e-6, "{what}");
                }
            }
        }
        assert_eq!(after.status.first_nonfinite_bucket, Some(0));
        assert!(!after.status.skipped && after.step_counts == [1]);
    }
}

/// As in `torch.nn.utils.clip_grad_norm_`, an infinite norm multiplies by 0, and a NaN multiplies by NaN.
#[test]
fn without_skipping_a_nonfinite_norm_clips_as_ieee_says() {
    let layout = layout(&[4, 300]);
    let optim = few_optimizers()[0];
    for mode in [Mode::Sequential, Mode::Normed] {
        let options = Options { mode, max_norm: Some(1.0), ..Options::default() };
        let feed = |bad: f32| {
            move |_: usize, param: usize, values: &mut [f32]| {
                values.fill(paint(1, param) + 2.0);
                if param == 1 {
                    values[299] = bad;
                }
                true
            }
        };
        let start = run(&layout, optim, &options, 0, feed(0.0));
        let infinite = run(&layout, optim, &options, 1, feed(f32::INFINITY));
        assert_eq!((infinite.status.norm, infinite.status.clip), (Some(f64::INFINITY), 0.0));
        assert_same_bits(&infinite.params[0], &start.params[0], "a zero gradient without momentum and decay");
        assert_eq!(infinite.params[1][299].to_bits(), 0x7fff_ffff, "infinity times zero");

        let nan = run(&layout, optim, &options, 1, feed(f32::NAN));
        assert!(nan.status.norm.unwrap().is_nan() && nan.status.clip.is_nan());
        assert!(nan.params.iter().flatten().all(|p| p.to_bits() == 0x7fff_ffff));
    }
}

#[test]
fn the_status_of_a_layout_without_elements_waits_for_the_decision() {
    // It would be a race, so it is given a thousand chances; without the wait about half of them are lost.
    for mode in MODES {
        for _ in 0..1000 {
            let options = Options { mode, ..Options::default() };
            let status = run(&layout(&[0]), few_optimizers()[0], &options, 1, |_, _, _| true).status;
            assert_eq!((status.clip, status.first_nonfinite_bucket), (1.0, None), "{mode:?}");
        }
    }
}

fn combinations(modes: &[Mode]) -> Vec<(Optim, Mode, Option<u64>)> {
    let each = |optim: Optim| modes.iter().flat_map(move |mode| CAPS.map(|cap| (optim, *mode, cap)));
    one_per_state_count().into_iter().flat_map(each).collect()
}

#[test]
fn eager_names_the_first_nonfinite_bucket_wherever_the_value_lies() {
    // Every lane of the widest vector, its tail, the last element of a tile and the one after it.
    let places = (0..40).chain([255, 256, 2046, 2047, 2048, 2099]);
    for place in places {
        for isa in instep::Isa::available() {
            let options = Options { mode: Mode::Eager, cap: Some(1), isa: Some(isa), ..Options::default() };
            // Parameter 1 is bucket 0; the value lies in bucket 1.
            let feed = |_: usize, param: usize, gradient: &mut [f32]| {
                gradient.fill(1.0);
                if param == 0 {
                    gradient[place] = f32::NEG_INFINITY;
                }
                true
            };
            let status = run(&layout(&[2100, 5]), few_optimizers()[0], &options, 1, feed).status;
            assert_eq!(status.first_nonfinite_bucket, Some(1), "element {place} on {isa}");
        }
    }
}

/// A forward may begin before the pass does, so it reads between passes.
#[test]
fn a_parameter_read_between_passes_waits_for_the_step_of_its_bucket_alone() {
    for mode in MODES {
        let layout = Layout::builder().param("first", 64).param("last", 64).build().unwrap();
        let options = Options { mode, cap: Some(1), record: true, ..Options::default() };
        let mut stepper = options.stepper(&layout, few_optimizers()[1], Solo::default()).unwrap();
        // Bucket 0 has the last parameter, whose gradient comes first.
        let [first, last] = ["first", "last"].map(|name| layout.id(name).unwrap());
        for _ in 0..2 {
            let mut pass = stepper.begin().unwrap();
            pass.write(last.grad(), &[1.0f32; 64]).unwrap();
            pass.write(first.grad(), &[1.0f32; 64]).unwrap();
            pass.finish().unwrap();
        }
        // Eager steps it first; the other modes begin with what a forward reads first.
        let (read_first, bucket, later) = if mode == Mode::Eager { (last, 0, 1) } else { (first, 1, 0) };
        stepper.view::<f32>(read_first).unwrap();
        let list = stepper.take_recording().unwrap().list;
        let read = list.iter().rposition(|entry| matches!(entry, Traced::Trainer(_))).unwrap();
        let awaited = list[..read].iter().rev().find_map(|entry| match entry {
            Traced::Op(Op { stream: Stream::Compute, action: Action::Wait(ticket) }) => Some(*ticket),
            _ => None,
        });
        let place = |action: Action| {
            let is_it = |entry: &Traced| matches!(entry, Traced::Op(op) if op.action == action);
            list.iter().rposition(is_it).unwrap()
        };
        let passed = place(Action::Record(awaited.unwrap()));
        assert!(place(Action::Step { bucket, count: 1 }) < passed, "{mode:?}");
        assert!(passed < place(Action::Step { bucket: later, count: 1 }), "{mode:?}");
    }
}
