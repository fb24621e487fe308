//! Forgotten gradients and abandoned passes: each is an error or a number, also on borrowed memory.
//!
//! The reference for a complete pass is `Unused::StepZero`. A refused pass must not change parameters, counts or the
//! caller's gradients.

use instep::layout::ForeignBucket;
use instep::{Adam, Borrowed, Error, Layout, LrSchedule, Mode, SegmentAction, Solo, Stepper, Sums, Unused};

use crate::support::device::cuda;
use crate::support::{MODES, Options, Outcome, layout, paint_params, painted, pass};

const LENGTHS: [usize; 4] = [300, 0, 17, 700];

fn options(mode: Mode, unused: Unused) -> Options {
    Options { mode, unused, ..Options::default() }
}

/// Makes a pass in which this parameter is forgotten.
fn pass_without(stepper: &mut Stepper, forgotten: usize) -> instep::Result<()> {
    let options = Options::default();
    let gradient = painted(&options);
    pass(stepper, &options, |param, values| gradient(0, param, values) && param != forgotten)
}

fn of_adam(layout: &Layout, mode: Mode, unused: Unused) -> Stepper {
    let options = options(mode, unused);
    let builder = Stepper::builder(layout, Adam::default()).mode(options.mode).unused(options.unused);
    let mut stepper = builder.bucket_cap_bytes(1).host(Solo::default()).unwrap();
    paint_params(&mut stepper);
    stepper
}

#[test]
fn a_forgotten_gradient_is_named_and_the_pass_is_abandoned() {
    let layout = layout(&LENGTHS);
    for mode in MODES {
        let mut stepper = of_adam(&layout, mode, Unused::Refuse);
        let mut reference = of_adam(&layout, mode, Unused::StepZero);
        let before = Outcome::of(&stepper).unwrap();
        let refused = pass_without(&mut stepper, 2).unwrap_err();
        assert!(matches!(&refused, Error::Order(refusal) if refusal.thing == "`p2`"), "{refused}");
        assert_eq!(stepper.status().unwrap().abandoned, 1);
        if mode != Mode::Eager {
            Outcome::of(&stepper).unwrap().assert_same(&before, "refused");
            // Complete passes have the bits of any other treatment; an empty parameter has nothing to forget.
            for _ in 0..3 {
                pass_without(&mut stepper, 1).unwrap();
                pass_without(&mut reference, 1).unwrap();
            }
            Outcome::of(&stepper).unwrap().assert_same(&Outcome::of(&reference).unwrap(), "complete");
        }
        // A frozen parameter is not forgotten.
        stepper.set_frozen(layout.id("p2").unwrap(), true).unwrap();
        pass_without(&mut stepper, 2).unwrap();
    }
}

#[test]
fn a_hand_over_of_an_unwritten_gradient_is_refused_with_a_cure_that_its_treatment_allows() {
    let layout = layout(&LENGTHS);
    for (unused, cure) in [
        (Unused::Skip, "by grad_ready"),
        (Unused::StepZero, "call set_unused"),
        (Unused::Refuse, "call set_unused"),
    ] {
        let mut stepper = of_adam(&layout, Mode::Eager, unused);
        let mut pass = stepper.begin().unwrap();
        let refused = pass.grad_ready(layout.id("p2").unwrap()).unwrap_err().to_string();
        assert!(refused.starts_with("`p2`: its gradient") && refused.contains(cure), "{unused:?}: {refused}");
    }
}

#[test]
fn what_no_step_and_no_average_takes_may_be_left_out_and_what_is_averaged_may_not() {
    for (action, is_refused) in [(SegmentAction::Leave, false), (SegmentAction::Average, true)] {
        let layout = Layout::builder().param("p0", 5).param("p1", 5).action(action).build().unwrap();
        let builder = Stepper::builder(&layout, Adam::default()).unused(Unused::Refuse);
        let mut stepper = builder.host(Solo::default()).unwrap();
        assert_eq!(pass_without(&mut stepper, 1).is_err(), is_refused, "{action:?}");
    }
}

#[test]
fn a_borrowed_bucket_that_nobody_asked_for_is_an_error_and_keeps_its_gradients() {
    let layout = Layout::builder().param("a", 3).param("b", 2).build().unwrap();
    let [a, b] = ["a", "b"].map(|name| layout.id(name).unwrap());
    for unused in [Unused::StepZero, Unused::Refuse] {
        for mode in MODES {
            let (mut first, mut second, mut bucket) = ([1.0f32; 3], [1.0f32; 2], [5.0f32; 5]);
            let at = bucket.as_mut_ptr();
            let memory = Borrowed::new()
                .param(a, first.as_mut_ptr())
                .param(b, second.as_mut_ptr())
                .bucket(ForeignBucket::new(5).gradient(a, 0).gradient(b, 3), at);
            let builder = Stepper::builder(&layout, Adam::default()).mode(mode).unused(unused);
            // SAFETY: the arrays outlive the stepper, and are touched between its passes alone.
            let mut stepper = unsafe { builder.host_borrowing(Solo::default(), memory) }.unwrap();
            let refused = stepper.begin().unwrap().finish();
            assert!(matches!(refused, Err(Error::Order(_))), "{unused:?}, {mode:?}: {refused:?}");
            assert_eq!((stepper.step_count(a).unwrap(), stepper.status().unwrap().abandoned), (0, 1));
            // One that was asked for is enough, unless every one must be.
            let mut pass = stepper.begin().unwrap();
            pass.grads().get_mut(a).unwrap();
            let outcome = pass.finish();
            assert_eq!(outcome.is_err(), unused == Unused::Refuse, "{unused:?}, {mode:?}");
            if let Err(error) = outcome {
                assert!(matches!(&error, Error::Order(refusal) if refusal.thing == "`b`"), "{error}");
                assert_eq!(stepper.step_count(a).unwrap(), 0);
                stepper.close().unwrap();
                assert_eq!((first, second, bucket), ([1.0; 3], [1.0; 2], [5.0; 5]));
                continue;
            }
            // With everything frozen there is nothing to ask for.
            for id in [a, b] {
                stepper.set_frozen(id, true).unwrap();
            }
            stepper.begin().unwrap().finish().unwrap();
            stepper.close().unwrap();
        }
    }
}

#[test]
fn a_gpu_refuses_what_the_host_refuses() {
    let layout = Layout::builder().param("a", 300).param("b", 2).build().unwrap();
    let [a, b] = ["a", "b"].map(|name| layout.id(name).unwrap());
    for mode in MODES {
        let builder = Stepper::builder(&layout, Adam::default()).mode(mode).unused(Unused::Refuse);
        // SAFETY: the trainer's stream is the default one, or the stand-in's, which is a number.
        let mut stepper = unsafe { builder.cuda(Solo::default(), &cuda()) }.unwrap();
        for asked in [vec![a], vec![a, b]] {
            let mut pass = stepper.begin().unwrap();
            for id in &asked {
                pass.ptr(id.grad()).unwrap();
            }
            match pass.finish() {
                Ok(()) => assert_eq!(asked.len(), 2, "{mode:?}"),
                Err(error) => assert!(asked.len() == 1 && error.to_string().starts_with("`b`"), "{error}"),
            }
        }
        assert_eq!((stepper.step_count(b).unwrap(), stepper.status().unwrap().abandoned), (1, 1), "{mode:?}");
    }
}

#[test]
fn every_way_to_give_a_pass_up_is_counted_and_leaves_the_schedule_where_it_was() {
    let layout = layout(&LENGTHS);
    for mode in MODES {
        let builder = Stepper::builder(&layout, Adam::default()).mode(mode);
        let builder = builder.lr_schedule("default", LrSchedule::step(0.5, 1, 0.5));
        let mut stepper = builder.host(Solo::default()).unwrap();
        pass_without(&mut stepper, 9).unwrap();
        assert_eq!(stepper.status().unwrap().abandoned, 0);
        drop(stepper.begin().unwrap());
        stepper.begin().unwrap().abandon().unwrap();
        std::mem::forget(stepper.begin().unwrap());
        stepper.abandon().unwrap();
        assert_eq!(stepper.status().unwrap().abandoned, 3, "{mode:?}");
        assert_eq!(stepper.latest_status().unwrap().abandoned, 3, "{mode:?}");
        assert_eq!(stepper.schedule_step(), 1);
        pass_without(&mut stepper, 9).unwrap();
        let status = stepper.status().unwrap();
        assert_eq!((status.pass, status.abandoned, stepper.schedule_step()), (5, 3, 2), "{mode:?}");
    }
}

#[test]
fn sums_made_outside_bring_no_counts_on_the_host_either() {
    let layout = layout(&LENGTHS);
    let build =
        |unused| Stepper::builder(&layout, Adam::default()).unused(unused).host(Sums::by_caller(0, 2));
    let refused = build(Unused::Skip).map(drop);
    assert!(matches!(refused, Err(Error::Config { field: "unused", .. })), "{refused:?}");
    for unused in [Unused::StepZero, Unused::Refuse] {
        let mut stepper = build(unused).unwrap();
        let refused = pass_without(&mut stepper, 2).unwrap_err();
        assert!(matches!(&refused, Error::Order(refusal) if refusal.thing == "`p2`"), "{refused}");
        pass_without(&mut stepper, 9).unwrap();
    }
}
