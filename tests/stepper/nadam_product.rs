//! NAdam carries a momentum product from update to update: which updates change it, and that it follows the step count.
//!
//! The reference is the product of momenta up to the step count, from the paper's formula. Products in another order
//! may differ in their last bits, which the test allows.

use instep::{Adam, Error, Mode, NAdam, ParamId, Solo, Stepper, Unused};

use crate::support::reference::Rule;
use crate::support::{Optim, Options, layout, paint_gradient, paint_params, pass};

pub(crate) const NADAM: NAdam = NAdam {
    lr: 2e-3,
    betas: (0.9, 0.999),
    eps: 1e-8,
    weight_decay: 0.0,
    momentum_decay: 0.1,
    decoupled_weight_decay: false,
    maximize: false,
};

pub(crate) fn carried(stepper: &Stepper, id: ParamId) -> f64 {
    stepper.carried((id, stepper.optimizers_of(id).unwrap()[0])).unwrap().unwrap()
}

fn assert_product(stepper: &Stepper, id: ParamId, updates: i32) {
    let Rule::NAdam(nadam) = Optim::of(NADAM).rule() else { unreachable!() };
    let (got, expected) = (carried(stepper, id), nadam.mu_product(updates));
    assert_eq!(stepper.step_count(id).unwrap(), updates as u64);
    // Each momentum and each product has a rounding or two, in either program.
    let tolerance = 8.0 * f64::from(updates) * f64::EPSILON * expected;
    assert!((got - expected).abs() <= tolerance, "{got} is not {expected} after {updates} updates");
}

#[test]
fn only_an_update_advances_it() {
    for mode in [Mode::Sequential, Mode::Normed] {
        let options = Options { mode, skip_nonfinite: true, unused: Unused::Skip, ..Options::default() };
        let (layout, optim) = (layout(&[5, 300]), Optim::of(NADAM));
        let mut stepper = options.stepper(&layout, optim, Solo::default()).unwrap();
        paint_params(&mut stepper);
        let [first, second] = [layout.id("p0").unwrap(), layout.id("p1").unwrap()];
        let train = |stepper: &mut Stepper, step: usize, uses_second: bool, bad: bool| {
            let feed = |param: usize, values: &mut [f32]| {
                values.iter_mut().enumerate().for_each(|(k, g)| *g = paint_gradient(step, param, k));
                if bad {
                    values[0] = f32::NAN;
                }
                param == 0 || uses_second
            };
            pass(stepper, &options, feed).unwrap();
        };
        assert_product(&stepper, first, 0);
        train(&mut stepper, 0, true, false);
        assert_product(&stepper, first, 1);
        train(&mut stepper, 1, true, true); // skipped
        assert_product(&stepper, first, 1);
        train(&mut stepper, 2, false, false); // unused
        assert_product(&stepper, first, 2);
        assert_product(&stepper, second, 1);
        stepper.set_frozen(second, true).unwrap();
        train(&mut stepper, 3, false, false);
        stepper.set_frozen(second, false).unwrap();
        assert_product(&stepper, second, 1);
        drop(stepper.begin().unwrap()); // abandoned
        assert_product(&stepper, first, 3);
        train(&mut stepper, 4, true, false);
        assert_product(&stepper, first, 4);
        assert_product(&stepper, second, 2);
    }
}

#[test]
fn a_count_without_what_is_carried_beside_it_is_refused_and_changes_nothing() {
    let layout = layout(&[3]);
    let id = layout.id("p0").unwrap();
    let mut stepper = Stepper::host(&layout, NADAM, Solo::default()).unwrap();
    let nadam = stepper.optimizers_of(id).unwrap()[0];
    stepper.set_step_count((id, nadam), (3, 0.25)).unwrap();
    let refused = [
        (stepper.set_step_count(id, 3), "step_count"),
        (stepper.set_step_count((id, nadam), 4), "step_count"),
        (stepper.set_step_count((id, nadam), (1 << 63, 0.5)), "step_count"),
        (stepper.set_step_count((id, nadam), (0, 0.5)), "carried"),
        (stepper.set_step_count((id, nadam), (3, -0.5)), "carried"),
        (stepper.set_step_count((id, nadam), (3, 1.0)), "carried"),
        (stepper.set_step_count((id, nadam), (3, 1.5)), "carried"),
        (stepper.set_step_count((id, nadam), (3, f64::NAN)), "carried"),
    ];
    for (outcome, field) in refused {
        assert!(matches!(outcome, Err(Error::Config { field: f, .. }) if f == field), "{outcome:?}");
    }
    assert_eq!((stepper.step_count(id).unwrap(), carried(&stepper, id)), (3, 0.25));
    stepper.set_step_count(id, 0).unwrap();
    assert_eq!((stepper.step_count(id).unwrap(), carried(&stepper, id)), (0, 1.0));

    let mut adam = Stepper::host(&layout, Adam::default(), Solo::default()).unwrap();
    let only = adam.optimizers_of(id).unwrap()[0];
    assert_eq!(adam.carried((id, only)).unwrap(), None);
    let refused = adam.set_step_count((id, only), (3, 0.5));
    assert!(matches!(refused, Err(Error::Config { field: "carried", .. })));
}

#[test]
fn a_count_from_before_there_was_an_optimizer_is_refused_by_one_that_carries() {
    let layout = layout(&[3]);
    let id = layout.id("p0").unwrap();
    let mut stepper = Stepper::builder_without_optimizer(&layout).host(Solo::default()).unwrap();
    stepper.set_step_count(id, 5).unwrap();
    let refused = stepper.add_optimizer_for(&[id], NADAM).map(drop);
    assert!(matches!(refused, Err(Error::Config { field: "params", .. })), "{refused:?}");
    stepper.set_step_count(id, 0).unwrap();
    stepper.add_optimizer_for(&[id], NADAM).unwrap();
    assert_eq!(carried(&stepper, id), 1.0);
}
