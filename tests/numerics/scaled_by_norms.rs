//! The two launches of a rule that is scaled by norms make one update, whatever else is in the bucket.
//!
//! They are compared with the reference, with definitions, and with steppers of one parameter and one optimizer. The
//! norms are such that another parameter, another optimizer or a skipped pass would change them.

use half::bf16;
use instep::{AdamW, DType, Gradients, Isa, Layout, Mode, ParamId, SegmentAction, Sgd, Solo, Stepper};

use crate::numerics::lamb::lamb;
use crate::numerics::steps::assert_one_step;
use crate::support::{
    LENGTHS, MODES, Optim, Options, Outcome, Presummed, assert_same_bits, layout, open, paint_params,
    painted, pass, run,
};

/// All parameters in one bucket, some, and one bucket each.
const CAPS: [Option<u64>; 3] = [None, Some(4096), Some(1)];

/// The next pass must not use norms of a pass that changed nothing.
#[test]
fn a_skipped_pass_changes_no_bit_and_leaves_no_norm_behind() {
    let (layout, optim) = (layout(&[300, 17, 2050]), Optim::of(lamb()));
    for mode in [Mode::Sequential, Mode::Normed] {
        for cap in CAPS {
            let options = Options { mode, cap, skip_nonfinite: true, ..Options::default() };
            let (paint, what) = (painted(&options), format!("{mode:?}, cap {cap:?}"));
            let mut stepper = open(&layout, optim, &options);
            for step in 0..3 {
                let before = Outcome::of(&stepper).unwrap();
                let poison = |param: usize, values: &mut [f32]| {
                    paint(step, param, values);
                    values[param] = f32::NAN;
                    true
                };
                pass(&mut stepper, &options, poison).unwrap();
                let skipped = Outcome::of(&stepper).unwrap();
                assert!(skipped.status.skipped, "{what}");
                skipped.assert_same(&before, &what);
                pass(&mut stepper, &options, |param, values| paint(step, param, values)).unwrap();
                let after = Outcome::of(&stepper).unwrap();
                assert_eq!(after.step_counts, [step as u64 + 1; 3], "{what}");
                assert_one_step(&optim.rule(), &before, &after, 1.0, &what);
            }
        }
    }
}

/// Makes three passes of one parameter in a separate stepper.
fn alone(start: &[f32], param: usize) -> Outcome {
    let layout = layout(&[start.len()]);
    let options = Options { isa: Some(Isa::Baseline), threads: Some(1), ..Options::default() };
    let mut stepper = options.stepper(&layout, Optim::of(lamb()), Solo::default()).unwrap();
    stepper.write(layout.ids().next().unwrap(), start).unwrap();
    for step in 0..3 {
        pass(&mut stepper, &options, |_, values| painted(&options)(step, param, values)).unwrap();
    }
    Outcome::of(&stepper).unwrap()
}

#[test]
fn each_parameters_norms_are_its_own_however_the_work_is_cut() {
    let layout = layout(&LENGTHS);
    let start = Outcome::of(&open(&layout, Optim::of(lamb()), &Options::default())).unwrap();
    let expected: Vec<Outcome> =
        start.params.iter().enumerate().map(|(param, values)| alone(values, param)).collect();
    for isa in Isa::available() {
        for mode in MODES {
            for (cap, threads) in CAPS.into_iter().zip([3, 1, 2]) {
                let options =
                    Options { mode, cap, isa: Some(isa), threads: Some(threads), ..Options::default() };
                let ours = run(&layout, Optim::of(lamb()), &options, 3, painted(&options));
                for (param, expected) in expected.iter().enumerate() {
                    let what = format!("{isa}, {mode:?}, cap {cap:?}, {threads} threads");
                    ours.assert_same_param(param, expected, 0, &what);
                }
            }
        }
    }
}

#[test]
fn two_launches_zero_copy_average_and_leave_what_one_launch_does() {
    const LENS: [usize; 4] = [300, 2100, 40, 17];
    let builder = Layout::builder().param("first", LENS[0]).param("second", LENS[1]);
    let builder = builder.param("averaged", LENS[2]).action(SegmentAction::Average).param("frozen", LENS[3]);
    let layout = builder.build().unwrap();
    let (ids, optim): (Vec<ParamId>, _) = (layout.ids().collect(), Optim::of(lamb()));
    for mode in MODES {
        let options = Options { mode, gradients: Gradients::Zero, world_size: 2, ..Options::default() };
        let builder = options.builder(&layout, optim).copy_params(DType::BF16).ema(0.75);
        let mut stepper = builder.host(Presummed(2)).unwrap();
        paint_params(&mut stepper);
        stepper.set_frozen(ids[3], true).unwrap();
        let mut averages = vec![Vec::new(); 2];
        for step in 0..3 {
            let before = Outcome::of(&stepper).unwrap();
            let mut fed = LENS.map(|len| vec![0.0; len]);
            let feed = |param: usize, values: &mut [f32]| {
                painted(&options)(step, param, values);
                fed[param].copy_from_slice(values);
                param != 3
            };
            pass(&mut stepper, &options, feed).unwrap();
            let after = Outcome::of(&stepper).unwrap();
            let what = format!("{mode:?}, pass {step}");
            // The two that are stepped, with the gradients that they had.
            let (mut stepped, mut start) = (after.clone(), before.clone());
            stepped.grads = fed.to_vec();
            start.params.truncate(2);
            assert_one_step(&optim.rule(), &start, &stepped, options.divisor(), &what);
            for param in 0..2 {
                assert!(after.grads[param].iter().all(|g| g.to_bits() == 0), "{what}: zeros");
                let mut values = vec![0.0; LENS[param]];
                stepper.read(ids[param].copy(), &mut values).unwrap();
                let rounded = after.params[param].iter().map(|p| bf16::from_f32(*p).to_f32());
                assert_same_bits(&values, &rounded.collect::<Vec<f32>>(), &format!("copy, {what}"));
                stepper.read(ids[param].ema(), &mut values).unwrap();
                let now = after.params[param].iter().map(|p| f64::from(*p));
                averages[param] = match step {
                    0 => now.collect(),
                    _ => {
                        now.zip(&averages[param]).map(|(p, old): (f64, &f64)| 0.75 * old + 0.25 * p).collect()
                    }
                };
                for (ours, average) in values.iter().zip(&averages[param]) {
                    assert!((f64::from(*ours) - average).abs() <= 1e-6, "average, {what}: {ours}, {average}");
                }
            }
            let halved: Vec<f32> = fed[2].iter().map(|sum| sum / 2.0).collect();
            assert_same_bits(&after.grads[2], &halved, &format!("mean, {what}"));
            for param in [2, 3] {
                after.assert_same_param(param, &before, param, &what);
            }
        }
    }
}

/// Trains one parameter with these optimizers in turn, each in a separate stepper from its first pass on; returns value
/// and states.
fn handed_around(optims: &[(Optim, usize)], start: &[f32], param: usize, passes: usize) -> Vec<Vec<f32>> {
    let (layout, options) = (layout(&[start.len()]), Options::default());
    let id = layout.ids().next().unwrap();
    let open = |(optim, first): &(Optim, usize)| {
        (options.stepper(&layout, *optim, Solo::default()).unwrap(), *first)
    };
    let mut steppers: Vec<(Stepper, usize)> = optims.iter().map(open).collect();
    let mut value = start.to_vec();
    for step in 0..passes {
        for (stepper, _) in steppers.iter_mut().filter(|(_, first)| *first <= step) {
            stepper.write(id, &value).unwrap();
            pass(stepper, &options, |_, values| painted(&options)(step, param, values)).unwrap();
            stepper.read(id, &mut value).unwrap();
        }
    }
    let states = steppers.iter().flat_map(|(stepper, _)| Outcome::of(stepper).unwrap().states.remove(0));
    [value].into_iter().chain(states).collect()
}

#[test]
fn beside_and_behind_other_optimizers_it_does_what_it_does_alone() {
    let adamw = AdamW { lr: 0.01, ..AdamW::default() };
    let heavy = Sgd { lr: 0.05, momentum: 0.9, ..Sgd::default() };
    let (first, second, third) = (Optim::of(adamw), Optim::of(lamb()), Optim::of(heavy));
    let layout = layout(&[300, 2100, 257, 40, 5]);
    let ids: Vec<ParamId> = layout.ids().collect();
    // Before another, after another, on its own, not at all, and from the third pass on.
    let lists: [&[(Optim, usize)]; 5] = [
        &[(second, 0), (third, 0)],
        &[(first, 0), (second, 0)],
        &[(second, 0)],
        &[(first, 0)],
        &[(first, 0), (second, 2)],
    ];
    for mode in MODES {
        for cap in CAPS {
            let builder = Stepper::builder_without_optimizer(&layout).mode(mode);
            let builder = builder.bucket_cap_bytes(cap.unwrap_or(1 << 20));
            let builder = builder.optimizer_for(&[ids[1], ids[3], ids[4]], adamw);
            let builder = builder
                .optimizer_for(&[ids[0], ids[2]], lamb())
                .then_for(&ids[1..2], lamb())
                .then_for(&ids[..1], heavy);
            let mut stepper = builder.host(Solo::default()).unwrap();
            paint_params(&mut stepper);
            let start = Outcome::of(&stepper).unwrap();
            let options = Options::default();
            for step in 0..4 {
                if step == 2 {
                    stepper.add_optimizer_for(&ids[4..], lamb()).unwrap();
                }
                pass(&mut stepper, &options, |param, values| painted(&options)(step, param, values)).unwrap();
            }
            let after = Outcome::of(&stepper).unwrap();
            for (param, list) in lists.into_iter().enumerate() {
                let expected = handed_around(list, &start.params[param], param, 4);
                let what = format!("p{param}, {mode:?}, cap {cap:?}");
                assert_same_bits(&after.params[param], &expected[0], &what);
                assert_eq!(after.states[param].len(), expected.len() - 1, "{what}");
                for (ours, theirs) in after.states[param].iter().zip(&expected[1..]) {
                    assert_same_bits(ours, theirs, &format!("state of {what}"));
                }
            }
        }
    }
}
