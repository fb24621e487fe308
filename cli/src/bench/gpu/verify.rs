//! What a case computes, held against the host device, bit by bit, before anything is timed.
//!
//! Values repeat, so one period on the host stands for any number of elements. Must compare every element that is stepped,
//! of parameters and of every state.

use instep::bench::{GpuLauncher, Launcher};
use instep::layout::Storage;
use instep::op::Memory;
use instep::{Isa, Layout};

use super::sweep::{Case, PART, PERIODS};
use crate::Failure;
use crate::bench::cases::{Rule, WORLD_SIZE, gradient, parameter};

const STEPS: usize = 2;

/// What one optimizer makes of a period.
pub(super) struct Expected {
    memories: Vec<(Memory, Vec<f32>)>,
}

impl Expected {
    pub(super) fn new(rule: Rule) -> instep::Result<Expected> {
        let period = PERIODS.0 * PERIODS.1;
        let layout = Layout::builder().param("period", period).build()?;
        let optimizer = rule.optimizer();
        let mut host =
            Launcher::new(&layout, &*optimizer, u64::MAX, WORLD_SIZE, Storage::default(), Isa::best(), 1)?;
        host.elements(Memory::Params).iter_mut().enumerate().for_each(|(k, x)| *x = parameter(k));
        host.elements(Memory::Grads).iter_mut().enumerate().for_each(|(k, x)| *x = gradient(k));
        for _ in 0..STEPS {
            host.begin()?;
            host.step(0)?;
        }
        let states = (0..optimizer.state_names().len()).map(|k| Memory::State(k as u8));
        let memories = [Memory::Params].into_iter().chain(states);
        let values = memories.map(|memory| (memory, host.elements(memory)[..period].to_vec()));
        Ok(Expected { memories: values.collect() })
    }

    /// Steps all buckets of a fresh launcher as often as the host did, and compares.
    pub(super) fn verify(&self, case: &Case, launcher: &mut GpuLauncher) -> Result<(), Failure> {
        for _ in 0..STEPS {
            launcher.step_all()?;
        }
        let all = launcher.plan().arena_len() as usize;
        let mut got = vec![0.0; all.min(PART)];
        for (memory, expected) in &self.memories {
            for first in (0..all).step_by(PART) {
                let part = &mut got[..(all - first).min(PART)];
                launcher.read(*memory, first as u64, part)?;
                let wanted = expected.iter().cycle().skip(first % expected.len());
                let differs = part.iter().zip(wanted).position(|(a, b)| a.to_bits() != b.to_bits());
                if let Some(at) = differs {
                    let (k, got) = (first + at, part[at]);
                    let wanted = expected[k % expected.len()];
                    let name = &case.optimizer;
                    return Err(Failure::Bench(format!(
                        "{name} {memory:?} element {k}: {got:e} on the GPU, {wanted:e} on the host"
                    )));
                }
            }
        }
        Ok(())
    }
}
