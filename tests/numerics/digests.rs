//! One number per optimizer case: the bits of a complete training, printed so that machines can be compared.
//!
//! `cargo test digests -- --nocapture` prints a line per case; `.ci/run` compares those of x86-64 and aarch64. The
//! numbers depend only on inputs that formulas give.

use instep::Mode;

use crate::support::{LENGTHS, Options, Outcome, layout, optimizers, painted, run};

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
            digest(&run(&layout, optim, &options, 6, painted(&options)))
        };
        let digest = with_cap(None);
        assert_eq!(digest, with_cap(Some(4096)), "{optim:?}");
        println!("digest {digest:016x} {optim:?}");
    }
}
