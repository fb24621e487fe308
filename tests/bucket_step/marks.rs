//! A norm knows its buckets: each bucket is added once and stepped once, and a decision needs at least one bucket.
//!
//! Every error names the bucket, and leaves norm and parameters unchanged.

use instep::bucket_step::{Lent, StepTensors};
use instep::layout::ForeignBucket;
use instep::{BucketStep, Error, GradNorm, Layout, Scaling, Sgd};

/// Returns two buckets of one parameter each.
fn buckets() -> [BucketStep; 2] {
    let layout = Layout::builder().param("first", 1).param("second", 1).build().unwrap();
    ["first", "second"].map(|name| {
        let bucket = ForeignBucket::new(1).gradient(layout.id(name).unwrap(), 0);
        let sgd = Sgd { lr: 1.0, ..Sgd::default() };
        BucketStep::builder(&layout, sgd).bucket(bucket).host().unwrap()
    })
}

fn begun() -> GradNorm {
    let mut norm = GradNorm::host().unwrap();
    norm.begin(Scaling::NONE).unwrap();
    norm
}

fn step(bucket: &mut BucketStep, param: &mut [f32], norm: &mut GradNorm) -> instep::Result<()> {
    bucket.step_decided(&StepTensors::new(Lent::slice_mut(param), Lent::slice(&[3f32])), norm)
}

#[track_caller]
fn refused<T>(outcome: instep::Result<T>, words: &str) {
    let Err(error) = outcome else { panic!("not refused: {words}") };
    assert!(matches!(error, Error::Order(_)) && error.to_string().contains(words), "{error}");
}

#[test]
fn a_bucket_is_added_once_and_counts_once() {
    let [mut first, mut second] = buckets();
    let mut norm = begun();
    first.add_norm(&Lent::slice(&[3f32]), &mut norm).unwrap();
    refused(
        first.add_norm(&Lent::slice(&[3f32]), &mut norm),
        "bucket of `first`: added to this norm already; add each bucket once",
    );
    second.add_norm(&Lent::slice(&[4f32]), &mut norm).unwrap();
    assert_eq!(norm.decide(None, true).unwrap().norm, 5.0);
    norm.begin(Scaling::NONE).unwrap();
    first.add_norm(&Lent::slice(&[3f32]), &mut norm).unwrap();
    assert_eq!(norm.decide(None, true).unwrap().norm, 3.0);
}

#[test]
fn a_bucket_that_was_never_added_is_not_stepped() {
    let [mut first, mut second] = buckets();
    let (mut norm, mut param) = (begun(), [0f32]);
    first.add_norm(&Lent::slice(&[3f32]), &mut norm).unwrap();
    norm.decide(None, true).unwrap();
    refused(
        step(&mut second, &mut param, &mut norm),
        "bucket of `second`: not added to this norm; add its gradients before the decision",
    );
    assert_eq!(param, [0.0]);
    // Another norm's bucket is none of this one's.
    let mut other = begun();
    second.add_norm(&Lent::slice(&[3f32]), &mut other).unwrap();
    refused(step(&mut second, &mut param, &mut norm), "bucket of `second`: not added");
}

#[test]
fn a_decision_steps_a_bucket_once() {
    let [mut first, _] = buckets();
    let (mut norm, mut param) = (begun(), [0f32]);
    first.add_norm(&Lent::slice(&[3f32]), &mut norm).unwrap();
    norm.decide(None, true).unwrap();
    step(&mut first, &mut param, &mut norm).unwrap();
    refused(
        step(&mut first, &mut param, &mut norm),
        "bucket of `first`: stepped by this decision already; begin the norm anew",
    );
    assert_eq!(param, [-3.0]);
    norm.begin(Scaling::NONE).unwrap();
    first.add_norm(&Lent::slice(&[3f32]), &mut norm).unwrap();
    norm.decide(None, true).unwrap();
    step(&mut first, &mut param, &mut norm).unwrap();
    assert_eq!(param, [-6.0]);
}

#[test]
fn a_decision_about_nothing_is_refused_unless_the_sum_was_taken() {
    let mut norm = begun();
    refused(norm.decide(None, true), "norm: no bucket was added; add the gradients of each bucket first");
    // A rank that holds no bucket takes the sum, and adds what the others have.
    *norm.sum().unwrap().largest = 0;
    assert_eq!(norm.decide(None, true).unwrap().norm, 0.0);
    norm.begin(Scaling::NONE).unwrap();
    refused(norm.decide(None, true), "no bucket was added");
}

#[test]
fn a_norm_whose_sum_was_taken_steps_what_was_added_to_another_one() {
    let [mut first, mut second] = buckets();
    let (mut part, mut total, mut param) = (begun(), begun(), [0f32]);
    first.add_norm(&Lent::slice(&[3f32]), &mut part).unwrap();
    let from = part.sum().unwrap();
    let to = total.sum().unwrap();
    to.limbs.copy_from_slice(from.limbs);
    *to.largest = *from.largest;
    assert_eq!(total.decide(None, true).unwrap().norm, 3.0);
    step(&mut first, &mut param, &mut total).unwrap();
    refused(step(&mut first, &mut param, &mut total), "bucket of `first`: stepped by this decision already");
    refused(step(&mut second, &mut param, &mut total), "bucket of `second`: not added");
    assert_eq!(param, [-3.0]);
}

#[test]
fn a_bucket_without_a_gradient_is_added_as_any_other() {
    let [mut first, _] = buckets();
    let id = first.layout().id("first").unwrap();
    let (mut norm, mut param) = (begun(), [0f32]);
    first.set_frozen(id, true).unwrap();
    first.add_norm(&Lent::slice(&[f32::NAN]), &mut norm).unwrap();
    assert_eq!(norm.decide(None, true).unwrap().norm, 0.0);
    step(&mut first, &mut param, &mut norm).unwrap();
    first.set_frozen(id, false).unwrap();
    norm.begin(Scaling::NONE).unwrap();
    let none: [Option<&[f32]>; 1] = [None];
    first.add_norm(&Lent::optional_slices(&none), &mut norm).unwrap();
    assert_eq!(norm.decide(None, true).unwrap().norm, 0.0);
    let tensors = StepTensors::new(Lent::slice_mut(&mut param), Lent::optional_slices(&none));
    first.step_decided(&tensors, &mut norm).unwrap();
    assert_eq!((param, first.step_count(id).unwrap()), ([0.0], 0));
}

#[test]
fn a_bucket_may_be_in_two_norms_at_a_time() {
    let [mut first, mut second] = buckets();
    let (mut all, mut own, mut param) = (begun(), begun(), [0f32]);
    first.add_norm(&Lent::slice(&[3f32]), &mut all).unwrap();
    first.add_norm(&Lent::slice(&[3f32]), &mut own).unwrap();
    second.add_norm(&Lent::slice(&[4f32]), &mut all).unwrap();
    assert_eq!((own.decide(None, true).unwrap().norm, all.decide(None, true).unwrap().norm), (3.0, 5.0));
    step(&mut first, &mut param, &mut all).unwrap();
    assert_eq!(param, [-3.0]);
}

#[test]
fn a_bucket_that_was_stepped_otherwise_since_it_was_added_is_not_stepped_again() {
    let [mut first, _] = buckets();
    let (mut norm, mut other, mut param) = (begun(), begun(), [0f32]);
    let words = "bucket of `first`: stepped since it was added to this norm; begin the norm anew";
    first.add_norm(&Lent::slice(&[3f32]), &mut norm).unwrap();
    first.add_norm(&Lent::slice(&[3f32]), &mut other).unwrap();
    norm.decide(None, true).unwrap();
    other.decide(None, true).unwrap();
    step(&mut first, &mut param, &mut other).unwrap();
    refused(step(&mut first, &mut param, &mut norm), words);
    norm.begin(Scaling::NONE).unwrap();
    first.add_norm(&Lent::slice(&[3f32]), &mut norm).unwrap();
    norm.decide(None, true).unwrap();
    let tensors = StepTensors::new(Lent::slice_mut(&mut param), Lent::slice(&[3f32]));
    first.step(&tensors, Scaling::NONE).unwrap();
    refused(step(&mut first, &mut param, &mut norm), words);
    // Its next gradients are in another norm alone.
    other.begin(Scaling::NONE).unwrap();
    first.add_norm(&Lent::slice(&[5f32]), &mut other).unwrap();
    refused(step(&mut first, &mut param, &mut norm), words);
    assert_eq!(param, [-6.0]);
}

#[test]
fn tensors_are_stepped_again_without_being_lent_unless_a_norm_was_lent_others() {
    let [mut bucket, _] = buckets();
    let (mut param, mut grad) = ([0f32], [1f32]);
    let again = |bucket: &mut BucketStep| {
        // SAFETY: both arrays are alive, and nothing else touches them meanwhile.
        unsafe { bucket.step_again(Scaling::NONE) }
    };
    refused(again(&mut bucket), "bucket of `first`: has no tensors of a step; call step first");
    let (at_param, at_grad) = ((&raw mut param).cast(), (&raw mut grad).cast::<f32>());
    // SAFETY: as above.
    let lent = || unsafe { StepTensors::new(Lent::at(at_param), Lent::at(at_grad.cast())) };
    bucket.step(&lent(), Scaling::NONE).unwrap();
    // SAFETY: as above.
    unsafe { at_grad.write(10.0) };
    again(&mut bucket).unwrap();
    bucket.add_norm(&Lent::slice(&[3f32]), &mut begun()).unwrap();
    refused(again(&mut bucket), "bucket of `first`: has no tensors of a step");
    bucket.step(&lent(), Scaling::NONE).unwrap();
    again(&mut bucket).unwrap();
    assert_eq!(param, [-31.0]);
}
