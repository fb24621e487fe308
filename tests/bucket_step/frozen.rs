//! The step of a bucket skips frozen parameters, as it skips one without a gradient in this pass.
//!
//! A frozen parameter's gradient is NaN, so a step that read it would change bits.

use instep::bucket_step::{Lent, StepTensors};
use instep::{AdamW, BucketStep, DEFAULT_GROUP, GradNorm, Gradients, Layout, Scaling, Sgd};

const LEN: usize = 300;

/// Steps two parameters and freezes the second in the pass `frozen_at`; returns parameters and first moments.
fn train(steps: usize, frozen_at: Option<usize>, gradients: Gradients) -> (Vec<f32>, Vec<f32>, [u64; 2]) {
    let layout = Layout::builder().param("a", LEN).param("b", LEN).build().unwrap();
    let b = layout.id("b").unwrap();
    let adamw = AdamW { lr: 0.1, ..Default::default() };
    let mut step = BucketStep::builder(&layout, adamw).gradients(gradients).host().unwrap();
    let (mut params, mut first, mut second) = (vec![1f32; 2 * LEN], vec![0f32; 2 * LEN], vec![0f32; 2 * LEN]);
    for k in 0..steps {
        let mut grads: Vec<f32> = (0..2 * LEN).map(|i| (i + k) as f32 / 100.0 - 3.0).collect();
        if frozen_at == Some(k) {
            grads[LEN..].fill(f32::NAN);
        }
        step.set_frozen(b, frozen_at == Some(k)).unwrap();
        // A changed rate goes the same way to the kernels, and leaves what is frozen frozen.
        step.set_optimizer(DEFAULT_GROUP, &AdamW { lr: 0.1 / (k + 1) as f64, ..adamw }).unwrap();
        let states = [Lent::slice_mut(&mut first), Lent::slice_mut(&mut second)];
        let tensors =
            StepTensors::new(Lent::slice_mut(&mut params), Lent::slice_mut(&mut grads)).states(states);
        step.step(&tensors, Scaling::mean(2)).unwrap();
        assert_eq!(grads[0] == 0.0, gradients == Gradients::Zero);
    }
    let counts = layout.ids().map(|id| step.step_count(id).unwrap()).collect::<Vec<_>>();
    (params, first, counts.try_into().unwrap())
}

#[test]
fn a_frozen_parameter_keeps_its_tensors_and_count_and_goes_on_afterwards() {
    for gradients in [Gradients::Keep, Gradients::Zero, Gradients::Average] {
        let (params, first, counts) = train(3, Some(2), gradients);
        let (all, all_first, _) = train(3, None, gradients);
        let (earlier, earlier_first, _) = train(2, None, gradients);
        assert_eq!((&params[..LEN], &first[..LEN]), (&all[..LEN], &all_first[..LEN]));
        assert_eq!((&params[LEN..], &first[LEN..]), (&earlier[LEN..], &earlier_first[LEN..]));
        assert_eq!(counts, [3, 2]);
        let (params, _, counts) = train(5, Some(2), gradients);
        assert!(params.iter().all(|p| p.is_finite()) && params[LEN..] != earlier[LEN..]);
        assert_eq!(counts, [5, 4]);
    }
}

#[test]
fn a_parameter_of_another_bucket_cannot_be_frozen() {
    let layout = Layout::builder().param("a", 1).param("b", 1).build().unwrap();
    let bucket = instep::layout::ForeignBucket::new(1).gradient(layout.id("a").unwrap(), 0);
    let mut step = BucketStep::builder(&layout, AdamW::default()).bucket(bucket).host().unwrap();
    let error = step.set_frozen(layout.id("b").unwrap(), true).unwrap_err().to_string();
    assert!(error.contains("not in this bucket"), "{error}");
}

#[test]
fn a_norm_leaves_out_what_is_frozen_from_the_same_pass_on() {
    let layout = Layout::builder().param("a", 1).param("b", 1).build().unwrap();
    let b = layout.id("b").unwrap();
    let mut step = BucketStep::builder(&layout, Sgd { lr: 1.0, ..Default::default() }).host().unwrap();
    let mut norm = GradNorm::host().unwrap();
    let mut params = [0f32; 2];
    for (frozen, grads, expected) in [
        (false, [3.0, 4.0], 5.0),
        (true, [3.0, f32::NAN], 3.0),
        (true, [3.0, f32::NAN], 3.0),
        (false, [3.0, 4.0], 5.0),
    ] {
        step.set_frozen(b, frozen).unwrap();
        norm.begin(Scaling::NONE).unwrap();
        step.add_norm(&Lent::slice(&grads), &mut norm).unwrap();
        let decision = norm.decide(Some(100.0), true).unwrap();
        assert_eq!((decision.norm, decision.skipped), (expected, false));
        let tensors = StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&grads));
        step.step_decided(&tensors, &mut norm).unwrap();
    }
    assert_eq!(params, [-12.0, -8.0]);
    assert_eq!(layout.ids().map(|id| step.step_count(id).unwrap()).collect::<Vec<_>>(), [4, 2]);
}
