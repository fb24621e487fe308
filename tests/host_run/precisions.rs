//! The GPU's kernels equal the CPU's for every precision and rounding.
//!
//! The tests in `mod.rs` alternate precisions where they should not matter. The list here has every precision that a
//! stepper accepts.

use instep::abi::INSTEP_ACTION_STEP;
use instep::{Adagrad, DType, Master, Moments, Precision, Rounding, Sgd};

use super::case::{Bucket, Case, ENDS, Segment};
use super::machine::SHAPES;
use super::random_bits;
use crate::support::{Optim, few_optimizers, optimizers};

pub(crate) const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
pub(crate) const COPIES: [Option<DType>; 4] = [None, Some(DType::F32), Some(DType::BF16), Some(DType::F16)];
/// Both formulas of an average, and no average.
pub(crate) const DECAYS: [Option<f64>; 3] = [None, Some(0.9), Some(0.3)];
const SEED: u64 = 0x9b1f_44e2_70c3_d8a5;

/// Returns every precision that a stepper accepts, with one dtype of gradients after the other.
pub(crate) fn precisions() -> Vec<Precision> {
    let mut all = Vec::new();
    for param in DTYPES {
        for master in [Master::None, Master::F32, Master::Remainder16, Master::Remainder8] {
            for moments in [Moments::F32, Moments::BF16, Moments::EightBit] {
                for rounding in [Rounding::Nearest, Rounding::Stochastic { seed: SEED }] {
                    let grad = DTYPES[all.len() % 3];
                    let precision = Precision { param, grad, master, moments, rounding };
                    all.extend(precision.validate().is_ok().then_some(precision));
                }
            }
        }
    }
    all
}

/// Lengths near every width of the kernels, and several tiles; whole blocks and parts of blocks.
fn few_lengths() -> Vec<Bucket> {
    let segment = |len| Segment { len, action: INSTEP_ACTION_STEP, used: None };
    let segments = [1, 3, 5, 255, 256, 257, 1023, 2047, 0, 4101].map(segment).into();
    vec![Bucket { segments, ranks: None }]
}

/// One long run in few tiles.
fn one_long_run() -> Vec<Bucket> {
    let segments = [1000, 2300].map(|len| Segment { len, action: INSTEP_ACTION_STEP, used: None }).into();
    vec![Bucket { segments, ranks: None }]
}

/// Returns finite gradients. Their largest magnitude falls from block to block until a block's scale is too small to be
/// one. Each block also has every smaller exponent.
fn falling_gradient(pass: usize, segment: usize, element: usize) -> f32 {
    let bits = random_bits(pass, segment, element);
    let largest = 140 - 16 * (element as u32 / 256 % 8);
    bits_with_exponent(bits, largest - bits % 32 % (1 + 4 * (bits >> 5 & 7)))
}

fn bits_with_exponent(bits: u32, exponent: u32) -> f32 {
    f32::from_bits(bits & 0x807f_ffff | exponent << 23)
}

/// Each special value occurs once in its segment, so it spoils one block and no other.
fn seldom_nonfinite(pass: usize, segment: usize, element: usize) -> f32 {
    match (pass, element) {
        (0, 700) => f32::NAN,
        (1, 20) => f32::INFINITY,
        (1, 1999) => f32::NEG_INFINITY,
        _ => falling_gradient(pass, segment, element),
    }
}

fn seldom_finite_param(segment: usize, element: usize) -> f32 {
    match element % 300 {
        7 => f32::NAN,
        11 => f32::INFINITY,
        13 => f32::NEG_INFINITY,
        17 => f32::MAX,
        19 => -0.0,
        // Halfway between two bf16, and between two f32 of 24 bits.
        23 => f32::from_bits(0x3f80_8000),
        29 => f32::from_bits(0x3f81_0080),
        31 => f32::from_bits(0x3f81_0180),
        _ => bits_with_exponent(random_bits(99, segment, element), 96 + element as u32 % 40),
    }
}

/// Each precision meets each copy, gradient and number of states; each of those meets averages and zeroing.
#[test]
#[ignore = "scripts/host-run-lane.py runs it: compiles the kernels for it"]
fn every_precision_gives_the_cpus_bits_with_every_option() {
    for (k, precision) in precisions().into_iter().enumerate() {
        for j in 0..4 {
            let optim = few_optimizers()[(k / 4 + j) % 4];
            let case = Case::new(optim, few_lengths());
            let case = Case {
                precision: Precision { grad: DTYPES[(k / 16 + j) % 3], ..precision },
                copy: COPIES[(k + j) % 4],
                ema: DECAYS[(k / 3 + j) % 3],
                gradients: ENDS[(k / 2 + j) % 3],
                misalignment: (5 * k + 3 * j) % 16,
                normed: j % 2 == 0,
                ..case
            };
            case.assert_same_bits(&SHAPES[(k + j) % 5..][..1]);
        }
    }
}

#[test]
#[ignore = "scripts/host-run-lane.py runs it: compiles the kernels for it"]
fn every_optimizer_gives_the_cpus_bits_with_narrow_states_and_behind_remainders() {
    let precision = |master, moments, rounding, grad| {
        let param = DType::BF16;
        Precision { param, grad, master, moments, rounding }
    };
    let stochastic = Rounding::Stochastic { seed: SEED };
    // The last two are what the CPU has a loop of its own for.
    let kinds = [
        precision(Master::Remainder16, Moments::EightBit, Rounding::Nearest, DType::F32),
        precision(Master::Remainder8, Moments::EightBit, stochastic, DType::BF16),
        precision(Master::Remainder8, Moments::BF16, Rounding::Nearest, DType::F32),
        precision(Master::None, Moments::BF16, stochastic, DType::BF16),
        precision(Master::None, Moments::BF16, Rounding::Nearest, DType::BF16),
    ];
    for (k, optim) in optimizers().into_iter().enumerate() {
        for (j, precision) in kinds.into_iter().enumerate() {
            let case = Case { precision, normed: false, passes: 4, ..Case::new(optim, one_long_run()) };
            let is_plain = precision.master == Master::None;
            let (copy, ema) =
                if is_plain { (None, None) } else { (COPIES[(k + j) % 4], DECAYS[(k + j) % 3]) };
            let case = Case { copy, ema, ..case };
            let case = if k % 2 == 0 { case } else { Case { gradient: falling_gradient, ..case } };
            case.assert_same_bits(&SHAPES[(k + j) % 5..][..1]);
        }
    }
}

/// Returns full tiles in several runs, and a tail after them.
fn several_runs() -> Vec<Bucket> {
    let segments =
        [10240, 4101, 2048].map(|len| Segment { len, action: INSTEP_ACTION_STEP, used: None }).into();
    vec![Bucket { segments, ranks: None }]
}

/// The formats for which kernels/gpu/place.cuh has special loops, and the same formats with stochastic rounding.
/// Stochastic rounding has no special loop.
#[test]
#[ignore = "scripts/host-run-lane.py runs it: compiles the kernels for it"]
fn every_optimizer_gives_the_cpus_bits_in_every_known_format_over_runs_of_tiles() {
    let known =
        |dtype, master, moments, rounding| Precision { param: dtype, grad: dtype, master, moments, rounding };
    let (nearest, stochastic) = (Rounding::Nearest, Rounding::Stochastic { seed: SEED });
    let kinds = [
        (known(DType::F32, Master::None, Moments::F32, nearest), 0),
        (known(DType::F32, Master::None, Moments::F32, nearest), 1),
        (known(DType::F32, Master::None, Moments::F32, nearest), 2),
        (known(DType::F32, Master::None, Moments::F32, nearest), 3),
        (known(DType::BF16, Master::None, Moments::BF16, nearest), 0),
        (known(DType::BF16, Master::None, Moments::BF16, nearest), 4),
        (known(DType::BF16, Master::None, Moments::BF16, stochastic), 0),
        (known(DType::BF16, Master::F32, Moments::F32, nearest), 0),
        (known(DType::BF16, Master::Remainder16, Moments::F32, nearest), 0),
        (known(DType::BF16, Master::Remainder8, Moments::F32, nearest), 0),
        (known(DType::BF16, Master::Remainder8, Moments::F32, stochastic), 0),
        (known(DType::F32, Master::None, Moments::EightBit, nearest), 0),
        (known(DType::F32, Master::None, Moments::EightBit, stochastic), 0),
        (known(DType::BF16, Master::None, Moments::EightBit, nearest), 0),
    ];
    for (k, optim) in optimizers().into_iter().enumerate() {
        for (j, (precision, gradient_misalignment)) in kinds.into_iter().enumerate() {
            let case =
                Case { precision, gradient_misalignment, passes: 2, ..Case::new(optim, several_runs()) };
            let case = Case { gradients: ENDS[(k + j) % 3], normed: (k / 2 + j) % 2 == 0, ..case };
            case.assert_same_bits(&SHAPES[2 + (k + j) % 3..][..1]);
        }
    }
}

#[test]
#[ignore = "scripts/host-run-lane.py runs it: compiles the kernels for it"]
fn what_is_not_finite_too_small_or_halfway_gives_the_cpus_bits_in_every_precision() {
    for (k, precision) in precisions().into_iter().enumerate() {
        for (j, optim) in few_optimizers()[1..].iter().enumerate() {
            let case = Case { precision, normed: j == 0, ..Case::new(*optim, one_long_run()) };
            let case = Case { copy: COPIES[(k + j) % 4], ema: DECAYS[(k / 4 + j) % 3], ..case };
            let case = Case { param: seldom_finite_param, gradient: seldom_nonfinite, ..case };
            Case { skip_nonfinite: k % 2 == 0, ..case }.assert_same_bits(&SHAPES[2 + j % 2..][..1]);
        }
    }
}

/// Returns a block's largest value, then powers within 14 last places of every threshold between two codes.
fn power_next_to_a_threshold(is_signed: bool, element: usize) -> f32 {
    let (codes, scale) = if is_signed { (127, 16129.0) } else { (255, 65536.0) };
    if element.is_multiple_of(256) {
        return scale;
    }
    let (code, off) = (element / 29 % codes + 1, element % 29);
    let half = code as f64 - 0.5;
    let power = if is_signed { half * half } else { (half * 16.0 / 255.0).powi(4) };
    f32::from_bits((power as f32).to_bits() + off as u32 - 14)
}

/// The momentum of SGD is the first gradient, of either sign.
fn signed_power(_: usize, _: usize, element: usize) -> f32 {
    let power = power_next_to_a_threshold(true, element);
    if element % 2 == 1 { -power } else { power }
}

/// The sum of Adagrad is the square of the first gradient.
fn root_of_unsigned_power(_: usize, _: usize, element: usize) -> f32 {
    power_next_to_a_threshold(false, element).sqrt()
}

#[test]
#[ignore = "scripts/host-run-lane.py runs it: compiles the kernels for it"]
fn codes_next_to_every_threshold_are_the_cpus() {
    for rounding in [Rounding::Nearest, Rounding::Stochastic { seed: SEED }] {
        let precision = Precision { moments: Moments::EightBit, rounding, ..Precision::F32 };
        let momentum = Optim::of(Sgd { momentum: 0.9, ..Sgd::default() });
        let sum = Optim::of(Adagrad::default());
        for optim in [momentum, sum] {
            let gradient = if optim.descriptor.name == "sgd" { signed_power } else { root_of_unsigned_power };
            let segments = vec![Segment { len: 255 * 29 + 256, action: INSTEP_ACTION_STEP, used: None }];
            let case = Case::new(optim, vec![Bucket { segments, ranks: None }]);
            let case = Case { precision, gradient, normed: false, divisor: 1.0, passes: 1, ..case };
            case.assert_same_bits(&SHAPES[2..4]);
        }
    }
}
