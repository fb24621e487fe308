//! The codes of 8-bit states against their definition in f64: the error of a stored value, and values that never occur.
//!
//! Bounds are derived: half a code's distance in the root, and U for each rounding. The tests must take codes only from
//! the formulas of `kernels/numeric/codes.h`: (c/127)^2 and (c/255)^4 of the block's largest.

use instep::abi::*;
use instep::{Isa, Moments, ParamId, Precision, Sgd, Solo, Stepper};

use crate::support::entries::kernels;
use crate::support::tolerance::{U, code_distance};
use crate::support::{layout, paint};

/// Whether a state has either sign, or is never negative.
pub(crate) const KINDS: [bool; 2] = [true, false];
const BLOCK: usize = INSTEP_QUANTUM as usize;

/// Returns the value of a code.
pub(crate) fn value(is_signed: bool, code: u8, scale: f64) -> f64 {
    if is_signed {
        let root = f64::from(code as i8) / 127.0;
        root * root.abs() * scale
    } else {
        (f64::from(code) / 255.0).powi(4) * scale
    }
}

/// A state as it is stored.
pub(crate) struct Coded {
    pub(crate) codes: Vec<u8>,
    scales: Vec<f32>,
    is_signed: bool,
}

impl Coded {
    fn stored(&mut self) -> InstepStored {
        InstepStored {
            values: self.codes.as_mut_ptr().cast(),
            second: self.scales.as_mut_ptr().cast(),
            count: self.codes.len() as u64,
            format: INSTEP_MOMENTS_8BIT,
            master_kind: INSTEP_MASTER_NONE,
            is_signed: self.is_signed.into(),
            reserved: 0,
        }
    }

    pub(crate) fn encode(isa: Isa, is_signed: bool, values: &[f32]) -> Coded {
        let scales = vec![f32::NAN; values.len().div_ceil(BLOCK)];
        let mut coded = Coded { codes: vec![0xaa; values.len()], scales, is_signed };
        // SAFETY: as many codes as values, and a scale per block.
        unsafe { kernels(isa).encode.unwrap()(values.as_ptr(), &coded.stored()) };
        coded
    }

    fn decode(&mut self, isa: Isa) -> Vec<f32> {
        let mut values = vec![f32::NAN; self.codes.len()];
        // SAFETY: as above.
        unsafe { kernels(isa).decode.unwrap()(&self.stored(), values.as_mut_ptr()) };
        values
    }
}

/// 2^-90; with a smaller scale a code could leave the normal numbers.
const SMALLEST_SCALE: f32 = f32::from_bits((127 - 90) << 23);
const SCALES: [f32; 7] = [SMALLEST_SCALE, 1.5 * SMALLEST_SCALE, 1.3e-20, 0.3333333, 1.0, 4.2e19, f32::MAX];

#[test]
fn every_code_stands_for_its_value_and_comes_back_from_it() {
    for (isa, is_signed) in Isa::available().into_iter().flat_map(|isa| KINDS.map(|kind| (isa, kind))) {
        for scale in SCALES {
            // The largest code is among them, so the block's largest is the scale.
            let codes: Vec<u8> = (0..=255).filter(|code| !is_signed || *code != 0x80).collect();
            let mut coded = Coded { codes: codes.clone(), scales: vec![scale], is_signed };
            let decoded = coded.decode(isa);
            for (code, x) in codes.iter().zip(&decoded) {
                let exact = value(is_signed, *code, scale.into());
                let roundings = if is_signed { 6.0 } else { 12.0 };
                let error = (f64::from(*x) - exact).abs();
                assert!(error <= 1.01 * roundings * U * exact.abs(), "{isa} {code}: {x:e}, not {exact:e}");
                assert!(*x == 0.0 || x.is_normal(), "{isa} {code} of {scale:e}: {x:e}");
            }
            let mut again = Coded::encode(isa, is_signed, &decoded);
            assert_eq!((&again.codes, &again.scales), (&codes, &vec![scale]), "{isa} {scale:e}");
            assert_eq!(again.decode(isa), decoded);
        }
    }
}

#[test]
fn a_value_is_stored_as_its_nearest_code_and_the_largest_and_zero_exactly() {
    // Four decades in each block and 38 over all; the last block is a partial one.
    let raw: Vec<f32> = (0..40 * BLOCK + 77)
        .map(|k| paint(7, k).powi(3) * 10f32.powi((k / BLOCK) as i32 - 26 + 20 * (k / (31 * BLOCK)) as i32))
        .map(|x| if x.abs() < 1e-38 { 0.0 } else { x })
        .collect();
    for (isa, is_signed) in Isa::available().into_iter().flat_map(|isa| KINDS.map(|kind| (isa, kind))) {
        let values: Vec<f32> = raw.iter().map(|x| if is_signed { *x } else { x.abs() }).collect();
        let mut coded = Coded::encode(isa, is_signed, &values);
        let decoded = coded.decode(isa);
        for (at, block) in values.chunks(BLOCK).enumerate() {
            let scale = block.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            assert_eq!(coded.scales[at], scale, "{isa}, block {at}");
            for (x, stored) in block.iter().zip(&decoded[at * BLOCK..]) {
                let what = format!("{isa}, signed: {is_signed}, scale {scale:e}: {x:e} became {stored:e}");
                let error = (f64::from(*stored) - f64::from(*x)).abs();
                assert!(error <= code_distance(is_signed, (*x).into(), scale.into()), "{what}");
                assert!(x.abs() < scale || stored.to_bits() == x.to_bits(), "the largest: {what}");
                assert!(*x != 0.0 || stored.to_bits() == 0, "zero: {what}");
                assert!(is_signed || *x == 0.0 || *stored > 0.0, "above zero: {what}");
            }
        }
    }
}

#[test]
fn what_is_above_zero_stays_so_however_small_it_is_beside_its_block() {
    let tiny = [f32::from_bits(1), f32::MIN_POSITIVE, 1e-20, 2.0f32.powi(-33), 1e-9];
    for (isa, scale) in Isa::available().into_iter().flat_map(|isa| [1.0, 7e37].map(|scale| (isa, scale))) {
        let values: Vec<f32> = tiny.into_iter().chain([scale, 0.0]).collect();
        let mut coded = Coded::encode(isa, false, &values);
        assert_eq!(coded.codes[..5], [1; 5], "{isa}: the smallest code, not zero");
        assert_eq!(coded.codes[6], 0);
        assert!(coded.decode(isa)[..5].iter().all(|x| *x > 0.0));
    }
}

#[test]
fn tiny_blocks_are_zero_and_blocks_that_are_not_finite_are_nan_altogether() {
    let below = f32::from_bits(SMALLEST_SCALE.to_bits() - 1);
    for (isa, is_signed) in Isa::available().into_iter().flat_map(|isa| KINDS.map(|kind| (isa, kind))) {
        for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::from_bits(0xffc0_0001)] {
            let mut values = vec![1.0f32; 3 * BLOCK + 5];
            values[..BLOCK].fill(below);
            values[BLOCK + 17] = bad;
            let last = values.len() - 1;
            values[last] = bad;
            let mut coded = Coded::encode(isa, is_signed, &values);
            let decoded = coded.decode(isa);
            assert!(decoded[..BLOCK].iter().all(|x| x.to_bits() == 0), "{isa}: below 2^-90");
            assert!(decoded[BLOCK..2 * BLOCK].iter().all(|x| x.to_bits() == 0x7fff_ffff), "{isa} {bad}");
            assert!(decoded[2 * BLOCK..3 * BLOCK].iter().all(|x| *x == 1.0), "{isa}: its neighbour");
            assert!(decoded[3 * BLOCK..].iter().all(|x| x.is_nan()), "{isa}: a partial block");
            // And what has been read and is written again is the same.
            assert_eq!(Coded::encode(isa, is_signed, &decoded).codes, coded.codes);
        }
    }
}

#[test]
fn blocks_are_counted_from_the_start_of_each_parameter() {
    let layout = layout(&[300, 260]);
    let precision = Precision { moments: Moments::EightBit, ..Precision::F32 };
    let sgd = Sgd { momentum: 0.9, ..Sgd::default() };
    let mut stepper = Stepper::builder(&layout, sgd).precision(precision).host(Solo::default()).unwrap();
    // Growing, so that the last of each block is its largest, and alone is certain to be kept.
    let gradients: Vec<Vec<f32>> = [300, 260]
        .map(|len: usize| (0..len).map(|k| 1.37f32.powi(k as i32 % 97) + k as f32).collect())
        .into();
    let ids: Vec<ParamId> = layout.ids().collect();
    let mut pass = stepper.begin().unwrap();
    ids.iter().zip(&gradients).for_each(|(id, g)| pass.write(id.grad(), g).unwrap());
    pass.finish().unwrap();
    for (id, gradients) in ids.iter().zip(&gradients) {
        let mut state = vec![0.0; gradients.len()];
        stepper.read(id.state("momentum_buffer"), &mut state).unwrap();
        for (stored, exact) in state.chunks(BLOCK).zip(gradients.chunks(BLOCK)) {
            let largest = exact.iter().copied().fold(0.0, f32::max);
            assert_eq!(stored.iter().copied().fold(0.0, f32::max), largest);
            for (stored, x) in stored.iter().zip(exact) {
                let error = (f64::from(*stored) - f64::from(*x)).abs();
                assert!(error <= code_distance(true, (*x).into(), largest.into()), "{x} became {stored}");
            }
        }
    }
}
