//! The kernel pool runs every chunk once, and no launch returns while a helper still works on it.
//!
//! Two launchers share the pool, and each launches its job twice without a pause. The counts are in atomics that
//! shuttle does not control, because a switch inside the counting could hide an important one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use shuttle::thread::{spawn, yield_now};

use super::{explore, join};
use crate::pool::{Chunks, Job, Pool};

/// Counts how often each chunk has begun and ended, and has the number of bytes that the job claims to move.
struct Count(Vec<[AtomicUsize; 2]>, u64);

impl Chunks for Arc<Count> {
    fn chunk_count(&self) -> usize {
        self.0.len()
    }

    fn bytes(&self) -> u64 {
        self.1
    }

    fn run_chunk(&self, chunk: usize) {
        self.0[chunk][0].fetch_add(1, SeqCst);
        yield_now();
        self.0[chunk][1].fetch_add(1, SeqCst);
    }
}

const LONG: u64 = 1 << 30;
const SHORT: u64 = 1 << 20;

#[test]
fn every_chunk_runs_once_and_a_launch_returns_behind_the_last_helper() {
    for (spin, bytes) in [(0, LONG), (200, LONG), (200, SHORT)] {
        explore(move || launches(Duration::from_micros(spin), bytes));
    }
}

/// Two launchers share the pool and launch twice each. Depending on `bytes` and `spin`, launches wake helpers or use
/// only helpers that are awake.
fn launches(spin: Duration, bytes: u64) {
    let pool = Pool::of(3, spin);
    let launcher = || {
        let pool = pool.clone();
        spawn(move || {
            let count = Arc::new(Count((0..3).map(|_| Default::default()).collect(), bytes));
            let job = Job::new(Arc::clone(&count));
            for launch in 1..=2 {
                pool.run(&job);
                let ran = |chunk: &[AtomicUsize; 2]| chunk.iter().all(|c| c.load(SeqCst) == launch);
                assert!(count.0.iter().all(ran), "launch {launch}");
            }
        })
    };
    join(vec![launcher(), launcher()]);
}
