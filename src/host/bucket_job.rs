//! One launch of a bucket on a CPU, as a job of the thread pool. The launch's arguments and its table of tiles are
//! built once.
//!
//! A stepper's job stores the addresses of the stepper's memory. The job of a `BucketStep` receives new addresses
//! before each launch. Running a job allocates nothing.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ops::RangeInclusive;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use crate::abi::{InstepBases, InstepControl, InstepStepArgs, InstepTile};
use crate::error::{Error, Result};
use crate::host::kernels::Kernels;
use crate::host::memories::Memories;
use crate::launch::{Bases, Kind, Launch, Regions, rebind};
use crate::layout::Plan;
use crate::pool::Chunks;

/// How many chunks a launch has per thread. With several chunks per thread, the other threads can take over chunks of a
/// thread that starts late.
const CHUNKS_PER_THREAD: usize = 4;

/// The smallest and the largest number of tiles in a chunk. Running a chunk must take much longer than fetching it from
/// the pool. A chunk must also be so small that all threads end at about the same time.
const TILES_PER_CHUNK: RangeInclusive<usize> = 4..=64;

/// The threads and prefetches of a launch. Results have the same bits for any number of threads and any prefetch
/// distance.
#[derive(Clone, Copy)]
pub(crate) struct Execution {
    pub(crate) kernels: Kernels,
    pub(crate) prefetches: Prefetches,
    pub(crate) threads: usize,
}

/// One launch of a bucket, as a job of the pool.
pub(crate) struct BucketJob {
    kind: Kind,
    args: UnsafeCell<InstepStepArgs>,
    /// The addresses of each segment's tensors. The list is empty if the arguments hold the addresses.
    bases: Arc<SegmentBases>,
    /// The table of tiles. The table changes only together with the arguments.
    tiles: UnsafeCell<Vec<InstepTile>>,
    tile_count: usize,
    tiles_per_chunk: usize,
    moved_bytes: u64,
    kernels: Kernels,
    trial: Trial,
    /// Keeps alive the memory to which the arguments point.
    _memories: Arc<Memories>,
}

/// The addresses of a bucket's tensors. All launches of the bucket share these addresses, and the `BucketStep` changes
/// them between launches.
#[derive(Default)]
pub(crate) struct SegmentBases(UnsafeCell<Vec<Bases>>);

// SAFETY: `set` requires that no launch runs, and the pool's lock publishes the addresses that `set` has written.
unsafe impl Send for SegmentBases {}
// SAFETY: `set` requires that no launch runs, and the pool's lock publishes the addresses that `set` has written.
unsafe impl Sync for SegmentBases {}

impl SegmentBases {
    /// Changes the addresses.
    ///
    /// # Safety
    /// No launch that reads the addresses is running, and no other thread calls this function.
    pub(crate) unsafe fn set(&self, change: impl FnOnce(&mut Vec<Bases>)) {
        // SAFETY: by the contract, nothing else refers to the changed memory now.
        change(unsafe { &mut *self.0.get() });
    }
}

// SAFETY: the pointers lead into `_memories`, which is shareable, or to memory that the launch's caller lends. Chunks
// of one launch touch different tiles, and the kernels access shared control words as atomics. Arguments change only
// between launches.
unsafe impl Send for BucketJob {}
// SAFETY: chunks of one launch touch different tiles, and arguments change only between launches, as for `Send`.
unsafe impl Sync for BucketJob {}

impl BucketJob {
    /// Makes a job with all addresses in its arguments.
    pub(crate) fn bound(
        kind: Kind,
        launch: Launch,
        memories: &Arc<Memories>,
        execution: Execution,
    ) -> BucketJob {
        BucketJob::unbound(kind, launch, memories, execution, Arc::default())
    }

    /// Makes a job that reads its tensors' addresses from `bases`. `bases` has one entry for all segments, or one entry
    /// per segment.
    pub(crate) fn unbound(
        kind: Kind,
        launch: Launch,
        memories: &Arc<Memories>,
        execution: Execution,
        bases: Arc<SegmentBases>,
    ) -> BucketJob {
        let Launch { mut args, tiles, moved_bytes } = launch;
        args.tiles = tiles.as_ptr();
        let wanted = tiles.len() / (CHUNKS_PER_THREAD * execution.threads);
        let tiles_per_chunk = wanted.clamp(*TILES_PER_CHUNK.start(), *TILES_PER_CHUNK.end());
        let prefetches = if kind == Kind::Step { execution.prefetches } else { Prefetches::Never };
        let trial = Trial::new(prefetches, tiles.len().div_ceil(tiles_per_chunk));
        BucketJob {
            kind,
            args: UnsafeCell::new(args),
            bases,
            tile_count: tiles.len(),
            tiles: UnsafeCell::new(tiles),
            tiles_per_chunk,
            moved_bytes,
            kernels: execution.kernels,
            trial,
            _memories: Arc::clone(memories),
        }
    }

    /// Sets the control block that later launches use.
    ///
    /// # Safety
    /// No launch of this job is running, and no other thread calls this function. The block outlives the launches.
    pub(crate) unsafe fn set_control(&self, control: *mut InstepControl) {
        // SAFETY: by the contract, nothing else refers to the changed memory now.
        unsafe { (*self.args.get()).control = control }
    }

    /// Replaces the addresses of the caller's tensors.
    ///
    /// # Safety
    /// No launch of this job is running, and no other thread calls this function.
    pub(crate) unsafe fn rebind(&self, plan: &Plan, regions: &Regions) {
        // SAFETY: by the contract, nothing else refers to the arguments or the tiles now.
        let (args, tiles) = unsafe { (&mut *self.args.get(), &mut *self.tiles.get()) };
        rebind(self.kind, args, tiles, plan, regions);
        args.tiles = tiles.as_ptr();
    }

    /// Returns whether the pass steps anything. A skipped pass steps nothing.
    fn is_stepping(&self) -> bool {
        // SAFETY: arguments change only between launches, and the block outlives them. Begin and Decide write the skip
        // flag, and both come before the step.
        unsafe { (&raw const (*(*self.args.get()).control).skip).read() == 0 }
    }

    /// Runs a chunk of tiles with this job's arguments.
    fn run_between(&self, first: usize, last: usize, ahead_bytes: u64) {
        // SAFETY: arguments and addresses change only between launches. They were resolved from the op's accesses.
        // `_memories` keeps that memory alive, or the launch's caller lends it. Chunks are disjoint ranges of this
        // job's own tiles, and by the schedule no other op touches the bucket now.
        unsafe {
            let mut args = *self.args.get();
            let mut bases = ptr::null();
            match (*self.bases.0.get()).as_slice() {
                [] => {}
                [of_all] => of_all.put(&mut args),
                of_segments => bases = of_segments.as_ptr().cast::<InstepBases>(),
            }
            let (first, last) = (first as u64, last as u64);
            match self.kind {
                Kind::Norm => self.kernels.norm(&args, bases, first, last),
                Kind::Step => self.kernels.step(&args, bases, first, last, ahead_bytes),
            }
        }
    }
}

impl Chunks for BucketJob {
    fn chunk_count(&self) -> usize {
        self.tile_count.div_ceil(self.tiles_per_chunk)
    }

    fn bytes(&self) -> u64 {
        self.moved_bytes
    }

    fn run_chunk(&self, chunk: usize) {
        let first = chunk * self.tiles_per_chunk;
        let last = (first + self.tiles_per_chunk).min(self.tile_count);
        self.trial.run(
            last - first,
            || self.is_stepping(),
            |ahead_bytes| self.run_between(first, last, ahead_bytes),
        );
    }
}

/// The prefetch distance in bytes: in each array, a step prefetches this far ahead of its loads.
pub(crate) const AHEAD_BYTES: u64 = 2048;

/// If the memory of the steps takes fewer bytes than this in total, it is assumed to be in a cache, where prefetches do
/// not help.
const BEYOND_CACHE: u64 = 32 << 20;

/// The number of pairs of chunks that a launch compares before it decides whether to prefetch. The launch prefetches if
/// prefetches were faster in at least `WINS` pairs.
const PAIRS: u32 = 32;
const WINS: u32 = 20;

/// Whether a step prefetches.
#[derive(Clone, Copy)]
pub(crate) enum Prefetches {
    Never,
    Always,
    /// Each launch measures whether prefetches make it faster. The result depends on the CPU and the element types.
    WhereFaster,
}

impl Prefetches {
    /// Returns the choice for steps on `memory_bytes` bytes of memory. The environment variable `INSTEP_PREFETCH` sets
    /// `Always` or `Never`. If the variable is unset, the choice is `Never` for memory that is assumed to be in a
    /// cache, and `WhereFaster` for larger memory.
    ///
    /// # Errors
    /// `Config` if the variable is neither `on` nor `off`.
    pub(crate) fn of(memory_bytes: u64) -> Result<Prefetches> {
        let Some(text) = std::env::var_os("INSTEP_PREFETCH") else {
            let is_beyond = memory_bytes >= BEYOND_CACHE;
            return Ok(if is_beyond { Prefetches::WhereFaster } else { Prefetches::Never });
        };
        match &*text.to_string_lossy() {
            "on" => Ok(Prefetches::Always),
            "off" => Ok(Prefetches::Never),
            other => Err(Error::config(
                "INSTEP_PREFETCH",
                other,
                "is no choice",
                "use on or off, or leave it unset",
            )),
        }
    }
}

/// Measures pairs of neighbouring chunks to decide whether the launch prefetches. In each pair, one chunk runs with
/// prefetches and the other without. Each pair has one vote, so a single interrupted chunk hardly affects the result.
struct Trial {
    pairs_left: AtomicU32,
    wins: AtomicU32,
    /// Number of measured chunks so far, in all passes. Every second of these chunks prefetches, so a launch of one
    /// chunk prefetches in every second measured pass.
    chunks: AtomicU32,
    /// Picoseconds per tile: of the latest chunk without prefetches, and of the latest chunk with prefetches.
    latest: [AtomicU64; 2],
}

impl Trial {
    /// Makes the trial of a launch with `chunks` chunks. The first launch that steps is not compared, because it also
    /// maps pages.
    fn new(prefetches: Prefetches, chunks: usize) -> Trial {
        let (pairs_left, wins) = match prefetches {
            Prefetches::Never => (0, 0),
            Prefetches::Always => (0, WINS),
            Prefetches::WhereFaster => (PAIRS + (chunks as u32).div_ceil(2), 0),
        };
        Trial {
            pairs_left: pairs_left.into(),
            wins: wins.into(),
            chunks: AtomicU32::default(),
            latest: Default::default(),
        }
    }

    /// Runs a chunk, and passes the prefetch distance to `work`. A chunk of a skipped pass is not compared.
    fn run(&self, tiles: usize, steps: impl FnOnce() -> bool, work: impl FnOnce(u64)) {
        if self.pairs_left.load(Ordering::Relaxed) == 0 {
            return work(if self.wins.load(Ordering::Relaxed) >= WINS { AHEAD_BYTES } else { 0 });
        }
        if !steps() {
            return work(0);
        }
        let is_ahead = self.chunks.fetch_add(1, Ordering::Relaxed) % 2 == 1;
        let start = Instant::now();
        work(if is_ahead { AHEAD_BYTES } else { 0 });
        self.count(is_ahead, start.elapsed().as_nanos() as u64 * 1000 / tiles as u64);
    }

    /// Compares a chunk's time with the time of the other chunk in its pair. If threads call this function
    /// concurrently, the other chunk may be of another pair.
    fn count(&self, is_ahead: bool, picoseconds: u64) {
        self.latest[usize::from(is_ahead)].store(picoseconds, Ordering::Relaxed);
        if is_ahead {
            let relaxed = Ordering::Relaxed;
            let left = self.pairs_left.fetch_update(relaxed, relaxed, |left| left.checked_sub(1));
            let is_counted = left.is_ok_and(|left| left <= PAIRS);
            if is_counted && picoseconds < self.latest[0].load(relaxed) {
                self.wins.fetch_add(1, relaxed);
            }
        }
    }
}

#[cfg(test)]
#[path = "../../tests/unit/host/bucket_job.rs"]
mod tests;
