//! Kernel launches of the buckets, prepared before the first pass.
//!
//! A launch holds its arguments and its grid, so running it takes one driver call. A custom optimizer also takes one
//! call to the user's code per parameter. The addresses in the arguments point into memory of the stepper or of its
//! caller, which outlives the launches.
#![allow(unsafe_code)]

use std::mem::{MaybeUninit, offset_of};
use std::ptr;

use crate::abi::{
    INSTEP_GPU_THREADS, INSTEP_MOMENTS_8BIT, INSTEP_OPTIMIZER_CUSTOM, INSTEP_PART_MEASURE, InstepGiven,
    InstepRecord, InstepStepArgs, InstepStepLaunch, InstepTile,
};
use crate::cuda::driver::{Driver, Kernel, Shape};
use crate::cuda::gpu_memory::{DeviceMemory, address};
use crate::cuda::kernels::Kernels;
use crate::error::Result;
use crate::handle::{DevicePtr, StreamHandle};
use crate::launch::{Assignment, CustomParam, Kind, Launch, Regions, rebind};
use crate::layout::Plan;
use crate::optim::EnqueuedStep;

/// If tiles move at least this many bytes on average, each block of a step processes one tile. A full tile reaches this
/// size if a step moves at least 19 bytes per element, and most optimizers in f32 move more. Each parameter's last tile
/// is shorter, and lowers the average. Blocks start in the order of their tiles. With one tile per block, the blocks
/// that run at the same time touch a smaller range of memory. kernels/PERFORMANCE.md has the times.
const LARGE_TILE_BYTES: u64 = 38 << 10;

/// If tiles move fewer bytes than [`LARGE_TILE_BYTES`], for example because all tensors are bf16, each block moves
/// about this many bytes. A single small tile has too few loads to hide the time that a block takes to start.
const SHARE_BYTES: u64 = 224 << 10;

/// The GPU has a slot for each block that can be resident. If there are enough tiles, each slot runs at least this many
/// blocks, one after the other. If there were only slightly more blocks than slots, most slots would be idle while the
/// last blocks run.
const LEAST_TURNS: u64 = 2;

/// One launch of a bucket, and the user's own code that runs after it. Neighbouring buckets may share a launch.
pub(super) struct BucketLaunch {
    kernel: Kernel,
    grid: Grid,
    shape: Shape,
    moved_bytes: u64,
    /// Launches of norms and of the user's own code use only the first field of this struct.
    args: Box<InstepStepLaunch>,
    pub(super) custom: Option<Vec<CustomParam>>,
}

pub(super) struct Preparation<'a> {
    pub(super) kernels: &'a Kernels,
    pub(super) plan: &'a Plan,
    pub(super) assignment: &'a Assignment,
    /// The caller's limit on the blocks of one launch, if there is one.
    pub(super) max_blocks: Option<u32>,
}

impl Preparation<'_> {
    /// Prepares the launches of every bucket and uploads their tiles.
    pub(super) fn launches(&self, kind: Kind, memory: &mut DeviceMemory) -> Result<Vec<Vec<BucketLaunch>>> {
        let mut prepared = Vec::new();
        let mut neighbours: Vec<Vec<Launch>> = Vec::new();
        for (bucket, shares) in (0..).zip(self.assignment.shares_with_next(self.plan)) {
            let mut launches = Launch::all(kind, bucket, self.plan, &memory.regions, self.assignment);
            if let Some(first) = neighbours.first() {
                launches
                    .iter_mut()
                    .zip(first)
                    .for_each(|(own, first)| own.count_from(&first.args, self.plan));
            }
            neighbours.push(launches);
            if kind == Kind::Norm || !shares {
                prepared.extend(self.of_neighbours(kind, std::mem::take(&mut neighbours), memory)?);
            }
        }
        Ok(prepared)
    }

    /// Prepares the launches of neighbouring buckets. The k-th launches of these buckets have consecutive tiles in one
    /// table.
    fn of_neighbours(
        &self,
        kind: Kind,
        buckets: Vec<Vec<Launch>>,
        memory: &mut DeviceMemory,
    ) -> Result<Vec<Vec<BucketLaunch>>> {
        let mut prepared: Vec<_> =
            buckets.iter().map(|launches| Vec::with_capacity(launches.len())).collect();
        for place in 0..buckets[0].len() {
            let tiles: Vec<_> = buckets.iter().flat_map(|launches| &launches[place].tiles).copied().collect();
            let mut table = memory.keep(&tiles)?;
            for (launches, prepared) in buckets.iter().zip(&mut prepared) {
                prepared.push(self.prepare(kind, &launches[place], table, &*memory.driver)?);
                table = table.wrapping_add(launches[place].tiles.len());
            }
        }
        Ok(prepared)
    }

    /// Prepares the launches of a plan that has one bucket, and uploads their tiles. Returns each launch with its
    /// tiles. The addresses of tensors are passed at each launch.
    pub(super) fn unbound(
        &self,
        kind: Kind,
        memory: &mut DeviceMemory,
    ) -> Result<Vec<(BucketLaunch, Vec<InstepTile>)>> {
        let launches = Launch::unbound(kind, 0, self.plan, &memory.regions, self.assignment);
        let prepare = |launch: Launch| {
            let table = memory.keep(&launch.tiles)?;
            Ok((self.prepare(kind, &launch, table, &*memory.driver)?, launch.tiles))
        };
        launches.into_iter().map(prepare).collect()
    }

    fn prepare(
        &self,
        kind: Kind,
        launch: &Launch,
        table: *const InstepTile,
        driver: &dyn Driver,
    ) -> Result<BucketLaunch> {
        let Launch { mut args, ref tiles, moved_bytes } = *launch;
        args.tiles = table;
        let is_custom = kind == Kind::Step && args.optimizer == INSTEP_OPTIMIZER_CUSTOM;
        let kernel = match kind {
            Kind::Step => self.kernels.step(args.optimizer, args.moments == INSTEP_MOMENTS_8BIT),
            Kind::Norm => self.kernels.norm,
        };
        let measures = kind == Kind::Norm || args.part == INSTEP_PART_MEASURE;
        let grid = if is_custom { Grid::One } else { self.grid(kernel, measures, driver)? };
        let shape = grid.shape(&mut args, moved_bytes);
        Ok(BucketLaunch {
            kernel,
            grid,
            shape,
            moved_bytes,
            custom: is_custom.then(|| CustomParam::all(&args, tiles, self.plan, self.assignment)),
            args: Box::new(InstepStepLaunch { args, given: nothing_given() }),
        })
    }

    fn grid(&self, kernel: Kernel, measures: bool, driver: &dyn Driver) -> Result<Grid> {
        // SAFETY: `kernels` holds the kernel.
        let resident = unsafe { driver.resident_blocks(kernel, INSTEP_GPU_THREADS)? };
        let most = self.max_blocks.unwrap_or(u32::MAX);
        Ok(match self.max_blocks {
            _ if measures => Grid::Even { most: resident.min(most) },
            Some(most) => Grid::AtMost { most },
            None => Grid::Short { resident },
        })
    }
}

/// How tiles are assigned to blocks. The share of a block is the number of its tiles. In a launch that computes norms,
/// each block ends with atomic additions, so the launch has at most as many blocks as can be resident at a time, with
/// equal shares. In a launch of a step, each block has a short share, unless the caller limits the number of blocks. A
/// launch for a custom optimizer has one block.
#[derive(Clone, Copy)]
enum Grid {
    One,
    Even { most: u32 },
    AtMost { most: u32 },
    Short { resident: u32 },
}

impl Grid {
    /// Returns the shape of a launch over these arguments' tiles, and sets `args.share`, the tiles per block.
    fn shape(self, args: &mut InstepStepArgs, moved_bytes: u64) -> Shape {
        let tiles = args.tile_count;
        let blocks = match self {
            Grid::One => tiles.min(1) as u32,
            Grid::Even { most } => even_shares(tiles, most),
            Grid::AtMost { most } => tiles.min(most.into()) as u32,
            Grid::Short { resident } => short_shares(tiles, resident, moved_bytes),
        };
        args.share = share(tiles, blocks);
        Shape { blocks, threads: INSTEP_GPU_THREADS }
    }
}

/// Divides the tiles into equal shares, one per block, and returns the number of blocks, which is at most `most`. Only
/// the last share may be smaller. With exactly `most` blocks, the shares would have the same size, and the last blocks
/// might have no tile.
fn even_shares(tiles: u64, most: u32) -> u32 {
    tiles.div_ceil(tiles.div_ceil(most.into()).max(1)) as u32
}

/// Returns the number of blocks to launch. Each block's share of the tiles is then one large tile, or several smaller
/// tiles that together move about [`SHARE_BYTES`]. A concurrent kernel, such as one of NCCL's, occupies a part of the
/// GPU's slots. Blocks without a slot start when other blocks end. Blocks with short shares end soon, so blocks without
/// a slot do not wait long.
fn short_shares(tiles: u64, resident: u32, moved_bytes: u64) -> u32 {
    let is_large = moved_bytes >= LARGE_TILE_BYTES * tiles;
    let short = if is_large { 1 } else { (SHARE_BYTES * tiles).div_ceil(moved_bytes.max(1)) };
    tiles.div_ceil(short.min(tiles / (LEAST_TURNS * u64::from(resident))).max(1)) as u32
}

/// Returns how many consecutive tiles each block takes, so that the blocks together take all tiles.
fn share(tiles: u64, blocks: u32) -> u64 {
    tiles.div_ceil(u64::from(blocks).max(1))
}

/// Returns an empty argument, for a launch that reads its records from control memory.
pub(super) fn nothing_given() -> InstepGiven {
    // SAFETY: all fields are numbers, or records of numbers, for which zeros are valid.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

impl BucketLaunch {
    /// Writes the new addresses of the caller's moved tensors into the launch, but not into its table of tiles.
    pub(super) fn rebind(&mut self, kind: Kind, plan: &Plan, regions: &Regions) {
        rebind(kind, &mut self.args.args, &mut [], plan, regions);
        self.custom.iter_mut().flatten().for_each(|param| param.rebind(plan, regions));
    }

    pub(super) fn args(&self) -> InstepStepArgs {
        self.args.args
    }

    /// Returns the address of the launch's table of tiles, and its length in bytes. Kernels only read the table.
    pub(super) fn table(&self) -> (usize, u64) {
        (self.args.args.tiles.addr(), self.args.args.tile_count * size_of::<InstepTile>() as u64)
    }

    /// Copies the launch's arguments, lets `change` complete the copy, and enqueues the launch with the copy.
    ///
    /// # Safety
    /// The conditions of [`enqueue`](Self::enqueue) hold for the completed arguments.
    pub(super) unsafe fn enqueue_changed(
        &self,
        driver: &dyn Driver,
        stream: StreamHandle,
        change: impl FnOnce(&mut InstepStepLaunch),
    ) -> Result<()> {
        if self.shape.blocks == 0 {
            return Ok(());
        }
        let mut args = *self.args;
        change(&mut args);
        // SAFETY: the kernel takes this struct, and the caller guarantees its addresses.
        unsafe { driver.launch(self.kernel, self.shape, stream, ptr::from_ref(&args).cast()) }
    }

    /// Enqueues one launch for one bucket, or for neighbouring buckets with consecutive tiles in a table.
    ///
    /// # Safety
    /// The stepper's memory is alive. Until the kernel has ended, nothing else touches its memory.
    pub(super) unsafe fn enqueue<'a>(
        neighbours: impl Iterator<Item = &'a BucketLaunch> + Clone,
        driver: &dyn Driver,
        stream: StreamHandle,
    ) -> Result<()> {
        let Some(first) = neighbours.clone().next() else { return Ok(()) };
        let sum = |of: fn(&BucketLaunch) -> u64| neighbours.clone().map(of).sum();
        let (tiles, moved_bytes) =
            (sum(|launch| launch.args.args.tile_count), sum(|launch| launch.moved_bytes));
        if tiles == 0 {
            return Ok(());
        }
        let (mut args, mut shape, mut shared) = (&*first.args, first.shape, None);
        if tiles > args.args.tile_count {
            let together = shared.insert(*args);
            together.args.tile_count = tiles;
            (shape, args) = (first.grid.shape(&mut together.args, moved_bytes), together);
        }
        // SAFETY: the kernel takes this struct, and the caller guarantees the rest.
        unsafe { driver.launch(first.kernel, shape, stream, ptr::from_ref(args).cast())? };
        let mut params = neighbours.filter_map(|launch| launch.custom.as_ref()).flatten();
        params.try_for_each(|param| enqueue_param(param, first.args.args.records, stream))
    }
}

fn enqueue_param(param: &CustomParam, records: *mut InstepRecord, stream: StreamHandle) -> Result<()> {
    let states = param.states.map(|state| address(state));
    let scalars = address(records.wrapping_add(param.record)).0 + offset_of!(InstepRecord, scalars) as u64;
    param.rule.enqueue_param(&EnqueuedStep {
        name: &param.name,
        stream,
        len: param.len,
        param: address(param.param),
        grad_sum: address(param.grad),
        states: &states[..param.state_count],
        scalars: DevicePtr(scalars),
    })
}

#[cfg(test)]
#[path = "../../tests/unit/cuda/launches.rs"]
mod tests;
