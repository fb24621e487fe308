//! The GPU's kernels, compiled for the CPU and run block by block, have the same bits as the CPU's in all memories.
//!
//! scripts/host-run-lane.py compiles them and runs these tests, also with AddressSanitizer and
//! UndefinedBehaviorSanitizer; otherwise the tests are ignored, because there is no shared object to open. With
//! `INSTEP_REQUIRE_GPU=1` the same tests launch the same kernels on a GPU, on pinned memory. The tests must compare
//! whole memories, never chosen fields.

mod add;
mod case;
mod cast;
pub(crate) mod launch;
mod machine;
mod memory;
mod naive;
mod precisions;
mod tensors;
mod world;

use case::{Bucket, Case, ENDS, Segment};
use instep::abi::*;
use instep::{Moments, Precision};
use machine::SHAPES;
use precisions::{COPIES, DECAYS, DTYPES, precisions};

use crate::kernels::bitpatterns::SPECIAL;
use crate::support::{LENGTHS, few_optimizers, optimizers, paint_gradient};

/// Returns the lengths of all tests, and those near the elements of a block in one round.
fn lengths() -> impl Iterator<Item = usize> {
    LENGTHS.into_iter().chain([2, 4, 5, 127, 128, 129, 1023, 1024, 1025, 3071, 4096, 4097, 0])
}

fn stepped(len: usize) -> Segment {
    Segment { len, action: INSTEP_ACTION_STEP, used: None }
}

/// Returns one bucket with a segment of every length.
fn every_length() -> Vec<Bucket> {
    vec![Bucket { segments: lengths().map(stepped).collect(), ranks: None }]
}

#[test]
#[ignore = "scripts/host-run-lane.py runs it: compiles the kernels for it"]
fn every_optimizer_gives_the_cpus_bits_at_every_length_in_every_launch_shape() {
    for (k, optim) in optimizers().into_iter().enumerate() {
        let case = Case { normed: k % 2 == 0, ..Case::new(optim, every_length()) };
        case.assert_same_bits(&SHAPES);
    }
}

#[test]
#[ignore = "scripts/host-run-lane.py runs it: compiles the kernels for it"]
fn no_misalignment_differs_from_the_cpu() {
    let all = precisions();
    for misalignment in 0..16 {
        for (k, grad) in DTYPES.into_iter().enumerate() {
            for j in 0..2 {
                let few = few_optimizers();
                let optim = few[(misalignment + k + j) % few.len()];
                let stored = all[(misalignment * 6 + k * 2 + j) % all.len()];
                let case = Case {
                    precision: Precision { grad, ..stored },
                    copy: COPIES[(misalignment / 2 + 2 * k + j) % 4],
                    ema: DECAYS[(misalignment + j) % 3],
                    gradients: ENDS[(misalignment + k + j) % 3],
                    misalignment,
                    passes: 2,
                    ..Case::new(optim, every_length())
                };
                case.assert_same_bits(&SHAPES[2..4]);
            }
        }
    }
}

const TILE: usize = INSTEP_TILE_ELEMENTS as usize;

/// Returns every action with every count, also over tiles that a block takes as one run, and empty segments between
/// them.
fn every_fate() -> Vec<Bucket> {
    let mut buckets = Vec::new();
    for ranks in [Some(2.0), Some(0.0), Some(1.0)] {
        let mut segments = Vec::new();
        for action in [INSTEP_ACTION_STEP, INSTEP_ACTION_AVERAGE, INSTEP_ACTION_LEAVE] {
            for used in [None, Some(0.0), Some(1.0), Some(2.0)] {
                segments.extend([0, 301, 0, 0, 2 * TILE + 5].map(|len| Segment { len, action, used }));
            }
        }
        buckets.push(Bucket { segments, ranks });
    }
    buckets.push(Bucket { segments: vec![stepped(0); 5], ranks: Some(3.0) });
    buckets
}

#[test]
#[ignore = "scripts/host-run-lane.py runs it: compiles the kernels for it"]
fn segments_are_stepped_averaged_or_left_as_on_the_cpu() {
    let mut stored = precisions().into_iter().cycle();
    for optim in few_optimizers() {
        for (k, grad) in DTYPES.into_iter().enumerate() {
            for (normed, divisor) in [(false, 0.0), (true, 0.0), (false, 3.0), (true, 3.0)] {
                let precision = Precision { grad, ..stored.next().unwrap() };
                let case = Case { precision, normed, divisor, ..Case::new(optim, every_fate()) };
                let case = Case { misalignment: k, copy: COPIES[k + 1], ema: DECAYS[k], ..case };
                let ends = usize::from(normed) + k;
                Case { gradients: ENDS[ends % 3], ..case }.assert_same_bits(&SHAPES[2..4]);
            }
        }
    }
}

#[test]
#[ignore = "scripts/host-run-lane.py runs it: compiles the kernels for it"]
fn gradients_that_are_ended_alone_are_the_cpus_and_nothing_is_stepped() {
    for (k, gradients) in ENDS.into_iter().enumerate() {
        for (j, divisor) in [0.0, 3.0].into_iter().enumerate() {
            let case = Case::new(few_optimizers()[0], every_fate());
            let case = Case { gradients, divisor, normed: j == 0, misalignment: 3 * k, ..case };
            Case { parts: &[INSTEP_PART_END], ..case }.assert_same_bits(&SHAPES[1..4]);
        }
    }
}

/// Returns finite values, except that one segment has a NaN in the first of two passes and an infinity in the second.
fn sometimes_nonfinite(pass: usize, segment: usize, element: usize) -> f32 {
    match (pass, segment, element) {
        (1, 3, 64) => f32::NAN,
        (3, 8, 0) => f32::NEG_INFINITY,
        _ => paint_gradient(pass, segment, element),
    }
}

#[test]
#[ignore = "scripts/host-run-lane.py runs it: compiles the kernels for it"]
fn a_skipped_pass_a_clipped_one_and_the_ring_after_them_are_the_cpus() {
    let mut stored = precisions().into_iter().cycle();
    for optim in few_optimizers() {
        for skip_nonfinite in [false, true] {
            for max_norm in [-1.0, 0.0, 0.5, 1e9] {
                let segments =
                    |lens: [usize; 5]| Bucket { segments: lens.map(stepped).to_vec(), ranks: None };
                let buckets = vec![segments([1, 256, 0, 300, 2049]), segments([7, 0, 64, 5000, 0])];
                let case =
                    Case { skip_nonfinite, max_norm, passes: 7, slots: 3, ..Case::new(optim, buckets) };
                let (precision, copy, ema) = (stored.next().unwrap(), COPIES[1], DECAYS[1]);
                let case = Case { gradient: sometimes_nonfinite, precision, copy, ema, ..case };
                let ends = usize::from(max_norm > 0.0) + usize::from(skip_nonfinite && max_norm != 0.5);
                Case { gradients: ENDS[ends], ..case }.assert_same_bits(&SHAPES[2..]);
            }
        }
    }
}

/// There are more buckets than the kernel that opens a pass has threads, and one has an infinity in the last pass.
#[test]
#[ignore = "scripts/host-run-lane.py runs it: compiles the kernels for it"]
fn segments_are_clipped_by_the_norm_of_their_own_bucket_as_on_the_cpu() {
    for (k, optim) in few_optimizers()[1..3].iter().enumerate() {
        let ranks = |bucket: usize| Some((bucket % 3) as f32).filter(|_| k % 2 == 0);
        let mut buckets: Vec<Bucket> = (0..300)
            .map(|bucket| Bucket { segments: vec![stepped(bucket % 5), stepped(3)], ranks: ranks(bucket) })
            .collect();
        buckets[4].segments[0] = stepped(5000);
        let divisor = if k % 2 == 0 { 0.0 } else { 3.0 };
        let case = Case { divisor, per_bucket: true, passes: 4, ..Case::new(*optim, buckets) };
        Case { gradient: sometimes_nonfinite, ..case }.assert_same_bits(&SHAPES[1..3]);
    }
}

fn special_param(_: usize, element: usize) -> f32 {
    f32::from_bits(SPECIAL[element / SPECIAL.len() % SPECIAL.len()])
}

/// Together with the parameters it makes every pair of special values; the upper halves are also special as 16-bit
/// values.
fn special_gradient(pass: usize, _: usize, element: usize) -> f32 {
    let row = element / SPECIAL.len();
    f32::from_bits(SPECIAL[(element + pass * (row + 1)) % SPECIAL.len()])
}

/// Returns uniform bits: the finisher of splitmix64 (Steele et al., 2014) over a counter.
fn random_bits(pass: usize, segment: usize, element: usize) -> u32 {
    let counter = (pass << 40 | segment << 20 | element) as u64 + 1;
    let z = counter.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 32) as u32
}

fn random_gradient(pass: usize, segment: usize, element: usize) -> f32 {
    f32::from_bits(random_bits(pass, segment, element))
}

#[test]
#[ignore = "scripts/host-run-lane.py runs it: compiles the kernels for it"]
fn nan_infinity_subnormals_and_noise_give_the_cpus_bits() {
    for (k, optim) in optimizers().into_iter().enumerate() {
        let bucket = |len| vec![Bucket { segments: vec![stepped(len)], ranks: None }];
        let precision = precisions()[7 * k % precisions().len()];
        let special = Case { normed: false, ..Case::new(optim, bucket(SPECIAL.len() * SPECIAL.len())) };
        let special = Case { param: special_param, gradient: special_gradient, ..special };
        special.assert_same_bits(&SHAPES[..1]);
        let (copy, ema, normed) = (COPIES[k / 2 % 4], DECAYS[k % 3], true);
        Case { precision, copy, ema, normed, ..special }.assert_same_bits(&SHAPES[..1]);
        let noise = Case { normed: false, gradient: random_gradient, ..Case::new(optim, bucket(8192)) };
        noise.assert_same_bits(&SHAPES[2..3]);
        Case { precision, ..noise }.assert_same_bits(&SHAPES[2..3]);
    }
}

#[test]
#[ignore = "scripts/host-run-lane.py runs it: compiles the kernels for it"]
fn offsets_past_two_and_four_billion_elements_lead_to_the_same_memory() {
    let mut stored = precisions().into_iter().cycle();
    for shift in [(1 << 31) - 100, (1 << 31) + 48, (1 << 32) - 100, (1 << 32) + 48, 5 << 32] {
        for k in 0..6 {
            let precision = stored.next().unwrap();
            let shift = if precision.moments == Moments::EightBit { shift & !255 } else { shift };
            let case = Case { shift, precision, passes: 2, ..Case::new(few_optimizers()[3], every_length()) };
            let case = Case { copy: COPIES[1 + k % 3], ema: DECAYS[1], gradients: ENDS[1 + k % 2], ..case };
            case.assert_same_bits(&SHAPES[2..3]);
        }
    }
}

#[test]
#[ignore = "scripts/host-run-lane.py runs it: compiles the kernels for it"]
fn many_segments_are_opened_by_as_few_blocks_as_a_cap_allows() {
    let segments = (0..600).map(|k| stepped(k % 3)).collect();
    let adam = few_optimizers()[2];
    assert!(adam.descriptor.name == "Adam");
    Case::new(adam, vec![Bucket { segments, ranks: None }]).assert_same_bits(&SHAPES);
}
