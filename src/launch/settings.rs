//! The settings that the op `Begin` reads, as one block of words.
//!
//! Between passes, the stepper changes hyperparameters, learning-rate multipliers and actions, and passes the whole
//! block to the device. The offsets of all parts come from [`Counts`], so every copy of the block has the same layout.

use crate::abi::InstepHyper;
use crate::launch::assignment::Assignment;
use crate::launch::region::Counts;
use crate::layout::{Plan, SegmentAction};
use crate::op::Frozen;

const WORD: usize = size_of::<u32>();

/// The block of settings.
#[derive(Clone, Debug)]
pub struct Settings {
    counts: Counts,
    words: Vec<u32>,
}

impl Settings {
    /// Returns the settings before the first pass: the optimizers' hyperparameters, multipliers of 1, and the plan's
    /// actions.
    pub(crate) fn new(plan: &Plan, assignment: &Assignment) -> Settings {
        let (hypers, records) = (assignment.hypers().len(), assignment.record_count());
        let counts = Counts { hypers, records, ..Counts::default() };
        let mut settings = Settings { counts, words: vec![0; counts.settings_bytes() / WORD] };
        for (index, hyper) in assignment.hypers().enumerate() {
            settings.set_hyper(index, &hyper);
        }
        for record in 0..records {
            settings.set_lr_multiplier(record, 1.0);
        }
        for round in 0..assignment.rounds() {
            for (k, segment) in plan.segments().iter().enumerate() {
                settings.set_action(assignment.record(round, k), segment.action);
            }
        }
        settings
    }

    pub(crate) fn set_hyper(&mut self, index: usize, hyper: &InstepHyper) {
        const WORDS: usize = size_of::<InstepHyper>() / WORD;
        assert!(index < self.counts.hypers, "there is no such optimizer");
        let to = &mut self.words[index * WORDS..][..WORDS];
        to.copy_from_slice(bytemuck::cast_slice(&hyper.to_words()));
    }

    pub(crate) fn set_lr_multiplier(&mut self, record: usize, multiplier: f64) {
        assert!(record < self.counts.records, "there is no such record");
        let at = self.counts.multipliers_at() / WORD + record * 2;
        let bits = multiplier.to_bits().to_ne_bytes();
        for (word, bytes) in self.words[at..][..2].iter_mut().zip(bits.as_chunks().0) {
            *word = u32::from_ne_bytes(*bytes);
        }
    }

    pub(crate) fn set_action(&mut self, record: usize, action: SegmentAction) {
        assert!(record < self.counts.records, "there is no such record");
        self.words[self.counts.actions_at() / WORD + record] = action as u32;
    }

    /// Returns the whole block of settings as words.
    pub(crate) fn words(&self) -> &[u32] {
        &self.words
    }
}

/// Returns the segments that a block of settings freezes. No step touches these segments.
pub(crate) fn frozen_by(words: &[u32], plan: &Plan, assignment: &Assignment) -> Frozen {
    let mut frozen = Frozen::default();
    // Actions are the last part of the block.
    let actions = &words[words.len() - assignment.record_count()..];
    let rounds = 0..assignment.rounds();
    for segment in 0..plan.segments().len() {
        let leaves = |round| actions[assignment.record(round, segment)] == SegmentAction::Leave as u32;
        frozen.set(segment, rounds.clone().all(leaves));
    }
    frozen
}
