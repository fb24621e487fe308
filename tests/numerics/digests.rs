//! One number per optimizer case: the bits of a complete training, printed so that machines can be compared.
//!
//! `cargo test digests -- --nocapture` prints a line per case; `.ci/run` compares those of x86-64 and aarch64. The
//! numbers depend only on inputs that formulas give.

use instep::{AdamW, DType, Mode, Moments, Precision, Rounding, Solo, Stepper};

use crate::support::{
    LENGTHS, Optim, Options, Outcome, layout, optimizers, paint_params, painted, pass, run,
};

const STEPS: usize = 6;
/// Formats with 8-bit states: f32 throughout otherwise, and bf16 rounded stochastically.
const CODED: [Precision; 2] = [
    Precision { moments: Moments::EightBit, ..Precision::F32 },
    Precision {
        param: DType::BF16,
        grad: DType::BF16,
        moments: Moments::EightBit,
        rounding: Rounding::Stochastic { seed: 1 },
        ..Precision::F32
    },
];
/// The digests of AdamW in these formats. A change of the coding must not change them.
const OF_ADAMW: [u64; 2] = [0x10a2_4af8_8b12_2f67, 0xc769_005f_fdf2_a831];

/// FNV-1a over all bits that last.
fn digest(outcome: &Outcome) -> u64 {
    let states = outcome.states.iter().flatten();
    let tensors = outcome.params.iter().chain(states);
    let bits = tensors.flatten().map(|x| u64::from(x.to_bits()));
    let norm = outcome.status.norm.map(f64::to_bits);
    let numbers = bits.chain(outcome.step_counts.iter().copied()).chain(norm);
    numbers
        .flat_map(u64::to_le_bytes)
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[test]
fn every_case_has_one_digest_whatever_the_bucket_cap() {
    let layout = layout(&LENGTHS);
    for optim in optimizers() {
        let with_cap = |cap| {
            let options = Options { mode: Mode::Normed, max_norm: Some(0.5), cap, ..Options::default() };
            digest(&run(&layout, optim, &options, STEPS, painted(&options)))
        };
        let digest = with_cap(None);
        assert_eq!(digest, with_cap(Some(4096)), "{optim:?}");
        println!("digest {digest:016x} {optim:?}");
    }
}

/// Returns the digest of a training in these formats, or none if the optimizer refuses them.
fn coded(optim: Optim, precision: Precision, cap: Option<u64>) -> Option<u64> {
    let (layout, options) = (layout(&LENGTHS), Options { cap, ..Options::default() });
    let mut stepper: Stepper =
        options.builder(&layout, optim).precision(precision).host(Solo::default()).ok()?;
    paint_params(&mut stepper);
    let gradient = painted(&options);
    for step in 0..STEPS {
        pass(&mut stepper, &options, |param, values| gradient(step, param, values)).unwrap();
    }
    Some(digest(&Outcome::of(&stepper).unwrap()))
}

#[test]
fn every_optimizer_with_8_bit_states_has_one_digest() {
    let mut counts = [0; CODED.len()];
    for (precision, count) in CODED.into_iter().zip(&mut counts) {
        for optim in optimizers() {
            let Some(digest) = coded(optim, precision, None) else { continue };
            assert_eq!(Some(digest), coded(optim, precision, Some(4096)), "{optim:?}");
            println!("digest {digest:016x} {:?} {optim:?}", precision.rounding);
            *count += 1;
        }
    }
    assert!(counts.iter().all(|count| *count > optimizers().len() / 2), "{counts:?}");
}

#[test]
fn adamw_with_8_bit_states_keeps_its_digests() {
    let adamw = Optim::of(AdamW { lr: 0.01, ..AdamW::default() });
    assert_eq!(CODED.map(|precision| coded(adamw, precision, None).unwrap()), OF_ADAMW);
}
