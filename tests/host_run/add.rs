//! The GPU's addition of two runs equals the CPU's sum of two ranks in every bit, for numbers and for bit patterns.
//!
//! Words after each run must keep their bits too. The tests run as those of `mod.rs` do, on the same launcher.

use instep::abi::*;

use super::launch::{launch, words};
use super::machine::SHAPES;
use crate::kernels::bitpatterns::SPECIAL;
use crate::support::entries;

/// Blocks of 256 elements: less than one round of a block, one round, and more than one.
const LENGTHS: [usize; 5] = [256, 512, 1024, 1280, 5376];

/// Returns the bits of any float: special ones first, then all exponents.
fn pattern(k: usize) -> u32 {
    match SPECIAL.get(k) {
        Some(special) => *special,
        None => (k as u32).wrapping_mul(0x9e37_79b9) ^ (k as u32) << 7,
    }
}

#[test]
#[ignore = "scripts/host-run-lane.py runs it: compiles the kernels for it"]
fn a_gpu_adds_two_runs_to_the_bits_of_the_cpu() {
    for dtype in [INSTEP_DTYPE_F32, INSTEP_DTYPE_BF16, INSTEP_DTYPE_F16] {
        let bytes = if dtype == INSTEP_DTYPE_F32 { 4 } else { 2 };
        for count in LENGTHS {
            // After each run, words that no thread may touch.
            let run = |seed: usize| {
                let mut run = words(0x5555_5555_5555_5555, count * bytes / 8 + 8);
                for (k, word) in run[..count * bytes / 8].iter_mut().enumerate() {
                    let half = |j| u64::from(pattern((2 * k + j) * (seed + 1) + 31 * seed));
                    *word = half(0) | half(1) << 32;
                }
                run
            };
            let from = run(0);
            let before = from.to_vec();
            let mut expected = run(1).to_vec();
            let ranks = [expected.as_mut_ptr().cast(), before.as_ptr().cast_mut().cast()];
            let sum = entries::kernels(instep::Isa::Baseline).sum.unwrap();
            // SAFETY: runs of so many elements, and the sum may replace the first.
            unsafe { sum(ranks.as_ptr(), 2, dtype, 0, count as u64, ranks[0]) };
            for shape in SHAPES {
                let mut to = run(1);
                let args = InstepAddArgs {
                    from: from.as_ptr().cast(),
                    to: to.as_mut_ptr().cast(),
                    count: count as u64,
                    dtype,
                    reserved: 0,
                };
                let blocks = shape.blocks.min(count.div_ceil(1024) as u32 + 2);
                // SAFETY: as above, and whole blocks that are aligned.
                unsafe { launch(c"instep_add", &args, blocks, INSTEP_GPU_THREADS, shape.order) };
                assert!(**to == *expected, "{dtype}, {count} elements, {shape:?}: it differs from the CPU's");
            }
            assert!(**from == *before, "what is added is only read");
        }
    }
}
