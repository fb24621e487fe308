//! The settings that Begin reads, as one block of words, and the numbers that never change between passes.
//!
//! The stepper changes hyperparameters, learning-rate multipliers and actions between passes and hands the whole block to the
//! device. [`Counts`] says where each part lies, so every copy of the block has the same layout. The constants are set
//! once by the builder, so a captured graph has them baked in.

use crate::abi::InstepHyper;
use crate::launch::assignment::Assignment;
use crate::launch::codes::action_code;
use crate::launch::region::Counts;
use crate::layout::{Plan, SegmentAction};
use crate::op::Frozen;
use crate::optim::{Clip, LossScale};

const WORD: usize = size_of::<u32>();

/// See the module.
#[derive(Clone, Debug)]
pub struct Settings {
    counts: Counts,
    words: Vec<u32>,
}

impl Settings {
    /// The settings before the first pass: the optimizers' hyperparameters, multipliers of 1, the plan's actions.
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

    /// Sets one optimizer's hyperparameters.
    pub(crate) fn set_hyper(&mut self, index: usize, hyper: &InstepHyper) {
        const WORDS: usize = size_of::<InstepHyper>() / WORD;
        assert!(index < self.counts.hypers, "there is no such optimizer");
        let to = &mut self.words[index * WORDS..][..WORDS];
        to.copy_from_slice(bytemuck::cast_slice(&hyper.to_words()));
    }

    /// Sets the factor in one record's learning rate.
    pub(crate) fn set_lr_multiplier(&mut self, record: usize, multiplier: f64) {
        assert!(record < self.counts.records, "there is no such record");
        let at = self.counts.multipliers_at() / WORD + record * 2;
        let bits = multiplier.to_bits().to_ne_bytes();
        for (word, bytes) in self.words[at..][..2].iter_mut().zip(bits.as_chunks().0) {
            *word = u32::from_ne_bytes(*bytes);
        }
    }

    /// Sets what steps do with one record's segment.
    pub(crate) fn set_action(&mut self, record: usize, action: SegmentAction) {
        assert!(record < self.counts.records, "there is no such record");
        self.words[self.counts.actions_at() / WORD + record] = action_code(action);
    }

    /// The whole block.
    pub(crate) fn words(&self) -> &[u32] {
        &self.words
    }
}

/// Returns the segments that a block of settings makes every step leave alone.
pub(crate) fn frozen_by(words: &[u32], plan: &Plan, assignment: &Assignment) -> Frozen {
    let mut frozen = Frozen::default();
    // Actions are the last part of the block.
    let actions = &words[words.len() - assignment.record_count()..];
    let rounds = 0..assignment.rounds();
    for segment in 0..plan.segments().len() {
        let leaves = |round| actions[assignment.record(round, segment)] == action_code(SegmentAction::Leave);
        frozen.set(segment, rounds.clone().all(leaves));
    }
    frozen
}

/// The numbers of a step that no op carries.
#[derive(Clone, Copy)]
pub(crate) struct StepConstants {
    /// Ranks to take the mean over; 0: those that contributed.
    pub(crate) divisor: f64,
    pub(crate) loss_scale: LossScale,
    /// The largest scale that a dynamic one may use.
    pub(crate) largest_loss_scale: f64,
    pub(crate) clip: Option<Clip>,
    pub(crate) skip_nonfinite: bool,
    /// Decay rate of the moving averages of parameters, if there are any.
    pub(crate) ema_decay: f64,
}

impl StepConstants {
    /// Gradients that are stepped as they are.
    pub(crate) const PLAIN: StepConstants = StepConstants {
        divisor: 1.0,
        loss_scale: LossScale::Constant(1.0),
        largest_loss_scale: 0.0,
        clip: None,
        skip_nonfinite: false,
        ema_decay: 0.0,
    };

    /// Begin's loss scale; 0 sends Begin to the control block, or to the address of another program's.
    pub(crate) fn constant_loss_scale(&self) -> f64 {
        match self.loss_scale {
            LossScale::Constant(loss_scale) => loss_scale,
            LossScale::Dynamic(_) | LossScale::External(_) => 0.0,
        }
    }

    /// The norm that decisions clip to: those on the whole pass, or those on one bucket.
    pub(crate) fn decided_max_norm(&self) -> Option<f64> {
        match self.clip? {
            Clip::Global(max_norm) | Clip::PerBucket(max_norm) => Some(max_norm),
            Clip::Previous(_) => None,
        }
    }

    /// The norm that Begin clips to, by the norm of the pass before.
    pub(crate) fn previous_max_norm(&self) -> Option<f64> {
        match self.clip? {
            Clip::Previous(max_norm) => Some(max_norm),
            Clip::Global(_) | Clip::PerBucket(_) => None,
        }
    }

    fn clips_per_bucket(&self) -> bool {
        matches!(self.clip, Some(Clip::PerBucket(_)))
    }

    /// The sizes of the device's control memory, settings and states.
    pub(crate) fn counts(&self, plan: &Plan, assignment: &Assignment) -> Counts {
        Counts {
            hypers: assignment.hypers().len(),
            records: assignment.record_count(),
            norms: assignment.norm_count(),
            // One for each bucket, or none.
            bucket_controls: if self.clips_per_bucket() { plan.buckets().len() } else { 0 },
            set_controls: plan.max_norms().len(),
            states: assignment.state_count(),
        }
    }
}
