//! bf16 and f16 on every instruction set against another implementation, the `half` crate.
//!
//! `precision::sixteen_bit` has the formats' definition. This file tests more numbers: each value widened, and f32
//! narrowed; a lane of `.ci/run` narrows all f32. Every NaN must become 0x7fff, because payloads are not kept.

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
        _ if x.is_nan() => 0x7fff,
        INSTEP_DTYPE_BF16 => half::bf16::from_f32(x).to_bits(),
        _ => half::f16::from_f32(x).to_bits(),
    }
}

fn assert_narrowed(values: &[f32], theirs: [&[u16]; 2]) {
    let mut ours = vec![0u16; values.len()];
    for (dtype, theirs) in DTYPES.into_iter().zip(theirs) {
        for isa in Isa::available() {
            // SAFETY: as many elements in both.
            unsafe {
                let (from, to) = (values.as_ptr(), ours.as_mut_ptr());
                kernels(isa).narrow.unwrap()(from, to, dtype, 1.0, values.len() as u64);
            }
            // Slices compare as memory does, which is fast in a debug build too.
            if ours != theirs {
                let at = (0..values.len()).find(|&at| ours[at] != theirs[at]).unwrap();
                let (x, ours) = (values[at].to_bits(), ours[at]);
                panic!("{isa}, dtype {dtype}, {x:#010x}: {ours:#06x}, not {:#06x}", theirs[at]);
            }
        }
    }
}

/// Computes with `half` the results for all f32 with this upper half. Rounding is monotone. If the first and the last
/// of a run of lower halves give the same value, so do all between, and `half` computes only the ends of runs.
fn narrowed_by_half(dtype: u32, upper: u32, theirs: &mut [u16]) {
    let value = |lower: usize| narrow(dtype, f32::from_bits(upper << 16 | lower as u32));
    let mut from = 0;
    while from < theirs.len() {
        let (first, mut last, mut end) = (value(from), from, theirs.len());
        while end - last > 1 {
            let middle = last + (end - last) / 2;
            if value(middle) == first { last = middle } else { end = middle }
        }
        theirs[from..end].fill(first);
        from = end;
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
        let theirs = DTYPES.map(|dtype| values.iter().map(|x| narrow(dtype, *x)).collect::<Vec<u16>>());
        assert_narrowed(&values, [&theirs[0], &theirs[1]]);
    }
}

#[test]
#[ignore = ".ci/run: a lane of its own, since this takes a minute"]
fn every_f32_is_narrowed_as_half_does() {
    let threads = thread::available_parallelism().map_or(1, |threads| threads.get() as u32);
    let run = |part: u32| {
        let mut theirs = [vec![0u16; 1 << 16], vec![0u16; 1 << 16]];
        for upper in (0..1u32 << 16).filter(|upper| upper % threads == part) {
            let values: Vec<f32> = (0..=0xffffu32).map(|lower| f32::from_bits(upper << 16 | lower)).collect();
            for (dtype, theirs) in DTYPES.into_iter().zip(&mut theirs) {
                narrowed_by_half(dtype, upper, theirs);
            }
            assert_narrowed(&values, [&theirs[0], &theirs[1]]);
        }
    };
    thread::scope(|scope| (0..threads).for_each(|part| drop(scope.spawn(move || run(part)))));
}
