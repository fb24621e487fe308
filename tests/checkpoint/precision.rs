//! A checkpoint of any precision, with or without moving averages, gives the bits of the uninterrupted run, or the same
//! values.
//!
//! Files hold F32 for all types that the stepper stores. Every combination of types that a stepper accepts is covered.

use std::io::Cursor;

use half::bf16;
use instep::checkpoint::safetensors::Dtype;
use instep::checkpoint::{self, Extras};
use instep::{DType, Master, Mode, Moments, Precision, Rounding, Solo, Stepper, in_process};

use crate::checkpoint::refusals::{Made, f32s, file};
use crate::checkpoint::round_trip::bytes_of;
use crate::support::{self, Optim, Options, Outcome, few_optimizers, layout, painted};

const LENGTHS: [usize; 4] = [300, 0, 17, 600];

/// The type of gradients is independent of all other types, so each combination gets only one of the three.
fn precisions() -> Vec<Precision> {
    let floats = [DType::F32, DType::BF16, DType::F16];
    let masters = [Master::None, Master::F32, Master::Remainder16, Master::Remainder8];
    let roundings = [Rounding::Nearest, Rounding::Stochastic { seed: 3 }];
    let mut all = Vec::new();
    for (param, master) in floats.into_iter().flat_map(|param| masters.map(|master| (param, master))) {
        for moments in [Moments::F32, Moments::BF16, Moments::EightBit] {
            let of = |rounding| Precision { param, grad: floats[all.len() % 3], master, moments, rounding };
            let some = roundings.map(of).into_iter().filter(|precision| precision.validate().is_ok());
            all.extend(some.collect::<Vec<_>>());
        }
    }
    assert_eq!(all.len(), 35);
    all
}

fn stepper(optim: Optim, options: &Options, precision: Precision, ema: bool) -> Stepper {
    let layout = layout(&LENGTHS);
    let mut builder = options.builder(&layout, optim).precision(precision).copy_params(DType::BF16);
    if ema {
        builder = builder.ema(0.8);
    }
    builder.host(Solo::default()).unwrap()
}

fn train(stepper: &mut Stepper, options: &Options, steps: std::ops::Range<usize>) {
    let gradient = painted(options);
    for step in steps {
        // One of them is used every other time, so that counts differ.
        let fill = |param, values: &mut [f32]| (param != 2 || step % 2 == 0) && gradient(step, param, values);
        support::pass(stepper, options, fill).unwrap();
    }
}

/// Returns what a checkpoint does not hold: parameters as they are stored, and their copies.
fn stored(stepper: &Stepper) -> Vec<Vec<u32>> {
    let bits = |id| match stepper.params() {
        params if params.get_as::<bf16>(id).is_ok() => {
            params.get_as::<bf16>(id).unwrap().iter().map(|value| value.to_bits().into()).collect()
        }
        params if params.get(id).is_ok() => {
            params.get(id).unwrap().iter().map(|value| value.to_bits()).collect()
        }
        params => {
            params.get_as::<half::f16>(id).unwrap().iter().map(|value| value.to_bits().into()).collect()
        }
    };
    stepper.layout().ids().map(bits).collect()
}

fn copies(stepper: &Stepper) -> Vec<Vec<f32>> {
    let copy = |(id, len): (instep::ParamId, &usize)| {
        let mut values = vec![0.0; *len];
        stepper.read(id.copy(), &mut values).unwrap();
        values
    };
    stepper.layout().ids().zip(&LENGTHS).map(copy).collect()
}

#[test]
fn every_precision_goes_on_with_the_bits_of_the_uninterrupted_run() {
    for (k, precision) in precisions().into_iter().enumerate() {
        for optim in [few_optimizers()[k % 2], few_optimizers()[2 + k % 2]] {
            let what = format!("{optim:?} {precision:?}");
            let ema = k % 3 > 0;
            let written = Options { mode: Mode::Eager, cap: Some(1500), ..Options::default() };
            let mut whole = stepper(optim, &written, precision, ema);
            support::paint_params(&mut whole);
            train(&mut whole, &written, 0..3);
            let (bytes, halfway) = (bytes_of(&whole, &Extras::default()), stored(&whole));
            train(&mut whole, &written, 3..6);

            let options = Options { mode: Mode::Sequential, cap: Some(1 << 20), ..Options::default() };
            let mut resumed = stepper(optim, &options, precision, ema);
            checkpoint::read(&mut resumed, Cursor::new(&bytes)).unwrap();
            assert!(bytes_of(&resumed, &Extras::default()) == bytes, "{what}: saved again");
            assert_eq!(stored(&resumed), halfway, "{what}: loaded");
            train(&mut resumed, &options, 3..6);
            let (resumed_bytes, bytes) =
                (bytes_of(&resumed, &Extras::default()), bytes_of(&whole, &Extras::default()));
            assert!(resumed_bytes == bytes, "{what}: trained on");
            assert_eq!(stored(&resumed), stored(&whole), "{what}");
            // Of what was updated since.
            assert_eq!(copies(&resumed), copies(&whole), "{what}");
        }
    }
}

#[test]
fn another_precision_goes_on_from_the_same_values_rounded_where_it_has_fewer_bits() {
    let (optim, options) = (few_optimizers()[3], Options::default());
    for from in precisions() {
        let mut source = stepper(optim, &options, from, false);
        support::paint_params(&mut source);
        train(&mut source, &options, 0..2);
        let (bytes, values) = (bytes_of(&source, &Extras::default()), Outcome::of(&source).unwrap());
        for to in precisions().into_iter().filter(|to| to.rounding == Rounding::Nearest) {
            let what = format!("{from:?} into {to:?}");
            let mut target = stepper(optim, &options, to, false);
            checkpoint::read(&mut target, Cursor::new(&bytes)).unwrap();
            let loaded = Outcome::of(&target).unwrap();
            assert_eq!(loaded.step_counts, values.step_counts);
            let param = if to.master == Master::None { to.param } else { DType::F32 };
            let state = if to.moments == Moments::BF16 { DType::BF16 } else { DType::F32 };
            let rounded = |dtype: DType, all: &[f32]| all.iter().map(|x| dtype.round(*x)).collect::<Vec<_>>();
            for k in 0..LENGTHS.len() {
                if to.master != Master::Remainder8 {
                    let expected = rounded(param, &values.params[k]);
                    support::assert_same_bits(&loaded.params[k], &expected, &what);
                }
                for (loaded, value) in loaded.states[k].iter().zip(&values.states[k]) {
                    if to.moments != Moments::EightBit {
                        support::assert_same_bits(loaded, &rounded(state, value), &what);
                    }
                }
            }
            train(&mut target, &options, 2..3);
        }
    }
}

#[test]
fn ranks_go_on_in_every_kind_of_master() {
    let (layout, folder, optim) = (layout(&LENGTHS), tempfile::tempdir().unwrap(), few_optimizers()[2]);
    let options = Options::default();
    for master in [Master::None, Master::F32, Master::Remainder16, Master::Remainder8] {
        let path = folder.path().join(format!("{master:?}"));
        let moments = Moments::EightBit;
        let rounding = Rounding::Stochastic { seed: 9 };
        let precision = Precision { param: DType::BF16, grad: DType::BF16, master, moments, rounding };
        let run = |load: bool| {
            in_process(2, |comm| {
                let builder = options.builder(&layout, optim).precision(precision).ema(0.8);
                let mut stepper = builder.host(comm)?;
                if load {
                    checkpoint::load(&mut stepper, &path)?;
                } else {
                    support::paint_params(&mut stepper);
                    train(&mut stepper, &options, 0..2);
                    checkpoint::save(&stepper, &path)?;
                }
                train(&mut stepper, &options, 2..4);
                Ok::<_, instep::Error>((bytes_of(&stepper, &Extras::default()), stored(&stepper)))
            })
            .unwrap()
        };
        let whole = run(false);
        assert_eq!(whole[0], whole[1], "{master:?}");
        assert_eq!(run(true), whole, "{master:?}");
    }
}

#[test]
fn averages_that_the_file_lacks_begin_as_the_parameters_and_those_without_a_place_are_refused() {
    let (optim, options) = (few_optimizers()[2], Options::default());
    let open = |ema| {
        let mut stepper = stepper(optim, &options, Precision::F32, ema);
        support::paint_params(&mut stepper);
        train(&mut stepper, &options, 0..2);
        stepper
    };
    let (mut with, mut without) = (open(true), open(false));
    let ids: Vec<_> = with.layout().ids().collect();
    let average = |stepper: &Stepper| {
        let mut values = vec![0.0; LENGTHS[0]];
        stepper.read(ids[0].ema(), &mut values).unwrap();
        values
    };
    let before = bytes_of(&without, &Extras::default());
    let refused = checkpoint::read(&mut without, Cursor::new(bytes_of(&with, &Extras::default())));
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("`ema.p0`: has no place in this stepper"), "{refused}");
    assert_eq!(bytes_of(&without, &Extras::default()), before, "a refusal changes nothing");
    for read in [checkpoint::read, |stepper: &mut Stepper, source| checkpoint::import(stepper, source, None)]
    {
        train(&mut with, &options, 2..3);
        assert_ne!(average(&with), without.view::<f32>(ids[0]).unwrap());
        read(&mut with, Cursor::new(before.clone())).unwrap();
        assert_eq!(average(&with), without.view::<f32>(ids[0]).unwrap());
    }
}

#[test]
fn half_of_the_averages_are_refused_by_name() {
    let layout = layout(&[2, 1]);
    let builder = Options::default().builder(&layout, few_optimizers()[0]).ema(0.5);
    let mut stepper = builder.host(Solo::default()).unwrap();
    let fine: [Made; 4] = [
        ("param.p0", Dtype::F32, &[2], f32s(&[1.0, 2.0])),
        ("param.p1", Dtype::F32, &[1], f32s(&[3.0])),
        ("ema.p0", Dtype::F32, &[2], f32s(&[4.0, 5.0])),
        ("ema.p1", Dtype::F32, &[1], f32s(&[6.0])),
    ];
    let mut import =
        |tensors: &[Made]| checkpoint::import(&mut stepper, Cursor::new(file(tensors, &[])), None);
    let refused = import(&fine[..3]).unwrap_err().to_string();
    assert!(refused.contains("`ema.p1`: missing"), "{refused}");
    let stranger = [&fine[..], &[("ema.p2", Dtype::F32, &[1], f32s(&[6.0]))]].concat();
    assert!(import(&stranger).unwrap_err().to_string().contains("`ema.p2`: belongs to no parameter"));
    import(&fine).unwrap();
    let mut average = [0.0; 2];
    stepper.read(layout.id("p0").unwrap().ema(), &mut average).unwrap();
    assert_eq!(average, [4.0, 5.0]);
}

#[test]
fn bf16_states_of_torch_keep_their_bits() {
    let layout = layout(&[3]);
    let precision = Precision { param: DType::BF16, moments: Moments::BF16, ..Precision::F32 };
    let builder = Options::default().builder(&layout, few_optimizers()[2]).precision(precision);
    let mut stepper = builder.host(Solo::default()).unwrap();
    let bits: [u16; 3] = [0x3f81, 0x8001, 0x7f7f];
    let bytes = || bits.map(u16::to_le_bytes).concat();
    let tensors: [Made; 4] = [
        ("param.p0", Dtype::Bf16, &[3], bytes()),
        ("state.0.exp_avg", Dtype::Bf16, &[3], bytes()),
        ("state.0.exp_avg_sq", Dtype::Bf16, &[3], bytes()),
        ("state.0.step", Dtype::F32, &[], f32s(&[9.0])),
    ];
    checkpoint::import(&mut stepper, Cursor::new(file(&tensors, &[])), None).unwrap();
    let id = layout.id("p0").unwrap();
    let all = [
        stepper.view::<bf16>(id).unwrap(),
        stepper.view(id.state("exp_avg")).unwrap(),
        stepper.view(id.state("exp_avg_sq")).unwrap(),
    ];
    assert_eq!(all.map(|tensor| [0, 1, 2].map(|k| tensor[k].to_bits())), [bits; 3]);
}
