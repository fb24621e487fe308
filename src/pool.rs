//! Threads that kernels are split over, shared by all ranks of a process.
//!
//! The launching thread works too, so a pool of one thread is that thread alone. Jobs must never block: with that,
//! any number of ranks on any number of cores makes progress. It knows neither kernels nor streams. Own code
//! instead of a work-stealing crate because a launch must not allocate.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::thread;

use crate::error::{Result, environment};
use crate::sync::{AtomicUsize, Builder, Condvar, Mutex, MutexGuard};

/// Work that can be done in any order, chunk by chunk.
pub(crate) trait Chunks: Send + Sync {
    fn chunk_count(&self) -> usize;
    fn run_chunk(&self, chunk: usize);
}

/// A job that can be launched again and again, one launch at a time.
pub(crate) struct Job {
    work: Box<dyn Chunks>,
    next_chunk: AtomicUsize,
    /// Helpers inside; changes only under the pool's lock.
    helpers: AtomicUsize,
}

impl Job {
    pub(crate) fn new(work: impl Chunks + 'static) -> Arc<Self> {
        Arc::new(Job { work: Box::new(work), next_chunk: AtomicUsize::new(0), helpers: AtomicUsize::new(0) })
    }

    fn work_on(&self) {
        loop {
            let chunk = self.next_chunk.fetch_add(1, Ordering::Relaxed);
            if chunk >= self.work.chunk_count() {
                return;
            }
            self.work.run_chunk(chunk);
        }
    }
}

/// A handle to the threads; clones share them, and the last one to go ends them.
#[derive(Clone)]
pub struct Pool {
    shared: Arc<Shared>,
    _closer: Arc<Closer>,
}

struct Shared {
    helpers: usize,
    state: Mutex<State>,
    work: Condvar,
    left: Condvar,
}

#[derive(Default)]
struct State {
    started: bool,
    closed: bool,
    queue: VecDeque<Arc<Job>>,
}

struct Closer(Arc<Shared>);

impl Pool {
    /// Threads that a pool has at most: more could only wait for memory.
    pub const MAX_THREADS: usize = 1024;

    /// Builds a pool of `threads` threads, brought into the range 1 to [`MAX_THREADS`](Self::MAX_THREADS), the
    /// launching one included; they start with the first launch.
    pub fn new(threads: usize) -> Self {
        let threads = threads.clamp(1, Self::MAX_THREADS);
        let shared = Arc::new(Shared {
            helpers: threads - 1,
            state: Mutex::default(),
            work: Condvar::new(),
            left: Condvar::new(),
        });
        Pool { _closer: Arc::new(Closer(Arc::clone(&shared))), shared }
    }

    /// Builds a pool of `INSTEP_THREADS` threads, or of one per core.
    ///
    /// # Errors
    /// `Config` if the variable is not a whole number above zero.
    pub fn from_environment() -> Result<Self> {
        let cores = || thread::available_parallelism().map_or(1, |n| n.get());
        let threads = environment("INSTEP_THREADS")?.map(usize::try_from);
        Ok(Pool::new(threads.map_or_else(cores, |threads| threads.unwrap_or(usize::MAX))))
    }

    /// Returns how many threads work on one launch at most.
    pub fn threads(&self) -> usize {
        self.shared.helpers + 1
    }

    /// Runs all chunks and returns when the last one is done.
    pub(crate) fn run(&self, job: &Arc<Job>) {
        job.next_chunk.store(0, Ordering::Relaxed);
        if self.shared.helpers == 0 || job.work.chunk_count() < 2 {
            return job.work_on();
        }
        {
            let mut state = self.shared.lock();
            if !state.started {
                state.started = true;
                self.start();
            }
            // The lock publishes the job's inputs to the helpers, and its release below their results to us.
            state.queue.push_back(Arc::clone(job));
        }
        self.shared.work.notify_all();
        job.work_on();
        let mut state = self.shared.lock();
        state.queue.retain(|queued| !Arc::ptr_eq(queued, job));
        while job.helpers.load(Ordering::Relaxed) > 0 {
            state = self.shared.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn start(&self) {
        for helper in 0..self.shared.helpers {
            let shared = Arc::clone(&self.shared);
            let thread = Builder::new().name(format!("instep-pool-{helper}"));
            if thread.spawn(move || shared.help()).is_err() {
                // Fewer helpers cost speed, not correctness: the launching thread does the work.
                return;
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn help(&self) {
        let mut state = self.lock();
        while !state.closed {
            let open = |job: &&Arc<Job>| job.next_chunk.load(Ordering::Relaxed) < job.work.chunk_count();
            let Some(job) = state.queue.iter().find(open).map(Arc::clone) else {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            job.helpers.fetch_add(1, Ordering::Relaxed);
            drop(state);
            let leave = Leave { shared: self, job: &job };
            job.work_on();
            drop(leave);
            state = self.lock();
        }
    }
}

/// Counts a helper out even if its chunk panics; the launcher would otherwise wait forever.
struct Leave<'a> {
    shared: &'a Shared,
    job: &'a Job,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        let _state = self.shared.lock();
        self.job.helpers.fetch_sub(1, Ordering::Relaxed);
        self.shared.left.notify_all();
    }
}

impl Drop for Closer {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.work.notify_all();
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Count(Vec<AtomicUsize>);

    impl Chunks for Arc<Count> {
        fn chunk_count(&self) -> usize {
            self.0.len()
        }
        fn run_chunk(&self, chunk: usize) {
            self.0[chunk].fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn every_chunk_runs_once_per_launch_whatever_the_number_of_launchers() {
        let pool = Pool::new(3);
        thread::scope(|scope| {
            for _ in 0..4 {
                let pool = pool.clone();
                scope.spawn(move || {
                    let count = Arc::new(Count((0..57).map(|_| AtomicUsize::new(0)).collect()));
                    let job = Job::new(Arc::clone(&count));
                    for launch in 1..=200 {
                        pool.run(&job);
                        assert!(count.0.iter().all(|c| c.load(Ordering::Relaxed) == launch));
                    }
                });
            }
        });
    }
}
