//! T-DDP-1, 2 and 3: optimizers in backward on several ranks. Gradients are released after their steps.
//!
//! Every rank starts from a different seed and takes rank 0's parameters in the first pass. Gradients are written in
//! the bucket ("view"), copied into it ("non-view"), or copied into the caller's buckets. All results are compared
//! after every iteration.

use instep::layout::ForeignBucket;
use instep::{
    Adam, Borrowed, Error, Gradients, InProcess, Layout, Mode, Result, Sgd, Stepper, Unused, in_process,
};

use super::network::sum;
use super::ranks::{
    Handing, RANKS, batch_of, initialise, iterate_with, layout_of, step_ordinary, three_layers,
};
use super::{Ordinary, assert_like, ids, resnet};
use crate::support::{MODES, Optim, Presummed, assert_same_bits};

const ITERATIONS: usize = 8;

fn optimizers() -> [Optim; 2] {
    [Optim::of(Sgd { lr: 0.03, ..Sgd::default() }), Optim::of(Adam { lr: 0.03, ..Adam::default() })]
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Registered {
    Before,
    After,
}

/// Attaches an optimizer per parameter, before or after it builds the stepper.
fn build(
    layout: &Layout,
    comm: InProcess,
    optim: Optim,
    (mode, gradients, registered): (Mode, Gradients, Registered),
) -> Result<Stepper> {
    let mut builder =
        Stepper::builder_without_optimizer(layout).mode(mode).gradients(gradients).bucket_cap_bytes(40);
    if registered == Registered::Before {
        builder = layout.ids().fold(builder, |builder, id| builder.optimizer_for(&[id], optim.boxed()));
    }
    let mut stepper = builder.host(comm)?;
    if registered == Registered::After {
        for id in layout.ids() {
            stepper.add_optimizer_for(&[id], optim.boxed())?;
        }
    }
    Ok(stepper)
}

fn assert_gone(stepper: &Stepper, gradients: Gradients, what: &str) {
    for id in ids(stepper) {
        let gradient = stepper.view::<f32>(id.grad());
        match gradients {
            Gradients::Release => assert!(matches!(gradient, Err(Error::Order(_))), "{what}: {gradient:?}"),
            _ => assert!(gradient.unwrap().iter().all(|g| g.to_bits() == 0), "{what}"),
        }
    }
}

/// Runs eight iterations of one rank beside ordinary training.
fn assert_parity(
    mut stepper: Stepper,
    optim: Optim,
    handing: Handing,
    gradients: Gradients,
    what: &str,
) -> Result<()> {
    let (rank, mut network) = (stepper.rank() as usize, three_layers(0));
    initialise(&mut stepper, &three_layers(rank))?;
    let mut ordinary = Ordinary::new(&network, |_| vec![optim.rule()]);
    for iteration in 0..ITERATIONS {
        let what = format!("{what}, rank {rank}, iteration {iteration}");
        let batch = batch_of(&network, rank, iteration);
        iterate_with(&mut stepper, &network, &batch, handing, |_| true)?;
        step_ordinary(&mut ordinary, &mut network, RANKS, iteration, |_| true);
        assert_like(&stepper, &network, &ordinary, &what)?;
        assert_gone(&stepper, gradients, &what);
    }
    stepper.close()
}

#[test]
fn ddp_1_and_2_steps_in_backward_are_ordinary_steps_on_averages_and_gradients_are_gone() {
    for (optim, mode) in optimizers().into_iter().flat_map(|optim| MODES.map(|mode| (optim, mode))) {
        for (handing, gradients, registered) in [
            (Handing::InPlace, Gradients::Release, Registered::Before),
            (Handing::InPlace, Gradients::Zero, Registered::After),
            (Handing::Copied, Gradients::Release, Registered::After),
            (Handing::Copied, Gradients::Zero, Registered::Before),
        ] {
            let what = format!("{optim:?}, {mode:?}, {handing:?}, {gradients:?}, {registered:?}");
            in_process(RANKS as u32, |comm| {
                let layout = layout_of(&three_layers(0));
                let stepper = build(&layout, comm, optim, (mode, gradients, registered))?;
                assert_parity(stepper, optim, handing, gradients, &what)
            })
            .unwrap();
        }
    }
}

#[test]
fn ddp_2_buckets_of_the_callers_are_stepped_alike() {
    for (optim, mode) in optimizers().into_iter().flat_map(|optim| MODES.map(|mode| (optim, mode))) {
        in_process(RANKS as u32, |comm| {
            let layout = layout_of(&three_layers(0));
            let all: Vec<_> = layout.ids().collect();
            let mut params: Vec<Vec<f32>> =
                three_layers(0).params().iter().map(|p| vec![0.0; p.len()]).collect();
            let mut buckets = [vec![0.0f32; 24], vec![0.0f32; 12]];
            let (mut memory, [first, second]) = (Borrowed::new(), &mut buckets);
            for (id, values) in all.iter().zip(&mut params) {
                memory = memory.param(*id, values.as_mut_ptr());
            }
            // Two layers, then the first one, each tensor right after the other.
            let later = ForeignBucket::new(24).gradient(all[5], 0).gradient(all[4], 3).gradient(all[3], 12);
            let earliest = ForeignBucket::new(12).gradient(all[1], 0).gradient(all[0], 3);
            memory = memory.bucket(later.gradient(all[2], 15), first.as_mut_ptr());
            memory = memory.bucket(earliest, second.as_mut_ptr());
            let builder = Stepper::builder_without_optimizer(&layout).mode(mode).gradients(Gradients::Zero);
            let builder =
                layout.ids().fold(builder, |builder, id| builder.optimizer_for(&[id], optim.boxed()));
            // SAFETY: the vectors outlive the stepper, which alone touches them until it is closed.
            let stepper = unsafe { builder.unused(Unused::StepZero).host_borrowing(comm, memory)? };
            let what = format!("{optim:?}, {mode:?}, borrowed");
            assert_parity(stepper, optim, Handing::Copied, Gradients::Zero, &what)
        })
        .unwrap();
    }
}

/// Several ranks are compared with a single rank in Sequential that gets their sums.
#[test]
fn ddp_1_and_2_with_the_shapes_of_resnet50() {
    const STEPS: usize = 2;
    for (shapes, optim, handing, gradients, registered) in [
        (resnet::whole(), optimizers()[0], Handing::Copied, Gradients::Release, Registered::Before),
        (resnet::sixteenth(), optimizers()[1], Handing::InPlace, Gradients::Zero, Registered::After),
    ] {
        let layout = &shapes.layout;
        let all: Vec<_> = layout.ids().collect();
        let ranks = in_process(2, |comm| {
            let rank = comm.rank() as usize;
            let builder = Stepper::builder_without_optimizer(layout).mode(Mode::Eager).gradients(gradients);
            let builder = shapes.capped(builder);
            let mut stepper = if registered == Registered::Before {
                layout
                    .ids()
                    .fold(builder, |builder, id| builder.optimizer_for(&[id], optim.boxed()))
                    .host(comm)?
            } else {
                // One call: each moves every tensor.
                let mut stepper = builder.host(comm)?;
                stepper.add_optimizer_for(&all, optim.boxed())?;
                stepper
            };
            resnet::initialise(&mut stepper, rank)?;
            for step in 0..STEPS {
                resnet::pass(&mut stepper, step, rank..rank + 1, handing == Handing::Copied)?;
            }
            assert_gone(&stepper, gradients, "ResNet50");
            resnet::digests(&stepper)
        })
        .unwrap();
        let mut alone = optim.builder(layout).mode(Mode::Sequential).host(Presummed(2)).unwrap();
        resnet::initialise(&mut alone, 0).unwrap();
        (0..STEPS).for_each(|step| resnet::pass(&mut alone, step, 0..2, false).unwrap());
        let expected = resnet::digests(&alone).unwrap();
        assert!(ranks.iter().all(|rank| *rank == expected), "{optim:?}");
    }
}

#[test]
fn ddp_3_a_local_parameter_goes_its_own_way_and_no_other_does() {
    const LOCAL: usize = 2;
    let network = three_layers(0);
    let layout = network.params().iter().enumerate().fold(Layout::builder(), |layout, (k, values)| {
        let layout = layout.param(format!("p{k}"), values.len());
        if k == LOCAL { layout.local() } else { layout }
    });
    let layout = layout.build().unwrap();
    for (optim, mode) in optimizers().into_iter().flat_map(|optim| MODES.map(|mode| (optim, mode))) {
        let ranks = in_process(RANKS as u32, |comm| {
            let rank = comm.rank() as usize;
            let builder = Stepper::builder_without_optimizer(&layout).mode(mode);
            let builder =
                layout.ids().fold(builder, |builder, id| builder.optimizer_for(&[id], optim.boxed()));
            let mut stepper = builder.host(comm)?;
            initialise(&mut stepper, &network)?;
            iterate_with(&mut stepper, &network, &batch_of(&network, rank, 0), Handing::InPlace, |_| true)?;
            let mut expected = network.clone();
            let mut ordinary = Ordinary::new(&expected, |_| vec![optim.rule()]);
            step_ordinary(&mut ordinary, &mut expected, RANKS, 0, |param| param != LOCAL);
            let own = network.gradients(&batch_of(&network, rank, 0), sum);
            ordinary.step(&mut expected, LOCAL, &own[LOCAL]);
            assert_like(&stepper, &expected, &ordinary, &format!("{optim:?}, {mode:?}, rank {rank}"))?;
            ids(&stepper)
                .into_iter()
                .map(|id| Ok(stepper.view::<f32>(id)?.to_vec()))
                .collect::<Result<Vec<_>>>()
        })
        .unwrap();
        for rank in &ranks[1..] {
            for (param, (ours, first)) in rank.iter().zip(&ranks[0]).enumerate() {
                match param {
                    LOCAL => assert_ne!(ours, first, "{optim:?}, {mode:?}"),
                    _ => assert_same_bits(ours, first, &format!("{optim:?}, {mode:?}")),
                }
            }
        }
    }
}
