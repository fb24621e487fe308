//! What a bucket refuses, by name and before anything is written.
//!
//! Each error is told from the others by its words.

use instep::bucket_step::{Tensor, Tensors};
use instep::layout::ForeignBucket;
use instep::optim::{Custom, ParamStep, StepParam};
use instep::{
    Adadelta, Adam, AdamW, BucketStep, DType, Gradients, Layout, Moments, Precision, Scaling, SegmentAction,
    Sgd,
};

fn two() -> Layout {
    Layout::builder().param("a", 4).param("b", 2).build().unwrap()
}

pub(super) fn refused(outcome: instep::Result<()>, words: &str) {
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains(words), "{error}");
}

#[test]
fn tensors_that_do_not_fit_are_refused_before_anything_is_written() {
    let layout = two();
    let mut step = BucketStep::builder(&layout, Sgd { momentum: 0.9, ..Default::default() }).host().unwrap();
    let (mut params, grads, mut state) = ([1f32; 6], [1f32; 6], [0f32; 6]);
    let (mut short, mut halves) = ([1f32; 5], [half::bf16::ONE; 6]);
    let mut try_step = |tensors: Tensors<'_>, words: &str| refused(step.step(&tensors, Scaling::NONE), words);
    let plain = Tensors::new(Tensor::slice_mut(&mut params), Tensor::slice(&grads));
    try_step(plain, "states 0: missing, but this step has them; add them with `Tensors::states`");
    let plain = Tensors::new(Tensor::slice_mut(&mut params), Tensor::slice(&grads));
    try_step(
        plain.states([Tensor::slice_mut(&mut short)]),
        "states 0: a run of 5 elements, where the bucket has 6",
    );
    let plain = Tensors::new(Tensor::slice(&grads), Tensor::slice(&grads));
    try_step(plain.states([Tensor::slice_mut(&mut state)]), "parameters: only lent for reading");
    let plain = Tensors::new(Tensor::slice_mut(&mut halves), Tensor::slice(&grads));
    try_step(plain.states([Tensor::slice_mut(&mut state)]), "parameters: elements of 2 bytes");
    let mut extra = [0f32; 6];
    let plain = Tensors::new(Tensor::slice_mut(&mut params), Tensor::slice(&grads));
    let tensors = plain.states([Tensor::slice_mut(&mut state), Tensor::slice_mut(&mut extra)]);
    try_step(tensors, "states 1: given, but this step has none");
    let plain = Tensors::new(Tensor::slice_mut(&mut params), Tensor::slice(&grads));
    let tensors = plain.states([Tensor::slice_mut(&mut state)]).master(Tensor::slice_mut(&mut extra));
    try_step(tensors, "masters: given");
    let one: [&[f32]; 1] = [&grads[..4]];
    let plain = Tensors::new(Tensor::slice_mut(&mut params), Tensor::slices(&one));
    try_step(plain.states([Tensor::slice_mut(&mut state)]), "gradients: 1 runs for 2 parameters");
    let wrong: [&[f32]; 2] = [&grads[..4], &grads[..3]];
    let plain = Tensors::new(Tensor::slice_mut(&mut params), Tensor::slices(&wrong));
    try_step(plain.states([Tensor::slice_mut(&mut state)]), "where its parameter has 2");
    // SAFETY: refused before it is used.
    let null = unsafe { Tensor::at(std::ptr::null_mut()) };
    let plain = Tensors::new(null, Tensor::slice(&grads));
    try_step(plain.states([Tensor::slice_mut(&mut state)]), "null or not a multiple of 4");
    // SAFETY: as above.
    let odd = unsafe { Tensor::at(params.as_mut_ptr().wrapping_byte_add(2).cast()) };
    try_step(
        Tensors::new(odd, Tensor::slice(&grads)).states([Tensor::slice_mut(&mut state)]),
        "not a multiple of 4",
    );
    assert_eq!((params, state, step.step_count(layout.id("a").unwrap()).unwrap()), ([1f32; 6], [0f32; 6], 0));
}

#[test]
fn gradients_that_the_step_writes_must_be_writable() {
    let layout =
        Layout::builder().param("a", 4).param("b", 2).action(SegmentAction::Average).build().unwrap();
    let sgd = Sgd { lr: 1.0, ..Default::default() };
    let zeroing = BucketStep::builder(&two(), sgd).gradients(Gradients::Zero).host().unwrap();
    let ending = BucketStep::builder(&two(), sgd).gradients(Gradients::Average).host().unwrap();
    let averaging = BucketStep::builder(&layout, sgd).host().unwrap();
    let steps = [(zeroing, [0f32; 6]), (ending, [2.0; 6]), (averaging, [4.0, 4.0, 4.0, 4.0, 2.0, 2.0])];
    for (mut step, expected) in steps {
        let (mut params, mut grads) = ([0f32; 6], [4f32; 6]);
        let tensors = Tensors::new(Tensor::slice_mut(&mut params), Tensor::slice(&grads));
        refused(step.step(&tensors, Scaling::mean(2)), "gradients: only lent for reading");
        let tensors = Tensors::new(Tensor::slice_mut(&mut params), Tensor::slice_mut(&mut grads));
        step.step(&tensors, Scaling::mean(2)).unwrap();
        assert_eq!(grads, expected);
    }
}

#[derive(Debug)]
struct Own;

impl StepParam for Own {
    fn name(&self) -> &str {
        "own"
    }

    fn step_param(&self, _: ParamStep<'_>) -> instep::Result<()> {
        unreachable!("it is never built")
    }
}

#[test]
fn options_that_no_kernel_has_are_refused() {
    let layout = two();
    let build = |builder: instep::bucket_step::BucketStepBuilder| builder.host().map(drop);
    let adamw = || BucketStep::builder(&layout, AdamW::default());
    let (a, b) = (layout.id("a").unwrap(), layout.id("b").unwrap());
    refused(build(adamw().group("none", AdamW::default())), "`none`");
    refused(build(adamw().ema(1.5)), "ema = 1.5");
    refused(build(adamw().gradients(Gradients::Release)), "cannot be released");
    refused(build(adamw().bucket(ForeignBucket::new(4))), "holds no gradient");
    refused(build(adamw().bucket(ForeignBucket::new(5).gradient(a, 0).gradient(b, 3))), "overlap");
    refused(build(adamw().bucket(ForeignBucket::new(9).gradient(a, 0).gradient(a, 5))), "listed twice");
    refused(build(adamw().bucket(ForeignBucket::new(5).gradient(a, 2))), "ends outside");
    let coded = Precision { moments: Moments::EightBit, ..Precision::F32 };
    refused(build(adamw().precision(coded)), "splits a block of 256");
    let one = Layout::builder().param("a", 4).build().unwrap();
    refused(build(BucketStep::builder(&one, Adadelta::default()).precision(coded)), "moments = EightBit");
    let wrong = Precision { master: instep::Master::F32, ..Precision::F32 };
    refused(build(adamw().precision(wrong)), "master");
    refused(build(BucketStep::builder(&layout, AdamW { lr: -1.0, ..AdamW::default() })), "lr = -1");
    refused(build(BucketStep::builder(&layout, Custom::new(Own))), "runs kernels alone");
    assert!(build(adamw().copy_params(DType::BF16).ema(0.9)).is_ok());
}

#[test]
fn a_group_keeps_its_kind_of_optimizer_and_its_states() {
    let layout = two();
    let mut step = BucketStep::builder(&layout, Adam::default()).host().unwrap();
    refused(step.set_optimizer("default", &Sgd::default()), "another optimizer, or other states");
    refused(step.set_optimizer("default", &Adam { amsgrad: true, ..Adam::default() }), "other states");
    refused(step.set_optimizer("default", &Adam { lr: f64::NAN, ..Adam::default() }), "lr = NaN");
    refused(step.set_optimizer("other", &Adam::default()), "`other`");
    step.set_optimizer("default", &Adam { betas: (0.5, 0.9), ..Adam::default() }).unwrap();
    let stranger = Layout::builder().param("a", 1).build().unwrap().id("a").unwrap();
    refused(step.step_count(stranger).map(drop), "belongs to another layout");
    refused(step.set_carried(layout.id("a").unwrap(), f64::INFINITY), "carried");
}

#[test]
fn a_bucket_that_no_memory_holds_is_refused_before_it_is_cut_into_tiles() {
    let layout = Layout::builder().param("endless", 1 << 50).build().unwrap();
    refused(BucketStep::builder(&layout, Adam::default()).host().map(drop), "1125899906842624 elements");
}

#[test]
fn a_product_of_momenta_may_be_zero_and_nothing_outside_zero_to_one() {
    let layout = two();
    let id = layout.id("a").unwrap();
    let mut step = BucketStep::builder(&layout, instep::NAdam::default()).host().unwrap();
    for wrong in [-0.5, 1.5, f64::NAN, f64::INFINITY] {
        refused(step.set_carried(id, wrong), "use a number from 0 to 1");
    }
    step.set_carried(id, 0.0).unwrap();
    assert_eq!(step.carried(id).unwrap(), 0.0);
}
