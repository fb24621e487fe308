//! An optimizer steps some parameters in backward, and an ordinary optimizer steps the others after it, on averaged
//! gradients.
//!
//! Without bucket views PyTorch leaves each rank's own gradients in the ordinary parameters, so ranks diverge. The
//! tests write gradients in place, copy them, and use the caller's buckets.

use instep::layout::{ForeignBucket, SegmentAction};
use instep::{Borrowed, Layout, Mode, ParamId, Result, Sgd, Stepper, StepperBuilder, Unused, in_process};

use super::ranks::{
    Handing, RANKS, averaged, batch_of, initialise, iterate_with, layout_of, step_ordinary, three_layers,
};
use super::{Ordinary, assert_close, ids};
use crate::support::{MODES, Optim, assert_same_bits};

const ITERATIONS: usize = 5;

/// The optimizer in backward, and the ordinary optimizer.
const HEAVY: Sgd =
    Sgd { lr: 0.05, momentum: 0.9, dampening: 0.0, weight_decay: 0.01, nesterov: false, maximize: false };
const ORDINARY_LR: f64 = 0.02;

/// Every second parameter is stepped in backward, so each bucket has both kinds.
fn is_ours(param: usize) -> bool {
    param.is_multiple_of(2)
}

fn builder(layout: &Layout, mode: Mode) -> StepperBuilder<'_> {
    let (ours, others): (Vec<_>, Vec<_>) = layout.ids().enumerate().partition(|(param, _)| is_ours(*param));
    let [ours, others] =
        [ours, others].map(|all| all.into_iter().map(|(_, id)| id).collect::<Vec<ParamId>>());
    let ordinary = Sgd { lr: ORDINARY_LR, ..Sgd::default() };
    Stepper::builder_without_optimizer(layout)
        .mode(mode)
        .optimizer_for(&ours, HEAVY)
        .attach(&others, ordinary)
}

/// Trains and returns the gradients of the last pass.
fn train(mut stepper: Stepper, handing: Handing, what: &str) -> Result<Vec<Vec<f32>>> {
    let (rank, mut network) = (stepper.rank() as usize, three_layers(0));
    initialise(&mut stepper, &three_layers(rank))?;
    let ordinary = Optim::of(Sgd { lr: ORDINARY_LR, ..Sgd::default() });
    let mut reference = Ordinary::new(&network, |param| {
        vec![if is_ours(param) { Optim::of(HEAVY).rule() } else { ordinary.rule() }]
    });
    let all = ids(&stepper);
    for iteration in 0..ITERATIONS {
        let what = format!("{what}, rank {rank}, iteration {iteration}");
        let batch = batch_of(&network, rank, iteration);
        iterate_with(&mut stepper, &network, &batch, handing, |_| true)?;
        let mean = averaged(&network, RANKS, iteration);
        step_ordinary(&mut reference, &mut network, RANKS, iteration, is_ours);
        // The in-backward part alone: the others are where they were.
        for (param, id) in all.iter().enumerate().filter(|(param, _)| !is_ours(*param)) {
            assert_close(stepper.view::<f32>(*id)?, &network.params()[param], &what);
            assert_close(stepper.view::<f32>(id.grad())?, &mean[param], &format!("gradient, {what}"));
            reference.step(&mut network, param, &mean[param]);
            let gradient = stepper.view::<f32>(id.grad())?.to_vec();
            let mut values = stepper.view::<f32>(*id)?.to_vec();
            values.iter_mut().zip(gradient).for_each(|(x, g)| *x -= ORDINARY_LR as f32 * g);
            stepper.write(*id, &values)?;
        }
        for (param, id) in all.iter().enumerate().filter(|(param, _)| is_ours(*param)) {
            let state = reference.state(param, 0, 0);
            assert_close(stepper.view::<f32>(id.state("momentum_buffer"))?, &state, &what);
            assert_eq!(stepper.step_count(*id)?, iteration as u64 + 1, "{what}");
        }
        for (param, id) in all.iter().enumerate() {
            assert_close(stepper.view::<f32>(*id)?, &network.params()[param], &what);
        }
    }
    let gradients = all.iter().map(|id| Ok(stepper.view::<f32>(id.grad())?.to_vec())).collect();
    stepper.close()?;
    gradients
}

fn assert_one(ranks: &[Vec<Vec<f32>>], what: &str) {
    for rank in &ranks[1..] {
        for (param, (ours, first)) in
            rank.iter().zip(&ranks[0]).enumerate().filter(|(param, _)| !is_ours(*param))
        {
            assert_same_bits(ours, first, &format!("the average of p{param}, {what}"));
        }
    }
}

#[test]
fn parameters_of_ordinary_optimizers_end_with_the_average_on_every_rank() {
    for (mode, handing) in MODES.into_iter().flat_map(|m| [Handing::InPlace, Handing::Copied].map(|h| (m, h)))
    {
        let what = format!("{mode:?}, {handing:?}");
        let ranks = in_process(RANKS as u32, |comm| {
            let layout = layout_of(&three_layers(0));
            train(builder(&layout, mode).bucket_cap_bytes(90).host(comm)?, handing, &what)
        });
        assert_one(&ranks.unwrap(), &what);
    }
}

#[test]
fn the_same_in_buckets_of_the_callers() {
    for mode in MODES {
        let what = format!("{mode:?}, borrowed");
        let ranks = in_process(RANKS as u32, |comm| {
            let layout = layout_of(&three_layers(0));
            let all: Vec<ParamId> = layout.ids().collect();
            let mut params: Vec<Vec<f32>> =
                three_layers(0).params().iter().map(|p| vec![0.0; p.len()]).collect();
            let mut gradients = vec![0.0f32; 36];
            let (mut memory, mut bucket, mut next) = (Borrowed::new(), ForeignBucket::new(36), 0);
            for (id, values) in all.iter().zip(&mut params).rev() {
                bucket = bucket.gradient(*id, next);
                next += values.len();
                memory = memory.param(*id, values.as_mut_ptr());
            }
            let memory = memory.bucket(bucket, gradients.as_mut_ptr());
            let builder = builder(&layout, mode).unused(Unused::StepZero);
            // SAFETY: the vectors outlive the stepper, which alone touches them until it is closed.
            let stepper = unsafe { builder.host_borrowing(comm, memory)? };
            train(stepper, Handing::Copied, &what)
        });
        assert_one(&ranks.unwrap(), &what);
    }
}

/// No optimizer steps a parameter with `SegmentAction::Leave`, and its gradient stays the sum over ranks.
#[test]
fn only_what_the_layout_leaves_alone_keeps_gradients_of_its_own() {
    let network = three_layers(0);
    let layout = network.params().iter().enumerate().fold(Layout::builder(), |layout, (k, values)| {
        let layout = layout.param(format!("p{k}"), values.len());
        if k == 3 { layout.action(SegmentAction::Leave) } else { layout }
    });
    let layout = layout.build().unwrap();
    let sums = in_process(2, |comm| {
        let rank = comm.rank() as usize;
        let mut stepper = builder(&layout, Mode::Eager).host(comm)?;
        initialise(&mut stepper, &network)?;
        let batch = batch_of(&network, rank, 0);
        iterate_with(&mut stepper, &network, &batch, Handing::InPlace, |_| true)?;
        Ok::<_, instep::Error>(stepper.view::<f32>(ids(&stepper)[3].grad())?.to_vec())
    });
    let sums = sums.unwrap();
    let mean = averaged(&network, 2, 0);
    let twice: Vec<f64> = mean[3].iter().map(|g| 2.0 * g).collect();
    sums.iter().for_each(|sum| assert_close(sum, &twice, "summed, not divided"));
}
