//! Several precisions on several ranks: sums and counts of ranks have the type of their bucket, and some combinations
//! are refused.
//!
//! Gradients are dyadic as in `ranks.rs`, so one rank that gets the sums has the same bits.

use std::sync::Mutex;

use instep::collective::Call;
use instep::layout::{ForeignBucket, Plan, Storage, Storages};
use instep::op::CollectiveKind;
use instep::{
    AdamW, Borrowed, Clip, Collective, DType, Divisor, Error, InProcess, Layout, Master, Mode, Precision,
    Result, Sgd, Solo, Stepper, StepperBuilder, Unused, in_process,
};

use crate::precision::ranks::{BATCHES, FROZEN, LENGTHS, STEPS, UNUSED, join_a_rank, train, train_a_pass};
use crate::support::stored::{Stored, accepted, one_per_state_count, with};
use crate::support::{MODES, Options, Presummed, paint_params, pass};

const BF16: Precision =
    Precision { param: DType::BF16, grad: DType::BF16, master: Master::F32, ..Precision::F32 };

/// Three consecutive precisions in the list of all, in buckets of different types.
struct Mixture {
    layout: Layout,
    precisions: [Precision; 3],
    number: usize,
}

impl Mixture {
    fn all() -> impl Iterator<Item = Mixture> {
        let all: Vec<Precision> = accepted().collect();
        (0..all.len()).map(move |number| {
            let precisions = [0, 1, 2].map(|k| all[(number + 37 * k) % all.len()]);
            let add = |layout: instep::LayoutBuilder, (k, len): (usize, &usize)| {
                layout.param(format!("p{k}"), *len).in_group(["default", "first", "second"][k % 3])
            };
            let layout = LENGTHS.iter().enumerate().fold(Layout::builder(), add).build().unwrap();
            Mixture { layout, precisions, number }
        })
    }

    fn builder(&self) -> StepperBuilder<'_> {
        let optim = one_per_state_count()[self.number % 4];
        let copy = [None, Some(DType::F16)][self.number % 2];
        let storage = Storage { precision: self.precisions[0], copy, ema: self.number.is_multiple_of(3) };
        let builder = with(optim.builder(&self.layout), &storage).bucket_cap_bytes(2000).threads(1);
        builder.group_precision("first", self.precisions[1]).group_precision("second", self.precisions[2])
    }
}

#[test]
fn ranks_of_mixed_types_train_as_one_fed_their_sums() {
    for mixture in Mixture::all() {
        let (number, what) = (mixture.number, mixture.precisions);
        let (world_size, mode) = ([2, 4][number % 2], MODES[number / 2 % 3]);
        let build = || match mode {
            Mode::Eager => mixture.builder().mode(mode),
            // Far below the norm, so that every pass is clipped.
            mode => mixture.builder().mode(mode).clip(Clip::Global(0.25)).skip_nonfinite(true),
        };
        let ranks = in_process(world_size, |comm: InProcess| {
            let rank = Collective::rank(&comm) as usize;
            train(build().host(comm)?, &[rank])
        })
        .unwrap();
        let all: Vec<usize> = (0..world_size as usize).collect();
        let one = train(build().host(Presummed(world_size)).unwrap(), &all).unwrap();
        for stored in &ranks {
            stored.iter().zip(&one).for_each(|(stored, one)| stored.assert_same(one, &what));
        }
        assert_eq!(one[1].params[UNUSED], one[0].params[UNUSED], "unused: {what:?}");
        assert_ne!(one[2].params[UNUSED], one[1].params[UNUSED], "used by some: {what:?}");
        assert_eq!(one[2].params[FROZEN], one[0].params[FROZEN], "frozen: {what:?}");
    }
}

#[test]
fn ranks_that_run_out_of_data_are_counted_in_each_buckets_own_type() {
    for mixture in Mixture::all() {
        let (number, what) = (mixture.number, mixture.precisions);
        let divisor = [Divisor::WorldSize, Divisor::ContributingRanks][number % 2];
        let ranks = in_process(4, |comm: InProcess| {
            let rank = Collective::rank(&comm) as usize;
            let builder = mixture.builder().mode(MODES[number / 2 % 3]).uneven_inputs(divisor);
            join_a_rank(builder.host(comm)?, rank)
        })
        .unwrap();
        let mut one = mixture.builder().host(Solo::default()).unwrap();
        paint_params(&mut one);
        for step in 0..STEPS {
            let with_data: Vec<usize> = (0..4).filter(|rank| step < BATCHES[*rank]).collect();
            let over = if divisor == Divisor::WorldSize { 4 } else { with_data.len() };
            train_a_pass(&mut one, step, &with_data, over as f32).unwrap();
        }
        let one = Stored::of(&one).unwrap();
        ranks.iter().for_each(|stored| stored.assert_same(&one, &what));
    }
}

fn weights_and_norms() -> instep::LayoutBuilder {
    Layout::builder().param("weight", 600).param("norm", 30).in_group("norms")
}

#[test]
fn ranks_that_differ_in_types_are_told_so() {
    for (differ, word) in ["layout", "options"].into_iter().enumerate() {
        let outcome = in_process(2, |comm| {
            let odd = comm.rank() == 1;
            let layout = weights_and_norms();
            // Equal element types, so that all buckets have the same lengths.
            let layout = if odd && differ == 0 { layout.dtype(DType::F32) } else { layout }.build()?;
            let builder = Stepper::builder(&layout, AdamW::default()).precision(BF16);
            let precision = Precision { moments: instep::Moments::BF16, ..Precision::F32 };
            let precision = if odd && differ == 1 { precision } else { Precision::F32 };
            let mut stepper = builder.group_precision("norms", precision).host(comm)?;
            stepper.begin()?.finish()?;
            stepper.close()
        });
        let error = outcome.unwrap_err();
        let Error::Mismatch { differs, .. } = error.cause() else { panic!("{error}") };
        assert!(differs.contains(word) && !differs.contains("several"), "{word}: {error}");
    }
}

/// A communicator that cannot sum bf16, and records the types of its calls.
struct Recorded {
    calls: &'static Mutex<Vec<(CollectiveKind, DType, u64)>>,
    sums_bf16: bool,
}

impl Collective for Recorded {
    fn rank(&self) -> u32 {
        0
    }

    fn world_size(&self) -> u32 {
        1
    }

    fn sums(&self, dtype: DType) -> bool {
        self.sums_bf16 || dtype != DType::BF16
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        self.calls.lock().unwrap().push((call.kind, call.dtype, call.bytes));
        Ok(())
    }

    fn abort(&self, _: &Error) {}
}

#[test]
fn a_collective_is_asked_for_every_type_and_called_with_each_buckets_own() {
    static CALLS: Mutex<Vec<(CollectiveKind, DType, u64)>> = Mutex::new(Vec::new());
    let layout = weights_and_norms().param("half", 5).dtype(DType::F16).build().unwrap();
    let build = |sums_bf16| {
        let builder = Stepper::builder(&layout, AdamW::default()).group_precision("norms", Precision::F32);
        builder.precision(BF16).host(Recorded { calls: &CALLS, sums_bf16 })
    };
    let refused = build(false).map(drop).unwrap_err();
    assert!(matches!(&refused, Error::Unsupported(why) if why.thing == "bf16 gradients"), "{refused}");
    let mut stepper = build(true).unwrap();
    pass(&mut stepper, &Options::default(), |_, _| true).unwrap();
    stepper.close().unwrap();
    let calls = CALLS.lock().unwrap().clone();
    let of = |kind| calls.iter().filter(move |call| call.0 == kind).map(|call| (call.1, call.2));
    // In the order of backward. Each bucket is padded to 256 elements, a count of ranks included.
    let buckets = [(DType::F16, 2 * 512), (DType::F32, 4 * 512), (DType::BF16, 2 * 1024)];
    assert_eq!(of(CollectiveKind::AllReduce).collect::<Vec<_>>(), buckets);
    let masters = (DType::F32, 4 * (512 + 1024));
    assert_eq!(of(CollectiveKind::Broadcast).collect::<Vec<_>>(), [&[masters], &buckets[..]].concat());
}

#[test]
fn borrowed_buckets_hold_one_precision_each_and_train_as_the_steppers_own() {
    let layout = weights_and_norms().build().unwrap();
    let [weight, norm] = ["weight", "norm"].map(|name| layout.id(name).unwrap());
    let build = || {
        let sgd = Sgd { lr: 0.1, momentum: 0.9, ..Sgd::default() };
        let builder = Stepper::builder(&layout, sgd).precision(BF16).group_precision("norms", Precision::F32);
        builder.mode(Mode::Normed).clip(Clip::Global(1.0)).unused(Unused::StepZero)
    };
    let one = ForeignBucket::new(630).gradient(weight, 0).gradient(norm, 600);
    let storages = Storages::from(BF16).group("norms", Precision::F32);
    let refused = Plan::foreign(&layout, &[one], storages).unwrap_err().to_string();
    let wrong =
        "gradients of `weight` and `norm`: differ in precision, but share bucket 0: Precision { param: BF16";
    assert!(
        refused.starts_with(wrong) && refused.ends_with("give each precision buckets of its own"),
        "{refused}"
    );

    let zero = half::bf16::ZERO;
    let (mut weights, mut norms) = (vec![zero; 600], vec![0.0f32; 30]);
    let (mut narrow, mut wide) = (vec![zero; 603], vec![0.0f32; 31]);
    let memory = Borrowed::new()
        .param(weight, weights.as_mut_ptr())
        .param(norm, norms.as_mut_ptr())
        .bucket(ForeignBucket::new(31).gradient(norm, 1), wide.as_mut_ptr())
        .bucket(ForeignBucket::new(603).gradient(weight, 3), narrow.as_mut_ptr());
    // SAFETY: the vectors outlive the stepper, which alone touches them.
    let mut borrowing = unsafe { build().host_borrowing(Solo::default(), memory) }.unwrap();
    let mut own = build().host(Solo::default()).unwrap();
    for stepper in [&mut borrowing, &mut own] {
        paint_params(stepper);
        train_a_pass(stepper, 0, &[0], 1.0).unwrap();
        train_a_pass(stepper, 1, &[0], 1.0).unwrap();
    }
    Stored::of(&borrowing).unwrap().assert_same(&Stored::of(&own).unwrap(), &"borrowed");
}

/// Pieces of tensors travel through the gradients' memory, and may lie in buckets of other types on other ranks.
#[test]
fn tensors_are_gathered_where_gradients_differ_in_type() {
    let layout = Layout::builder().param("h", 2000).in_group("h").param("w", 300).build().unwrap();
    for (strategy, ranks) in
        [instep::Strategy::Zero, instep::Strategy::Fsdp].into_iter().flat_map(|s| [(s, 2), (s, 3)])
    {
        let moments = in_process(ranks, |comm| {
            let narrow = Precision { grad: DType::BF16, ..Precision::F32 };
            let builder = Stepper::builder(&layout, AdamW::default()).group_precision("h", narrow);
            let mut stepper = builder.strategy(strategy).host(comm)?;
            stepper.fill_params(|_, values| values.fill(0.25))?;
            let mut pass = stepper.begin()?;
            for id in layout.ids() {
                let len = layout.parameter(id)?.len as usize;
                pass.grads().write(id, &vec![1.0; len])?;
            }
            pass.finish()?;
            let mut moment = vec![0.0; 2000];
            stepper.gather(layout.id("h")?.state("exp_avg"), &mut moment)?;
            Ok(moment)
        });
        for moment in moments.unwrap() {
            assert!(
                moment[0] > 0.0 && moment.iter().all(|value| *value == moment[0]),
                "{strategy:?}, {ranks} ranks"
            );
        }
    }
}
