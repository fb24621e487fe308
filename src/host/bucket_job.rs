//! One launch of a bucket on a CPU, as a job of the pool: arguments and tiles, built once.
//!
//! A stepper's job has the addresses of its own memory for good. The job of a bucket that is stepped alone gets
//! addresses before each launch. Running a job allocates nothing.
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

/// How far ahead of its loads a step prefetches, in each stream.
pub(crate) const AHEAD_BYTES: u64 = 2048;

/// Memories that are shorter than this in sum are taken to lie in a cache, where a prefetch has nothing to fetch.
const BEYOND_CACHE: u64 = 32 << 20;

/// Size of each of the four arrays of the measurement. A last-level cache that holds all four is what is then measured.
const BYTES: u64 = 16 << 20;

/// Rounds of the measurement; the fastest counts, since a disturbance makes a round slower, never faster.
const ROUNDS: usize = 3;

/// Returns how far ahead a step of `memory_bytes` prefetches; 0: not at all. `INSTEP_PREFETCH` comes first.
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

/// Runs the memory traffic of a step with and without prefetches, and returns what was faster: by more than noise is, if
/// it is the prefetches.
fn measure(kernels: Kernels) -> Result<u64> {
    let mut stagger = Stagger::default();
    // One allocation: freeing several smaller ones would teach some allocators to keep as much for later.
    let starts = [0, 1, 2, 3].map(|k| (k * (BYTES + PAGE) + stagger.next(BYTES)) as usize / size_of::<f32>());
    let mut arena = Arena::zeroed(4 * (BYTES + PAGE), 0)?;
    let length = BYTES as usize / size_of::<f32>();
    let mut arrays =
        arena.f32s().get_disjoint_mut(starts.map(|start| start..start + length)).unwrap_or_default();
    // Pages that nobody wrote are one page of zeros.
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
