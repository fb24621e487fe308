//! States of 16 and 8 bits against the f64 reference: one step from the stored values is that of f32, and storing
//! rounds once.
//!
//! A parameter has the bound of f32 states, because a step computes with the states that it has read, before they are
//! rounded. LAMB has two launches, and its second one reads the rounded states. A state has a wider bound, by the error
//! of its format. Each step must start from the stored values, so that the error does not include earlier roundings.

use instep::{
    Adadelta, Error, Isa, Moments, Optimizer, Precision, RmsProp, Rounding, Rprop, Solo, Stepper,
    StepperBuilder,
};

use crate::support::reference::{Lamb, Rule, Scalar};
use crate::support::tolerance::{Bound, bounds, lamb_params, storage_error};
use crate::support::{Optim, Options, Outcome, layout, optimizers, paint_params, painted, pass};

const LENGTHS: [usize; 3] = [600, 17, 256];
const BLOCK: usize = 256;

/// Returns whether a state can be negative, from the papers' formulas, because the test checks the kernels' own table.
fn is_signed(state: &str) -> bool {
    match state {
        "exp_avg" | "exp_avg_fast" | "exp_avg_slow" | "grad_avg" | "momentum_buffer" | "prev" => true,
        "acc_delta" | "exp_avg_sq" | "exp_inf" | "max_exp_avg_sq" | "square_avg" | "step_size" | "sum" => {
            false
        }
        other => panic!("say whether `{other}` has a sign"),
    }
}

/// Returns whether an optimizer refuses these states, independently of the tested descriptors. With rounded states, a
/// variance that is a difference would be negative. 8-bit codes are too coarse for sizes that grow by factors near 1,
/// and for a quotient of averages that is fed back.
pub(crate) fn is_refused(optim: Optim, moments: Moments) -> bool {
    match optim.rule() {
        Rule::RmsProp(rmsprop) if rmsprop.centered => moments != Moments::F32,
        Rule::Rprop(_) | Rule::Adadelta(_) => moments == Moments::EightBit,
        _ => false,
    }
}

fn step(stepper: &mut Stepper, at: usize) -> Outcome {
    let options = Options::default();
    let paint = painted(&options);
    pass(stepper, &options, |param, values| paint(at, param, values)).unwrap();
    Outcome::of(stepper).unwrap()
}

/// Returns parameters and bounds of a step that applies the stored states in `gots`.
fn apply_stored(lamb: &Lamb, starts: &[Scalar], gots: &[Scalar], ends: &mut [Scalar], bounds: &mut [Bound]) {
    let start = |(start, got): (&Scalar, &Scalar)| Scalar { param: start.param, ..*got };
    let mut applied: Vec<Scalar> = starts.iter().zip(gots).map(start).collect();
    lamb.apply(&mut applied);
    let exact = vec![Bound { param: 0.0, states: [0.0; 3] }; starts.len()];
    let params = lamb_params(lamb, starts, &applied, &exact);
    for (((end, bound), applied), param) in ends.iter_mut().zip(bounds).zip(applied).zip(params) {
        (end.param, bound.param) = (applied.param, param);
    }
}

/// Compares every element of `after` with a step of the reference from `before`.
fn assert_one_step(optim: Optim, moments: Moments, names: &[String], before: &Outcome, after: &Outcome) {
    let rule = optim.rule();
    for (param, len) in LENGTHS.into_iter().enumerate() {
        let stored = |outcome: &Outcome| {
            let scalar = |element: usize| {
                let mut states = [0.0; 3];
                let columns = outcome.states[param].iter().map(|state| f64::from(state[element]));
                states.iter_mut().zip(columns).for_each(|(to, from)| *to = from);
                let value = f64::from(outcome.params[param][element]);
                Scalar { param: value, states, steps: outcome.step_counts[param] as i32 }
            };
            (0..len).map(scalar).collect::<Vec<Scalar>>()
        };
        let (starts, gots) = (stored(before), stored(after));
        let gradients: Vec<f64> = after.grads[param].iter().map(|g| f64::from(*g)).collect();
        let mut ends = starts.clone();
        rule.step(&mut ends, &gradients);
        let mut bounds = bounds(&rule, &starts, &ends, &gradients);
        if let Rule::Lamb(lamb) = &rule {
            apply_stored(lamb, &starts, &gots, &mut ends, &mut bounds);
        }
        for element in 0..len {
            let (start, got) = (starts[element], gots[element]);
            let (expected, bound) = (ends[element], bounds[element]);
            let what = format!(
                "{optim:?} {moments:?} p{param}[{element}]: {start:?} became {got:?}, not {expected:?}"
            );
            assert!((got.param - expected.param).abs() <= bound.param, "{what}; {bound:?}");
            for (k, name) in names.iter().enumerate() {
                let block = element / BLOCK * BLOCK..len.min((element / BLOCK + 1) * BLOCK);
                let largest = after.states[param][k][block].iter().fold(0f32, |a, x| a.max(x.abs()));
                let size = expected.states[k].abs() + bound.states[k];
                // A root is steepest near zero, so that the near end of the interval may be the worse one.
                let near = (expected.states[k].abs() - bound.states[k]).max(0.0);
                let storing =
                    [near, size].map(|x| storage_error(moments, is_signed(name), x, largest.into()));
                let error = (got.states[k] - expected.states[k]).abs();
                assert!(error <= bound.states[k] + storing[0].max(storing[1]), "{name} of {what}; {bound:?}");
            }
        }
    }
}

#[test]
fn a_step_from_stored_states_is_as_exact_as_f32s_and_stores_once_rounded_ones() {
    let layout = layout(&LENGTHS);
    for optim in optimizers() {
        let all = [Moments::F32, Moments::BF16, Moments::EightBit].into_iter().enumerate();
        for (k, moments) in all.filter(|(_, moments)| !is_refused(optim, *moments)) {
            let precision = Precision { moments, ..Precision::F32 };
            let isa = Isa::available()[k % Isa::available().len()];
            let builder = optim.builder(&layout).precision(precision).isa(isa).threads(1);
            let mut stepper = builder.host(Solo::default()).unwrap();
            paint_params(&mut stepper);
            let id = layout.ids().next().unwrap();
            let names: Vec<String> =
                stepper.state_names(id).unwrap().iter().map(|name| name.to_string()).collect();
            let mut before = Outcome::of(&stepper).unwrap();
            for at in 0..6 {
                let after = step(&mut stepper, at);
                assert_one_step(optim, moments, &names, &before, &after);
                before = after;
            }
        }
    }
}

fn assert_8_bits_are_refused(optimizer: impl Optimizer + Copy, reason: &str) {
    let layout = layout(&LENGTHS);
    let build = |moments, rounding| {
        let precision = Precision { moments, rounding, ..Precision::F32 };
        Stepper::builder(&layout, optimizer).precision(precision).host(Solo::default())
    };
    assert!(build(Moments::BF16, Rounding::Nearest).is_ok());
    for rounding in [Rounding::Nearest, Rounding::Stochastic { seed: 1 }] {
        let Err(error) = build(Moments::EightBit, rounding) else { panic!("8-bit states were accepted") };
        assert!(matches!(error, Error::Config { field: "moments", .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
}

#[test]
fn rprop_refuses_8_bit_states_because_they_cannot_hold_step_sizes() {
    assert_8_bits_are_refused(Rprop::default(), "factors near 1");
}

#[test]
fn adadelta_refuses_8_bit_states_because_they_bias_its_averages() {
    assert_8_bits_are_refused(Adadelta::default(), "bias upwards");
}

#[test]
fn what_rounded_states_would_make_nan_is_refused_wherever_it_is_registered() {
    let layout = layout(&LENGTHS);
    let id = layout.ids().next().unwrap();
    let centered = RmsProp { centered: true, ..RmsProp::default() };
    for moments in [Moments::BF16, Moments::EightBit] {
        let refused =
            |built: Result<Stepper, Error>| matches!(built, Err(Error::Config { field: "moments", .. }));
        let precision = Precision { moments, ..Precision::F32 };
        let build = |builder: StepperBuilder<'_>| builder.precision(precision).host(Solo::default());
        let plain = || Stepper::builder(&layout, RmsProp::default());
        assert!(refused(build(Stepper::builder(&layout, centered))));
        assert!(refused(build(plain().optimizer_for(&[id], centered))));
        let mut stepper = build(plain().attach(&[id], centered)).unwrap();
        let added = stepper.add_optimizer_for(&[id], centered);
        assert!(matches!(added, Err(Error::Config { field: "moments", .. })));
        stepper.begin().unwrap().finish().unwrap();
    }
}
