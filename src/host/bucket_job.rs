//! One launch of a bucket on a CPU, as a job of the pool: arguments and tiles, built once.
//!
//! A stepper's job has the addresses of its own memory for good. The job of a bucket that is stepped alone gets
//! addresses before each launch. Running a job allocates nothing.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ops::RangeInclusive;
use std::sync::Arc;

use crate::abi::{InstepControl, InstepStepArgs, InstepTile};
use crate::host::kernels::Kernels;
use crate::host::memories::Memories;
use crate::launch::{Bases, Kind, Launch, Regions, rebind};
use crate::layout::Plan;
use crate::pool::Chunks;

/// Chunks of a launch per thread: enough for one that comes late to find a fair part.
const CHUNKS_PER_THREAD: usize = 4;

/// Tiles of a chunk: enough to outweigh the cost of taking it, and few enough that all threads end together.
const TILES_PER_CHUNK: RangeInclusive<usize> = 4..=64;

/// How a launch is carried out; no bit depends on it but by the kernels.
#[derive(Clone, Copy)]
pub(crate) struct Execution {
    pub(crate) kernels: Kernels,
    pub(crate) ahead_bytes: u64,
    pub(crate) threads: usize,
}

/// See the module.
pub(crate) struct BucketJob {
    kind: Kind,
    args: UnsafeCell<InstepStepArgs>,
    /// Per segment, the addresses of its tensors; empty if the arguments hold them.
    bases: Arc<SegmentBases>,
    /// Changes only with the arguments.
    tiles: UnsafeCell<Vec<InstepTile>>,
    tile_count: usize,
    tiles_per_chunk: usize,
    moved_bytes: u64,
    execution: Execution,
    /// Keeps what the arguments point to alive.
    _memories: Arc<Memories>,
}

/// The addresses of a bucket's tensors, which all launches of the bucket share and its owner changes between launches.
#[derive(Default)]
pub(crate) struct SegmentBases(UnsafeCell<Vec<Bases>>);

// SAFETY: `set` needs that no launch runs; the pool's lock publishes what it wrote.
unsafe impl Send for SegmentBases {}
// SAFETY: `set` needs that no launch runs; the pool's lock publishes what it wrote.
unsafe impl Sync for SegmentBases {}

impl SegmentBases {
    /// Changes the addresses.
    ///
    /// # Safety
    /// No launch that reads them is running, and no other thread calls this.
    pub(crate) unsafe fn set(&self, change: impl FnOnce(&mut Vec<Bases>)) {
        // SAFETY: nothing else refers to it now, by the contract.
        change(unsafe { &mut *self.0.get() });
    }
}

// SAFETY: the pointers lead into `_memories`, which is shareable, or to what the launch's caller lends it; chunks of one
// launch touch different tiles, and control words that they share are atomics on the other side. Arguments change only
// between launches.
unsafe impl Send for BucketJob {}
// SAFETY: chunks of one launch touch different tiles, and arguments change only between launches, as for `Send`.
unsafe impl Sync for BucketJob {}

impl BucketJob {
    /// A job whose arguments hold all addresses.
    pub(crate) fn bound(
        kind: Kind,
        launch: Launch,
        memories: &Arc<Memories>,
        execution: Execution,
    ) -> BucketJob {
        BucketJob::unbound(kind, launch, memories, execution, Arc::default())
    }

    /// A job that takes its tensors' addresses from `bases`: one for all segments, or one per segment.
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
        BucketJob {
            kind,
            args: UnsafeCell::new(args),
            bases,
            tile_count: tiles.len(),
            tiles: UnsafeCell::new(tiles),
            tiles_per_chunk,
            moved_bytes,
            execution,
            _memories: Arc::clone(memories),
        }
    }

    /// Sets the control block that decides about the launches that follow.
    ///
    /// # Safety
    /// As for [`SegmentBases::set`]; the block outlives those launches.
    pub(crate) unsafe fn set_control(&self, control: *mut InstepControl) {
        // SAFETY: nothing else refers to it now, by the contract.
        unsafe { (*self.args.get()).control = control }
    }

    /// Follows the caller's tensors to other addresses.
    ///
    /// # Safety
    /// No launch of this job is running, and no other thread calls this.
    pub(crate) unsafe fn rebind(&self, plan: &Plan, regions: &Regions) {
        // SAFETY: nothing else refers to either now, by the contract.
        let (args, tiles) = unsafe { (&mut *self.args.get(), &mut *self.tiles.get()) };
        rebind(self.kind, (args, tiles), plan, regions);
        args.tiles = tiles.as_ptr();
    }

    /// Runs some tiles with these arguments.
    ///
    /// # Safety
    /// The arguments' pointers are valid for those tiles, and nothing else touches what the tiles cover.
    unsafe fn run_tiles(&self, args: &InstepStepArgs, first: usize, last: usize) {
        let (first, last, Execution { kernels, ahead_bytes, .. }) =
            (first as u64, last as u64, self.execution);
        // SAFETY: the caller's promise.
        unsafe {
            match self.kind {
                Kind::Norm => kernels.norm(args, first, last),
                Kind::Step => kernels.step(args, first, last, ahead_bytes),
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
        // SAFETY: arguments and addresses change only between launches. They were resolved from the op's accesses, and
        // `_memories` keeps that memory alive, or lent by the launch's caller. Chunks are disjoint runs of this job's own
        // tiles, and nothing else touches the bucket, as for every op.
        unsafe {
            let mut args = *self.args.get();
            match (*self.bases.0.get()).as_slice() {
                [] => self.run_tiles(&args, first, last),
                [of_all] => {
                    of_all.put(&mut args);
                    self.run_tiles(&args, first, last);
                }
                of_segments => {
                    let mut at = first;
                    for tiles in (&(*self.tiles.get()))[first..last].chunk_by(|a, b| a.record == b.record) {
                        of_segments[tiles[0].record as usize].put(&mut args);
                        self.run_tiles(&args, at, at + tiles.len());
                        at += tiles.len();
                    }
                }
            }
        }
    }
}
