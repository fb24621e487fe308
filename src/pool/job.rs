//! A job of the pool, and the range of chunks that no thread has taken yet.
//!
//! The launcher takes chunks from the front and helpers take them from the back, so each side walks through adjacent
//! memory. Both ends of the range are packed into one word. One compare-and-swap takes a chunk, so only one thread gets
//! the chunk.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::sync::{AtomicU64, AtomicUsize};

/// A piece of work that consists of chunks, which can run in any order. A chunk must not panic, because the launch
/// would count it as done.
pub(crate) trait Chunks: Send + Sync {
    fn chunk_count(&self) -> usize;
    /// Returns how many bytes all chunks together move.
    fn bytes(&self) -> u64;
    fn run_chunk(&self, chunk: usize);
}

/// Implements `Chunks` for work in an `Arc`, so that the owner of a job can keep a reference to the work.
impl<W: Chunks> Chunks for Arc<W> {
    fn chunk_count(&self) -> usize {
        (**self).chunk_count()
    }

    fn bytes(&self) -> u64 {
        (**self).bytes()
    }

    fn run_chunk(&self, chunk: usize) {
        (**self).run_chunk(chunk);
    }
}

/// A job that can be launched any number of times, one launch at a time.
pub(crate) struct Job {
    pub(super) work: Box<dyn Chunks>,
    /// The chunks that no thread has taken.
    pub(super) rest: Rest,
    /// Number of helpers that are working on the job. This number changes only under the pool's lock.
    pub(super) helpers: AtomicUsize,
    /// Nanoseconds that the last launch on one thread took. Each later split launch reduces this time by 1/64.
    pub(super) alone_ns: AtomicU64,
}

/// A range of chunks: its start in the lower half of a word, and its end in the upper half.
pub(super) struct Rest(AtomicU64);

impl Rest {
    pub(super) fn refill(&self, chunks: usize) {
        self.0.store((chunks as u64) << 32, Ordering::Relaxed);
    }

    pub(super) fn is_empty(&self) -> bool {
        let (start, end) = Rest::ends(self.0.load(Ordering::Relaxed));
        start >= end
    }

    /// Takes one chunk. The pool's lock publishes the memory that chunks read and write, so relaxed ordering is enough
    /// here.
    fn take(&self, side: Side) -> Option<usize> {
        let shrink = |word| {
            let (start, end) = Rest::ends(word);
            (start < end).then(|| match side {
                Side::Front => end << 32 | (start + 1),
                Side::Back => (end - 1) << 32 | start,
            })
        };
        let (start, end) =
            Rest::ends(self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, shrink).ok()?);
        Some(match side {
            Side::Front => start as usize,
            Side::Back => end as usize - 1,
        })
    }

    fn ends(word: u64) -> (u64, u64) {
        (word & 0xffff_ffff, word >> 32)
    }
}

#[derive(Clone, Copy)]
pub(super) enum Side {
    Front,
    Back,
}

impl Job {
    /// # Panics
    /// Panics if there are 2^32 chunks or more.
    pub(crate) fn new(work: impl Chunks + 'static) -> Arc<Self> {
        assert!(u32::try_from(work.chunk_count()).is_ok(), "a job has less than 2^32 chunks");
        let rest = Rest(AtomicU64::new(0));
        Arc::new(Job {
            work: Box::new(work),
            rest,
            helpers: AtomicUsize::new(0),
            alone_ns: AtomicU64::new(0),
        })
    }

    /// Takes and runs chunks until none is left.
    pub(super) fn work_from(&self, side: Side) {
        while let Some(chunk) = self.rest.take(side) {
            self.work.run_chunk(chunk);
        }
    }
}
