//! The rendezvous: when a rank may return, and that all ranks get an error if one is lost at any moment.
//!
//! The tests count arrivals and departures themselves, to detect an early return. Leaving a seat wakes all ranks and
//! could hide a missing wake-up, so only the tests of leaving do it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use shuttle::thread::{spawn, yield_now};

use super::{explore, join};
use crate::collective::{Call, CallKey, NoCalls};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::host::rendezvous::{Arrived, Rendezvous, Seat};
use crate::op::CollectiveKind;

const NEVER: Duration = Duration::from_secs(1 << 32);

/// A group that counts the arrived ranks and the finished ranks of each split and pass.
struct Group {
    ranks: u32,
    rendezvous: Rendezvous,
    counts: [[[AtomicUsize; 2]; 4]; 3],
}

impl Group {
    fn new(ranks: u32) -> Arc<Group> {
        Arc::new(Group { ranks, rendezvous: Rendezvous::new(ranks), counts: Default::default() })
    }

    fn sit(&self, rank: u32) -> Seat {
        self.rendezvous.sit(rank, &(0..self.ranks).collect())
    }

    /// Makes one collective as the host device does.
    fn enqueue(&self, split: usize, seat: &Seat, pass: u64, deadline: Duration) -> Result<()> {
        let [came, done] = &self.counts[split][pass as usize];
        let all = self.ranks as usize;
        came.fetch_add(1, SeqCst);
        let mut calls = Vec::new();
        let is_over = self.rendezvous.culprit().is_some();
        self.meet(seat, pass, deadline, &mut calls)?;
        assert!(!is_over, "met after the end");
        assert_eq!(came.load(SeqCst), all, "met before all had come");
        assert!(
            calls.len() == all && calls.iter().all(|(key, _)| key.pass == pass),
            "calls of another meeting"
        );
        yield_now();
        done.fetch_add(1, SeqCst);
        self.rendezvous.part(seat);
        assert_eq!(done.load(SeqCst), all, "returned while a peer is at work");
        Ok(())
    }

    fn meet(&self, seat: &Seat, pass: u64, deadline: Duration, calls: &mut Vec<Arrived>) -> Result<()> {
        let (kind, comm) =
            (CollectiveKind::AllReduce, NoCalls { rank: 0, world_size: self.ranks, supports_all: false });
        let key = CallKey { kind, pass, bucket: None, dtype: DType::F32, bytes: 0, agreement: 0 };
        let nothing = bytemuck::cast_slice_mut::<f32, u8>(&mut []);
        self.rendezvous.meet(seat, &Call::on_host(&comm, key, None, nothing, deadline)?, calls)
    }

    /// Makes passes until an error or the last one, then leaves the seat.
    fn passes(&self, split: usize, seat: Seat, passes: u64) -> Result<()> {
        let outcome = (0..passes).try_for_each(|pass| self.enqueue(split, &seat, pass, NEVER));
        self.rendezvous.leave(&seat);
        outcome
    }

    fn culprit_is(&self, rank: u32) {
        assert_eq!(self.rendezvous.culprit(), Some(rank));
    }
}

fn is_lost(outcome: &Result<()>, rank: u32) {
    assert!(matches!(outcome, Err(Error::PeerLost { rank: lost, .. }) if *lost == rank), "{outcome:?}");
}

#[test]
fn nobody_returns_before_all_have_come_and_all_have_done_their_work() {
    explore(|| {
        let group = Group::new(3);
        let rank = |rank| {
            let group = Arc::clone(&group);
            spawn(move || {
                let seat = group.sit(rank);
                let outcome = (0..3).try_for_each(|pass| group.enqueue(0, &seat, pass, NEVER));
                assert_eq!(outcome, Ok(()));
            })
        };
        join((0..3).map(rank).collect());
    });
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Act {
    Fail,
    Leave,
    Disagree,
    TooLate,
}

#[test]
fn a_rank_that_fails_leaves_disagrees_or_gives_up_ends_all_others() {
    // All acts but `Leave` keep the seat, because leaving it would wake the others and hide a missing wake-up.
    for (act, after) in [Act::Fail, Act::Leave, Act::Disagree, Act::TooLate].into_iter().zip([0, 1, 1, 0]) {
        explore(move || {
            let group = Group::new(3);
            let tasks = (0..3).map(|rank| {
                let group = Arc::clone(&group);
                let seat = group.sit(rank);
                let end = Error::order("test", "made up", "");
                spawn(move || {
                    if rank != 1 {
                        let outcome = group.passes(0, seat, 4);
                        return match act {
                            Act::Disagree => {
                                let left = matches!(outcome, Err(Error::LeftPass { rank: 1, .. }));
                                assert!(left, "{outcome:?}")
                            }
                            // The last rank to arrive finds all others there, so it need not be late.
                            Act::TooLate => assert!(outcome.is_err()),
                            _ => is_lost(&outcome, 1),
                        };
                    }
                    for pass in 0..after {
                        assert_eq!(group.enqueue(0, &seat, pass, NEVER), Ok(()));
                    }
                    match act {
                        Act::Fail => group.rendezvous.fail(1, &end),
                        Act::Leave => group.rendezvous.leave(&seat),
                        Act::Disagree => {
                            let outcome = group.meet(&seat, 9, NEVER, &mut Vec::new());
                            assert!(matches!(outcome, Err(Error::LeftPass { rank: 1, .. })), "{outcome:?}");
                        }
                        Act::TooLate => {
                            let outcome = group.enqueue(0, &seat, after, Duration::ZERO);
                            assert!(matches!(outcome, Ok(()) | Err(Error::Deadline { .. })), "{outcome:?}");
                            if outcome.is_ok() {
                                group.rendezvous.leave(&seat);
                            }
                        }
                    }
                })
            });
            join(tasks.collect());
            if act != Act::Disagree {
                group.culprit_is(1);
            }
        });
    }
}

/// Two ranks have a task per split, as they have a reduce stream per split. On the second split, rank 1's task calls
/// `act`.
fn on_two_splits(act: impl Fn(&Group, Seat) + Copy + Send + Sync + 'static) {
    explore(move || {
        let group = Group::new(2);
        let tasks = (0..2).flat_map(|rank| {
            let group = Arc::clone(&group);
            // The seats are taken before the tasks run, because every rank must take its seats in the same order of
            // splits.
            let seats = [group.sit(rank), group.sit(rank)];
            seats.into_iter().enumerate().map(move |(split, seat)| {
                let group = Arc::clone(&group);
                spawn(move || {
                    if (rank, split) == (1, 1) {
                        return act(&group, seat);
                    }
                    // The first split may complete all its passes before the other ends.
                    let outcome = group.passes(split, seat, 4);
                    assert!(outcome.is_err() || split == 0);
                })
            })
        });
        join(tasks.collect());
    });
}

#[test]
fn splits_meet_in_any_order_relative_to_each_other() {
    explore(|| {
        let group = Group::new(2);
        let mut tasks = Vec::new();
        for rank in 0..2 {
            for (split, seat) in [group.sit(rank), group.sit(rank)].into_iter().enumerate() {
                let group = Arc::clone(&group);
                tasks.push(spawn(move || {
                    let outcome = (0..2).try_for_each(|pass| group.enqueue(split, &seat, pass, NEVER));
                    assert_eq!(outcome, Ok(()));
                }));
            }
        }
        join(tasks);
    });
}

#[test]
fn what_ends_one_split_ends_the_other_at_any_moment() {
    // The seat is kept, because leaving it would wake the others and hide that failing does not wake them.
    let fail = |group: &Group, _: Seat| group.rendezvous.fail(1, &Error::order("test", "made up", ""));
    on_two_splits(fail);
    on_two_splits(|group, seat| group.rendezvous.leave(&seat));
}

#[test]
fn a_rank_without_seats_is_missed_on_a_split_that_it_never_joined() {
    explore(|| {
        let group = Group::new(2);
        let (seat, peer) = (group.sit(0), group.sit(1));
        let waiting = {
            let group = Arc::clone(&group);
            spawn(move || {
                let second = group.sit(0);
                is_lost(&group.passes(1, second, 1), 1);
                group.rendezvous.leave(&seat);
            })
        };
        let leaving = {
            let group = Arc::clone(&group);
            spawn(move || group.rendezvous.leave(&peer))
        };
        join(vec![waiting, leaving]);
        group.culprit_is(1);
    });
}
