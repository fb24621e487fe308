//! A job of the pool, and its chunks that nobody has taken.
//!
//! The launcher takes chunks from the front and helpers take them from the back, so that each side walks on through memory
//! that lies together. Both ends stand in one word: a chunk is taken by one compare-and-swap, and by one thread only.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::sync::{AtomicU64, AtomicUsize};

/// Work that can be done in any order, chunk by chunk. A chunk must not panic: the launch would end as if it were done.
pub(crate) trait Chunks: Send + Sync {
    fn chunk_count(&self) -> usize;
    /// Bytes that all chunks together move.
    fn bytes(&self) -> u64;
    fn run_chunk(&self, chunk: usize);
}

/// Work that its owner also keeps.
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

/// A job that can be launched again and again, one launch at a time.
pub(crate) struct Job {
    pub(super) work: Box<dyn Chunks>,
    /// The chunks that nobody has taken.
    pub(super) rest: Rest,
    /// Helpers inside; changes only under the pool's lock.
    pub(super) helpers: AtomicUsize,
    /// Nanoseconds of the last launch on one thread.
    pub(super) alone_ns: AtomicU64,
}

/// A range of chunks: its start in the lower half of a word, and its end in the upper.
pub(super) struct Rest(AtomicU64);

impl Rest {
    pub(super) fn refill(&self, chunks: usize) {
        self.0.store((chunks as u64) << 32, Ordering::Relaxed);
    }

    pub(super) fn is_empty(&self) -> bool {
        let (start, end) = Rest::ends(self.0.load(Ordering::Relaxed));
        start >= end
    }

    /// Takes one chunk. What it reads and writes is published by the pool's lock, so no order is asked for here.
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
    /// If there are 2^32 chunks or more.
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

    /// Runs chunks that nobody has taken until there are none.
    pub(super) fn work_from(&self, side: Side) {
        while let Some(chunk) = self.rest.take(side) {
            self.work.run_chunk(chunk);
        }
    }
}
