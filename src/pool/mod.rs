//! The threads over which kernel launches are split. The ranks of an in-process group share these threads. A stepper
//! with another collective, or with its own number of threads, has its own pool.
//!
//! The launching thread works too, so a pool of one thread has no other thread. The launching thread waits only for
//! helpers that are inside a chunk, so a descheduled helper outside a chunk causes no delay. Waking a helper takes
//! longer than most launches. Helpers therefore stay awake for a while after a launch. A launch wakes sleeping helpers
//! only if it is long or closely follows another launch. Jobs must never block, so that any number of ranks makes
//! progress on any number of cores. No work-stealing crate is used, because a launch must not allocate.

mod job;
mod team;

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::Duration;

use crate::error::{Error, Result, environment};
use crate::sync::{AtomicU64, AtomicUsize, Builder, Condvar, Mutex, MutexGuard, Spin, now_ns};

use job::Side;
pub(crate) use job::{Chunks, Job};
pub use team::Team;

/// A launch that moves fewer bytes than this is not split, even if helpers are awake. Splitting such a launch would
/// cost more than it saves.
const SPLIT_BYTES: u64 = 448 << 10;

/// A launch that moves fewer bytes than this wakes no helper, unless it computes for long or closely follows another
/// launch. Such a launch usually ends before a woken helper begins.
const WAKE_BYTES: u64 = 6 << 20;

/// If a job's last launch on one thread took longer than this, the job's next launches wake helpers. Each of these
/// launches reduces the stored time by 1/64. One interrupted launch, which took unusually long, therefore stops having
/// an effect after some launches.
const WAKE_NS: u64 = 200_000;

/// How long helpers stay awake after a launch, unless `INSTEP_SPIN_US` or [`Pool::spinning`] sets another time.
const SPIN: Duration = Duration::from_micros(200);

/// How long a launcher watches helpers that are inside a chunk. After this time, the launcher sleeps until the helpers
/// leave the job.
const WATCH: Duration = Duration::from_micros(50);

/// A handle to a pool of threads. Clones share the threads, and dropping the last clone ends the threads.
#[derive(Clone)]
pub struct Pool {
    shared: Arc<Shared>,
    _closer: Arc<Closer>,
    /// The team that runs launches instead of the pool's own threads.
    team: Option<Arc<dyn Team>>,
}

struct Shared {
    helpers: usize,
    spin: Duration,
    state: Mutex<State>,
    /// Number of jobs queued so far. The shutdown of the pool counts as a job.
    queued: AtomicUsize,
    /// Number of helpers that watch `queued`.
    awake: AtomicUsize,
    /// When the last launch of at least `SPLIT_BYTES` ended.
    ended_ns: AtomicU64,
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
    /// The largest number of threads of a pool. More threads would only wait for memory. The constructors check every
    /// thread count that a user sets.
    pub const MAX_THREADS: usize = 1024;

    /// Builds a pool of `threads` threads, including the launching thread. The threads start with the first launch that
    /// needs them, and stay awake for 200 us after each launch.
    ///
    /// # Errors
    /// `Config` unless `threads` is 1 to [`MAX_THREADS`](Self::MAX_THREADS).
    pub fn new(threads: usize) -> Result<Self> {
        Pool::spinning(threads, SPIN)
    }

    /// Builds a pool that contains only the launching thread.
    pub(crate) fn alone() -> Self {
        Pool::of(1, SPIN)
    }

    /// Builds a pool of `threads` threads, which stay awake for `spin` after a launch. With `Duration::ZERO`, the
    /// threads sleep at once, and only launches of at least 6 MiB or 200 us are split over threads.
    ///
    /// # Errors
    /// Errors as for [`new`](Self::new).
    pub fn spinning(threads: usize, spin: Duration) -> Result<Self> {
        Pool::refuse_threads("threads", threads)?;
        Ok(Pool::of(threads, spin))
    }

    /// Refuses a number of threads that is out of range. The error names the option.
    pub(crate) fn refuse_threads(option: &'static str, threads: usize) -> Result<()> {
        if (1..=Self::MAX_THREADS).contains(&threads) {
            return Ok(());
        }
        Err(Error::range(option, threads, format_args!("1 to {}", Self::MAX_THREADS)))
    }

    /// Builds a pool of `threads` threads. The caller must have checked that `threads` is valid.
    pub(crate) fn of(threads: usize, spin: Duration) -> Self {
        let shared = Arc::new(Shared {
            helpers: threads - 1,
            spin,
            state: Mutex::default(),
            queued: AtomicUsize::new(0),
            awake: AtomicUsize::new(0),
            ended_ns: AtomicU64::new(u64::MAX),
            work: Condvar::new(),
            left: Condvar::new(),
        });
        Pool { _closer: Arc::new(Closer(Arc::clone(&shared))), shared, team: None }
    }

    /// Builds a pool that runs its launches on at most `threads` threads of a team. The pool owns no threads. A launch
    /// of less than 1 MiB does not use the team.
    ///
    /// # Errors
    /// Errors as for [`new`](Self::new).
    pub fn of_team(threads: usize, team: Arc<dyn Team>) -> Result<Self> {
        Ok(Pool { team: Some(team), ..Pool::new(threads)? })
    }

    /// Builds a pool of `INSTEP_THREADS` threads, by default one per core but at most
    /// [`MAX_THREADS`](Self::MAX_THREADS). After a launch, the threads stay awake for `INSTEP_SPIN_US` microseconds, by
    /// default 200.
    ///
    /// # Errors
    /// `Config` if a variable is not a whole number, or the number of threads is not 1 to
    /// [`MAX_THREADS`](Self::MAX_THREADS).
    pub fn from_environment() -> Result<Self> {
        let cores = || thread::available_parallelism().map_or(1, |n| n.get().min(Self::MAX_THREADS));
        let threads = environment("INSTEP_THREADS", 1)?.map(usize::try_from);
        let threads = threads.map_or_else(cores, |threads| threads.unwrap_or(usize::MAX));
        Pool::refuse_threads("INSTEP_THREADS", threads)?;
        Pool::with_threads(threads)
    }

    /// Builds a pool of `threads` threads. After a launch, the threads stay awake for `INSTEP_SPIN_US` microseconds, by
    /// default 200.
    ///
    /// # Errors
    /// `Config` if `INSTEP_SPIN_US` is not a whole number, or `threads` is not 1 to [`MAX_THREADS`](Self::MAX_THREADS).
    pub(crate) fn with_threads(threads: usize) -> Result<Self> {
        let spin = environment("INSTEP_SPIN_US", 0)?.map_or(SPIN, Duration::from_micros);
        Pool::spinning(threads, spin)
    }

    /// Returns the largest number of threads that work on one launch.
    pub fn threads(&self) -> usize {
        self.shared.helpers + 1
    }

    /// Runs all chunks and returns when the last one is done.
    pub(crate) fn run(&self, job: &Arc<Job>) {
        let shared = &*self.shared;
        let (chunks, bytes) = (job.work.chunk_count(), job.work.bytes());
        job.rest.refill(chunks);
        if let Some(team) = self.team.as_deref().filter(|_| shared.helpers > 0) {
            return team::run(team, self.threads(), job);
        }
        if shared.helpers == 0 || chunks < 2 || bytes < SPLIT_BYTES {
            return job.work_from(Side::Front);
        }
        let start_ns = now_ns();
        let wakes = bytes >= WAKE_BYTES
            || job.alone_ns.load(Ordering::Relaxed) >= WAKE_NS
            || shared.has_just_ended(start_ns);
        if wakes || shared.awake.load(Ordering::Relaxed) > 0 {
            self.run_together(job, if wakes { chunks - 1 } else { 0 });
            let alone_ns = job.alone_ns.load(Ordering::Relaxed);
            job.alone_ns.store(alone_ns - alone_ns / 64, Ordering::Relaxed);
            shared.ended_ns.store(now_ns(), Ordering::Relaxed);
        } else {
            job.work_from(Side::Front);
            let end_ns = now_ns();
            job.alone_ns.store(end_ns.saturating_sub(start_ns), Ordering::Relaxed);
            shared.ended_ns.store(end_ns, Ordering::Relaxed);
        }
    }

    /// Runs all chunks with the helpers that are awake, and wakes at most `wanted` more helpers.
    fn run_together(&self, job: &Arc<Job>, wanted: usize) {
        let shared = &*self.shared;
        {
            let mut state = shared.lock();
            if !state.started {
                state.started = true;
                self.start();
            }
            // This lock publishes the job's inputs to the helpers. The lock below publishes the helpers' results to
            // this thread.
            state.queue.push_back(Arc::clone(job));
            shared.queued.fetch_add(1, Ordering::Release);
        }
        // Each woken helper takes the lock for a moment, so this wakes no more helpers than can find a chunk.
        let asleep = shared.helpers - shared.awake.load(Ordering::Relaxed).min(shared.helpers);
        (0..wanted.min(asleep)).for_each(|_| shared.work.notify_one());
        job.work_from(Side::Front);
        let mut state = shared.lock();
        state.queue.retain(|queued| !Arc::ptr_eq(queued, job));
        if job.helpers.load(Ordering::Relaxed) > 0 {
            drop(state);
            let mut watch = Spin::new(WATCH);
            while job.helpers.load(Ordering::Relaxed) > 0 && watch.again() {}
            state = shared.lock();
        }
        while job.helpers.load(Ordering::Relaxed) > 0 {
            state = shared.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn start(&self) {
        for helper in 0..self.shared.helpers {
            let shared = Arc::clone(&self.shared);
            let thread = Builder::new().name(format!("instep-pool-{helper}"));
            if thread.spawn(move || shared.help()).is_err() {
                // With fewer helpers a launch is slower but still correct, because the launching thread does the work.
                return;
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the last launch ended less than `spin` ago. Helpers that the last launch had woken would then
    /// still be awake.
    fn has_just_ended(&self, now_ns: u64) -> bool {
        let ended_ns = self.ended_ns.load(Ordering::Relaxed);
        ended_ns <= now_ns && u128::from(now_ns - ended_ns) < self.spin.as_nanos()
    }

    fn help(&self) {
        let mut state = self.lock();
        let mut seen = None;
        while !state.closed {
            if let Some(job) = state.queue.iter().find(|job| !job.rest.is_empty()).map(Arc::clone) {
                job.helpers.fetch_add(1, Ordering::Relaxed);
                drop(state);
                let leave = Leave { shared: self, job: &job };
                job.work_from(Side::Back);
                drop(leave);
                drop(job); // this may be the last reference, and the job's memory must not be freed under the lock
                (state, seen) = (self.lock(), None);
                continue;
            }
            let queued = self.queued.load(Ordering::Relaxed);
            if seen == Some(queued) {
                // No job was queued since this helper last looked.
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                seen = None;
                continue;
            }
            drop(state);
            self.watch(queued);
            (state, seen) = (self.lock(), Some(queued));
        }
    }

    /// Polls until another job is queued or `spin` has passed.
    fn watch(&self, queued: usize) {
        self.awake.fetch_add(1, Ordering::Relaxed);
        let mut spin = Spin::new(self.spin);
        while self.queued.load(Ordering::Acquire) == queued && spin.again() {}
        self.awake.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Removes a helper from its job's count when this value is dropped, even if the helper's chunk panics. The launcher
/// would otherwise wait forever.
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
        self.0.queued.fetch_add(1, Ordering::Release);
        self.0.work.notify_all();
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish()
    }
}

#[cfg(test)]
#[path = "../../tests/unit/pool.rs"]
mod tests;
