//! The host-side collective beside a communicator. The host collective sends the id, reports failures, and compares
//! calls for the ledger.
//!
//! NCCL itself does not report that a rank has died, and does not compare calls. Without a host collective, the other
//! ranks hang if one rank makes a different call or dies. With a host collective, a rank learns of a failure as soon as
//! the host collective's `check` returns the failure.

use std::sync::Arc;
use std::time::Duration;

use crate::collective::{Call, CallKey, Collective, CollectiveKind};
use crate::cuda::nccl::UniqueId;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// The number of values that are sent for a [`CallKey`]: one value for each byte.
const KEY: usize = CallKey::BYTES;

pub(super) struct Host(pub(super) Arc<dyn Collective>);

impl Host {
    /// Sends rank 0's id to all ranks.
    pub(super) fn share_id(&self, id: UniqueId, deadline: Duration) -> Result<UniqueId> {
        let mut words = [0f32; 32];
        bytemuck::cast_slice_mut::<f32, u8>(&mut words).copy_from_slice(&id);
        self.run(CollectiveKind::Broadcast, 1, &mut words, deadline)?;
        Ok(bytemuck::cast(words))
    }

    /// Waits until every rank is about to make the same call.
    ///
    /// # Errors
    /// `Mismatch` or `LeftPass`. Every rank gets the same error. Other errors as for [`Collective::enqueue`].
    pub(super) fn compare(&self, key: &CallKey, deadline: Duration) -> Result<()> {
        let (rank, ranks) = (self.0.rank() as usize, self.0.world_size() as usize);
        // This all-reduce works as an all-gather: each rank's numbers are summed with zeros from the other ranks. Every
        // collective knows all-reduces.
        let mut numbers = vec![0f32; ranks * KEY];
        let own = &mut numbers[rank * KEY..][..KEY];
        own.iter_mut().zip(key.to_bytes()).for_each(|(number, byte)| *number = byte.into());
        self.run(CollectiveKind::AllReduce, 2, &mut numbers, deadline)?;
        let (numbers, _) = numbers.as_chunks::<KEY>();
        let keys: Vec<_> = numbers.iter().map(|key| CallKey::from_bytes(&key.map(|n| n as u8))).collect();
        for (other, theirs) in (0..).zip(&keys) {
            match (&keys[0], theirs) {
                (Some(first), Some(theirs)) if first != theirs => {
                    return Err(first.mismatch(theirs, 0, other));
                }
                (_, None) => return Err(Error::other_version(other, "call")),
                _ => {}
            }
        }
        Ok(())
    }

    /// Waits until no rank has a call in progress. A rank that ends afterwards does not count as failed.
    pub(super) fn part(&self, deadline: Duration) -> Result<()> {
        self.run(CollectiveKind::AllReduce, 3, &mut [0.0], deadline)
    }

    fn run(&self, kind: CollectiveKind, agreement: u64, words: &mut [f32], deadline: Duration) -> Result<()> {
        let bytes = size_of_val(words) as u64;
        let key = CallKey { kind, pass: 0, bucket: None, dtype: DType::F32, bytes, agreement };
        let words = bytemuck::cast_slice_mut(words);
        self.0.enqueue(&mut Call::on_host(&*self.0, key, None, words, deadline)?)
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/cuda/nccl/host.rs"]
mod tests;
