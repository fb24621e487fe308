//! Hyperparameters that change between two steps give the bits of a step built with them; a call changes all of them or
//! none.
//!
//! Replacing all hyperparameters also resets those that the call does not name; the other calls do not.

use instep::bucket_step::{Lent, StepTensors};
use instep::optim::Value;
use instep::{AdamW, BucketStep, DEFAULT_GROUP, Error, Layout, Moments, Precision, Scaling, Sgd};

use super::counts::on_both;

fn one() -> Layout {
    Layout::builder().param("w", 4).build().unwrap()
}

/// Steps once by gradients of 1, and returns the first parameter and its buffer.
fn step_once(step: &mut BucketStep, params: &mut [f32; 4], buffer: &mut [f32; 4]) -> (f32, f32) {
    let tensors = StepTensors::new(Lent::slice_mut(params), Lent::slice(&[1f32; 4]));
    step.step(&tensors.states([Lent::slice_mut(buffer)]), Scaling::NONE).unwrap();
    (params[0], buffer[0])
}

#[test]
fn a_rate_and_a_hyperparameter_change_alone_and_a_replacement_resets_the_rest() {
    let adamw = AdamW { lr: 0.5, betas: (0.5, 0.75), weight_decay: 0.25, ..AdamW::default() };
    let layout = one();
    on_both!(&layout, adamw, step => {
        step.set_lr(DEFAULT_GROUP, 0.125).unwrap();
        step.set_hyper(DEFAULT_GROUP, &[("eps", 1e-3)]).unwrap();
        step.set_hyper(DEFAULT_GROUP, &[("maximize", true)]).unwrap();
        let now = step.optimizer(DEFAULT_GROUP).unwrap();
        assert_eq!(now.get("lr"), Some(Value::Number(0.125)));
        assert_eq!(now.get("betas"), Some(Value::Pair((0.5, 0.75))));
        assert_eq!(now.get("weight_decay"), Some(Value::Number(0.25)));
        assert_eq!(now.get("eps"), Some(Value::Number(1e-3)));
        assert_eq!(now.get("maximize"), Some(Value::Flag(true)));
        step.set_optimizer(DEFAULT_GROUP, &AdamW { lr: 0.125, ..AdamW::default() }).unwrap();
        let now = step.optimizer(DEFAULT_GROUP).unwrap();
        assert_eq!(now.get("betas"), Some(Value::Pair(AdamW::default().betas)));
        assert_eq!(now.get("weight_decay"), Some(Value::Number(AdamW::default().weight_decay)));
    });
}

#[test]
fn a_schedule_of_rates_keeps_momentum() {
    let sgd = Sgd { lr: 1.0, momentum: 0.5, ..Sgd::default() };
    let mut step = BucketStep::builder(&one(), sgd).host().unwrap();
    let (mut params, mut buffer) = ([0f32; 4], [0f32; 4]);
    assert_eq!(step_once(&mut step, &mut params, &mut buffer), (-1.0, 1.0));
    step.set_lr(DEFAULT_GROUP, 0.5).unwrap();
    assert_eq!(step_once(&mut step, &mut params, &mut buffer), (-1.75, 1.5));
}

#[test]
fn a_change_that_is_refused_changes_nothing_of_it() {
    let sgd = Sgd { lr: 1.0, momentum: 0.5, ..Sgd::default() };
    let layout = one();
    on_both!(&layout, sgd, step => {
        let refusals: [&[(&str, Value)]; 5] = [
            &[("momentum", 0.25.into()), ("lr", f64::NAN.into())],
            &[("momentum", 0.25.into()), ("betas", (0.1, 0.2).into())],
            &[("momentum", true.into())],
            &[("nesterov", true.into()), ("dampening", 0.5.into())],
            &[("lr", 1e300.into())],
        ];
        for changes in refusals {
            let refused = step.set_hyper(DEFAULT_GROUP, changes);
            assert!(matches!(refused, Err(Error::Config { .. } | Error::Unsupported(_))), "{changes:?}: {refused:?}");
        }
        assert!(matches!(step.set_lr(DEFAULT_GROUP, -1.0), Err(Error::Config { field: "lr", .. })));
        assert!(matches!(step.set_lr("other", 1.0), Err(Error::Layout(_))));
        assert!(matches!(step.set_hyper("other", &[("lr", 1.0)]), Err(Error::Layout(_))));
        let now = step.optimizer(DEFAULT_GROUP).unwrap();
        assert_eq!((now.get("lr"), now.get("momentum")), (Some(1.0.into()), Some(0.5.into())));
    });
    let mut host = BucketStep::builder(&layout, sgd).host().unwrap();
    assert!(host.set_lr(DEFAULT_GROUP, f64::NAN).is_err());
    assert_eq!(step_once(&mut host, &mut [0.0; 4], &mut [0.0; 4]), (-1.0, 1.0));
}

#[test]
fn a_state_that_is_switched_off_rests_and_one_that_was_never_lent_is_refused_by_name() {
    let sgd = Sgd { lr: 1.0, momentum: 0.5, ..Sgd::default() };
    let mut step = BucketStep::builder(&one(), sgd).host().unwrap();
    let (mut params, mut buffer) = ([0f32; 4], [0f32; 4]);
    step_once(&mut step, &mut params, &mut buffer);
    step.set_hyper(DEFAULT_GROUP, &[("momentum", 0.0)]).unwrap();
    assert_eq!(step.state_names(DEFAULT_GROUP).unwrap(), ["momentum_buffer"], "it is lent all the same");
    assert_eq!(step_once(&mut step, &mut params, &mut buffer), (-2.0, 1.0));
    step.set_hyper(DEFAULT_GROUP, &[("momentum", 0.5)]).unwrap();
    assert_eq!(step_once(&mut step, &mut params, &mut buffer), (-3.5, 1.5));
    let mut plain = BucketStep::builder(&one(), Sgd::default()).host().unwrap();
    let refused = plain.set_hyper(DEFAULT_GROUP, &[("momentum", 0.5)]).unwrap_err().to_string();
    assert!(
        refused.contains("would keep momentum_buffer, where the step was built for no state"),
        "{refused}"
    );
}

#[test]
fn what_the_precision_excludes_is_excluded_later_too() {
    let layout = Layout::builder().param("w", 256).build().unwrap();
    let codes = Precision { moments: Moments::EightBit, ..Precision::F32 };
    let mut step = BucketStep::builder(&layout, AdamW::default()).precision(codes).host().unwrap();
    let refused = step.set_hyper(DEFAULT_GROUP, &[("eps", 1e-30)]);
    assert!(matches!(refused, Err(Error::Config { field: "moments", .. })), "{refused:?}");
}
