//! Short parameters that one loop steps together: each gets the bits that it gets alone.
//!
//! Neighbours with equal scalars are stepped in one call of the kernels' loop. A count or a gradient that differs must
//! not reach the neighbour.

use instep::bucket_step::{Lent, StepTensors};
use instep::{AdamW, BucketStep, Layout, Optimizer, Scaling, Sgd};

/// Parameters with the same count stand in groups of up to six, and there are more of them than one call takes.
const PARAMS: usize = 150;

fn len(k: usize) -> usize {
    1 + k * 7 % 37
}

fn count(k: usize) -> u64 {
    (k / 6 % 4) as u64
}

fn values(k: usize, seed: usize) -> Vec<f32> {
    (0..len(k)).map(|i| ((k * 31 + i * 17 + seed * 5) % 23) as f32 * 0.01 + 0.01).collect()
}

fn gradient(k: usize) -> Vec<f32> {
    let mut gradient = values(k, 1);
    if k % 41 == 7 {
        gradient[len(k) / 2] = f32::from_bits(0x7fc1_2345); // a NaN with a payload, which is not stored
    }
    gradient
}

/// Steps these parameters in one bucket. Returns the bits of each parameter and its states, and its count.
fn stepped(optimizer: impl Optimizer + Clone + 'static, chosen: &[usize]) -> Vec<(Vec<u32>, u64)> {
    let layout = chosen.iter().fold(Layout::builder(), |layout, k| layout.param(format!("p{k}"), len(*k)));
    let layout = layout.build().unwrap();
    let mut step = BucketStep::builder(&layout, optimizer).host().unwrap();
    let ids: Vec<_> = layout.ids().collect();
    for (id, k) in ids.iter().zip(chosen) {
        step.set_step_count(*id, count(*k)).unwrap();
    }
    let states = step.state_names(instep::DEFAULT_GROUP).unwrap().len();
    let of = |seed: usize| chosen.iter().map(|k| values(*k, seed)).collect::<Vec<_>>();
    let grads: Vec<_> = chosen.iter().map(|k| gradient(*k)).collect();
    let grads: Vec<&[f32]> = grads.iter().map(Vec::as_slice).collect();
    let mut written: Vec<_> = (0..=states).map(|k| of(if k == 0 { 0 } else { k + 1 })).collect();
    {
        let mut runs: Vec<Vec<&mut [f32]>> =
            written.iter_mut().map(|list| list.iter_mut().map(Vec::as_mut_slice).collect()).collect();
        let mut lent = runs.iter_mut().map(|list| Lent::slices_mut(list));
        let tensors = StepTensors::new(lent.next().unwrap(), Lent::slices(&grads)).states(lent);
        step.step(&tensors, Scaling::mean(2)).unwrap();
    }
    let bits = |at: usize| written.iter().flat_map(|list| list[at].iter().map(|x| x.to_bits())).collect();
    ids.iter().enumerate().map(|(at, id)| (bits(at), step.step_count(*id).unwrap())).collect()
}

fn assert_as_alone(optimizer: impl Optimizer + Clone + 'static) {
    let all: Vec<usize> = (0..PARAMS).collect();
    for (k, found) in stepped(optimizer.clone(), &all).into_iter().enumerate() {
        let alone = stepped(optimizer.clone(), &[k]);
        assert!(
            found == alone[0],
            "parameter {k} of {} elements at count {} differs from alone",
            len(k),
            count(k)
        );
        assert_eq!(found.1, count(k) + 1, "parameter {k}");
    }
}

#[test]
fn short_neighbours_with_other_counts_are_stepped_as_alone() {
    assert_as_alone(AdamW { lr: 0.1, ..Default::default() });
    assert_as_alone(Sgd { lr: 0.1, momentum: 0.9, ..Default::default() });
}
