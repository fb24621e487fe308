//! Compares the results of a case with the host device, bit by bit, before anything is timed.
//!
//! Values repeat, so the host computes one period for any number of elements, unless an update depends on the whole
//! parameter. Every stepped element of parameters and states is compared.

use std::ops::Range;

use instep::bench::{GpuLauncher, Launcher};
use instep::layout::Storage;
use instep::op::Memory;
use instep::{Isa, Layout};

use super::sweep::{Case, PART, PERIODS};
use crate::Failure;
use crate::bench::cases::{self, WORLD_SIZE, gradient, parameter};

const STEPS: usize = 2;

/// The expected values of one optimizer.
pub(super) struct Expected {
    memories: Vec<(Memory, Vec<f32>)>,
}

impl Expected {
    /// Of a period.
    pub(super) fn new(rule: cases::Case) -> instep::Result<Expected> {
        Expected::of(rule, 0..PERIODS.0 * PERIODS.1)
    }

    /// Of one parameter of these elements.
    fn of(rule: cases::Case, elements: Range<usize>) -> instep::Result<Expected> {
        let (first, len) = (elements.start, elements.len());
        let layout = Layout::builder().param("w", len).build()?;
        let optimizer = rule.optimizer()?;
        let mut host =
            Launcher::new(&layout, &*optimizer, u64::MAX, WORLD_SIZE, Storage::default(), Isa::best(), 1)?;
        host.elements(Memory::Params).iter_mut().zip(first..).for_each(|(x, k)| *x = parameter(k));
        host.elements(Memory::Grads).iter_mut().zip(first..).for_each(|(x, k)| *x = gradient(k));
        for _ in 0..STEPS {
            host.begin()?;
            host.step(0)?;
        }
        let states = (0..optimizer.state_names().len()).map(|k| Memory::State(k as u8));
        let memories = [Memory::Params].into_iter().chain(states);
        let values = memories.map(|memory| (memory, host.elements(memory)[..len].to_vec()));
        Ok(Expected { memories: values.collect() })
    }

    /// Steps all buckets of a fresh launcher as often as the host did, and compares.
    pub(super) fn verify(&self, case: &Case, launcher: &mut GpuLauncher) -> Result<(), Failure> {
        for _ in 0..STEPS {
            launcher.step_all()?;
        }
        if !case.rule.is_scaled() {
            return self.compare(case, launcher, 0..launcher.plan().arena_len() as usize);
        }
        for segment in launcher.plan().segments().to_vec() {
            let elements = segment.start as usize..(segment.start + segment.len) as usize;
            Expected::of(case.rule, elements.clone())?.compare(case, launcher, elements)?;
        }
        Ok(())
    }

    /// Of these elements, the first of which is the first that is expected.
    fn compare(
        &self,
        case: &Case,
        launcher: &mut GpuLauncher,
        elements: Range<usize>,
    ) -> Result<(), Failure> {
        let mut got = vec![0.0; elements.len().min(PART)];
        for (memory, expected) in &self.memories {
            for first in elements.clone().step_by(PART) {
                let part = &mut got[..(elements.end - first).min(PART)];
                launcher.read(*memory, first as u64, part)?;
                let wanted = expected.iter().cycle().skip((first - elements.start) % expected.len());
                let differs = part.iter().zip(wanted).position(|(a, b)| a.to_bits() != b.to_bits());
                if let Some(at) = differs {
                    let (k, got) = (first + at, part[at]);
                    let wanted = expected[(k - elements.start) % expected.len()];
                    let name = &case.optimizer;
                    return Err(Failure::Bench(format!(
                        "{name} {memory:?} element {k}: {got:e} on the GPU, {wanted:e} on the host; report this as a bug"
                    )));
                }
            }
        }
        Ok(())
    }
}
