//! The momentum product that NAdam carries, in checkpoints and in states of torch.
//!
//! A state without its product is refused and changes nothing. `stepper::nadam_product` tests which updates change it.

use std::io::Cursor;

use instep::checkpoint::safetensors::Dtype;
use instep::checkpoint::{self, Extras};
use instep::layout::DEFAULT_GROUP;
use instep::{Layout, Mode, Sgd, Solo, Stepper};

use crate::checkpoint::import::import;
use crate::checkpoint::refusals::f32s;
use crate::checkpoint::round_trip::bytes_of;
use crate::stepper::nadam_product::{NADAM, carried};
use crate::support::{MODES, Options, Outcome, layout, paint_gradient, paint_params, pass};

/// SGD comes first, so the product belongs to a second optimizer.
#[test]
fn a_checkpoint_has_that_of_a_further_optimizer_too() {
    let (layout, options) = (layout(&[5, 300]), Options::default());
    let open = |mode| {
        let builder = Stepper::builder(&layout, Sgd::default()).then(DEFAULT_GROUP, NADAM).mode(mode);
        builder.host(Solo::default()).unwrap()
    };
    let train = |stepper: &mut Stepper, step: usize| {
        let feed = |param: usize, values: &mut [f32]| {
            values.iter_mut().enumerate().for_each(|(k, g)| *g = paint_gradient(step, param, k));
            true
        };
        pass(stepper, &options, feed).unwrap();
    };
    let mut whole = open(Mode::Sequential);
    paint_params(&mut whole);
    (0..3).for_each(|step| train(&mut whole, step));
    let bytes = bytes_of(&whole, &Extras::default());
    let halfway = Outcome::of(&whole).unwrap();
    assert!(halfway.carried.iter().all(|carried| carried.len() == 1 && carried[0] != 1f64.to_bits()));
    (3..5).for_each(|step| train(&mut whole, step));
    for mode in MODES {
        let mut stepper = open(mode);
        checkpoint::read(&mut stepper, Cursor::new(&bytes)).unwrap();
        Outcome::of(&stepper).unwrap().assert_same(&halfway, "loaded");
        (3..5).for_each(|step| train(&mut stepper, step));
        Outcome::of(&stepper).unwrap().assert_same(&Outcome::of(&whole).unwrap(), "trained on");
    }
}

#[test]
fn a_state_of_torch_comes_with_its_product_or_is_refused() {
    let layout = Layout::builder().param("w", 1).param("b", 1).build().unwrap();
    let (w, b) = (layout.id("w").unwrap(), layout.id("b").unwrap());
    let mut stepper = Stepper::host(&layout, NADAM, Solo::default()).unwrap();
    let state = |product| {
        [
            ("state.0.step", Dtype::F32, &[][..], f32s(&[9.0])),
            ("state.0.exp_avg", Dtype::F32, &[1], f32s(&[2.0])),
            ("state.0.exp_avg_sq", Dtype::F32, &[1], f32s(&[3.0])),
            ("state.0.mu_product", Dtype::F32, &[], f32s(&[product])),
        ]
    };
    let refused = [
        (&state(0.1)[..3], "`state.w.mu_product`: missing"),
        (&state(1.5), "and a number of at least 0 and below 1 after it"),
        (&state(1.0), "below 1 after it"),
        (&state(f32::NAN), "below 1 after it"),
        (&state(0.1)[3..], "missing"),
    ];
    for (tensors, word) in refused {
        let error = import(&mut stepper, tensors, None).unwrap_err().to_string();
        assert!(error.contains(word), "{error}, not {word}");
        assert_eq!((stepper.step_count(w).unwrap(), carried(&stepper, w)), (0, 1.0));
    }
    import(&mut stepper, &state(0.1), None).unwrap();
    assert_eq!((stepper.step_count(w).unwrap(), carried(&stepper, w)), (9, f64::from(0.1f32)));
    // torch has nothing of what has had no update.
    assert_eq!((stepper.step_count(b).unwrap(), carried(&stepper, b)), (0, 1.0));
}
