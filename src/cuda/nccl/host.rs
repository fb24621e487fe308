//! The host-side collective beside a communicator. It sends the id, reports failures, and compares calls for the
//! ledger.
//!
//! NCCL does not do the last two: without a host, other ranks hang if a rank disagrees or dies. The collective's
//! `check` determines how soon a rank learns of a failure.

use std::sync::Arc;
use std::time::Duration;

use crate::collective::{Call, CallKey, Collective, CollectiveKind};
use crate::cuda::nccl::UniqueId;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// Room for one key, each byte a number.
const KEY: usize = CallKey::BYTES;

/// One rank's end of the host collective.
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
    /// `Mismatch` or `LeftPass`, the same on every rank. Other errors as for [`Collective::enqueue`].
    pub(super) fn compare(&self, key: &CallKey, deadline: Duration) -> Result<()> {
        let (rank, ranks) = (self.0.rank() as usize, self.0.world_size() as usize);
        // The sum of every rank's numbers beside zeros: all collectives know all-reduces.
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

    /// Waits until no rank has a call in progress. A rank that ends afterwards then does not count as failed.
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
mod tests {
    use super::*;
    use crate::host::{InProcess, in_process};

    /// Far longer than any test takes.
    const AMPLE: Duration = Duration::from_secs(60);

    fn sum(pass: u64) -> CallKey {
        let kind = CollectiveKind::AllReduce;
        CallKey { kind, pass, bucket: None, dtype: DType::F32, bytes: 1024, agreement: !pass }
    }

    fn ranks<T: Send>(ranks: u32, body: impl Fn(u32, Host) -> Result<T> + Sync) -> Vec<Result<T>> {
        in_process(ranks, |comm: InProcess| Ok(body(comm.rank(), Host(Arc::new(comm))))).unwrap()
    }

    #[test]
    fn rank_0s_id_reaches_all_ranks_and_equal_calls_agree_again_and_again() {
        for world_size in 1..=5 {
            let outcomes = ranks(world_size, |rank, host| {
                // Every byte, also in numbers that are no number.
                let id: UniqueId = std::array::from_fn(|k| (k as u8 | 0x80).wrapping_add(rank as u8));
                let shared = host.share_id(id, AMPLE)?;
                (0..3).try_for_each(|pass| host.compare(&sum(pass), AMPLE))?;
                host.part(AMPLE)?;
                Ok(shared)
            });
            let expected: UniqueId = std::array::from_fn(|k| k as u8 | 0x80);
            assert!(outcomes.iter().all(|id| *id == Ok(expected)), "{outcomes:?}");
        }
    }

    #[test]
    fn ranks_whose_calls_differ_all_learn_who_said_what() {
        let call = |rank: u32| CallKey { bytes: if rank == 2 { 4 } else { 1024 }, ..sum(3) };
        for outcome in ranks(4, |rank, host| host.compare(&call(rank), AMPLE)) {
            assert_eq!(outcome, Err(call(0).mismatch(&call(2), 0, 2)));
        }
    }

    #[test]
    fn a_rank_that_ends_the_group_or_leaves_it_is_named_to_all() {
        for aborts in [true, false] {
            let outcomes = ranks(3, |rank, host| {
                host.compare(&sum(0), AMPLE)?;
                if rank == 1 {
                    if aborts {
                        host.0.abort(&Error::Rank { rank, message: "out of coffee".to_owned() });
                    }
                    return Ok(());
                }
                // As a stepper does while it waits for a sum.
                loop {
                    host.0.check()?;
                    std::thread::yield_now();
                }
            });
            for rank in [0, 2] {
                match &outcomes[rank] {
                    Err(Error::PeerLost { rank: 1, why }) => {
                        assert_eq!(why.contains("coffee"), aborts, "{why}")
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}
