//! The GPU's conversions of whole runs equal those on the CPU in every bit, at every alignment; a NaN stays a NaN.
//!
//! Words around each run must keep their bits too. The tests run as those of `mod.rs` do, on the same launcher.

use instep::abi::*;
use instep::{Element, bf16, cast, f16};

use super::launch::{launch, words};
use super::machine::SHAPES;
use crate::kernels::bitpatterns::SPECIAL;

/// Lengths near one thread's elements, and near those of a block in one round.
const LENGTHS: [usize; 9] = [1, 2, 3, 4, 5, 255, 1023, 1025, 5000];

/// Number of elements before a run.
const OFFSETS: [usize; 4] = [0, 1, 2, 7];

/// Returns the bits of any value: special ones first, then all exponents.
fn pattern(k: usize) -> f32 {
    f32::from_bits(match SPECIAL.get(k) {
        Some(special) => *special,
        None => (k as u32).wrapping_mul(0x9e37_79b9) ^ (k as u32) << 7,
    })
}

fn is_cast<S: Element, T: Element>() {
    let (s, t) = (size_of::<S>(), size_of::<T>());
    for (len, offset) in LENGTHS.into_iter().flat_map(|len| OFFSETS.map(|offset| (len, offset))) {
        let values: Vec<S> = (0..len).map(|k| S::from_f32(pattern(k))).collect();
        let mut expected = vec![T::from_f32(0.0); len];
        cast(&values, &mut expected);
        let mut from = words(0, (offset + len) * s / 8 + 2);
        // SAFETY: room for them; every bit pattern is a word.
        unsafe {
            from.as_mut_ptr().cast::<S>().add(offset).copy_from_nonoverlapping(values.as_ptr(), len);
        }
        let before = from.to_vec();
        for shape in SHAPES {
            // Another alignment than the source's.
            let (at, room) = (OFFSETS[(offset + len) % 4], (OFFSETS[3] + len) * t / 8 + 3);
            let mut to = words(0x5555_5555_5555_5555, room);
            let first = to.as_mut_ptr().cast::<T>().wrapping_add(at);
            let args = InstepCastArgs {
                from: from.as_ptr().cast::<S>().wrapping_add(offset).cast(),
                to: first.cast(),
                count: len as u64,
                from_dtype: code::<S>(),
                to_dtype: code::<T>(),
            };
            let blocks = shape.blocks.min(len.div_ceil(1024) as u32 + 2);
            // SAFETY: runs of so many elements, which are apart.
            unsafe { launch(c"instep_cast", &args, blocks, INSTEP_GPU_THREADS, shape.order) };
            let got: Vec<T> = (0..len)
                // SAFETY: the run that was written.
                .map(|k| unsafe { first.add(k).read() })
                .collect();
            for (k, (got, expected)) in got.iter().zip(&expected).enumerate() {
                let [got, expected] = [got, expected].map(|value| value.to_f32());
                let is_same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
                assert!(is_same, "{got} at {k} of {len}, {shape:?}: it differs from the CPU's {expected}");
            }
            let bytes: &[u8] = bytemuck::cast_slice(&to);
            let around = bytes[..at * t].iter().chain(&bytes[(at + len) * t..]);
            assert!(
                { around }.all(|byte| *byte == 0x55),
                "{len} elements from {at}, {shape:?}: what is around them differs from the CPU's"
            );
        }
        assert!(**from == *before, "the source is only read");
    }
}

fn code<T: Element>() -> u32 {
    match T::DTYPE {
        instep::DType::F32 => INSTEP_DTYPE_F32,
        instep::DType::BF16 => INSTEP_DTYPE_BF16,
        instep::DType::F16 => INSTEP_DTYPE_F16,
        other => panic!("{other}"),
    }
}

#[test]
#[ignore = "scripts/host-run-lane.py runs it: compiles the kernels for it"]
fn a_gpu_casts_runs_to_the_bits_of_the_cpu() {
    is_cast::<f32, bf16>();
    is_cast::<f32, f16>();
    is_cast::<bf16, f32>();
    is_cast::<f16, f32>();
    is_cast::<bf16, f16>();
    is_cast::<f16, bf16>();
    is_cast::<f32, f32>();
    is_cast::<bf16, bf16>();
}
