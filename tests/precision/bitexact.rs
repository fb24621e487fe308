//! Tensors of any precision have the same bits however the work is divided, ordered, or spread over instruction sets.
//!
//! Every precision is tested with and without copies and averages, and all stored tensors are compared. The lengths
//! include a partial block of 256 and more than one tile.

use std::num::NonZeroU32;

use instep::layout::{ForeignBucket, Storage};
use instep::{Borrowed, DType, Isa, Layout, Mode, Precision, Solo, Stepper, StepperBuilder, Unused};

use crate::support::guarded::Guarded;
use crate::support::stored::{Stored, accepted, all, cases, dyadic, with};
use crate::support::{MODES, Optim, Options, layout, paint_params, pass};

pub(crate) const LENGTHS: [usize; 6] = [300, 0, 1, 2049, 512, 17];
const STEPS: usize = 3;

/// Trains a few passes on sums that are exact in every type.
fn train(mut stepper: Stepper) -> Stored {
    paint_params(&mut stepper);
    (0..STEPS).for_each(|step| train_a_pass(&mut stepper, &Options::default(), step));
    let stored = Stored::of(&stepper).unwrap();
    if let Some(recording) = stepper.take_recording() {
        assert_eq!(stepper.check(&recording), []);
    }
    stepper.close().unwrap();
    stored
}

fn train_a_pass(stepper: &mut Stepper, options: &Options, step: usize) {
    pass(stepper, options, |param, values| {
        values.iter_mut().enumerate().for_each(|(k, g)| *g = dyadic(step, 0, param, k));
        true
    })
    .unwrap();
}

fn plain<'a>(layout: &'a Layout, storage: &Storage, optim: Optim) -> StepperBuilder<'a> {
    with(optim.builder(layout), storage).mode(Mode::Sequential).isa(Isa::Baseline).threads(1)
}

fn expected(layout: &Layout, storage: &Storage, optim: Optim) -> Stored {
    train(plain(layout, storage, optim).host(Solo::default()).unwrap())
}

#[test]
fn all_that_the_table_of_precisions_promises_can_be_built() {
    // 7 parameters (f32; bf16 with 4 masters; f16 with 2), 3 gradients, 3 moments. By chance, where something loses
    // bits: 2 moments with parameters that do not, 3 with bf16 alone or an 8-bit remainder, none with f16
    // alone.
    assert_eq!(accepted().count(), 7 * 3 * 3 + 3 * (2 + 3 + 2 + 2 + 3 + 2));
    assert_eq!(all().count(), 216);
    assert!(accepted().any(|precision| precision == Precision::F32));
}

#[test]
fn no_instruction_set_bucket_cap_mode_or_thread_changes_a_bit() {
    let layout = layout(&LENGTHS);
    for (case, (storage, optim)) in cases().enumerate() {
        let expected = expected(&layout, &storage, optim);
        for (k, isa) in Isa::available().into_iter().enumerate() {
            let cap = [1, 700, 5000][(k + case) % 3];
            let mode = MODES[(k + case / 3) % 3];
            let builder = plain(&layout, &storage, optim).isa(isa).mode(mode).bucket_cap_bytes(cap);
            let builder = builder.threads(1 + case % 2).record(true);
            train(builder.host(Solo::default()).unwrap())
                .assert_same(&expected, &(storage, optim, isa, cap, mode));
        }
    }
}

#[test]
fn a_tensor_registered_in_two_pieces_trains_as_in_one() {
    // Cut at a block: 8-bit states and norms count theirs from each parameter's start.
    let (whole, cut) = (layout(&[1280, 300]), layout(&[768, 512, 300]));
    for (storage, optim) in cases() {
        let run = |layout: &Layout, pieces: &[(usize, usize)]| {
            let mut stepper = plain(layout, &storage, optim).host(Solo::default()).unwrap();
            for step in 0..STEPS {
                pass(&mut stepper, &Options::default(), |param, values| {
                    let (of, first) = pieces[param];
                    values.iter_mut().enumerate().for_each(|(k, g)| *g = dyadic(step, 0, of, first + k));
                    true
                })
                .unwrap();
            }
            Stored::of(&stepper).unwrap().params
        };
        let one = run(&whole, &[(0, 0), (1, 0)]);
        let two = run(&cut, &[(0, 0), (0, 768), (1, 0)]);
        assert_eq!(one[1], two[2], "{storage:?} {optim:?}");
        for (k, (name, bits)) in one[0].iter().enumerate().filter(|(_, (name, _))| name != "step count") {
            let joined = [&two[0][k].1[..], &two[1][k].1].concat();
            assert!(*bits == joined, "{name}: {storage:?} {optim:?}");
        }
    }
}

#[test]
fn rebuilt_buckets_train_on_with_the_same_bits() {
    let layout = layout(&LENGTHS);
    let order = vec![3, 0, 5, 2, 4, 1];
    for (storage, optim) in cases() {
        let expected = expected(&layout, &storage, optim);
        let mut stepper =
            plain(&layout, &storage, optim).bucket_cap_bytes(700).host(Solo::default()).unwrap();
        paint_params(&mut stepper);
        let options = Options { order: Some(order.clone()), ..Options::default() };
        for step in 0..STEPS {
            train_a_pass(&mut stepper, &options, step);
            if step == 1 {
                assert!(stepper.rebuild_buckets().unwrap());
            }
        }
        Stored::of(&stepper).unwrap().assert_same(&expected, &(storage, optim));
    }
}

#[test]
fn micro_batches_that_add_up_give_the_bits_of_their_sum() {
    let layout = layout(&LENGTHS);
    let ids: Vec<_> = layout.ids().collect();
    for (storage, optim) in cases().step_by(3) {
        let run = |micro_batches: u32| {
            let mut stepper = plain(&layout, &storage, optim).host(Solo::default()).unwrap();
            for step in 0..STEPS {
                let mut pass = stepper.begin_accumulating(NonZeroU32::new(micro_batches).unwrap()).unwrap();
                for micro_batch in 0..micro_batches {
                    if micro_batch > 0 {
                        pass.next_micro_batch().unwrap();
                    }
                    for part in (0..4).filter(|part| part % micro_batches == micro_batch) {
                        for (param, id) in ids.iter().enumerate() {
                            let of = |k| dyadic(step, part as usize, param, k);
                            let values: Vec<f32> = (0..LENGTHS[param]).map(of).collect();
                            pass.grads().add(*id, &values).unwrap();
                        }
                    }
                }
                pass.finish().unwrap();
            }
            Stored::of(&stepper).unwrap()
        };
        let one = run(1);
        for micro_batches in [2, 4] {
            run(micro_batches).assert_same(&one, &(storage, optim, micro_batches));
        }
    }
}

/// A caller's tensors, in words of 4 bytes, none longer than needed.
struct Tensors {
    params: Vec<Guarded>,
    bucket: Guarded,
}

impl Tensors {
    fn new(precision: Precision, offset: usize) -> Tensors {
        let words = |len: usize, dtype: DType| (len * dtype.bytes() as usize).div_ceil(4);
        let param = |(k, len): (usize, &usize)| Guarded::new(words(*len, precision.param), (offset + k) % 16);
        let bucket = words(LENGTHS.iter().sum(), precision.grad);
        Tensors {
            params: LENGTHS.iter().enumerate().map(param).collect(),
            bucket: Guarded::new(bucket, offset),
        }
    }

    fn lend(&mut self, layout: &Layout, precision: Precision) -> Borrowed {
        let (mut borrowed, mut bucket) = (Borrowed::new(), ForeignBucket::new(LENGTHS.iter().sum()));
        let mut next = 0;
        for (k, id) in layout.ids().enumerate() {
            let address = self.params[k].address();
            borrowed = match precision.param {
                DType::BF16 => borrowed.param(id, address.cast::<half::bf16>()),
                DType::F16 => borrowed.param(id, address.cast::<half::f16>()),
                _ => borrowed.param(id, address),
            };
            bucket = bucket.gradient(id, next);
            next += LENGTHS[k];
        }
        let address = self.bucket.address();
        match precision.grad {
            DType::BF16 => borrowed.bucket(bucket, address.cast::<half::bf16>()),
            DType::F16 => borrowed.bucket(bucket, address.cast::<half::f16>()),
            _ => borrowed.bucket(bucket, address),
        }
    }
}

#[test]
fn borrowed_tensors_of_any_type_give_the_bits_of_owned_ones() {
    let layout = layout(&LENGTHS);
    for (case, (storage, optim)) in cases().enumerate() {
        let expected = expected(&layout, &storage, optim);
        let mut tensors = Tensors::new(storage.precision, case % 16);
        let builder = plain(&layout, &storage, optim).unused(Unused::StepZero).record(true);
        let memory = tensors.lend(&layout, storage.precision);
        // SAFETY: the tensors outlive the stepper, and are read only after its end.
        let stepper = unsafe { builder.host_borrowing(Solo::default(), memory) }.unwrap();
        train(stepper).assert_same(&expected, &(storage, optim));
        tensors
            .params
            .iter()
            .chain([&tensors.bucket])
            .for_each(|tensor| tensor.assert_bands_stand("borrowed"));
    }
}

#[test]
fn masters_of_borrowed_parameters_start_as_what_lies_there() {
    let layout = Layout::builder().param("w", 3).build().unwrap();
    let w = layout.id("w").unwrap();
    let start = [1.0f32, -0.3359375, 2.0f32.powi(-20)];
    for precision in
        accepted().filter(|precision| precision.param == DType::BF16 && precision.grad == DType::BF16)
    {
        let mut params = start.map(half::bf16::from_f32);
        let mut bucket = [half::bf16::ZERO; 3];
        let memory = Borrowed::new()
            .param(w, params.as_mut_ptr())
            .bucket(ForeignBucket::new(3).gradient(w, 0), bucket.as_mut_ptr());
        let builder = with(crate::support::few_optimizers()[1].builder(&layout), &precision.into());
        // SAFETY: both arrays outlive the stepper.
        let stepper = unsafe { builder.unused(Unused::StepZero).host_borrowing(Solo::default(), memory) };
        let stepper = stepper.unwrap();
        let mut values = [0.0; 3];
        stepper.read(w, &mut values).unwrap();
        assert_eq!(values.map(f32::to_bits), start.map(|x| half::bf16::from_f32(x).to_f32().to_bits()));
        stepper.close().unwrap();
        assert_eq!(params.map(f32::from), values, "{precision:?}: nothing is rounded anew");
    }
}
