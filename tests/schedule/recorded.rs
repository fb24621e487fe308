//! The recorded list of a real run has no hazard and no wait too many, as the simulated lists have none.
//!
//! Steppers train on the host device, and the recorder copies all submitted ops. Ops and trainer accesses come from the
//! library itself, not from a model.

use instep::hazard::{Traced, check};
use instep::op::{Action, Op, Stream};
use instep::{AdamW, Clip, Layout, Mode, Sgd, Solo, Stepper, Unused};

use crate::support::waits::{assert_each_is_missed, middle_passes};

/// Trains six passes and returns the recorded list; parameter `left_out` gets no gradient in odd passes.
fn record(mode: Mode, cap: u64, max_norm: Option<f64>, left_out: usize) -> (Stepper, Vec<Traced>) {
    let mut builder = Layout::builder();
    for k in 0..7 {
        builder = builder.param(format!("p{k}"), [300, 0, 1, 700, 256, 5, 300][k]);
    }
    let layout = builder.build().unwrap();
    let mut options =
        Stepper::builder(&layout, AdamW::default()).mode(mode).bucket_cap_bytes(cap).record(true);
    if let Some(max_norm) = max_norm {
        options = options.clip(Clip::Global(max_norm));
    }
    let mut stepper = options.host(Solo::default()).unwrap();
    for pass_index in 0..6 {
        let mut pass = stepper.begin().unwrap();
        for id in layout.ids() {
            pass.split().0.get(id).unwrap();
        }
        for (k, id) in layout.ids().enumerate().rev() {
            if k == left_out && pass_index % 2 == 1 {
                continue;
            }
            let (params, mut grads) = pass.split();
            let _ = params.get(id).unwrap();
            grads.get_mut(id).unwrap().fill(0.25);
            pass.grad_ready(id).unwrap();
        }
        pass.finish().unwrap();
    }
    stepper.status().unwrap();
    let list = stepper.take_recording().unwrap().list;
    (stepper, list)
}

#[test]
fn a_recorded_run_has_no_hazard_and_no_wait_too_many() {
    for mode in [Mode::Sequential, Mode::Eager, Mode::Normed] {
        for cap in [1, 2000, 1 << 20] {
            for max_norm in [None, Some(1.0)] {
                if mode == Mode::Eager && max_norm.is_some() {
                    continue;
                }
                let (stepper, list) = record(mode, cap, max_norm, 3);
                let what = format!("{mode:?}, cap {cap}, max_norm {max_norm:?}");
                assert_each_is_missed(stepper.plan(), 2, &list, middle_passes(&list), 12, &what);
            }
        }
    }
}

#[test]
fn what_ran_is_what_was_submitted_in_the_order_of_each_stream() {
    for mode in [Mode::Sequential, Mode::Eager, Mode::Normed] {
        let layout = Layout::builder().param("a", 3000).param("b", 3000).build().unwrap();
        let builder = Stepper::builder(&layout, AdamW::default()).mode(mode).bucket_cap_bytes(1).record(true);
        let mut stepper = builder.host(Solo::default()).unwrap();
        for _ in 0..3 {
            stepper.begin().unwrap().finish().unwrap();
        }
        stepper.status().unwrap();
        let recording = stepper.take_recording().unwrap();
        for stream in [Stream::Reduce, Stream::Optim] {
            let work =
                |op: &Op| op.stream == stream && !matches!(op.action, Action::Wait(_) | Action::Record(_));
            let submitted: Vec<Op> = recording
                .list
                .iter()
                .filter_map(|entry| if let Traced::Op(op) = entry { Some(*op) } else { None })
                .filter(work)
                .collect();
            let ran: Vec<Op> = recording.ran.iter().map(|ran| ran.op).filter(work).collect();
            assert!(!ran.is_empty() && ran == submitted, "{mode:?} {stream:?}");
        }
        let exposure = recording.exposure();
        assert!(exposure.exposed_ns <= exposure.busy_ns);
    }
}

#[test]
fn a_bucket_that_nobody_touches_is_not_reduced_under_its_own_step() {
    // Without tails nothing but the schedule's own mark orders the reduce after the step of the pass before.
    const LEN: usize = 400_000;
    let layout = Layout::builder().param("w", LEN).build().unwrap();
    let id = layout.id("w").unwrap();
    for mode in [Mode::Sequential, Mode::Eager, Mode::Normed] {
        for _ in 0..20 {
            let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Default::default() }).mode(mode);
            let mut stepper = builder.unused(Unused::StepZero).record(true).host(Solo::default()).unwrap();
            let mut pass = stepper.begin().unwrap();
            pass.grads().get_mut(id).unwrap().fill(1.0);
            pass.finish().unwrap();
            stepper.begin().unwrap().finish().unwrap();
            stepper.begin().unwrap().abandon().unwrap();
            stepper.begin().unwrap().finish().unwrap();
            assert!(stepper.view::<f32>(id).unwrap().iter().all(|&w| w == -1.0), "{mode:?}");
            let list = stepper.take_recording().unwrap().list;
            assert_eq!(check(stepper.plan(), 0, &list), [], "{mode:?}");
        }
    }
}
