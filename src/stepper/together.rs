//! Calls for ranks that write one checkpoint file together. These calls read each rank's part of a tensor, and send
//! messages between ranks.
//!
//! Messages use the start of the gradients' memory. The gradients are restored afterwards, as in `shards.rs`. The parts
//! of all ranks cover the full tensor without a gap.

use std::ops::Range;

use crate::collective::CollectiveKind;
use crate::device::Device;
use crate::error::Result;
use crate::layout::Master;
use crate::op::{Memory, Span};
use crate::stepper::stepper::Stepper;
use crate::stepper::tensor::TensorId;

/// The size in bytes of a [message of rank 0](Stepper::broadcast_message). Every sharded plan has room for a message,
/// because its gradients have at least 256 elements of at least 16 bits each.
pub(crate) const WORD_BYTES: usize = 512;

impl<D: Device> Stepper<D> {
    /// Returns whether tensors are sharded over several ranks. The ranks then write one file together.
    pub(crate) fn has_parts(&self) -> bool {
        self.plan.is_sharded() && self.world_size() > 1 && self.plan.common_len() > 0
    }

    /// Returns whether this rank is in the first group of ranks. The ranks of each group together have all shards, and
    /// the other groups are replicas of the first.
    pub(crate) fn is_of_first_group(&self) -> bool {
        self.rank() < self.plan.shards().0
    }

    /// Waits for all steps, and refuses a stepper that was rescued.
    pub(crate) fn settle_together(&self) -> Result<()> {
        self.settle_between_passes()?;
        self.refuse_rescued()
    }

    /// Returns whether ranks may have different parameters now: no pass has begun, or parameters that are not local
    /// were written since the last pass began. With sums by the caller, the result is false.
    pub(crate) fn is_broadcast_due(&self) -> bool {
        self.params_written.is_broadcast_due()
    }

    /// Copies this rank's part of a tensor, and returns the part's elements. If the parameter's bucket is not sharded,
    /// rank 0's part is the full tensor, and the parts of the other ranks are empty. If the bucket is sharded, a rank's
    /// part is its shard, even if the parameter is full on every rank. With `rank_0s`, rank 0's part of such a
    /// parameter is the full parameter.
    pub(crate) fn read_part(
        &self,
        tensor: TensorId<'_>,
        rank_0s: bool,
        into: &mut Vec<f32>,
    ) -> Result<Range<u64>> {
        let (id, memory) = self.find(tensor)?;
        let segment = self.plan.segment_of(self.layout.index(id)?);
        let is_everywhere = memory == Memory::Params
            && !self.plan.shards_params()
            && self.precision_of(id)?.master == Master::None;
        let is_sharded = self.is_sharded(segment) && !(is_everywhere && rank_0s);
        let part = match (is_sharded, self.rank()) {
            (true, _) => self.plan.bucket_of(segment).shard_of_segment(segment),
            (false, 0) => 0..segment.len,
            (false, _) => 0..0,
        };
        into.resize((part.end - part.start) as usize, 0.0);
        self.decode(id, memory, part.clone(), into, |elements, bytes| self.read_elements(elements, bytes))?;
        Ok(part)
    }

    /// Broadcasts a message of rank 0 to all ranks.
    pub(crate) fn broadcast_message(&self, word: &mut [u8; WORD_BYTES]) -> Result<()> {
        let span = Span { memory: Memory::Grads, start: 0, end: WORD_BYTES as u64 };
        let told = self.exchange(CollectiveKind::Broadcast, [span; 2], word, self.agreement.fixed())?;
        word.copy_from_slice(&told);
        Ok(())
    }

    /// Gathers one message from each rank of a group. Every rank of the group gets all messages, in rank order.
    pub(crate) fn gather_messages(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let piece = self.piece_bytes(size_of::<u64>());
        let lengths = self.exchange_pieces(piece, &(own.len() as u64).to_le_bytes())?;
        let length = |said: &[u8]| said.as_chunks().0.first().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let lengths: Vec<usize> = lengths.chunks(piece).map(|said| length(said) as usize).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let mut said = vec![Vec::new(); lengths.len()];
        let piece = self.piece_bytes(longest).max(1);
        for at in (0..longest).step_by(piece) {
            let all = self.exchange_pieces(piece, &own[at.min(own.len())..(at + piece).min(own.len())])?;
            for ((said, length), got) in said.iter_mut().zip(&lengths).zip(all.chunks(piece)) {
                said.extend(&got[..length.saturating_sub(at).min(piece)]);
            }
        }
        Ok(said)
    }
}
