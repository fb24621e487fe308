//! Optimizers are registered before the stepper is built, after it, and after two passes.
//!
//! A late optimizer begins with zero states and the parameter's step count. This difference from PyTorch is documented:
//! a count belongs to a parameter. Earlier states keep every bit.

use instep::{
    AdamW, Clip, Device, Error, LossScaler, Mode, ParamId, Result, Sgd, Solo, Stepper, StepperBuilder,
    in_process,
};

use super::network::{Network, sum};
use super::ranks::{RANKS, batch_of, initialise, iterate, layout_of, step_ordinary, three_layers};
use super::{Ordinary, assert_like, ids};
use crate::support::device::cuda;
use crate::support::{MODES, Optim, Outcome, assert_same_bits};

const ITERATIONS: usize = 6;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    Before,
    AfterBuilding,
    AfterTwoPasses,
}

const WHENS: [When; 3] = [When::Before, When::AfterBuilding, When::AfterTwoPasses];

fn heavy() -> Sgd {
    Sgd { lr: 0.05, momentum: 0.9, dampening: 0.5, ..Sgd::default() }
}

fn averaging() -> AdamW {
    AdamW { lr: 0.02, weight_decay: 0.1, ..AdamW::default() }
}

/// Weights have momentum from the start. Two optimizers come late: a second one for the first weight, and one for all
/// biases.
fn late(layout: &instep::Layout) -> [(Vec<ParamId>, Optim); 2] {
    let all: Vec<ParamId> = layout.ids().collect();
    let biases = all.iter().copied().skip(1).step_by(2).collect();
    let gentle = Sgd { lr: 0.01, weight_decay: 0.1, ..heavy() };
    [
        (vec![all[0]], Optim::of(averaging())),
        (biases, Optim::of(Sgd { nesterov: true, dampening: 0.0, ..gentle })),
    ]
}

fn builder(layout: &instep::Layout, when: When, mode: Mode) -> StepperBuilder<'_> {
    let weights: Vec<ParamId> = layout.ids().step_by(2).collect();
    let builder = Stepper::builder_without_optimizer(layout).optimizer_for(&weights, heavy());
    let builder = match when {
        When::Before => {
            late(layout).into_iter().fold(builder, |b, (params, o)| b.then_for(&params, o.boxed()))
        }
        _ => builder,
    };
    builder.mode(mode).bucket_cap_bytes(40).record(true)
}

/// Registers the late optimizers, and asserts that all else is unchanged.
fn register<D: Device>(stepper: &mut Stepper<D>) -> Result<()> {
    let before = Outcome::of(stepper)?;
    let known = stepper.optimizers().len();
    for (k, (params, optim)) in late(&stepper.layout().clone()).into_iter().enumerate() {
        let id = stepper.add_optimizer_for(&params, optim.boxed())?;
        assert_eq!(stepper.optimizers().nth(known + k).unwrap().id, id);
        assert!(params.iter().all(|param| stepper.optimizers_of(*param).unwrap().last() == Some(&id)));
    }
    let after = Outcome::of(stepper)?;
    // Earlier states come first.
    after.assert_same(&before, "kept");
    for (param, (mine, grads)) in after.states.iter().zip(after.grads.iter().zip(&before.grads)).enumerate() {
        let new = mine.iter().skip(before.states[param].len());
        assert!({ new }.flatten().all(|value| value.to_bits() == 0), "new states begin as zeros");
        assert_same_bits(grads.0, grads.1, "gradients");
    }
    Ok(())
}

fn assert_no_hazard<D: Device>(stepper: &mut Stepper<D>, what: &str) {
    let recording = stepper.take_recording().unwrap();
    assert_eq!(stepper.check(&recording), [], "{what}");
}

/// Trains one rank beside ordinary training; returns its outcome.
fn train(mut stepper: Stepper, when: When, what: &str) -> Result<Outcome> {
    let (rank, ranks) = (stepper.rank() as usize, stepper.world_size() as usize);
    let layout = stepper.layout().clone();
    let mut network = three_layers(0);
    initialise(&mut stepper, &three_layers(rank))?;
    let mut ordinary =
        Ordinary::new(
            &network,
            |param| if param % 2 == 0 { vec![Optim::of(heavy()).rule()] } else { vec![] },
        );
    let mut has_late = false;
    for iteration in 0..ITERATIONS {
        let begins = [0, 0, 2][WHENS.iter().position(|known| *known == when).unwrap()];
        if iteration == begins {
            if when != When::Before {
                assert_no_hazard(&mut stepper, what);
                register(&mut stepper)?;
            }
            for (params, optim) in late(&layout) {
                for param in params {
                    let param = ids(&stepper).iter().position(|id| *id == param).unwrap();
                    ordinary.add(param, optim.rule(), 0);
                }
            }
            has_late = true;
        }
        iterate(&mut stepper, &network, rank, iteration)?;
        step_ordinary(&mut ordinary, &mut network, ranks, iteration, |param| has_late || param % 2 == 0);
        assert_like(&stepper, &network, &ordinary, &format!("{what}, rank {rank}, iteration {iteration}"))?;
    }
    assert_no_hazard(&mut stepper, what);
    Outcome::of(&stepper)
}

#[test]
fn an_optimizer_registered_late_steps_as_one_registered_early() {
    for (mode, ranks) in MODES.into_iter().flat_map(|mode| [(mode, 1), (mode, RANKS as u32)]) {
        let layout = layout_of(&three_layers(0));
        let run = |when| {
            let what = format!("{mode:?}, {when:?}");
            in_process(ranks, |comm| train(builder(&layout, when, mode).host(comm)?, when, &what)).unwrap()
        };
        let [before, after, _] = WHENS.map(run);
        for (before, after) in before.iter().zip(&after) {
            after.assert_same(before, &format!("{mode:?}"));
        }
    }
}

/// Both devices give the same bits, with gradients computed from the parameters of each.
#[test]
fn a_gpu_takes_late_optimizers_as_the_host_does() {
    fn run<D: Device>(mut stepper: Stepper<D>, when: When) -> Result<Outcome> {
        let mut network: Network = three_layers(0);
        initialise(&mut stepper, &network)?;
        for iteration in 0..ITERATIONS {
            if iteration == if when == When::AfterBuilding { 0 } else { 2 } {
                register(&mut stepper)?;
            }
            let ids = ids(&stepper);
            let mut pass = stepper.begin()?;
            let read = |(param, id): (usize, &ParamId)| {
                let mut values = vec![0.0; network.params()[param].len()];
                pass.read(*id, &mut values).unwrap();
                values
            };
            let values: Vec<Vec<f32>> = ids.iter().enumerate().map(read).collect();
            network.set_params(values.into_iter());
            for (param, gradient) in network.backward(&batch_of(&network, 0, iteration), sum) {
                pass.write(ids[param].grad(), &super::ranks::as_f32(&gradient))?;
                pass.grad_ready(ids[param])?;
            }
            pass.finish()?;
        }
        assert_no_hazard(&mut stepper, &format!("{when:?}"));
        Outcome::of(&stepper)
    }
    let layout = layout_of(&three_layers(0));
    for (mode, when) in
        MODES.into_iter().flat_map(|mode| [When::AfterBuilding, When::AfterTwoPasses].map(|w| (mode, w)))
    {
        let host = builder(&layout, when, mode).host(Solo::default()).unwrap();
        // SAFETY: the trainer's stream is the default one, or the stand-in's, which is a number.
        let gpu = unsafe { builder(&layout, when, mode).cuda(Solo::default(), &cuda()) }.unwrap();
        run(gpu, when).unwrap().assert_same(&run(host, when).unwrap(), &format!("{mode:?}, {when:?}"));
    }
}

#[test]
fn ranks_that_register_differently_are_told() {
    let layout = layout_of(&three_layers(0));
    for differ in 0..3 {
        let outcome = in_process(2, |comm| {
            let odd = comm.rank() == 1;
            let mut stepper = builder(&layout, When::AfterBuilding, Mode::Eager).host(comm)?;
            iterate(&mut stepper, &three_layers(0), 0, 0)?;
            let all = ids(&stepper);
            match differ {
                // One only, another rate, another parameter.
                0 if odd => {}
                1 if odd => drop(stepper.add_optimizer_for(&all[..1], AdamW { lr: 0.5, ..averaging() })?),
                2 if odd => drop(stepper.add_optimizer_for(&all[2..3], averaging())?),
                _ => drop(stepper.add_optimizer_for(&all[..1], averaging())?),
            }
            iterate(&mut stepper, &three_layers(0), 0, 1)?;
            stepper.status().map(drop)
        });
        let error = outcome.unwrap_err();
        assert!(matches!(error.cause(), Error::Mismatch { .. }), "{differ}: {error}");
    }
}

#[test]
fn what_cannot_be_registered_is_refused_and_changes_nothing() {
    let layout = layout_of(&three_layers(0));
    let mut stepper = builder(&layout, When::Before, Mode::Eager).host(Solo::default()).unwrap();
    iterate(&mut stepper, &three_layers(0), 0, 0).unwrap();
    let (before, all) = (Outcome::of(&stepper).unwrap(), ids(&stepper));
    let refused = stepper.add_optimizer_for(&all, AdamW { lr: f64::NAN, ..averaging() });
    assert!(matches!(refused, Err(Error::Config { field: "lr", .. })), "{refused:?}");
    let foreign = crate::support::layout(&[1; 9]).ids().last().unwrap();
    let refused = stepper.add_optimizer_for(&[foreign], averaging());
    assert!(matches!(refused, Err(Error::Layout(_))), "{refused:?}");
    let refused = stepper.add_optimizer_for(&[all[0], all[1], all[0]], averaging());
    assert!(matches!(refused, Err(Error::Config { field: "params", .. })), "{refused:?}");
    std::mem::forget(stepper.begin().unwrap());
    let refused = stepper.add_optimizer_for(&all, averaging());
    assert!(matches!(refused, Err(Error::Order(_))), "{refused:?}");
    stepper.abandon().unwrap();
    assert_eq!(stepper.optimizers().len(), 3);
    Outcome::of(&stepper).unwrap().assert_same(&before, "refused");
    stepper.add_optimizer_for(&all, averaging()).unwrap();
}

/// A stepper also keeps its scales and norms of earlier passes.
#[test]
fn scales_and_norms_of_earlier_passes_are_kept() {
    let layout = layout_of(&three_layers(0));
    let network = three_layers(0);
    let scaler = LossScaler { initial_scale: 8.0, growth_interval: 3, ..LossScaler::default() };
    let mut stepper =
        builder(&layout, When::AfterBuilding, Mode::Normed).loss_scale(scaler).host(Solo::default());
    let stepper = stepper.as_mut().unwrap();
    (0..4).for_each(|iteration| iterate(stepper, &network, 0, iteration).unwrap());
    let before = (stepper.scaler_state().unwrap(), stepper.status().unwrap());
    assert_eq!(before.0.scale, 16.0);
    register(stepper).unwrap();
    assert_eq!((stepper.scaler_state().unwrap(), stepper.status().unwrap()), before);

    let clips = builder(&layout, When::AfterBuilding, Mode::Eager).clip(Clip::Previous(0.5));
    let mut stepper = clips.host(Solo::default()).unwrap();
    iterate(&mut stepper, &network, 0, 0).unwrap();
    let before = stepper.previous_norm().unwrap();
    register(&mut stepper).unwrap();
    assert!(before.is_some());
    assert_eq!(stepper.previous_norm().unwrap(), before);
}
