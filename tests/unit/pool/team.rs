//! Tests of a team: a framework's threads, on which launches may run.
//!
//! Every chunk runs once, however many calls a team makes at the same time.

use std::thread;

use super::super::{Pool, tests::launch};
use super::*;

/// A team that makes this many calls at the same time, for any number that is asked for.
struct Calls(usize);

impl Team for Calls {
    fn run(&self, threads: usize, work: &(dyn Fn() + Sync)) {
        assert_eq!(threads, 3);
        thread::scope(|scope| (0..self.0).for_each(|_| drop(scope.spawn(work))));
    }
}

#[test]
fn every_chunk_runs_once_however_often_a_team_calls() {
    for calls in [0, 1, 3, 5] {
        launch(&Pool::of_team(3, Arc::new(Calls(calls))).unwrap(), 20, 57, SPLIT_BYTES);
    }
}

struct Refuses;

impl Team for Refuses {
    fn run(&self, _: usize, _: &(dyn Fn() + Sync)) {
        panic!("a short launch must not wake a team");
    }
}

#[test]
fn a_launch_that_cannot_be_split_or_is_short_stays_on_its_thread() {
    let pool = Pool::of_team(3, Arc::new(Refuses)).unwrap();
    launch(&pool, 20, 57, SPLIT_BYTES - 1);
    launch(&pool, 20, 1, SPLIT_BYTES);
    launch(&Pool::of_team(1, Arc::new(Refuses)).unwrap(), 20, 57, SPLIT_BYTES);
}
