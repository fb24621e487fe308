//! A bucket returns each refusal by name, before it writes anything.
//!
//! The words of the message distinguish the errors.

use instep::bucket_step::{Lent, StepTensors};
use instep::layout::ForeignBucket;
use instep::optim::{Custom, ParamStep, StepParam};
use instep::{
    Adadelta, Adam, AdamW, BucketStep, DEFAULT_GROUP, DType, Gradients, Layout, Moments, Optimizer,
    Precision, Scaling, SegmentAction, Sgd,
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
    let mut try_step =
        |tensors: StepTensors<'_>, words: &str| refused(step.step(&tensors, Scaling::NONE), words);
    let plain = StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&grads));
    try_step(
        plain,
        "state `momentum_buffer` of SGD (group `default`): missing, but this step has it; add it to",
    );
    let plain = StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&grads));
    try_step(
        plain.states([Lent::slice_mut(&mut short)]),
        "state `momentum_buffer` of SGD (group `default`): a run of 5 elements, where the bucket has 6",
    );
    let plain = StepTensors::new(Lent::slice(&grads), Lent::slice(&grads));
    try_step(plain.states([Lent::slice_mut(&mut state)]), "parameters: only lent for reading");
    let plain = StepTensors::new(Lent::slice_mut(&mut halves), Lent::slice(&grads));
    try_step(
        plain.states([Lent::slice_mut(&mut state)]),
        "parameters: elements of bf16, where the precision has f32",
    );
    let mut extra = [0f32; 6];
    let plain = StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&grads));
    let tensors = plain.states([Lent::slice_mut(&mut state), Lent::slice_mut(&mut extra)]);
    try_step(tensors, "states: more than the 1 of this step; leave the others out");
    let plain = StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&grads));
    let tensors = plain.states([Lent::slice_mut(&mut state)]).master(Lent::slice_mut(&mut extra));
    try_step(tensors, "masters: given, but this step has none");
    let one: [&[f32]; 1] = [&grads[..4]];
    let plain = StepTensors::new(Lent::slice_mut(&mut params), Lent::slices(&one));
    try_step(plain.states([Lent::slice_mut(&mut state)]), "gradients: 1 runs for 2 parameters");
    let wrong: [&[f32]; 2] = [&grads[..4], &grads[..3]];
    let plain = StepTensors::new(Lent::slice_mut(&mut params), Lent::slices(&wrong));
    try_step(
        plain.states([Lent::slice_mut(&mut state)]),
        "gradients, run 1: a run of 3 elements, where its parameter has 2",
    );
    // SAFETY: refused before it is used.
    let null = unsafe { Lent::at(std::ptr::null_mut()) };
    let plain = StepTensors::new(null, Lent::slice(&grads));
    try_step(
        plain.states([Lent::slice_mut(&mut state)]),
        "parameters: the address is null; give the address of its elements",
    );
    // SAFETY: as above.
    let odd = unsafe { Lent::at(params.as_mut_ptr().wrapping_byte_add(2).cast()) };
    try_step(
        StepTensors::new(odd, Lent::slice(&grads)).states([Lent::slice_mut(&mut state)]),
        "is not a multiple of 4; align it to an element",
    );
    let each = [params.as_mut_ptr().cast(), params.as_mut_ptr().wrapping_byte_add(18).cast()];
    // SAFETY: as above.
    let odd = unsafe { Lent::at_each(&each) };
    try_step(
        StepTensors::new(odd, Lent::slice(&grads)).states([Lent::slice_mut(&mut state)]),
        "parameters, run 1: the address",
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
        let tensors = StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&grads));
        refused(step.step(&tensors, Scaling::mean(2)), "gradients: only lent for reading");
        let tensors = StepTensors::new(Lent::slice_mut(&mut params), Lent::slice_mut(&mut grads));
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
    let twice = adamw().group(DEFAULT_GROUP, AdamW::default()).group(DEFAULT_GROUP, AdamW::default());
    refused(build(twice), "group = default: has an optimizer already");
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
    refused(step.set_optimizer("default", &Sgd::default()), "another optimizer than the step was built for");
    let amsgrad = Adam { amsgrad: true, ..Adam::default() };
    refused(step.set_optimizer("default", &amsgrad), "would keep exp_avg, exp_avg_sq, max_exp_avg_sq, where");
    refused(step.set_optimizer("default", &Adam { lr: f64::NAN, ..Adam::default() }), "lr = NaN");
    refused(step.set_optimizer("other", &Adam::default()), "`other`");
    step.set_optimizer("default", &Adam { betas: (0.5, 0.9), ..Adam::default() }).unwrap();
    let stranger = Layout::builder().param("a", 1).build().unwrap().id("a").unwrap();
    refused(
        step.step_count(stranger).map(drop),
        "belongs to another layout; take its id from the layout that this was built for",
    );
}

#[test]
fn a_bucket_that_no_memory_holds_is_refused_before_it_is_cut_into_tiles() {
    let layout = Layout::builder().param("endless", 1 << 50).build().unwrap();
    refused(BucketStep::builder(&layout, Adam::default()).host().map(drop), "1125899906842624 elements");
}

#[test]
fn a_missing_state_is_named_with_the_optimizers_and_groups_that_keep_it() {
    let layout = Layout::builder().param("a", 4).param("b", 2).in_group("head").build().unwrap();
    let (mut params, grads, mut state) = ([1f32; 6], [1f32; 6], [0f32; 6]);
    let mut of = |head: Box<dyn Optimizer>, words: &str| {
        let builder = BucketStep::builder(&layout, Adam::default()).group("head", head);
        let mut step = builder.host().unwrap();
        let tensors = StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&grads));
        let tensors = tensors.states([Some(Lent::slice_mut(&mut state)), None]);
        refused(step.step(&tensors, Scaling::NONE), words);
    };
    of(Adam::DESCRIPTOR.build(), "state `exp_avg_sq` of Adam (group `default` and 1 more): missing");
    let two =
        "state `exp_avg_sq` of Adam (group `default`) or `acc_delta` of Adadelta (group `head`): missing";
    of(Adadelta::DESCRIPTOR.build(), two);
    of(Sgd::DESCRIPTOR.build(), "state `exp_avg_sq` of Adam (group `default`): missing");
}

#[test]
fn runs_for_the_whole_bucket_that_overlap_are_refused_by_the_names_of_both() {
    let layout = two();
    let mut step = BucketStep::builder(&layout, Adam::default()).host().unwrap();
    let (mut params, mut grads, mut states) = ([1f32; 6], [1f32; 6], [0f32; 12]);
    let (own, theirs) = (grads.as_mut_ptr(), params.as_mut_ptr());
    let mut try_step = |grads: *mut f32, second: usize| {
        // SAFETY: memory of this test alone; overlapping runs are refused before they are read.
        let tensors = unsafe {
            let at = |address: *mut f32| Lent::at(address.cast());
            let states = [at(states.as_mut_ptr()), at(states.as_mut_ptr().wrapping_add(second))];
            StepTensors::new(at(theirs), at(grads)).states(states)
        };
        step.step(&tensors, Scaling::NONE)
    };
    let both =
        "state `exp_avg` of Adam (group `default`) and state `exp_avg_sq` of Adam (group `default`): overlap";
    refused(try_step(own, 5), both);
    refused(try_step(theirs, 6), "parameters and gradients: overlap; give each its own memory");
    try_step(own, 6).unwrap();
}
