//! The exact clip has one norm, to the bit, for the same reduced gradients. It does not matter how they are divided,
//! summed and placed.
//!
//! `stepper::delayed_clips` shows that the norm is taken after backward and before the steps; `numerics::norms` shows
//! that no instruction set changes it. Numbers of ranks are powers of two, so sums and means of equal gradients are
//! exact.

use instep::layout::ForeignBucket;
use instep::{Borrowed, Mode, Solo, Stepper, Unused, in_process};

use super::ids;
use crate::support::{
    Options, Outcome, Presummed, assert_same_bits, layout, one_per_state_count, paint_gradient, paint_params,
    pass,
};

const LENGTHS: [usize; 8] = [300, 0, 1, 2049, 17, 256, 5, 700];
const STEPS: usize = 3;

fn options(cap: Option<u64>, ranks: u32) -> Options {
    Options {
        mode: Mode::Normed,
        max_norm: Some(0.5),
        cap,
        world_size: ranks,
        unused: Unused::StepZero,
        ..Options::default()
    }
}

/// Gives every rank the same gradients, times `share`; returns the bits of each pass's norm and coefficient.
fn train(stepper: &mut Stepper, options: &Options, share: f32) -> (Vec<[u64; 2]>, Outcome) {
    paint_params(stepper);
    let mut decided = Vec::new();
    for step in 0..STEPS {
        pass(stepper, options, |param, values| {
            values.iter_mut().enumerate().for_each(|(k, g)| *g = paint_gradient(step, param, k) * share);
            true
        })
        .unwrap();
        let status = stepper.status().unwrap();
        assert!(status.clip < 1.0);
        decided.push([status.norm.unwrap().to_bits(), status.clip.to_bits()]);
    }
    (decided, Outcome::of(stepper).unwrap())
}

#[test]
fn the_norm_and_the_clipped_step_are_the_same_bits_for_any_cap_rank_count_and_alignment() {
    let layout = layout(&LENGTHS);
    for optim in one_per_state_count() {
        let (norms, outcome) = {
            let options = options(None, 1);
            let sequential = Options { mode: Mode::Sequential, ..options.clone() };
            train(&mut sequential.stepper(&layout, optim, Solo::default()).unwrap(), &options, 1.0)
        };
        let assert_same = |(other, theirs): (Vec<[u64; 2]>, Outcome), what: &str| {
            assert_eq!(other, norms, "{optim:?}, {what}");
            theirs.assert_same(&outcome, &format!("{optim:?}, {what}"));
        };
        for (ranks, cap) in
            [1, 2, 4, 8].into_iter().flat_map(|ranks| [Some(1), Some(3000), None].map(|c| (ranks, c)))
        {
            let options = options(cap, ranks);
            let mut alone = options.stepper(&layout, optim, Presummed(ranks)).unwrap();
            assert_same(train(&mut alone, &options, ranks as f32), &format!("one for {ranks}, cap {cap:?}"));
        }
        for cap in [Some(1), Some(3000), None] {
            let options = options(cap, 2);
            let both = in_process(2, |comm| {
                let mut stepper = options.stepper(&layout, optim, comm)?;
                Ok::<_, instep::Error>(train(&mut stepper, &options, 1.0))
            });
            both.unwrap().into_iter().for_each(|rank| assert_same(rank, &format!("two ranks, cap {cap:?}")));
        }
        for offset in [0, 1, 3, 7, 15] {
            let (mut params, mut buckets) = (Vec::new(), Vec::new());
            for len in LENGTHS {
                params.push(vec![0.0f32; len + offset]);
                buckets.push(vec![0.0f32; len + offset]);
            }
            let mut memory = Borrowed::new();
            for ((id, len), (param, bucket)) in
                layout.ids().zip(LENGTHS).zip(params.iter_mut().zip(&mut buckets)).rev()
            {
                let place = ForeignBucket::new(len).gradient(id, 0);
                memory = memory
                    .param(id, param[offset..].as_mut_ptr())
                    .bucket(place, bucket[offset..].as_mut_ptr());
            }
            let options = options(None, 1);
            // SAFETY: the vectors outlive the stepper, which alone touches them until it is closed.
            let stepper = unsafe { options.builder(&layout, optim).host_borrowing(Solo::default(), memory) };
            let mut stepper = stepper.unwrap();
            let trained = train(&mut stepper, &options, 1.0);
            assert_eq!(ids(&stepper).len(), LENGTHS.len());
            stepper.close().unwrap();
            params
                .iter()
                .zip(&trained.1.params)
                .for_each(|(p, own)| assert_same_bits(&p[offset..], own, "own view"));
            assert_same(trained, &format!("offset {offset}"));
        }
    }
}
