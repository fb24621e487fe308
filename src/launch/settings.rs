//! The settings that Begin reads, as one block of words, and the numbers that never change.
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

    /// Sets one optimizer's hyperparameters.
    pub(crate) fn set_hyper(&mut self, index: usize, hyper: &InstepHyper) {
        const WORDS: usize = size_of::<InstepHyper>() / WORD;
        assert!(index < self.counts.hypers, "there is no such optimizer");
        let to = &mut self.words[index * WORDS..][..WORDS];
        to.copy_from_slice(bytemuck::cast_slice(&hyper.to_words()));
    }

    /// Sets one record's learning-rate multiplier.
    pub(crate) fn set_lr_multiplier(&mut self, record: usize, multiplier: f64) {
        assert!(record < self.counts.records, "there is no such record");
        let at = self.counts.multipliers_at() / WORD + record * 2;
        let bits = multiplier.to_bits().to_ne_bytes();
        for (word, bytes) in self.words[at..][..2].iter_mut().zip(bits.as_chunks().0) {
            *word = u32::from_ne_bytes(*bytes);
        }
    }

    /// Sets the action of steps on one record's segment.
    pub(crate) fn set_action(&mut self, record: usize, action: SegmentAction) {
        assert!(record < self.counts.records, "there is no such record");
        self.words[self.counts.actions_at() / WORD + record] = action_code(action);
    }

    /// Returns the whole block.
    pub(crate) fn words(&self) -> &[u32] {
        &self.words
    }
}

/// Returns the segments that no step touches with a block of settings.
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

/// The numbers of a step that are constant from pass to pass.
#[derive(Clone, Copy)]
pub(crate) struct StepConstants {
    /// The divisor of summed gradients; 0 stands for the number of ranks with data.
    pub(crate) divisor: f64,
    pub(crate) loss_scale: LossScale,
    /// The largest value of a dynamic loss scale.
    pub(crate) largest_loss_scale: f64,
    pub(crate) clip: Option<Clip>,
    pub(crate) skip_nonfinite: bool,
    /// Decay rate of the moving averages of parameters, if there are any.
    pub(crate) ema_decay: f64,
}

impl StepConstants {
    /// The constants of a step that takes gradients as they are.
    pub(crate) const PLAIN: StepConstants = StepConstants {
        divisor: 1.0,
        loss_scale: LossScale::Constant(1.0),
        largest_loss_scale: 0.0,
        clip: None,
        skip_nonfinite: false,
        ema_decay: 0.0,
    };

    /// Returns Begin's loss scale. With 0, Begin reads it from the control block, or from the address of the caller's
    /// scaler.
    pub(crate) fn constant_loss_scale(&self) -> f64 {
        match self.loss_scale {
            LossScale::Constant(loss_scale) => loss_scale,
            LossScale::Dynamic(_) | LossScale::External(_) => 0.0,
        }
    }

    /// Returns the maximum norms to which Begin clips, by the previous pass's norm, and to which decisions clip, about the
    /// pass or about one bucket.
    pub(crate) fn max_norms(&self) -> [Option<f64>; 2] {
        match self.clip {
            Some(Clip::Previous(max_norm)) => [Some(max_norm), None],
            Some(Clip::Global(max_norm) | Clip::PerBucket(max_norm)) => [None, Some(max_norm)],
            None => [None, None],
        }
    }
}
