//! 16-bit parameters with an f32 master, or with a remainder of 16 bits, train to the bits of f32 parameters.
//!
//! Remainders are compared with a definition in f64 and in integers, independent of `kernels/numeric/remainder.h`. The
//! test takes every upper half of an f32, with the lower halves where rounding changes. The tests must derive the error
//! of a 24-bit master only from its fraction of 15 bits.

use instep::abi::*;
use instep::dtype::DType;
use instep::{Isa, Layout, Master, Moments, Precision, Rounding, Solo, Stepper};

use crate::support::entries::kernels;
use crate::support::stored::stored_param;
use crate::support::{Optim, Options, Outcome, layout, optimizers, paint_gradient, paint_params, pass};

const LENGTHS: [usize; 3] = [300, 17, 257];

/// Returns a precision with parameters and gradients of 16 bits.
fn narrow(dtype: DType, master: Master) -> Precision {
    Precision { param: dtype, grad: dtype, master, ..Precision::F32 }
}

fn rounded(dtype: DType, x: f32) -> f32 {
    if dtype == DType::BF16 { half::bf16::from_f32(x).to_f32() } else { half::f16::from_f32(x).to_f32() }
}

/// Returns the nearest bf16, ties away from zero, because a remainder of 16 bits can be -0x8000 but not 0x8000.
fn rounded_away(x: f32) -> f32 {
    f32::from_bits(x.to_bits().wrapping_add(0x8000) & 0xffff_0000)
}

fn open(layout: &Layout, optim: Optim, precision: Precision) -> Stepper {
    let mut stepper = optim.builder(layout).precision(precision).threads(1).host(Solo::default()).unwrap();
    paint_params(&mut stepper);
    stepper
}

/// Makes one pass with gradients that are values of a 16-bit type.
fn step(stepper: &mut Stepper, dtype: DType, at: usize) {
    pass(stepper, &Options::default(), |param, values| {
        values.iter_mut().enumerate().for_each(|(k, g)| *g = rounded(dtype, paint_gradient(at, param, k)));
        true
    })
    .unwrap();
}

#[test]
fn masters_and_remainders_of_16_bits_train_as_f32_does_bit_for_bit() {
    let layout = layout(&LENGTHS);
    for optim in optimizers() {
        for (dtype, master) in
            [(DType::BF16, Master::F32), (DType::F16, Master::F32), (DType::BF16, Master::Remainder16)]
        {
            let what = format!("{optim:?} {dtype} {master:?}");
            let (mut ours, mut wide) =
                (open(&layout, optim, narrow(dtype, master)), open(&layout, optim, Precision::F32));
            for at in 0..20 {
                step(&mut ours, dtype, at);
                step(&mut wide, dtype, at);
            }
            let outcome = Outcome::of(&ours).unwrap();
            outcome.assert_same(&Outcome::of(&wide).unwrap(), &what);
            for (id, values) in layout.ids().zip(&outcome.params) {
                let nearest = |x: &f32| {
                    if master == Master::F32 { rounded(dtype, *x) } else { rounded_away(*x) }.to_bits()
                };
                let stored = stored_param(&ours, id, dtype).unwrap();
                assert_eq!(stored, values.iter().map(nearest).collect::<Vec<_>>(), "{what}");
            }
        }
    }
}

/// Returns the nearest value to an f32, as bits, among those whose last `places` bits are zero.
fn nearest_of(bits: u32, places: u32, ties_to_even: bool) -> u32 {
    // What follows the largest finite number counts as 2^128, as rounding takes it.
    let value = |magnitude: u32| match magnitude {
        0x7f80_0000 => 2f64.powi(128),
        _ => f64::from(f32::from_bits(magnitude)),
    };
    let (magnitude, sign) = (bits & 0x7fff_ffff, bits & 0x8000_0000);
    let low = magnitude >> places << places;
    if low == magnitude {
        return bits;
    }
    let high = low + (1 << places);
    let (down, up) = (value(magnitude) - value(low), value(high) - value(magnitude));
    let goes_up = up < down || (up == down && (!ties_to_even || low >> places & 1 == 1));
    sign | if goes_up { high } else { low }
}

/// The lower halves where rounding to 16 and to 24 bits changes.
const LOWER_HALVES: [u32; 16] = [
    0, 1, 0x7f, 0x80, 0x81, 0x17f, 0x180, 0x181, 0x7f7f, 0x7f80, 0x7f81, 0x7fff, 0x8000, 0x8001, 0xff80,
    0xffff,
];

/// Returns how the kernels store these values, and how they read them again.
fn split_and_joined(isa: Isa, master: Master, values: &[f32]) -> (Vec<u16>, Vec<i16>, Vec<f32>) {
    let (mut params, mut joined) = (vec![0u16; values.len()], vec![0f32; values.len()]);
    let (mut long, mut short) = (vec![0i16; values.len()], vec![0i8; values.len()]);
    let is_long = master == Master::Remainder16;
    let stored = InstepStored {
        values: params.as_mut_ptr().cast(),
        second: if is_long { long.as_mut_ptr().cast() } else { short.as_mut_ptr().cast() },
        count: values.len() as u64,
        format: INSTEP_DTYPE_BF16,
        master_kind: if is_long { INSTEP_MASTER_REMAINDER16 } else { INSTEP_MASTER_REMAINDER8 },
        is_signed: 0,
        reserved: 0,
    };
    // SAFETY: as many elements everywhere, of the sizes that the kind of remainder says.
    unsafe {
        kernels(isa).encode.unwrap()(values.as_ptr(), &stored);
        kernels(isa).decode.unwrap()(&stored, joined.as_mut_ptr());
    }
    (params, if is_long { long } else { short.into_iter().map(|x| i16::from(x) << 8).collect() }, joined)
}

fn assert_split(values: &[f32]) {
    for isa in Isa::available() {
        for master in [Master::Remainder16, Master::Remainder8] {
            let (params, remainders, joined) = split_and_joined(isa, master, values);
            for (k, value) in values.iter().enumerate() {
                let what = format!("{isa} {master:?} {:#010x}", value.to_bits());
                let param = f32::from_bits(u32::from(params[k]) << 16);
                if value.is_nan() {
                    assert!(param.is_nan() && joined[k].to_bits() == 0x7fff_ffff, "{what}");
                    continue;
                }
                let kept = if master == Master::Remainder8 {
                    nearest_of(value.to_bits(), 8, true)
                } else {
                    value.to_bits()
                };
                assert_eq!(joined[k].to_bits(), kept, "{what}: joined");
                assert_eq!(param.to_bits(), nearest_of(kept, 16, false), "{what}: the parameter");
                let distance = i64::from(kept) - (i64::from(params[k]) << 16);
                assert_eq!(i64::from(remainders[k]), distance, "{what}: the remainder");
            }
        }
    }
}

#[test]
fn every_upper_half_of_an_f32_is_split_and_joined_as_defined() {
    for lower in LOWER_HALVES {
        let values: Vec<f32> = (0..=0xffffu32).map(|upper| f32::from_bits(upper << 16 | lower)).collect();
        assert_split(&values);
    }
}

#[test]
fn random_values_of_every_exponent_come_back_from_their_halves() {
    // A linear generator visits every residue; its upper bits are the even ones.
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let values = (0..1 << 17).map(|k: u32| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f32::from_bits((state >> 41) as u32 | (k & 0x1ff) << 23)
    });
    assert_split(&values.collect::<Vec<_>>());
}

#[test]
fn a_step_of_a_24_bit_master_is_f32s_rounded_once_to_a_fraction_of_15_bits() {
    let layout = layout(&LENGTHS);
    for optim in optimizers() {
        for rounding in [Rounding::Nearest, Rounding::Stochastic { seed: 7 }] {
            let precision = Precision { rounding, ..narrow(DType::BF16, Master::Remainder8) };
            assert_eq!(precision.moments, Moments::F32);
            let (mut ours, mut wide) =
                (open(&layout, optim, precision), open(&layout, optim, Precision::F32));
            for at in 0..6 {
                crate::precision::resume::load(&ours, &mut wide);
                step(&mut ours, DType::BF16, at);
                step(&mut wide, DType::BF16, at);
                let (ours, wide) = (Outcome::of(&ours).unwrap(), Outcome::of(&wide).unwrap());
                let pairs = ours.params.iter().flatten().zip(wide.params.iter().flatten());
                for (x, exact) in pairs {
                    let what = format!("{optim:?} {rounding:?}, pass {at}: {exact:e} became {x:e}");
                    // Half of the last of 15 places, or all of it by chance; below the normal numbers places are
                    // 2^-141.
                    let places = if rounding == Rounding::Nearest { 2f64.powi(-16) } else { 2f64.powi(-15) };
                    let bound = places * f64::from(*exact).abs().max(f64::from(f32::MIN_POSITIVE));
                    assert!((f64::from(*x) - f64::from(*exact)).abs() <= bound, "{what}");
                    assert!(x.to_bits().is_multiple_of(256), "{what}");
                    if rounding == Rounding::Nearest {
                        assert_eq!(x.to_bits(), nearest_of(exact.to_bits(), 8, true), "{what}");
                    }
                }
                assert_eq!(ours.states, wide.states, "{optim:?}: states are f32");
            }
        }
    }
}
