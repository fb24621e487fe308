//! bf16 and f16 on every instruction set against an implementation that is not ours, the `half` crate's.
//!
//! `precision::sixteen_bit` has the formats' definition; this has more numbers: each value widened, and f32 narrowed, all of
//! them in the long lane. Must compare bits, but of a NaN only that it is one: payloads are nobody's promise.

use std::thread;

use instep::Isa;
use instep::abi::{INSTEP_DTYPE_BF16, INSTEP_DTYPE_F16};

use crate::support::entries::kernels;

const DTYPES: [u32; 2] = [INSTEP_DTYPE_BF16, INSTEP_DTYPE_F16];

fn wide(dtype: u32, bits: u16) -> f32 {
    match dtype {
        INSTEP_DTYPE_BF16 => half::bf16::from_bits(bits).to_f32(),
        _ => half::f16::from_bits(bits).to_f32(),
    }
}

fn narrow(dtype: u32, x: f32) -> u16 {
    match dtype {
        INSTEP_DTYPE_BF16 => half::bf16::from_f32(x).to_bits(),
        _ => half::f16::from_f32(x).to_bits(),
    }
}

fn assert_narrowed(values: &[f32]) {
    let mut ours = vec![0u16; values.len()];
    for dtype in DTYPES {
        let theirs: Vec<u16> = values.iter().map(|x| narrow(dtype, *x)).collect();
        for isa in Isa::available() {
            // SAFETY: as many elements in both.
            unsafe {
                let (from, to) = (values.as_ptr(), ours.as_mut_ptr());
                kernels(isa).narrow.unwrap()(from, to, dtype, 1.0, values.len() as u64);
            }
            for ((x, ours), theirs) in values.iter().zip(&ours).zip(&theirs) {
                let theirs = if x.is_nan() { 0x7fff } else { *theirs };
                assert!(*ours == theirs, "{isa}, dtype {dtype}, {:#010x}: {ours:#06x}", x.to_bits());
            }
        }
    }
}

#[test]
fn every_16_bit_value_is_widened_as_half_does() {
    let narrow: Vec<u16> = (0..=u16::MAX).collect();
    for (isa, dtype) in Isa::available().into_iter().flat_map(|isa| DTYPES.map(|dtype| (isa, dtype))) {
        let mut ours = vec![0f32; narrow.len()];
        // SAFETY: as many elements in both.
        unsafe {
            let (from, to) = (narrow.as_ptr(), ours.as_mut_ptr());
            kernels(isa).widen.unwrap()(from, to, dtype, 1.0, narrow.len() as u64);
        }
        for (bits, ours) in narrow.iter().zip(ours) {
            let theirs = wide(dtype, *bits);
            let same = ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan());
            assert!(same, "{isa}, dtype {dtype}, {bits:#06x}: {ours:e}, not {theirs:e}");
        }
    }
}

#[test]
fn f32_of_every_upper_half_are_narrowed_as_half_does() {
    let turning = [0, 1, 0xfff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x7fff, 0x8000, 0x8001, 0xd000, 0xffff];
    for lower in turning.into_iter().chain((0..8u32).map(|k| k.wrapping_mul(0x9e37_79b9) >> 16)) {
        let values: Vec<f32> = (0..=0xffffu32).map(|upper| f32::from_bits(upper << 16 | lower)).collect();
        assert_narrowed(&values);
    }
}

#[test]
#[ignore = ".ci/run: the long lane, in release mode, since this takes a minute there and half an hour in a debug build"]
fn every_f32_is_narrowed_as_half_does() {
    let threads = thread::available_parallelism().map_or(1, |threads| threads.get() as u32);
    let run = |part: u32| {
        for upper in (0..1u32 << 16).filter(|upper| upper % threads == part) {
            let values: Vec<f32> = (0..=0xffffu32).map(|lower| f32::from_bits(upper << 16 | lower)).collect();
            assert_narrowed(&values);
        }
    };
    thread::scope(|scope| (0..threads).for_each(|part| drop(scope.spawn(move || run(part)))));
}
