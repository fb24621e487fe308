//! Runs launches on the threads of a framework.
//!
//! When the framework's threads have finished their work, they spin for a while on the cores that a pool's own threads
//! would need. A team's one task is to call a function on the framework's threads. These threads take chunks in the
//! same way as a pool's own threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::job::{Job, Side};

/// A launch that moves fewer bytes than this runs only on the launching thread. A team's threads may be asleep, and a
/// team waits for all of them. PyTorch splits its own loops at about the same size.
const SPLIT_BYTES: u64 = 1 << 20;

/// Threads that run a function together, such as those of an OpenMP runtime.
pub trait Team: Send + Sync {
    /// Calls `work` on at most `threads` threads at the same time, and returns when every call has returned.
    ///
    /// A team may make any number of calls. The work is done when at least one call of `work` has returned and none is
    /// still running. If a team makes no call, the launching thread does all the work.
    fn run(&self, threads: usize, work: &(dyn Fn() + Sync));
}

/// Runs all chunks of a job. The caller must have refilled the job's range of chunks.
pub(super) fn run(team: &dyn Team, threads: usize, job: &Arc<Job>) {
    let chunks = job.work.chunk_count();
    if chunks >= 2 && job.work.bytes() >= SPLIT_BYTES {
        let calls = AtomicUsize::new(0);
        team.run(threads.min(chunks), &|| {
            let is_first = calls.fetch_add(1, Ordering::Relaxed) == 0;
            job.work_from(if is_first { Side::Front } else { Side::Back });
        });
    }
    job.work_from(Side::Front);
}

#[cfg(test)]
#[path = "../../tests/unit/pool/team.rs"]
mod tests;
