//! A norm over several buckets clips and skips as a stepper does, bit for bit, in any order of buckets.
//!
//! The reference is a stepper in Normed on the same gradients.

use instep::bucket_step::{Decision, Lent, NORM_LIMBS, StepTensors};
use instep::layout::ForeignBucket;
use instep::{AdamW, BucketStep, Clip, Error, GradNorm, Layout, Mode, Scaling, Stepper};

use crate::support::{Presummed, layout, paint};

const LENGTHS: [usize; 3] = [700, 2100, 33];
const WORLD_SIZE: u32 = 2;
const LOSS_SCALE: f64 = 8.0;
const MAX_NORM: f64 = 0.75;

fn gradients(step: usize) -> Vec<Vec<f32>> {
    let of = |(row, len): (usize, &usize)| (0..*len).map(|k| paint(row + step, k)).collect();
    LENGTHS.iter().enumerate().map(of).collect()
}

/// A bucket of one parameter with its states.
struct Bucket {
    step: BucketStep,
    params: Vec<f32>,
    states: [Vec<f32>; 2],
}

impl Bucket {
    fn all(layout: &Layout) -> Vec<Bucket> {
        let ids = layout.ids().zip(LENGTHS);
        let bucket = |(id, len)| {
            let described = ForeignBucket::new(len).gradient(id, 0);
            let step = BucketStep::builder(layout, AdamW::default()).bucket(described).host().unwrap();
            Bucket { step, params: vec![0.0; len], states: [vec![0.0; len], vec![0.0; len]] }
        };
        ids.map(bucket).collect()
    }

    fn step_decided(&mut self, grads: &[f32], norm: &mut GradNorm) {
        let [first, second] = &mut self.states;
        let tensors = StepTensors::new(Lent::slice_mut(&mut self.params), Lent::slice(grads))
            .states([Lent::slice_mut(first), Lent::slice_mut(second)]);
        self.step.step_decided(&tensors, norm).unwrap();
    }
}

fn train(spoiled: Option<usize>) -> (Vec<Bucket>, Vec<Decision>) {
    let layout = layout(&LENGTHS);
    let mut buckets = Bucket::all(&layout);
    let mut norm = GradNorm::host().unwrap();
    let mut decisions = Vec::new();
    for step in 0..4 {
        let mut grads = gradients(step);
        if spoiled == Some(step) {
            grads[1][5] = f32::NAN;
        }
        norm.begin(Scaling::mean(WORLD_SIZE).loss_scale(LOSS_SCALE)).unwrap();
        for index in [step % 3, (step + 1) % 3, (step + 2) % 3] {
            buckets[index].step.add_norm(&Lent::slice(&grads[index]), &mut norm).unwrap();
        }
        decisions.push(norm.decide(Some(MAX_NORM), true).unwrap());
        for index in [(step + 1) % 3, step % 3, (step + 2) % 3] {
            buckets[index].step_decided(&grads[index], &mut norm);
        }
    }
    (buckets, decisions)
}

#[test]
fn a_norm_over_buckets_clips_and_skips_as_a_stepper_does() {
    for spoiled in [None, Some(2)] {
        let layout = layout(&LENGTHS);
        let builder = Stepper::builder(&layout, AdamW::default()).mode(Mode::Normed).loss_scale(LOSS_SCALE);
        let builder = builder.clip(Clip::Global(MAX_NORM)).skip_nonfinite(true);
        let mut stepper = builder.host(Presummed(WORLD_SIZE)).unwrap();
        let mut statuses = Vec::new();
        for step in 0..4 {
            let mut grads = gradients(step);
            if spoiled == Some(step) {
                grads[1][5] = f32::NAN;
            }
            let mut pass = stepper.begin().unwrap();
            layout.ids().zip(&grads).for_each(|(id, grads)| pass.write(id.grad(), grads).unwrap());
            crate::support::finish(pass).unwrap();
            statuses.push(stepper.status().unwrap());
        }
        let (buckets, decisions) = train(spoiled);
        for ((status, decision), step) in statuses.iter().zip(&decisions).zip(0..) {
            let is_spoiled = spoiled == Some(step);
            assert_eq!(status.norm.unwrap().to_bits(), decision.norm.to_bits());
            assert_eq!((status.clip, status.skipped), (decision.clip, decision.skipped));
            assert_eq!((decision.is_finite, decision.skipped), (!is_spoiled, is_spoiled));
        }
        for (id, bucket) in layout.ids().zip(&buckets) {
            assert_eq!(stepper.view::<f32>(id).unwrap(), bucket.params);
            assert_eq!(bucket.step.step_count(id).unwrap(), stepper.step_count(id).unwrap());
        }
    }
}

#[test]
fn a_coefficient_of_the_callers_gives_the_bits_of_the_decision() {
    let layout = layout(&LENGTHS);
    let (decided, decisions) = train(None);
    let mut buckets = Bucket::all(&layout);
    for (step, decision) in decisions.iter().enumerate() {
        let scaling = Scaling::mean(WORLD_SIZE).loss_scale(LOSS_SCALE).clip(decision.clip);
        for (bucket, grads) in buckets.iter_mut().zip(gradients(step)) {
            let [first, second] = &mut bucket.states;
            let tensors = StepTensors::new(Lent::slice_mut(&mut bucket.params), Lent::slice(&grads))
                .states([Lent::slice_mut(first), Lent::slice_mut(second)]);
            bucket.step.step(&tensors, scaling).unwrap();
        }
    }
    for (ours, theirs) in buckets.iter().zip(&decided) {
        assert_eq!(ours.params, theirs.params);
    }
}

#[test]
fn a_norm_is_begun_then_added_to_then_decided_and_nothing_else() {
    let layout = layout(&LENGTHS);
    let mut buckets = Bucket::all(&layout);
    let grads = vec![1.0; LENGTHS[0]];
    let mut norm = GradNorm::host().unwrap();
    let is_order = |outcome: instep::Result<()>| matches!(outcome, Err(Error::Order(_)));
    assert!(is_order(buckets[0].step.add_norm(&Lent::slice(&grads), &mut norm)));
    assert!(is_order(norm.decide(None, false).map(drop)));
    assert!(matches!(norm.begin(Scaling::NONE.clip(0.5)), Err(Error::Config { field: "clip", .. })));
    norm.begin(Scaling::NONE).unwrap();
    assert!(matches!(norm.decide(Some(f64::NAN), false), Err(Error::Config { field: "max_norm", .. })));
    let tensors = || StepTensors::new(Lent::slice(&grads), Lent::slice(&grads));
    assert!(is_order(buckets[0].step.step_decided(&tensors(), &mut norm)));
    buckets[0].step.add_norm(&Lent::slice(&grads), &mut norm).unwrap();
    let decision = norm.decide(None, true).unwrap();
    let expected = (LENGTHS[0] as f64).sqrt();
    assert_eq!(decision, Decision { norm: expected, clip: 1.0, is_finite: true, skipped: false });
    assert!(is_order(buckets[0].step.add_norm(&Lent::slice(&grads), &mut norm)));
}

#[test]
fn a_flag_of_another_program_forbids_the_steps_after_the_decision_too() {
    let layout = layout(&LENGTHS);
    let mut bucket = Bucket::all(&layout).remove(0);
    let grads = vec![1.0; LENGTHS[0]];
    for (found_inf, steps) in [(1.0f32, 0), (0.0, 1)] {
        let (scale, mut norm) = (4.0f32, GradNorm::host().unwrap());
        // SAFETY: both outlive the call.
        norm.begin(unsafe { Scaling::NONE.grad_scaler(&scale, &found_inf) }).unwrap();
        bucket.step.add_norm(&Lent::slice(&grads), &mut norm).unwrap();
        assert_eq!(norm.decide(None, false).unwrap().skipped, found_inf != 0.0);
        bucket.step_decided(&grads, &mut norm);
        assert_eq!(bucket.step.step_count(layout.id("p0").unwrap()).unwrap(), steps);
    }
}

/// Returns the decisions of several ranks, each of which has measured some of the buckets.
fn sharded_decisions(grads: &[Vec<f32>], ranks: usize) -> Vec<Decision> {
    let layout = layout(&LENGTHS);
    let mut norms: Vec<GradNorm> = (0..ranks).map(|_| GradNorm::host().unwrap()).collect();
    for norm in &mut norms {
        norm.begin(Scaling::mean(WORLD_SIZE)).unwrap();
    }
    for (index, (mut bucket, grads)) in Bucket::all(&layout).into_iter().zip(grads).enumerate() {
        bucket.step.add_norm(&Lent::slice(grads), &mut norms[index % ranks]).unwrap();
    }
    let (mut limbs, mut largest) = ([0u64; NORM_LIMBS], 0);
    for norm in &mut norms {
        let sum = norm.sum().unwrap();
        limbs.iter_mut().zip(sum.limbs).for_each(|(all, one)| *all = all.wrapping_add(*one));
        largest = largest.max(*sum.largest);
    }
    for norm in &mut norms {
        let sum = norm.sum().unwrap();
        (*sum.limbs, *sum.largest) = (limbs, largest);
    }
    norms.iter_mut().map(|norm| norm.decide(Some(MAX_NORM), true).unwrap()).collect()
}

#[test]
fn ranks_that_add_up_their_sums_decide_as_one_that_has_measured_all() {
    for spoiled in [None, Some(f32::NAN), Some(f32::INFINITY)] {
        let mut grads = gradients(0);
        if let Some(value) = spoiled {
            grads[2][30] = value;
        }
        let [alone] = sharded_decisions(&grads, 1)[..] else { panic!("one rank") };
        for decision in sharded_decisions(&grads, 3) {
            assert_eq!(decision.norm.to_bits(), alone.norm.to_bits());
            assert_eq!((decision.clip, decision.skipped), (alone.clip, spoiled.is_some()));
        }
    }
}

#[test]
fn a_sum_is_open_from_begin_to_the_decision() {
    let mut norm = GradNorm::host().unwrap();
    assert!(matches!(norm.sum(), Err(Error::Order(_))));
    norm.begin(Scaling::NONE).unwrap();
    assert!(norm.sum().is_ok_and(|sum| *sum.largest == 0 && *sum.limbs == [0; NORM_LIMBS]));
    norm.decide(None, true).unwrap();
    assert!(matches!(norm.sum(), Err(Error::Order(_))));
}
