//! Buckets run in any order if nothing is sent, in index order if ranks meet, and on the caller's thread if asked.
//!
//! The recorded ops show an order. Bits must not depend on it.

use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use instep::hazard::Traced;
use instep::op::Action;
use instep::optim::{Custom, ParamStep, StepParam};
use instep::{
    Clip, Divisor, Layout, Mode, ParamId, Result, Solo, Stepper, StepperBuilder, Sums, Unused, in_process,
};

use crate::support::{MODES, Optim, Outcome, Presummed, few_optimizers, layout, paint, paint_params};

/// There is one parameter per bucket.
const LENGTHS: [usize; 3] = [300, 2100, 17];
const ORDERS: [[usize; 3]; 4] = [[2, 1, 0], [0, 1, 2], [1, 2, 0], [2, 0, 1]];

fn builder(layout: &Layout, optim: Optim, mode: Mode) -> StepperBuilder<'_> {
    optim.builder(layout).mode(mode).bucket_cap_bytes(1).threads(1).record(true)
}

/// Trains two passes and returns the buckets in the order of their steps.
fn train(stepper: &mut Stepper, order: [usize; 3]) -> Result<Vec<u32>> {
    paint_params(stepper);
    let ids: Vec<ParamId> = stepper.layout().ids().collect();
    for step in 0..2 {
        let mut pass = stepper.begin()?;
        for param in order {
            let values: Vec<f32> = (0..LENGTHS[param]).map(|k| paint(param + 7 * step, k)).collect();
            pass.write(ids[param].grad(), &values)?;
            pass.grad_ready(ids[param])?;
        }
        pass.finish()?;
    }
    let recording = stepper.take_recording().unwrap();
    assert_eq!(stepper.check(&recording), []);
    let stepped = |traced: &Traced| match traced {
        Traced::Op(op) => match op.action {
            Action::Step { bucket, .. } => Some(bucket),
            _ => None,
        },
        _ => None,
    };
    Ok(recording.list.iter().filter_map(stepped).collect())
}

#[test]
fn a_bucket_that_the_caller_sums_is_stepped_whichever_comes_first() {
    let layout = layout(&LENGTHS);
    for (optim, mode) in few_optimizers().into_iter().flat_map(|optim| MODES.map(|mode| (optim, mode))) {
        let mut first = None;
        for order in ORDERS {
            let mut stepper =
                builder(&layout, optim, mode).unused(Unused::Refuse).host(Sums::by_caller(0, 3)).unwrap();
            let stepped = train(&mut stepper, order).unwrap();
            if mode == Mode::Eager {
                // The last parameter is in the first bucket.
                let expected: Vec<u32> = order.iter().map(|param| 2 - *param as u32).collect();
                assert_eq!(stepped, [&expected[..], &expected].concat());
            }
            let outcome = Outcome::of(&stepper).unwrap();
            first
                .get_or_insert_with(|| outcome.clone())
                .assert_same(&outcome, &format!("{optim:?} {mode:?} {order:?}"));
        }
    }
}

#[test]
fn ranks_that_meet_keep_the_order_of_the_buckets() {
    let layout = layout(&LENGTHS);
    for order in ORDERS {
        let stepped = in_process(2, |comm| {
            let optim = few_optimizers()[2];
            train(&mut builder(&layout, optim, Mode::Eager).host(comm)?, order)
        });
        assert_eq!(stepped.unwrap(), [[0, 1, 2, 0, 1, 2]; 2], "{order:?}");
    }
}

#[test]
fn an_abandoned_pass_names_the_buckets_that_were_stepped_in_their_order() {
    let layout = layout(&LENGTHS);
    let ids: Vec<ParamId> = layout.ids().collect();
    let mut stepper = builder(&layout, few_optimizers()[0], Mode::Eager).host(Solo::default()).unwrap();
    let mut pass = stepper.begin().unwrap();
    for param in [0, 2] {
        pass.write(ids[param].grad(), &vec![1.0; LENGTHS[param]]).unwrap();
        pass.grad_ready(ids[param]).unwrap();
    }
    assert_eq!(pass.abandon().unwrap().stepped_buckets, [2, 0]);
    let counts: Vec<u64> = ids.iter().map(|id| stepper.step_count(*id).unwrap()).collect();
    assert_eq!(counts, [1, 0, 1]);
}

#[test]
fn inline_steps_give_the_bits_of_threads_for_one_rank_and_for_several() {
    let layout = layout(&LENGTHS);
    for (optim, mode) in few_optimizers().into_iter().flat_map(|optim| MODES.map(|mode| (optim, mode))) {
        let run = |is_inline: bool| {
            in_process(2, |comm| {
                let builder = builder(&layout, optim, mode);
                let builder = if is_inline { builder.inline() } else { builder };
                let mut stepper = builder.host(comm)?;
                train(&mut stepper, ORDERS[2])?;
                Outcome::of(&stepper)
            })
        };
        let (inline, threads) = (run(true).unwrap(), run(false).unwrap());
        inline.iter().zip(&threads).for_each(|(a, b)| a.assert_same(b, &format!("{optim:?} {mode:?}")));
    }
}

/// An optimizer that records the thread that runs it.
#[derive(Clone, Debug, Default)]
struct Noting(Arc<Mutex<Vec<ThreadId>>>);

impl StepParam for Noting {
    fn name(&self) -> &str {
        "noting"
    }

    fn step_param(&self, _: ParamStep<'_>) -> Result<()> {
        self.0.lock().unwrap().push(thread::current().id());
        Ok(())
    }
}

#[test]
fn an_inline_step_has_run_on_the_callers_thread_when_the_hand_over_returns() {
    let layout = layout(&LENGTHS);
    let noting = Noting::default();
    let builder = Stepper::builder(&layout, Custom::new(noting.clone())).bucket_cap_bytes(1);
    let mut stepper = builder.inline().threads(1).host(Solo::default()).unwrap();
    let mut pass = stepper.begin().unwrap();
    for (count, (id, len)) in layout.ids().zip(LENGTHS).enumerate() {
        pass.write(id.grad(), &vec![1.0; len]).unwrap();
        pass.grad_ready(id).unwrap();
        assert_eq!(*noting.0.lock().unwrap(), vec![thread::current().id(); count + 1]);
    }
    pass.finish().unwrap();
    stepper.close().unwrap();
}

#[test]
fn a_frozen_bucket_that_counts_ranks_is_summed_before_the_decision_reads_it() {
    let layout = layout(&LENGTHS);
    let ids: Vec<ParamId> = layout.ids().collect();
    for order in ORDERS {
        let builder = builder(&layout, few_optimizers()[2], Mode::Eager).clip(Clip::Previous(1.0));
        let builder = builder.uneven_inputs(Divisor::ContributingRanks);
        let mut stepper = builder.host(Presummed(2)).unwrap();
        // The last parameter is in the first bucket, which carries the count.
        stepper.set_frozen(ids[2], true).unwrap();
        for _ in 0..3 {
            let mut pass = stepper.begin().unwrap();
            for param in order.into_iter().filter(|param| *param != 2) {
                pass.write(ids[param].grad(), &vec![1.0; LENGTHS[param]]).unwrap();
                pass.grad_ready(ids[param]).unwrap();
            }
            pass.finish().unwrap();
        }
        let recording = stepper.take_recording().unwrap();
        assert_eq!(stepper.check(&recording), [], "{order:?}");
    }
}
