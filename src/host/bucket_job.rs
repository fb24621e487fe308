//! One launch of a bucket on a CPU, as a job of the pool: arguments and tiles, built once.
//!
//! A stepper's job keeps the addresses of the stepper's memory. The job of a `BucketStep` gets addresses before each
//! launch. Running a job allocates nothing.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ops::RangeInclusive;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::abi::{InstepControl, InstepStepArgs, InstepTile};
use crate::error::{Error, Result};
use crate::host::kernels::{Isa, Kernels};
use crate::host::memories::{Arena, Memories};
use crate::host::stagger::{PAGE, Stagger};
use crate::launch::{Bases, Kind, Launch, Regions, rebind};
use crate::layout::Plan;
use crate::pool::Chunks;

/// Chunks of a launch per thread: enough that a thread that comes late still finds a fair part.
const CHUNKS_PER_THREAD: usize = 4;

/// Tiles of a chunk: enough to outweigh the cost of taking the chunk, and few enough that all threads end together.
const TILES_PER_CHUNK: RangeInclusive<usize> = 4..=64;

/// How a launch is carried out. Results have the same bits for any number of threads and any prefetch distance.
#[derive(Clone, Copy)]
pub(crate) struct Execution {
    pub(crate) kernels: Kernels,
    pub(crate) ahead_bytes: u64,
    pub(crate) threads: usize,
}

/// One launch of a bucket, as a job of the pool.
pub(crate) struct BucketJob {
    kind: Kind,
    args: UnsafeCell<InstepStepArgs>,
    /// Per segment, the addresses of its tensors; empty if the arguments hold the addresses.
    bases: Arc<SegmentBases>,
    /// The table of tiles. It changes only together with the arguments.
    tiles: UnsafeCell<Vec<InstepTile>>,
    tile_count: usize,
    tiles_per_chunk: usize,
    moved_bytes: u64,
    execution: Execution,
    /// Keeps what the arguments point to alive.
    _memories: Arc<Memories>,
}

/// The addresses of a bucket's tensors. All launches of the bucket share them, and their owner changes them between
/// launches.
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

// SAFETY: the pointers lead into `_memories`, which is shareable, or to memory that the launch's caller lends; chunks
// of one launch touch different tiles, and the kernels access control words that chunks share as atomics. Arguments
// change only between launches.
unsafe impl Send for BucketJob {}
// SAFETY: chunks of one launch touch different tiles, and arguments change only between launches, as for `Send`.
unsafe impl Sync for BucketJob {}

impl BucketJob {
    /// Makes a job whose arguments hold all addresses.
    pub(crate) fn bound(
        kind: Kind,
        launch: Launch,
        memories: &Arc<Memories>,
        execution: Execution,
    ) -> BucketJob {
        BucketJob::unbound(kind, launch, memories, execution, Arc::default())
    }

    /// Makes a job that takes its tensors' addresses from `bases`, which has one entry for all segments or one per
    /// segment.
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

    /// Sets the control block that later launches use.
    ///
    /// # Safety
    /// No launch of this job is running, and no other thread calls this. The block outlives the launches.
    pub(crate) unsafe fn set_control(&self, control: *mut InstepControl) {
        // SAFETY: nothing else refers to it now, by the contract.
        unsafe { (*self.args.get()).control = control }
    }

    /// Replaces the addresses of the caller's tensors.
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
        // SAFETY: arguments and addresses change only between launches. They were resolved from the op's accesses.
        // `_memories` keeps that memory alive, or the launch's caller lends it. Chunks are disjoint runs of this job's
        // own tiles, and by the schedule no other op touches the bucket now.
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

/// How far ahead of its loads a step prefetches, in each array.
pub(crate) const AHEAD_BYTES: u64 = 2048;

/// Memories that take fewer bytes than this together are assumed to lie in a cache, where prefetches do not help.
const BEYOND_CACHE: u64 = 32 << 20;

/// Size of each of the four arrays of the measurement. If the last-level cache holds all four, the measurement is of
/// that cache.
const BYTES: u64 = 16 << 20;

/// Rounds of the measurement. The fastest counts, because disturbances only make a round slower.
const ROUNDS: usize = 3;

/// Returns how many bytes ahead a step of `memory_bytes` prefetches; 0 means no prefetches. `INSTEP_PREFETCH` overrides
/// the measurement.
///
/// # Errors
/// `Config` if the variable is neither `on` nor `off`.
pub(crate) fn ahead_bytes(kernels: Kernels, memory_bytes: u64) -> Result<u64> {
    static MEASURED: [OnceLock<u64>; Isa::ALL.len()] = [const { OnceLock::new() }; Isa::ALL.len()];
    let Some(text) = std::env::var_os("INSTEP_PREFETCH") else {
        let is_beyond = memory_bytes >= BEYOND_CACHE;
        let measured = || *MEASURED[kernels.isa() as usize].get_or_init(|| measure(kernels).unwrap_or(0));
        return Ok(if is_beyond { measured() } else { 0 });
    };
    match &*text.to_string_lossy() {
        "on" => Ok(AHEAD_BYTES),
        "off" => Ok(0),
        other => {
            Err(Error::config("INSTEP_PREFETCH", other, "is no choice", "use on or off, or leave it unset"))
        }
    }
}

/// Runs the memory traffic of a step with and without prefetches, and returns the faster distance. Prefetches must be
/// more than 3 % faster, so that noise does not choose them.
fn measure(kernels: Kernels) -> Result<u64> {
    let mut stagger = Stagger::default();
    // One allocation, because some allocators keep memory for reuse after several smaller ones were freed.
    let starts = [0, 1, 2, 3].map(|k| (k * (BYTES + PAGE) + stagger.next(BYTES)) as usize / size_of::<f32>());
    let mut arena = Arena::zeroed(4 * (BYTES + PAGE), 0)?;
    let length = BYTES as usize / size_of::<f32>();
    let mut arrays =
        arena.f32s().get_disjoint_mut(starts.map(|start| start..start + length)).unwrap_or_default();
    // Pages are written first, because unwritten pages all map to one page of zeros.
    arrays.iter_mut().for_each(|array| array.fill(1.0));
    let mut fastest = [u128::MAX; 2];
    for _ in 0..ROUNDS {
        for (fastest, ahead_bytes) in fastest.iter_mut().zip([0, AHEAD_BYTES]) {
            let start = Instant::now();
            kernels.stream(&mut arrays, ahead_bytes);
            *fastest = start.elapsed().as_nanos().min(*fastest);
        }
    }
    Ok(if fastest[1] * 100 < fastest[0] * 97 { AHEAD_BYTES } else { 0 })
}
