//! T-DDP-7: micro-batches, learning-rate schedules and errors in the middle of backward, against ordinary training in
//! f64.
//!
//! `ranks::uneven`, `stepper::passes` and `ranks::multirank` compare uneven inputs and unused parameters with the bits
//! of one rank. Gradients are handed over in backward's order, one bucket each, so an error comes while steps run.

use std::num::NonZeroU32;

use instep::layout::DEFAULT_GROUP;
use instep::{Adam, Error, LrSchedule, Mode, Result, Sgd, Stepper, in_process};

use super::network::{batch, sum};
use super::ranks::{
    RANKS, as_f32, averaged, batch_of, initialise, iterate, layout_of, own, step_ordinary, three_layers,
};
use super::{Ordinary, assert_like, ids};
use crate::support::{MODES, Optim, Outcome};

fn optimizers() -> [Optim; 2] {
    let sgd = Sgd { lr: 0.03, momentum: 0.9, nesterov: true, ..Sgd::default() };
    [Optim::of(sgd), Optim::of(Adam { lr: 0.03, ..Adam::default() })]
}

fn cases() -> impl Iterator<Item = (Optim, Mode)> {
    optimizers().into_iter().flat_map(|optim| MODES.map(|mode| (optim, mode)))
}

#[test]
fn ddp_7_micro_batches_are_one_ordinary_step_on_the_mean_of_their_gradients() {
    const MICRO_BATCHES: u32 = 4;
    let part = |rank: usize, iteration: usize, micro_batch: u32| {
        batch(1, 3, 100 * iteration + 10 * micro_batch as usize + rank)
    };
    for (optim, mode) in cases() {
        in_process(RANKS as u32, |comm| {
            let (rank, mut network) = (comm.rank() as usize, three_layers(0));
            let layout = layout_of(&network);
            let mut stepper = optim.builder(&layout).mode(mode).bucket_cap_bytes(40).host(comm)?;
            initialise(&mut stepper, &three_layers(rank))?;
            let (all, mut ordinary) = (ids(&stepper), Ordinary::new(&network, |_| vec![optim.rule()]));
            for iteration in 0..5 {
                let mut pass = stepper.begin_accumulating(NonZeroU32::new(MICRO_BATCHES).unwrap())?;
                for micro_batch in 0..MICRO_BATCHES {
                    if micro_batch > 0 {
                        pass.next_micro_batch()?;
                    }
                    // The loss is divided, so that the micro-batches' gradients add up to their mean.
                    let slope = |output: &[f64]| vec![1.0 / f64::from(MICRO_BATCHES); output.len()];
                    let backward =
                        own(&pass, &network, &all)?.backward(&part(rank, iteration, micro_batch), slope);
                    for (param, gradient) in backward {
                        pass.grads().add(all[param], &as_f32(&gradient))?;
                        pass.grad_ready(all[param])?;
                    }
                }
                pass.finish()?;
                let parts = (0..RANKS).flat_map(|rank| (0..MICRO_BATCHES).map(move |m| (rank, m)));
                let everything: Vec<Vec<f64>> =
                    parts.flat_map(|(rank, m)| part(rank, iteration, m)).collect();
                let share = 1.0 / everything.len() as f64;
                let mean = network.gradients(&everything, |output| vec![share; output.len()]);
                for (param, gradient) in mean.iter().enumerate() {
                    ordinary.step(&mut network, param, gradient);
                }
                let what = format!("{optim:?}, {mode:?}, rank {rank}, iteration {iteration}");
                assert_like(&stepper, &network, &ordinary, &what)?;
            }
            stepper.close()
        })
        .unwrap();
    }
}

/// `StepLR`: the rate falls every fifth step.
#[test]
fn ddp_7_a_scheduled_rate_is_an_ordinary_optimizers_with_the_same_closed_form() {
    for (optim, mode) in cases() {
        in_process(RANKS as u32, |comm| {
            let (rank, mut network) = (comm.rank() as usize, three_layers(0));
            let layout = layout_of(&network);
            let builder = optim.builder(&layout).lr_schedule(DEFAULT_GROUP, LrSchedule::step(0.05, 5, 0.1));
            let mut stepper = builder.mode(mode).bucket_cap_bytes(40).host(comm)?;
            initialise(&mut stepper, &three_layers(rank))?;
            let mut ordinary = Ordinary::new(&network, |_| vec![optim.rule()]);
            for iteration in 0..12 {
                for (rules, _) in &mut ordinary.params {
                    *rules[0].lr_mut() = 0.05 * 0.1f64.powi(iteration / 5);
                }
                iterate(&mut stepper, &network, rank, iteration as usize)?;
                step_ordinary(&mut ordinary, &mut network, RANKS, iteration as usize, |_| true);
                let what = format!("{optim:?}, {mode:?}, rank {rank}, iteration {iteration}");
                assert_like(&stepper, &network, &ordinary, &what)?;
            }
            stepper.close()
        })
        .unwrap();
    }
}

/// Makes backward fail after its third gradient; the pass is abandoned or dropped. Returns the parameters that were
/// stepped.
fn fail_in_mid_backward(
    (stepper, mode): (&mut Stepper, Mode),
    rank: usize,
    iteration: usize,
    drops: bool,
) -> Result<Vec<u32>> {
    let (network, all) = (three_layers(0), ids(stepper));
    let mut pass = stepper.begin()?;
    let gradients = own(&pass, &network, &all)?.backward(&batch_of(&network, rank, iteration), sum);
    let mut backward = || -> Result<()> {
        for (param, gradient) in &gradients[..3] {
            pass.grads().write(all[*param], &as_f32(gradient))?;
            pass.grad_ready(all[*param])?;
        }
        // Written, and never handed over.
        pass.grads().get_mut(all[gradients[3].0])?.fill(1e9);
        Err(Error::Hook("backward ran out of memory".into()))
    };
    assert!(matches!(backward(), Err(Error::Hook(_))));
    if drops { Ok(stepped_in(mode)) } else { Ok(pass.abandon()?.stepped_buckets) }
}

fn stepped_in(mode: Mode) -> Vec<u32> {
    if mode == Mode::Eager { vec![0, 1, 2] } else { Vec::new() }
}

#[test]
fn ddp_7_after_an_error_in_mid_backward_the_next_pass_is_ordinary_again() {
    for ((optim, mode), drops) in cases().flat_map(|case| [(case, false), (case, true)]) {
        in_process(RANKS as u32, |comm| {
            let (rank, mut network) = (comm.rank() as usize, three_layers(0));
            let layout = layout_of(&network);
            let mut stepper =
                optim.builder(&layout).mode(mode).bucket_cap_bytes(1).record(true).host(comm)?;
            initialise(&mut stepper, &three_layers(rank))?;
            let mut ordinary = Ordinary::new(&network, |_| vec![optim.rule()]);
            for iteration in 0..6 {
                let what =
                    format!("{optim:?}, {mode:?}, rank {rank}, iteration {iteration}, dropped: {drops}");
                if iteration % 2 == 0 {
                    iterate(&mut stepper, &network, rank, iteration)?;
                    step_ordinary(&mut ordinary, &mut network, RANKS, iteration, |_| true);
                } else {
                    let before = Outcome::of(&stepper)?;
                    let buckets = fail_in_mid_backward((&mut stepper, mode), rank, iteration, drops)?;
                    assert_eq!(buckets, stepped_in(mode), "{what}");
                    let stepped: Vec<usize> = buckets
                        .iter()
                        .copied()
                        .flat_map(|bucket| {
                            stepper.plan().segments_of(&stepper.plan().buckets()[bucket as usize])
                        })
                        .map(|segment| segment.param as usize)
                        .collect();
                    if mode != Mode::Eager {
                        Outcome::of(&stepper)?.assert_same(&before, &what);
                    }
                    // All from where backward was: an ordinary step of exactly those.
                    let mean = averaged(&network, RANKS, iteration);
                    stepped.iter().for_each(|param| ordinary.step(&mut network, *param, &mean[*param]));
                }
                assert_like(&stepper, &network, &ordinary, &what)?;
            }
            let recording = stepper.take_recording().unwrap();
            assert_eq!(stepper.check(&recording), [], "{optim:?}, {mode:?}");
            stepper.close()
        })
        .unwrap();
    }
}
