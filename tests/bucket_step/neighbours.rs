//! Short parameters that one loop steps together: each gets the bits that it gets alone.
//!
//! Neighbours with equal scalars are stepped in one call of the kernels' loop. A count or a gradient that differs must
//! not reach the neighbour.

use instep::bucket_step::{Lent, StepTensors};
use instep::{AdamW, BucketStep, DEFAULT_GROUP, Layout, Optimizer, Scaling, Sgd};

const PARAMS: usize = 150;

fn len(k: usize) -> usize {
    1 + k * 7 % 37
}

/// How often each parameter has been stepped before.
type Counts = fn(usize) -> u64;

/// Parameters with the same count stand in groups of six.
fn mixed(k: usize) -> u64 {
    (k / 6 % 4) as u64
}

/// One call of the loop takes at most 32 of these.
fn equal(_: usize) -> u64 {
    5
}

fn is_frozen(k: usize) -> bool {
    k % 40 == 3
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

/// Steps these parameters in one bucket, lent one by one or as one run. Returns the bits of each parameter and its states,
/// and its count.
fn stepped(
    optimizer: impl Optimizer + 'static,
    count: Counts,
    chosen: &[usize],
    is_one_run: bool,
) -> Vec<(Vec<u32>, u64)> {
    let layout = chosen.iter().fold(Layout::builder(), |layout, k| layout.param(format!("p{k}"), len(*k)));
    let layout = layout.build().unwrap();
    let mut step = BucketStep::builder(&layout, optimizer).host().unwrap();
    let ids: Vec<_> = layout.ids().collect();
    for (id, k) in ids.iter().zip(chosen) {
        step.set_step_count(*id, count(*k)).unwrap();
        step.set_frozen(*id, is_frozen(*k)).unwrap();
    }
    let states = step.state_names(DEFAULT_GROUP).unwrap().len();
    let grads: Vec<f32> = chosen.iter().flat_map(|k| gradient(*k)).collect();
    let of = |seed: usize| chosen.iter().flat_map(|k| values(*k, seed)).collect::<Vec<_>>();
    let mut written: Vec<Vec<f32>> = (0..=states).map(|k| of(if k == 0 { 0 } else { k + 1 })).collect();
    if is_one_run {
        let mut lent = written.iter_mut().map(|list| Lent::slice_mut(list));
        let tensors = StepTensors::new(lent.next().unwrap(), Lent::slice(&grads)).states(lent);
        step.step(&tensors, Scaling::mean(2)).unwrap();
    } else {
        let mut runs: Vec<Vec<&mut [f32]>> = written.iter_mut().map(|list| cut_mut(list, chosen)).collect();
        let mut lent = runs.iter_mut().map(|list| Lent::slices_mut(list));
        let grads: Vec<&[f32]> = spans(chosen).map(|(from, to)| &grads[from..to]).collect();
        let tensors = StepTensors::new(lent.next().unwrap(), Lent::slices(&grads)).states(lent);
        step.step(&tensors, Scaling::mean(2)).unwrap();
    }
    let bits = |(from, to): (usize, usize)| {
        written.iter().flat_map(|list| &list[from..to]).map(|x| x.to_bits()).collect()
    };
    let counts = ids.iter().map(|id| step.step_count(*id).unwrap());
    spans(chosen).map(bits).zip(counts).collect()
}

/// The start and end of each parameter in a run of all.
fn spans(chosen: &[usize]) -> impl Iterator<Item = (usize, usize)> {
    chosen.iter().scan(0, |end, k| {
        let start = *end;
        *end += len(*k);
        Some((start, *end))
    })
}

fn cut_mut<'a>(mut rest: &'a mut [f32], chosen: &[usize]) -> Vec<&'a mut [f32]> {
    let cut = |k: &usize| rest.split_off_mut(..len(*k)).unwrap();
    chosen.iter().map(cut).collect()
}

fn assert_as_alone(optimizer: impl Optimizer + Clone + 'static, count: Counts) {
    let all: Vec<usize> = (0..PARAMS).collect();
    for is_one_run in [false, true] {
        for (k, found) in stepped(optimizer.clone(), count, &all, is_one_run).into_iter().enumerate() {
            let alone = stepped(optimizer.clone(), count, &[k], false);
            assert!(
                found == alone[0],
                "parameter {k} of {} elements at count {} differs from alone",
                len(k),
                count(k)
            );
            assert_eq!(found.1, count(k) + u64::from(!is_frozen(k)), "parameter {k}");
        }
    }
}

#[test]
fn short_neighbours_with_other_counts_are_stepped_as_alone() {
    assert_as_alone(AdamW { lr: 0.1, ..Default::default() }, mixed);
    assert_as_alone(Sgd { lr: 0.1, momentum: 0.9, ..Default::default() }, mixed);
}

#[test]
fn more_neighbours_than_one_call_takes_are_all_stepped_as_alone() {
    assert_as_alone(AdamW { lr: 0.1, ..Default::default() }, equal);
}
