//! Ranks that have met: they agree, differ, are late, leave and die, and all others learn which.
//!
//! Every rank must report the same cause; an error that names the wrong rank fails the test.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use super::{AMPLE, SHORT, ranks, sum};
use crate::cuda::nccl::message::{Entry, Members};
use crate::error::Error;
use crate::op::difference;

#[test]
fn up_to_eight_ranks_meet_and_agree_again_and_again() {
    for world_size in 1..=8 {
        let outcomes = ranks(world_size, |_, group| {
            let group = group?;
            for pass in 0..3 {
                group.compare(&sum(pass), AMPLE)?;
            }
            group.leave();
            group.check()
        });
        assert_eq!(outcomes.len(), world_size as usize);
        for outcome in outcomes {
            assert_eq!(outcome, Ok(()), "{world_size} ranks");
        }
    }
}

#[test]
fn ranks_that_differ_all_learn_who_said_what() {
    let say = |rank: u32| sum(if rank == 2 { 4 } else { 3 });
    for outcome in ranks(4, |rank, group| group?.compare(&say(rank), AMPLE)) {
        let theirs = sum(3).to_string();
        assert_eq!(outcome, Err(Error::LeftPass { rank: 2, pass: 3, other_rank: 0, theirs }));
    }
    let say = |rank: u32| Entry::Stepper(u64::from(rank == 2));
    for outcome in ranks(4, |rank, group| group?.compare(&say(rank), AMPLE)) {
        let expected = Error::Mismatch {
            rank: 0,
            ours: say(0).to_string(),
            other_rank: 2,
            theirs: say(2).to_string(),
            differs: difference(0, 1).unwrap().to_owned(),
        };
        assert_eq!(outcome, Err(expected));
    }
}

#[test]
fn a_rank_that_dies_is_missed_by_all() {
    for dead in 0..3 {
        let outcomes = ranks(3, |rank, group| {
            let group = group?;
            group.compare(&sum(0), AMPLE)?;
            if rank == dead {
                return Ok(());
            }
            // As a stepper does while it waits for a sum.
            loop {
                group.check()?;
                thread::sleep(Duration::from_millis(1));
            }
        });
        for (rank, outcome) in (0..).zip(outcomes) {
            match outcome {
                Ok(()) => assert_eq!(rank, dead),
                Err(Error::PeerLost { rank: lost, .. }) => assert_eq!(lost, dead, "as rank {rank} saw it"),
                Err(other) => panic!("{other}"),
            }
        }
    }
}

#[test]
fn a_rank_that_ends_the_group_tells_all_why() {
    for culprit in 0..3 {
        let cause = Error::Rank { rank: culprit, message: "out of coffee".to_owned() };
        let outcomes = ranks(3, |rank, group| {
            let group = group?;
            if rank == culprit {
                group.tell(&cause);
            }
            group.compare(&sum(0), AMPLE)
        });
        for outcome in outcomes {
            match outcome {
                Err(Error::PeerLost { rank, why }) => {
                    assert_eq!(rank, culprit);
                    assert!(why.contains("coffee"), "{why}");
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn a_rank_that_leaves_in_order_is_missed_only_where_it_is_needed() {
    let (gone, checked) = (Barrier::new(3), Barrier::new(2));
    let outcomes = ranks(3, |rank, group| {
        let group = group?;
        group.compare(&sum(0), AMPLE)?;
        if rank == 1 {
            group.leave();
            drop(group);
            gone.wait();
            return Ok::<(), Error>(());
        }
        gone.wait();
        let checks: Vec<_> = (0..50).map(|_| group.check()).collect();
        // The failing comparison below ends the group, so neither rank may begin it while the other still checks.
        checked.wait();
        assert_eq!(checks, vec![Ok(()); 50]);
        match group.compare(&sum(1), AMPLE) {
            Err(Error::PeerLost { rank: 1, why }) => assert!(why.contains("closed"), "{why}"),
            other => panic!("{other:?}"),
        }
        Ok(())
    });
    assert_eq!(outcomes, [Ok(()), Ok(()), Ok(())]);
}

#[test]
fn a_comparison_that_a_rank_does_not_reach_ends_in_a_deadline() {
    let outcomes = ranks(3, |rank, group| {
        let group = group?;
        let deadline = if rank == 0 { SHORT } else { AMPLE };
        if rank == 2 {
            // Alive, but elsewhere.
            while group.check().is_ok() {
                thread::sleep(Duration::from_millis(1));
            }
            return group.check();
        }
        group.compare(&sum(6), deadline)
    });
    for outcome in outcomes {
        match outcome {
            Err(Error::Deadline { rank: 0, call, missing, .. }) => {
                assert_eq!((call, missing), (sum(6).to_string(), vec![2]));
            }
            other => panic!("{other:?}"),
        }
    }
}

/// All of so many ranks.
fn all(count: u32) -> Members {
    Members { first: 0, count }
}

#[test]
fn another_id_reaches_all_ranks_again_and_again_and_a_rank_that_asks_for_none_is_a_mismatch() {
    for world_size in 1..=5 {
        let outcomes = ranks(world_size, |rank, group| {
            let group = group?;
            let mut ids = Vec::new();
            for round in 0..3 {
                let make = || Ok([10 * round + rank as u8; 128]);
                ids.push(group.share_id(all(world_size), make, AMPLE)?[0]);
                group.compare(&sum(round.into()), AMPLE)?;
            }
            group.leave();
            Ok::<_, Error>(ids)
        });
        assert!(outcomes.iter().all(|ids| *ids == Ok(vec![0, 10, 20])), "{outcomes:?}");
    }
    let outcomes = ranks(3, |rank, group| {
        let group = group?;
        match rank {
            1 => group.compare(&Entry::Stepper(7), AMPLE),
            _ => group.share_id(all(3), || Ok([1; 128]), AMPLE).map(drop),
        }
    });
    for outcome in outcomes {
        assert!(matches!(&outcome, Err(Error::Mismatch { differs, .. }) if differs == "kind"), "{outcome:?}");
    }
}

#[test]
fn an_id_that_rank_0_cannot_make_ends_the_group_with_its_reason() {
    let outcomes = ranks(3, |_, group| {
        let group = group?;
        let none = || Err(Error::Hook("no network".to_owned()));
        group.share_id(all(3), none, AMPLE).inspect_err(|error| group.tell(error))
    });
    assert_eq!(outcomes[0], Err(Error::Hook("no network".to_owned())));
    for outcome in &outcomes[1..] {
        assert!(matches!(outcome, Err(Error::PeerLost { rank: 0, .. })), "{outcome:?}");
    }
}

#[test]
fn every_group_of_ranks_gets_an_id_of_its_own_and_its_members_the_same() {
    // Neighbours and replicas, by the first of each, and a group of one beside the others.
    let of_neighbours = |rank: u32| Members { first: rank - rank % 2, count: 2 };
    let of_replicas = |rank: u32| Members { first: rank % 2, count: 3 };
    let uneven = |rank: u32| Members { first: rank.min(1), count: if rank == 0 { 1 } else { 5 } };
    let outcomes = ranks(6, |rank, group| {
        let group = group?;
        let mut made = 0;
        let mut share = |members| {
            let make = || {
                made += 1;
                Ok([made; 128])
            };
            group.share_id(members, make, AMPLE).map(|id| id[0])
        };
        let ids = [share(of_neighbours(rank))?, share(of_replicas(rank))?, share(uneven(rank))?];
        group.leave();
        Ok::<_, Error>(ids)
    });
    let expected = [[1, 4, 6], [1, 5, 7], [2, 4, 7], [2, 5, 7], [3, 4, 7], [3, 5, 7]];
    assert_eq!(outcomes, expected.map(Ok));
}

#[test]
fn ranks_whose_groups_do_not_fit_are_told_and_not_left_to_wait() {
    // Of three ranks: a number that differs, a member that names another group, one that names a rank elsewhere.
    for members in [[(0, 2), (0, 3), (2, 1)], [(0, 2), (1, 1), (2, 1)], [(0, 1), (2, 1), (2, 1)]] {
        let outcomes = ranks(3, |rank, group| {
            let (first, count) = members[rank as usize];
            group?.share_id(Members { first, count }, || Ok([1; 128]), AMPLE)
        });
        for outcome in outcomes {
            let Err(Error::Mismatch { differs, ours, .. }) = outcome else { panic!("{outcome:?}") };
            assert!(differs == "members" && ours.contains("is number 0"), "{differs} {ours}");
        }
    }
}
