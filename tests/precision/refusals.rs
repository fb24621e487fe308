//! Precisions, and views of stored tensors, are refused by the name of the wrong field or of the missing feature.
//!
//! The test lists the fields case by case, independently of `validate`. An error changes nothing.

use instep::collective::Call;
use instep::layout::{BucketCaps, ForeignBucket, Plan, Tails};
use instep::optim::{Custom, ParamStep, StepParam};
use instep::{
    AdamW, Borrowed, Collective, DType, Divisor, Error, Master, Moments, Precision, Result, Sgd, Solo,
    Stepper, StepperBuilder, Unused, in_process,
};

use crate::support::stored::{Stored, all};
use crate::support::{Presummed, layout, paint_params};

const CAPS: BucketCaps = BucketCaps { first_bytes: 4096, rest_bytes: 4096 };

fn field<T>(refused: Result<T>) -> Option<&'static str> {
    match refused {
        Ok(_) => None,
        Err(Error::Config { field, .. }) => Some(field),
        Err(other) => panic!("refused as {other:?}"),
    }
}

fn is_unsupported<T>(outcome: Result<T>) -> bool {
    matches!(outcome, Err(Error::Unsupported { .. }))
}

fn expected_field(precision: &Precision) -> Option<&'static str> {
    use DType::{BF16, F16, F32};
    let is_chance = precision.rounding != instep::Rounding::Nearest;
    match (precision.param, precision.master) {
        (F32, Master::F32 | Master::Remainder16 | Master::Remainder8) => Some("master"),
        (F16, Master::Remainder16 | Master::Remainder8) => Some("master"),
        // Its subnormals have no fixed number of bits.
        (F16, Master::None) => is_chance.then_some("rounding"),
        (BF16, Master::None | Master::Remainder8) => None,
        // Nothing is rounded but the states.
        _ => (is_chance && precision.moments == Moments::F32).then_some("rounding"),
    }
}

#[test]
fn a_combination_that_no_kernel_has_is_refused_by_its_field_wherever_it_is_given() {
    let layout = layout(&[3]);
    let id = layout.id("p0").unwrap();
    let mut refused = 0;
    for precision in all() {
        let expected = expected_field(&precision);
        let builder = Stepper::builder(&layout, AdamW::default()).precision(precision);
        assert_eq!(field(builder.host(Solo::default())), expected, "{precision:?}");
        assert_eq!(field(Plan::new(&layout, 1, CAPS, Tails::default(), precision)), expected);
        let bucket = ForeignBucket::new(3).gradient(id, 0);
        assert_eq!(field(Plan::foreign(&layout, &[bucket], precision)), expected);
        refused += usize::from(expected.is_some());
    }
    assert_eq!(refused, 216 - 105);
}

#[test]
fn decay_rates_of_averages_out_of_range_are_refused_and_those_at_the_edge_are_not() {
    let layout = layout(&[3]);
    let build = |decay| field(Stepper::builder(&layout, AdamW::default()).ema(decay).host(Solo::default()));
    for bad in [f64::NAN, -1e-9, 1.0 + f64::EPSILON, f64::INFINITY, f64::NEG_INFINITY] {
        assert_eq!(build(bad), Some("ema"), "{bad}");
    }
    assert!([0.0, 0.5, 1.0].into_iter().all(|decay| build(decay).is_none()));
}

#[test]
fn more_ranks_than_a_gradients_type_can_count_are_refused_unless_nothing_is_counted() {
    let layout = layout(&[3]);
    for (grad, largest) in [(DType::BF16, 256), (DType::F16, 2048)] {
        let precision = Precision { grad, ..Precision::F32 };
        let plan = |ranks, tails| field(Plan::new(&layout, ranks, CAPS, tails, precision));
        for (used, contributors) in [(true, false), (false, true), (true, true)] {
            let tails = Tails { used, contributors };
            assert_eq!(plan(largest + 1, tails), Some("grad"), "{grad} {tails:?}");
            assert_eq!(plan(largest, tails), None, "{grad} {tails:?}");
        }
        assert_eq!(plan(largest + 1, Tails::default()), None);
        let ranks = || Presummed(largest + 1);
        let builder = || Stepper::builder(&layout, AdamW::default()).precision(precision);
        assert_eq!(field(builder().host(ranks())), Some("grad"));
        let joins = builder().unused(Unused::StepZero).uneven_inputs(Divisor::WorldSize);
        assert_eq!(field(joins.host(ranks())), Some("grad"));
        assert_eq!(field(builder().unused(Unused::StepZero).host(ranks())), None);
    }
}

/// A collective that declares only what it must.
struct OnlyF32;

impl Collective for OnlyF32 {
    fn rank(&self) -> u32 {
        0
    }

    fn world_size(&self) -> u32 {
        1
    }

    fn enqueue(&self, _: &mut Call<'_>) -> Result<()> {
        Ok(())
    }

    fn abort(&self, _: &Error) {}
}

#[derive(Debug)]
struct Nothing;

impl StepParam for Nothing {
    fn name(&self) -> &str {
        "nothing"
    }

    fn step_param(&self, _: ParamStep<'_>) -> Result<()> {
        Ok(())
    }
}

#[test]
fn collectives_and_optimizers_that_know_f32_alone_are_refused_for_what_is_not() {
    let layout = layout(&[3]);
    let id = layout.id("p0").unwrap();
    let narrow = Precision { param: DType::BF16, grad: DType::BF16, ..Precision::F32 };
    for grad in [DType::BF16, DType::F16] {
        let precision = Precision { grad, ..Precision::F32 };
        let builder = Stepper::builder(&layout, AdamW::default()).precision(precision);
        assert!(is_unsupported(builder.host(OnlyF32)));
    }
    let wide = Precision { param: DType::BF16, moments: Moments::EightBit, ..Precision::F32 };
    assert!(Stepper::builder(&layout, AdamW::default()).precision(wide).host(OnlyF32).is_ok());
    for precision in [narrow, Precision { moments: Moments::BF16, ..Precision::F32 }] {
        let build = |builder: StepperBuilder<'_>| builder.precision(precision).host(Solo::default());
        assert!(is_unsupported(build(Stepper::builder(&layout, Custom::new(Nothing)))));
        // Nor later: its slices would be of f32.
        let mut stepper = build(Stepper::builder(&layout, AdamW::default())).unwrap();
        paint_params(&mut stepper);
        let before = Stored::of(&stepper).unwrap();
        assert!(is_unsupported(stepper.add_optimizer_for(&[id], Custom::new(Nothing))));
        assert_eq!(Stored::of(&stepper).unwrap(), before);
        stepper.begin().unwrap().finish().unwrap();
    }
}

#[test]
fn copies_and_averages_behind_code_of_the_users_own_are_refused_which_would_not_write_them() {
    let layout = layout(&[3]);
    let id = layout.id("p0").unwrap();
    let custom = || Stepper::builder(&layout, Custom::new(Nothing));
    assert!(is_unsupported(custom().ema(0.5).host(Solo::default())));
    assert!(is_unsupported(custom().copy_params(DType::BF16).host(Solo::default())));
    let builder = Stepper::builder(&layout, AdamW::default()).ema(0.5);
    let mut stepper = builder.host(Solo::default()).unwrap();
    assert!(is_unsupported(stepper.add_optimizer_for(&[id], Custom::new(Nothing))));
    stepper.begin().unwrap().finish().unwrap();
}

#[test]
fn an_eps_that_lost_second_moments_would_be_divided_by_is_refused_in_8_bits_alone() {
    let layout = layout(&[3]);
    let build = |eps, moments| {
        let precision = Precision { moments, ..Precision::F32 };
        field(
            Stepper::builder(&layout, AdamW { eps, ..AdamW::default() })
                .precision(precision)
                .host(Solo::default()),
        )
    };
    for eps in [0.0, 2f64.powi(-46)] {
        assert_eq!(build(eps, Moments::EightBit), Some("moments"));
        assert_eq!(build(eps, Moments::BF16), None);
    }
    assert_eq!(build(2f64.powi(-45), Moments::EightBit), None);
}

#[test]
fn a_slice_is_of_the_type_that_is_stored_or_refused() {
    let layout = layout(&[3]);
    let id = layout.id("p0").unwrap();
    let precision = Precision {
        param: DType::BF16,
        grad: DType::F16,
        master: Master::Remainder16,
        moments: Moments::BF16,
        ..Precision::F32
    };
    let mut stepper =
        Stepper::builder(&layout, AdamW::default()).precision(precision).host(Solo::default()).unwrap();
    let params = stepper.params();
    assert!(params.get_as::<half::bf16>(id).is_ok());
    assert!(is_unsupported(params.get(id)) && is_unsupported(params.get_as::<half::f16>(id)));
    assert!(stepper.view::<half::bf16>(id.state("exp_avg")).is_ok());
    assert!(is_unsupported(stepper.view::<f32>(id.state("exp_avg"))));
    assert!(is_unsupported(stepper.view_mut::<f32>(id.state("exp_avg"))));
    assert!(is_unsupported(stepper.view::<f32>(id.grad())) && stepper.view::<half::f16>(id.grad()).is_ok());
    // A slice of the parameter alone would leave out its master.
    assert!(
        is_unsupported(stepper.view_mut::<half::bf16>(id)) && is_unsupported(stepper.view_mut::<f32>(id))
    );
    let mut pass = stepper.begin().unwrap();
    assert!(is_unsupported(pass.grads().get_mut(id)));
    assert!(is_unsupported(pass.grads().get_disjoint_mut::<half::bf16, 1>([id])));
    assert!(pass.is_first(id).unwrap(), "a refused slice is no gradient");
    pass.grads().get_disjoint_mut::<half::f16, 1>([id]).unwrap()[0].fill(half::f16::ONE);
    pass.finish().unwrap();
    let eight = Precision { moments: Moments::EightBit, ..Precision::F32 };
    let stepper = Stepper::builder(&layout, AdamW::default()).precision(eight).host(Solo::default()).unwrap();
    assert!(is_unsupported(stepper.view::<f32>(id.state("exp_avg"))), "codes are copied, decoded");
    let mut values = [1.0; 3];
    stepper.read(id.state("exp_avg"), &mut values).unwrap();
    assert_eq!(values, [0.0; 3]);
}

#[test]
fn averages_and_copies_that_are_not_kept_cannot_be_read() {
    let layout = layout(&[3]);
    let id = layout.id("p0").unwrap();
    let mut stepper = Stepper::host(&layout, AdamW::default(), Solo::default()).unwrap();
    let mut values = [7.0; 3];
    assert!(is_unsupported(stepper.read(id.ema(), &mut values)));
    assert!(is_unsupported(stepper.read(id.copy(), &mut values)));
    assert!(is_unsupported(stepper.write(id.ema(), &values)));
    assert_eq!(values, [7.0; 3]);
}

#[test]
fn borrowed_tensors_of_another_type_are_refused() {
    let layout = layout(&[3]);
    let id = layout.id("p0").unwrap();
    let (mut wide, mut narrow) = ([0f32; 3], [half::bf16::ZERO; 3]);
    let bucket = || ForeignBucket::new(3).gradient(id, 0);
    for param in [DType::F32, DType::BF16] {
        let precision = Precision { param, ..Precision::F32 };
        let memory = Borrowed::new().bucket(bucket(), wide.as_mut_ptr());
        let memory = match param {
            DType::F32 => memory.param(id, narrow.as_mut_ptr()),
            _ => memory.param(id, narrow.as_mut_ptr().cast::<half::f16>()),
        };
        let builder = Stepper::builder(&layout, AdamW::default()).precision(precision);
        // SAFETY: both arrays outlive what is built, which never runs.
        let built = unsafe { builder.unused(Unused::StepZero).host_borrowing(Solo::default(), memory) };
        assert!(matches!(built, Err(Error::Layout(_))));
    }
}

#[test]
fn ranks_of_different_precision_are_told() {
    let layout = layout(&[300]);
    let outcome = in_process(2, |comm| {
        let moments = [Moments::F32, Moments::BF16][comm.rank() as usize];
        let precision = Precision { moments, ..Precision::F32 };
        let builder = Stepper::builder(&layout, Sgd { momentum: 0.9, ..Sgd::default() });
        let mut stepper = builder.precision(precision).host(comm)?;
        stepper.begin()?.finish()?;
        stepper.close()
    });
    assert!(matches!(outcome.unwrap_err().cause(), Error::Mismatch { .. }));
}
