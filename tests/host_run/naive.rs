//! The GPU's steps equal those of the naive kernel, kernels/gpu/naive.cu, in every bit of all memories, for every rule.
//!
//! Both sides use the same rule headers, so these tests do not find a wrong formula; `numerics` finds it. Each side has
//! its own version of all other code. The library does not embed the naive kernel; a GPU loads it from the file in
//! `INSTEP_GPU_NAIVE`.

use std::collections::BTreeSet;
use std::ffi::CStr;

use instep::abi::*;
use instep::{DType, Master, Moments, Precision, Rounding};

use super::case::{Bucket, Case, Segment, rule};
use super::launch::launch;
use super::machine::{Machine, SHAPES};
use super::precisions::{DTYPES, precisions};
use super::{TILE, sometimes_nonfinite, stepped};
use crate::support::{Optim, few_optimizers, optimizers};

const BLOCKS_PER_TILE: u64 = (INSTEP_TILE_ELEMENTS / INSTEP_GPU_THREADS) as u64;

/// Launches the naive kernel. The naive kernel measures no norms, so `measure` launches a kernel that does. That kernel
/// also changes the states, so they are restored before the naive kernel runs.
///
/// # Safety
/// The requirements are those of `Machine::step`.
pub(crate) unsafe fn step(kernel: &CStr, args: &InstepStepArgs, order: u32, measure: impl FnOnce()) {
    // SAFETY: the caller's promise.
    unsafe {
        if args.part == INSTEP_PART_MEASURE {
            let before = states(args).map(|state| state.read()).collect::<Vec<u16>>();
            measure();
            states(args).zip(before).for_each(|(state, before)| state.write(before));
        }
        launch(kernel, args, (args.tile_count * BLOCKS_PER_TILE) as u32, INSTEP_GPU_THREADS, order);
    }
}

/// Returns every state of every tile, as 16-bit words.
///
/// # Safety
/// There are as many tiles as `args` says.
unsafe fn states(args: &InstepStepArgs) -> impl Iterator<Item = *mut u16> {
    let words = if args.moments == INSTEP_MOMENTS_F32 { 2 } else { 1 };
    let bases = args.states.into_iter().take(args.state_count as usize);
    let tiles = (0..args.tile_count as usize).map(|k| {
        // SAFETY: the caller's promise.
        unsafe { args.tiles.add(k).read() }
    });
    tiles.flat_map(move |tile| {
        let (first, count) = (tile.state_offset as usize * words, tile.count as usize * words);
        bases
            .clone()
            .flat_map(move |base| (first..first + count).map(move |at| base.cast::<u16>().wrapping_add(at)))
    })
}

/// Returns f32, bf16 throughout, and the other precisions of the naive kernel, with gradients of every type.
fn plain_precisions() -> Vec<Precision> {
    let bf16 = DType::BF16;
    let throughout = Precision { param: bf16, grad: bf16, moments: Moments::BF16, ..Precision::F32 };
    let is_plain = |precision: &Precision| {
        let Precision { master, moments, rounding, .. } = *precision;
        (master, rounding) == (Master::None, Rounding::Nearest) && moments != Moments::EightBit
    };
    let others = precisions().into_iter().filter(is_plain);
    let typed = others.flat_map(|precision| DTYPES.map(|grad| Precision { grad, ..precision }));
    let mut all = vec![Precision::F32, throughout];
    all.extend(typed.filter(|precision| ![Precision::F32, throughout].contains(precision)));
    all
}

/// Returns segments shorter and longer than a round and a tile, a run of tiles, and every action with every count of
/// ranks.
fn buckets() -> Vec<Bucket> {
    let lens = [1, 3, 5, 255, 0, 256, 257, 1023, TILE - 1, TILE, 3 * TILE + 5, 2 * TILE];
    let mut all = vec![Bucket { segments: lens.map(stepped).to_vec(), ranks: Some(3.0) }];
    for ranks in [Some(2.0), Some(0.0)] {
        let mut segments = Vec::new();
        for action in [INSTEP_ACTION_STEP, INSTEP_ACTION_AVERAGE, INSTEP_ACTION_LEAVE] {
            for used in [None, Some(0.0), Some(2.0)] {
                segments.extend([301, 0, 7].map(|len| Segment { len, action, used }));
            }
        }
        all.push(Bucket { segments, ranks });
    }
    all
}

/// Alternates between the mean over all ranks and the mean over contributing ranks, and between modes.
fn assert_naive_bits(optim: Optim, k: usize, precision: Precision) {
    let divisor = if k.is_multiple_of(2) { 3.0 } else { 0.0 };
    let case = Case { precision, divisor, normed: !k.is_multiple_of(3), ..Case::new(optim, buckets()) };
    let case = Case { gradient_misalignment: [0, 0, 1, 0, 3][k % 5], ..case };
    case.assert_same_bits_as(Machine::Naive(SHAPES[0]), &SHAPES[2..4]);
}

#[test]
#[ignore = "scripts/host-run-lane.py runs it: compiles the kernels for it"]
fn every_rule_steps_a_bucket_to_the_bits_of_the_naive_kernel_in_f32_and_in_bf16() {
    let mut rules = BTreeSet::new();
    for (k, optim) in optimizers().into_iter().enumerate() {
        rules.insert(rule(optim).0);
        for precision in &plain_precisions()[..2] {
            assert_naive_bits(optim, k, *precision);
        }
    }
    assert!(
        rules.len() == INSTEP_OPTIMIZER_COUNT as usize,
        "every rule of kernels/optimizers.def: {rules:?}"
    );
}

#[test]
#[ignore = "scripts/host-run-lane.py runs it: compiles the kernels for it"]
fn every_mixture_of_types_gives_the_bits_of_the_naive_kernel() {
    let all = few_optimizers();
    for (k, precision) in plain_precisions().into_iter().enumerate().skip(2) {
        assert_naive_bits(all[k % all.len()], k, precision);
    }
}

#[test]
#[ignore = "scripts/host-run-lane.py runs it: compiles the kernels for it"]
fn an_infinite_gradient_spreads_or_skips_the_pass_as_with_the_naive_kernel() {
    for (k, optim) in few_optimizers().into_iter().enumerate() {
        for (normed, skip_nonfinite) in [(true, true), (true, false), (false, false)] {
            let precision = plain_precisions()[k % 2];
            let case = Case { precision, normed, skip_nonfinite, passes: 5, ..Case::new(optim, buckets()) };
            let case = Case { gradient: sometimes_nonfinite, ..case };
            case.assert_same_bits_as(Machine::Naive(SHAPES[0]), &SHAPES[2..4]);
        }
    }
}
