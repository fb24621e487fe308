//! A forecast is the schedule of a real stepper, with times that follow from each op's time.
//!
//! The tests must compare it with a recorded real run, and with times that were computed by hand.

use instep::hazard::Traced;
use instep::op::{Action, Interval, Op};
use instep::{AdamW, Clip, Layout, Mode, ParamId, Precision, Sgd, Stepper, Strategy, Unused, in_process};

use crate::support::device::cuda;
use crate::support::{MODES, Optim, Options, Presummed, layout};

fn options(layout: &Layout, mode: Mode, strategy: Strategy) -> instep::StepperBuilder<'_> {
    let builder = Stepper::builder(layout, AdamW::default()).mode(mode).bucket_cap_bytes(4096).record(true);
    let builder = builder.strategy(strategy).unused(Unused::StepZero).precision(Precision::F32);
    if mode == Mode::Eager { builder } else { builder.clip(Clip::Global(1.0)) }
}

fn ops(list: &[Traced]) -> Vec<Op> {
    list.iter().filter_map(|entry| if let Traced::Op(op) = entry { Some(*op) } else { None }).collect()
}

#[test]
fn a_forecast_lists_the_ops_of_a_real_run_and_its_bytes() {
    let layout = layout(&[300, 1, 700, 256, 5, 2000]);
    let ids: Vec<ParamId> = layout.ids().collect();
    let modes = [Mode::Eager, Mode::Normed, Mode::Sequential];
    let strategies = [Strategy::Replicated, Strategy::Zero];
    for (mode, strategy) in modes.into_iter().flat_map(|mode| strategies.map(|strategy| (mode, strategy))) {
        let real = in_process(2, |rank| {
            let mut stepper = options(&layout, mode, strategy).host(rank)?;
            for _ in 0..3 {
                let mut pass = stepper.begin()?;
                for id in ids.iter().rev() {
                    pass.grads().get_mut(*id)?.fill(0.5);
                    pass.grad_ready(*id)?;
                }
                pass.finish()?;
            }
            Ok((ops(&stepper.take_recording().unwrap().list), stepper.memory()))
        });
        let mut stepper = options(&layout, mode, strategy).forecast(0, 2, |_, _| 10).unwrap();
        for _ in 0..3 {
            stepper.begin().unwrap().detach();
            for id in ids.iter().rev() {
                stepper.touch(id.grad()).unwrap();
                stepper.grad_ready(*id).unwrap();
            }
            stepper.finish().unwrap();
        }
        let recording = stepper.take_recording().unwrap();
        assert!(stepper.check(&recording).is_empty(), "{mode:?} {strategy:?}");
        assert_eq!((ops(&recording.list), stepper.memory()), real.unwrap()[0], "{mode:?} {strategy:?}");
    }
}

/// Returns the first bucket of each launch of steps, how many it steps, and whether a mark follows at once.
fn launches(list: &[Traced]) -> Vec<(u32, u32, bool)> {
    let ops = ops(list);
    let steps = ops.iter().enumerate().filter_map(|(at, op)| match op.action {
        Action::Step { bucket, count } => {
            let is_marked = matches!(ops.get(at + 1), Some(Op { action: Action::Record(_), .. }));
            Some((bucket, count, is_marked))
        }
        _ => None,
    });
    steps.collect()
}

#[test]
fn a_forecast_that_shares_launches_has_those_of_a_run_on_a_gpu() {
    let layout = layout(&[300, 1, 700, 256, 5, 2000, 900, 4000]);
    let adamw = Optim::of(AdamW::default());
    for mode in MODES {
        let max_norm = (mode != Mode::Eager).then_some(1.0);
        let options = Options { mode, max_norm, cap: Some(4096), record: true, ..Options::default() };
        let mut gpu = options.stepper_on(&cuda(), &layout, adamw, Presummed(4)).unwrap();
        let foresee = |shares: bool| {
            let mut stepper = options.builder(&layout, adamw).forecast(0, 4, |_, _| 10).unwrap();
            if shares {
                stepper.share_launches();
            }
            for _ in 0..2 {
                stepper.begin().unwrap().finish().unwrap();
            }
            launches(&stepper.take_recording().unwrap().list)
        };
        for _ in 0..2 {
            gpu.begin().unwrap().finish().unwrap();
        }
        let ran = launches(&gpu.take_recording().unwrap().list);
        assert_eq!(foresee(true), ran, "{mode:?}");
        let are_shared = ran.iter().any(|(_, count, _)| *count > 1);
        assert_eq!(are_shared, mode != Mode::Eager, "{mode:?}: {ran:?}");
        assert!(ran.iter().all(|(_, _, is_marked)| *is_marked), "{mode:?}: {ran:?}");
        // One that was not asked to is of the host.
        assert!(foresee(false).iter().all(|(_, count, _)| *count == 1), "{mode:?}");
    }
}

/// Returns when the ops of a kind ran in the last pass.
fn times(ran: &[instep::timeline::TimedOp], of: impl Fn(&Action) -> bool) -> Vec<(u64, u64)> {
    let found = ran.iter().filter(|ran| of(&ran.op.action)).map(|ran| ran.interval);
    found.map(|Interval { start_ns, end_ns }| (start_ns, end_ns)).collect()
}

#[test]
fn a_forecast_takes_as_long_as_its_longest_way() {
    // Two buckets of a parameter each; the first one that backward completes is bucket 0.
    let layout = layout(&[1024, 1024]);
    let [first, last] = [0, 1].map(|at| layout.ids().nth(at).unwrap());
    let cost = |op: &Op, _: u64| match op.action {
        Action::Collective { .. } => 100,
        Action::Step { .. } => 30,
        _ => 0,
    };
    let builder = Stepper::builder(&layout, Sgd::default()).bucket_cap_bytes(4096).record(true);
    let mut stepper = builder.unused(Unused::StepZero).forecast(0, 8, cost).unwrap();
    for _ in 0..2 {
        let start = stepper.now_ns();
        stepper.begin().unwrap().detach();
        for id in [last, first] {
            stepper.compute(50);
            stepper.touch(id.grad()).unwrap();
            stepper.grad_ready(id).unwrap();
        }
        stepper.finish().unwrap();
        stepper.touch(first).unwrap();
        let ran = stepper.take_recording().unwrap().ran;
        if start == 0 {
            continue; // The first pass broadcasts.
        }
        let sums = times(&ran, |action| matches!(action, Action::Collective { .. }));
        assert_eq!(sums, [(start + 50, start + 150), (start + 150, start + 250)]);
        let steps = times(&ran, |action| matches!(action, Action::Step { .. }));
        assert_eq!(steps, [(start + 150, start + 180), (start + 250, start + 280)]);
        assert_eq!(stepper.now_ns(), start + 280);
    }
}

#[test]
fn a_forecast_moves_the_bytes_that_a_step_counts_and_holds_no_values() {
    let layout = layout(&[1024]);
    let id = layout.ids().next().unwrap();
    let moved = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = std::sync::Arc::clone(&moved);
    let cost = move |op: &Op, bytes: u64| {
        if matches!(op.action, Action::Step { .. } | Action::Collective { bucket: Some(_), .. }) {
            seen.lock().unwrap().push(bytes);
        }
        0
    };
    let builder = Stepper::builder(&layout, AdamW::default()).unused(Unused::StepZero);
    let mut stepper = builder.forecast(3, 4, cost).unwrap();
    stepper.begin().unwrap().finish().unwrap();
    // A sum of f32 gradients; then a gradient is read, and a parameter and two moments are read and written.
    assert_eq!(*moved.lock().unwrap(), [4 * 1024, 28 * 1024]);
    assert!(stepper.read(id, &mut [0.0; 1024]).unwrap_err().to_string().contains("forecast"));
    assert!(stepper.write(id, &[0.0; 1024]).is_err());
}

/// 2^64 nanoseconds are 584 years: a clock stops there and does not wrap.
#[test]
fn clocks_of_a_forecast_stop_at_their_end() {
    let layout = layout(&[300, 700]);
    let mut stepper =
        options(&layout, Mode::Normed, Strategy::Zero).forecast(0, 2, |_, _| u64::MAX / 3).unwrap();
    for _ in 0..3 {
        stepper.begin().unwrap().detach();
        stepper.compute(u64::MAX / 2);
        for id in layout.ids() {
            stepper.touch(id.grad()).unwrap();
            stepper.grad_ready(id).unwrap();
        }
        stepper.finish().unwrap();
    }
    stepper.touch(layout.id("p0").unwrap()).unwrap();
    assert_eq!(stepper.now_ns(), u64::MAX);
    let recording = stepper.take_recording().unwrap();
    assert!(recording.ran.iter().all(|ran| ran.interval.start_ns <= ran.interval.end_ns));
    assert!(recording.exposure().busy_ns >= u64::MAX / 3);
}
