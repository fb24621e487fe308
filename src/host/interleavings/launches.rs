//! The kernel pool: every chunk once, and no launch that returns while a helper is still at it.
//!
//! Two launchers share the pool, and each launches its job again at once. Counts are in atomics that shuttle does not
//! see, because a switch inside the counting would hide the switch that matters.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use shuttle::thread::{spawn, yield_now};

use super::{explore, join};
use crate::pool::{Chunks, Job, Pool};

/// Counts, per chunk, who has begun it and who has ended it.
struct Count(Vec<[AtomicUsize; 2]>);

impl Chunks for Arc<Count> {
    fn chunk_count(&self) -> usize {
        self.0.len()
    }

    fn run_chunk(&self, chunk: usize) {
        self.0[chunk][0].fetch_add(1, SeqCst);
        yield_now();
        self.0[chunk][1].fetch_add(1, SeqCst);
    }
}

#[test]
fn every_chunk_runs_once_and_a_launch_returns_behind_the_last_helper() {
    explore(|| {
        let pool = Pool::new(3);
        let launcher = || {
            let pool = pool.clone();
            spawn(move || {
                let count = Arc::new(Count((0..3).map(|_| Default::default()).collect()));
                let job = Job::new(Arc::clone(&count));
                for launch in 1..=2 {
                    pool.run(&job);
                    let ran = |chunk: &[AtomicUsize; 2]| chunk.iter().all(|c| c.load(SeqCst) == launch);
                    assert!(count.0.iter().all(ran), "launch {launch}");
                }
            })
        };
        join(vec![launcher(), launcher()]);
    });
}
