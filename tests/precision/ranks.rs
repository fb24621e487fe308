//! Tensors of any precision on several ranks; parameters that no step may change keep every stored byte.
//!
//! Gradients are dyadic numbers of few bits, so their sums are exact even in 16 bits. One rank that gets the sums
//! therefore has the same bits. A rank's gradient depends only on the rank's number.

use instep::layout::Storage;
use instep::{Divisor, InProcess, Layout, Mode, Result, Solo, Stepper, StepperBuilder, in_process};

use crate::support::stored::{Stored, cases, dyadic, with};
use crate::support::{MODES, Optim, Options, Presummed, layout, paint_params, pass};

pub(crate) const LENGTHS: [usize; 5] = [300, 0, 2049, 512, 17];
pub(crate) const STEPS: usize = 3;
/// The parameter that no rank uses in the second pass, and only odd ranks use in the third.
pub(crate) const UNUSED: usize = 3;
/// The parameter that is frozen from the second pass on.
pub(crate) const FROZEN: usize = 0;

fn uses(step: usize, rank: usize, param: usize) -> bool {
    match (step, param) {
        (1, UNUSED) => false,
        (2, UNUSED) => rank % 2 == 1,
        (1.., FROZEN) => false,
        _ => true,
    }
}

fn builder<'a>(layout: &'a Layout, storage: &Storage, optim: Optim) -> StepperBuilder<'a> {
    with(optim.builder(layout), storage).bucket_cap_bytes(2000).threads(1)
}

/// Makes one pass with the sums of these ranks, divided by `divisor`, a power of two.
pub(crate) fn train_a_pass(stepper: &mut Stepper, step: usize, ranks: &[usize], divisor: f32) -> Result<()> {
    let frozen = stepper.layout().ids().nth(FROZEN).unwrap();
    stepper.set_frozen(frozen, step > 0)?;
    pass(stepper, &Options::default(), |param, values| {
        let using: Vec<usize> = ranks.iter().copied().filter(|rank| uses(step, *rank, param)).collect();
        for (k, g) in values.iter_mut().enumerate() {
            *g = using.iter().map(|rank| dyadic(step, *rank, param, k)).sum::<f32>() / divisor;
        }
        !using.is_empty()
    })
}

pub(crate) fn train(mut stepper: Stepper, ranks: &[usize]) -> Result<Vec<Stored>> {
    paint_params(&mut stepper);
    let mut stored = Vec::new();
    for step in 0..STEPS {
        train_a_pass(&mut stepper, step, ranks, 1.0)?;
        stored.push(Stored::of(&stepper)?);
    }
    stepper.close()?;
    Ok(stored)
}

#[test]
fn ranks_train_as_one_fed_their_sums_and_what_is_frozen_or_unused_keeps_every_byte() {
    let layout = layout(&LENGTHS);
    for (case, (storage, optim)) in cases().enumerate() {
        let world_size = [2, 4][case % 2];
        let mode = MODES[case / 2 % 3];
        let what = (storage, optim, world_size, mode);
        let ranks = in_process(world_size, |comm: InProcess| {
            let rank = instep::Collective::rank(&comm) as usize;
            train(builder(&layout, &storage, optim).mode(mode).host(comm)?, &[rank])
        })
        .unwrap();
        let one = builder(&layout, &storage, optim).mode(Mode::Sequential).host(Presummed(world_size));
        let all: Vec<usize> = (0..world_size as usize).collect();
        let one = train(one.unwrap(), &all).unwrap();
        for stored in &ranks {
            stored.iter().zip(&one).for_each(|(stored, one)| stored.assert_same(one, &what));
        }
        assert_eq!(one[1].params[UNUSED], one[0].params[UNUSED], "unused: {what:?}");
        assert_ne!(one[2].params[UNUSED], one[1].params[UNUSED], "used by some: {what:?}");
        assert_eq!(one[2].params[FROZEN], one[0].params[FROZEN], "frozen: {what:?}");
    }
}

/// Number of passes for which each of four ranks has data.
pub(crate) const BATCHES: [usize; 4] = [3, 1, 3, 1];

/// Trains one rank until its data ends, then joins the passes of the others.
pub(crate) fn join_a_rank(mut stepper: Stepper, rank: usize) -> Result<Stored> {
    paint_params(&mut stepper);
    for step in 0..STEPS {
        if step < BATCHES[rank] {
            train_a_pass(&mut stepper, step, &[rank], 1.0)?;
        } else {
            let frozen = stepper.layout().ids().nth(FROZEN).unwrap();
            stepper.set_frozen(frozen, step > 0)?;
            assert!(stepper.join()?);
        }
    }
    assert!(!stepper.join()?, "nobody has data");
    Stored::of(&stepper)
}

#[test]
fn ranks_that_run_out_of_data_are_counted_in_gradients_of_any_type() {
    let layout = layout(&LENGTHS);
    for (case, (storage, optim)) in cases().enumerate().filter(|(case, _)| case % 3 == 0) {
        for divisor in [Divisor::WorldSize, Divisor::ContributingRanks] {
            let what = (storage, optim, divisor);
            let mode = MODES[case / 3 % 3];
            let ranks = in_process(4, |comm: InProcess| {
                let rank = instep::Collective::rank(&comm) as usize;
                let builder = builder(&layout, &storage, optim).mode(mode).uneven_inputs(divisor);
                join_a_rank(builder.host(comm)?, rank)
            })
            .unwrap();
            // Means over powers of two are exact, whether the step or the caller divides.
            let mut one = builder(&layout, &storage, optim).host(Solo::default()).unwrap();
            paint_params(&mut one);
            for step in 0..STEPS {
                let with_data: Vec<usize> = (0..4).filter(|rank| step < BATCHES[*rank]).collect();
                let over = if divisor == Divisor::WorldSize { 4 } else { with_data.len() };
                train_a_pass(&mut one, step, &with_data, over as f32).unwrap();
            }
            let one = Stored::of(&one).unwrap();
            ranks.iter().for_each(|stored| stored.assert_same(&one, &what));
        }
    }
}
