//! Tests of a group of ranks in which a collective on the host carries NCCL's id.
//!
//! A rank that ends or leaves the group is named to all others.

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
