//! Moving averages and copies of parameters from a user's view: the updates that they count, and their types.
//!
//! Other files show that they have the same bits everywhere. Expected values come from definitions.

use half::{bf16, f16};
use instep::{DType, Error, Layout, Master, ParamId, Precision, Result, Sgd, Solo, Stepper};

fn layout() -> (Layout, ParamId) {
    let layout = Layout::builder().param("w", 2).build().unwrap();
    let w = layout.id("w").unwrap();
    (layout, w)
}

fn step(stepper: &mut Stepper, w: ParamId) -> Result<()> {
    let mut pass = stepper.begin()?;
    pass.write(w.grad(), &[-1.0, -2.0])?;
    pass.finish().map(drop)
}

fn average(stepper: &Stepper, w: ParamId) -> [f32; 2] {
    let mut average = [0.0; 2];
    stepper.read(w.ema(), &mut average).unwrap();
    average
}

#[test]
fn an_average_starts_with_the_parameters_first_update_whatever_optimizer_comes_later() {
    let (layout, w) = layout();
    let optimizer = Sgd { lr: 1.0, ..Sgd::default() };
    let mut stepper = Stepper::builder(&layout, optimizer).ema(0.5).host(Solo::default()).unwrap();
    assert_eq!(average(&stepper, w), [0.0; 2], "nothing has been averaged");
    step(&mut stepper, w).unwrap();
    assert_eq!(average(&stepper, w), [1.0, 2.0]);
    step(&mut stepper, w).unwrap();
    assert_eq!(average(&stepper, w), [1.5, 3.0]);
    let further = stepper.add_optimizer_for(&[w], Sgd { lr: 0.0, ..Sgd::default() }).unwrap();
    step(&mut stepper, w).unwrap();
    assert_eq!(
        average(&stepper, w),
        [2.25, 4.5],
        "the further optimizer's first update is not the parameter's"
    );
    stepper.set_step_count((w, further), 0).unwrap();
    step(&mut stepper, w).unwrap();
    assert_eq!(average(&stepper, w), [3.125, 6.25]);
}

#[test]
fn a_copy_is_given_as_it_is_stored_and_is_of_the_master() {
    let (layout, w) = layout();
    let precision =
        Precision { param: DType::BF16, grad: DType::BF16, master: Master::F32, ..Precision::F32 };
    let optimizer = Sgd { lr: 2f64.powi(-9), ..Sgd::default() };
    let builder = Stepper::builder(&layout, optimizer).precision(precision).copy_params(DType::F16);
    let mut stepper = builder.host(Solo::default()).unwrap();
    stepper.write(w, &[1.0, 2.0]).unwrap();
    step(&mut stepper, w).unwrap();
    // Less than half a place of bf16, and two places of f16.
    assert_eq!(stepper.view::<bf16>(w).unwrap(), [1.0, 2.0].map(bf16::from_f32));
    let master = [1.0 + 2f32.powi(-9), 2.0 + 2f32.powi(-8)];
    assert_eq!(stepper.view::<f16>(w.copy()).unwrap(), master.map(f16::from_f32));
    let refused = stepper.view::<bf16>(w.copy()).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { .. }) && refused.to_string().contains("f16"), "{refused}");
}
