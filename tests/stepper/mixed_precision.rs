//! A policy of mixed precision trains f32 parameters to the bits of an f32 stepper that gets the values of the policy's
//! types.
//!
//! Each gradient of a micro-batch is exact in bf16 and in f16, but their sum is not, so the type of the sum shows.

use std::num::NonZeroU32;

use instep::{
    AdamW, DType, Error, Layout, MixedPrecisionPolicy, Result, Solo, Stepper, StepperBuilder, Strategy, bf16,
    cast, f16, in_process,
};

const LEN: usize = 700;
const RANKS: u32 = 2;

fn first(element: usize) -> f32 {
    ((element % 7) as f32 - 3.0) / 1024.0
}

fn second(element: usize) -> f32 {
    1.0 + (element % 5) as f32
}

fn layout() -> Layout {
    Layout::builder().param("a", LEN).param("b", LEN).build().unwrap()
}

/// Trains for three passes with gradients of type `compute`; returns the optimizer's parameters, and those of the
/// forward.
fn train(builder: StepperBuilder<'_>, rank: instep::InProcess, compute: DType) -> Result<[Vec<f32>; 2]> {
    let mut stepper = builder.host(rank)?;
    let ids: Vec<_> = stepper.layout().ids().collect();
    for id in &ids {
        stepper.write(*id, &(0..LEN).map(|k| 0.3 + k as f32 / 977.0).collect::<Vec<_>>())?;
    }
    for _ in 0..3 {
        let mut pass = stepper.begin_accumulating(NonZeroU32::new(2).unwrap())?;
        for gradient in [first, second] {
            let values: Vec<f32> = (0..LEN).map(gradient).collect();
            for id in &ids {
                match compute {
                    DType::BF16 => pass.grads().add(*id, &narrow::<bf16>(&values))?,
                    DType::F16 => pass.grads().add(*id, &narrow::<f16>(&values))?,
                    _ => pass.grads().add(*id, &values)?,
                }
                pass.grad_ready(*id)?;
            }
            if gradient(0) == first(0) {
                pass.next_micro_batch()?;
            }
        }
        pass.finish()?;
    }
    let mut exact = vec![0.0; LEN];
    stepper.gather(ids[0], &mut exact)?;
    stepper.unshard(stepper.plan().segment_of(0).bucket)?;
    let mut computed = vec![0.0; LEN];
    match stepper.precision_of(ids[0])?.param {
        DType::BF16 => cast(stepper.view::<bf16>(ids[0])?, &mut computed),
        DType::F16 => cast(stepper.view::<f16>(ids[0])?, &mut computed),
        _ => cast(stepper.view::<f32>(ids[0])?, &mut computed),
    }
    Ok([exact, computed])
}

fn narrow<T: instep::Element>(values: &[f32]) -> Vec<T> {
    let mut narrow = vec![T::from_f32(0.0); values.len()];
    cast(values, &mut narrow);
    narrow
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Returns the parameters of an f32 stepper that gets the sums of both micro-batches, rounded to `reduce`.
fn reference(reduce: DType) -> Vec<f32> {
    let layout = layout();
    let run = in_process(RANKS, |rank| {
        let mut stepper = Stepper::host(&layout, AdamW::default(), rank)?;
        let ids: Vec<_> = layout.ids().collect();
        for id in &ids {
            stepper.write(*id, &(0..LEN).map(|k| 0.3 + k as f32 / 977.0).collect::<Vec<_>>())?;
        }
        for _ in 0..3 {
            let mut pass = stepper.begin()?;
            let sums: Vec<f32> = (0..LEN).map(|k| reduce.round(first(k) + second(k))).collect();
            ids.iter().try_for_each(|id| pass.write(id.grad(), &sums))?;
            pass.finish()?;
        }
        let mut left = vec![0.0; LEN];
        stepper.read(ids[0], &mut left)?;
        Ok(left)
    });
    run.unwrap().swap_remove(0)
}

#[test]
fn every_policy_and_strategy_steps_the_parameters_own_type_on_sums_of_the_reduced_type() {
    let layout = layout();
    let types = [None, Some(DType::BF16), Some(DType::F16), Some(DType::F32)];
    for (param_dtype, reduce_dtype) in types.into_iter().flat_map(|a| types.map(|b| (a, b))) {
        let policy = MixedPrecisionPolicy { param_dtype, reduce_dtype, ..Default::default() };
        let compute = param_dtype.unwrap_or(DType::F32);
        let wanted = reference(reduce_dtype.unwrap_or(compute));
        for strategy in [Strategy::Replicated, Strategy::Zero, Strategy::Fsdp] {
            let run = in_process(RANKS, |rank| {
                let builder = Stepper::builder(&layout, AdamW::default()).strategy(strategy);
                train(builder.precision(policy.precision(DType::F32)?), rank, compute)
            });
            for [exact, computed] in run.unwrap() {
                assert_eq!(bits(&exact), bits(&wanted), "{policy:?} {strategy:?}");
                let rounded: Vec<f32> = wanted.iter().map(|value| compute.round(*value)).collect();
                assert_eq!(bits(&computed), bits(&rounded), "{policy:?} {strategy:?}");
            }
        }
    }
    assert_ne!(bits(&reference(DType::F32)), bits(&reference(DType::BF16)), "the type of the sum shows");
}

#[test]
fn groups_may_have_policies_of_their_own() {
    let layout = Layout::builder().param("a", 4).param("b", 4).in_group("norms").build().unwrap();
    let policy = MixedPrecisionPolicy { param_dtype: Some(DType::BF16), ..Default::default() };
    let own = MixedPrecisionPolicy::default();
    let stepper = Stepper::builder(&layout, AdamW::default())
        .precision(policy.precision(DType::F32).unwrap())
        .group_precision("norms", own.precision(DType::F32).unwrap())
        .host(Solo::default())
        .unwrap();
    let of = |name| stepper.precision_of(layout.id(name).unwrap()).unwrap();
    assert_eq!((of("a").param, of("a").grad, of("b").param), (DType::BF16, DType::BF16, DType::F32));
}

#[test]
fn a_type_that_the_parameters_cannot_hold_is_refused() {
    for (original, param) in [(DType::BF16, DType::F32), (DType::BF16, DType::F16), (DType::F16, DType::BF16)]
    {
        let policy = MixedPrecisionPolicy { param_dtype: Some(param), ..Default::default() };
        let refused = policy.precision(original);
        assert!(matches!(refused, Err(Error::Config { field: "param_dtype", .. })), "{refused:?}");
    }
    let summed = MixedPrecisionPolicy { reduce_dtype: Some(DType::F32), ..Default::default() };
    let precision = summed.precision(DType::BF16).unwrap();
    assert_eq!((precision.param, precision.grad), (DType::BF16, DType::F32));
}

#[test]
fn inputs_and_outputs_of_a_forward_are_cast_as_the_policy_says() {
    let plain = MixedPrecisionPolicy::default();
    assert_eq!(
        (plain.forward_input(DType::F32), plain.forward_output(DType::BF16)),
        (DType::F32, DType::BF16)
    );
    let policy = MixedPrecisionPolicy {
        param_dtype: Some(DType::BF16),
        output_dtype: Some(DType::F32),
        ..MixedPrecisionPolicy::default()
    };
    assert_eq!(
        (policy.forward_input(DType::F32), policy.forward_output(DType::BF16)),
        (DType::BF16, DType::F32)
    );
    let as_they_come = MixedPrecisionPolicy { cast_forward_inputs: false, ..policy };
    assert_eq!(as_they_come.forward_input(DType::F32), DType::F32);
}
