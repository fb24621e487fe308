//! Compares the bits of a step with those that the baseline instruction set computes.
//!
//! This check is for types with fewer bits than f32. Rounding to such a type may remove a small update, so a comparison
//! with a formula in f64 would prove nothing. Both sides run the same steps before anything is timed.

use instep::Isa;
use instep::bench::Launcher;
use instep::op::Memory;

use super::cases::{self, Case, Shape};
use super::precisions::Kind;
use crate::Failure;

/// Compares the first bucket's bytes after two steps with the bytes that the baseline instruction set computes. Both
/// launchers have the same buckets, because random bits depend on an element's position in the layout.
pub(super) fn verify(
    launcher: &mut Launcher,
    (case, kind): (Case, Kind),
    shape: Shape,
    quick: bool,
) -> Result<(), Failure> {
    let states = case.optimizer()?.state_names().len();
    let mut plain = cases::launcher(case, kind, shape, Isa::Baseline, 1, quick)?;
    for launcher in [&mut *launcher, &mut plain] {
        for _ in 0..2 {
            launcher.step(0)?;
        }
    }
    for memory in Memory::of_tensors(plain.plan(), states) {
        let theirs = plain.bytes(memory, 0);
        let ours = launcher.bytes(memory, 0);
        if let Some(at) = ours.iter().zip(&*theirs).position(|(ours, theirs)| ours != theirs) {
            let (case, kind) = (case.name(), kind.name());
            let what = format!(
                "{case} {kind} {memory:?}: byte {at} differs from the baseline instruction set's; report this as a bug"
            );
            return Err(Failure::Bench(what));
        }
    }
    Ok(())
}
