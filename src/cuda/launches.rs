//! Kernel launches of the buckets, prepared before the first pass.
//!
//! A launch holds its arguments and its grid, so running it takes one driver call and, with the user's own code, one
//! call per parameter. The addresses in the arguments lead into the stepper's memory, which outlives the launches.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;

use crate::abi::{
    INSTEP_GPU_THREADS, INSTEP_MAX_STATES, INSTEP_MOMENTS_8BIT, INSTEP_OPTIMIZER_CUSTOM, INSTEP_PART_MEASURE,
    InstepRecord, InstepStepArgs, InstepStepLaunch, InstepTile,
};
use crate::cuda::driver::{Driver, Entered, Kernel, Shape};
use crate::cuda::gpu_memory::{DeviceMemory, address};
use crate::cuda::kernels::Kernels;
use crate::error::Result;
use crate::handle::{DevicePtr, StreamHandle};
use crate::launch::{Assignment, Kind, Launch, Regions, StepConstants, rebind};
use crate::layout::Plan;
use crate::op::{Memory, Span};
use crate::optim::{EnqueuedStep, StepParam};

/// What a block's share of a step moves: four tiles of AdamW in f32, eight throughout in bf16. Predicted, not measured on a
/// GPU yet; kernels/PERFORMANCE.md.
const SHARE_BYTES: u64 = 224 << 10;

/// One launch of a bucket, and the user's own code that runs after it.
pub(super) struct BucketLaunch {
    kernel: Kernel,
    shape: Shape,
    /// Of a norm and of the user's own code, the first field alone.
    args: Box<InstepStepLaunch>,
    custom: Option<EnqueuedParams>,
}

/// Inputs that all launches of one stepper share.
pub(super) struct Preparation<'a> {
    pub(super) driver: &'a Arc<dyn Driver>,
    pub(super) kernels: &'a Kernels,
    pub(super) plan: &'a Plan,
    pub(super) constants: &'a StepConstants,
    pub(super) assignment: &'a Assignment,
    /// The stream on which tiles are uploaded.
    pub(super) stream: StreamHandle,
    /// Most blocks of one launch, if the caller says how many.
    pub(super) max_blocks: Option<u32>,
}

impl Preparation<'_> {
    /// Prepares the launches of every bucket and uploads their tiles.
    pub(super) fn launches(&self, kind: Kind, memory: &mut DeviceMemory) -> Result<Vec<Vec<BucketLaunch>>> {
        (0..self.plan.buckets().len() as u32).map(|bucket| self.of_bucket(kind, bucket, memory)).collect()
    }

    fn of_bucket(&self, kind: Kind, bucket: u32, memory: &mut DeviceMemory) -> Result<Vec<BucketLaunch>> {
        let inputs = (self.constants, self.assignment);
        let launches = Launch::all(kind, bucket, self.plan, &memory.regions, inputs);
        launches.into_iter().map(|launch| Ok(self.prepare(kind, launch, memory)?.0)).collect()
    }

    /// Prepares the launches of a plan's one bucket, whose tensors' addresses come with each launch, with the tiles that
    /// they upload.
    pub(super) fn unbound(
        &self,
        kind: Kind,
        memory: &mut DeviceMemory,
    ) -> Result<Vec<(BucketLaunch, Vec<InstepTile>)>> {
        let inputs = (self.constants, self.assignment);
        let launches = Launch::unbound(kind, 0, self.plan, &memory.regions, inputs);
        launches.into_iter().map(|launch| self.prepare(kind, launch, memory)).collect()
    }

    fn prepare(
        &self,
        kind: Kind,
        launch: Launch,
        memory: &mut DeviceMemory,
    ) -> Result<(BucketLaunch, Vec<InstepTile>)> {
        let Launch { mut args, tiles, moved_bytes } = launch;
        args.tiles = memory.keep(self.driver, self.stream, &tiles)?;
        let is_custom = kind == Kind::Step && args.optimizer == INSTEP_OPTIMIZER_CUSTOM;
        let kernel = match kind {
            Kind::Step => self.kernels.step(args.optimizer, args.moments == INSTEP_MOMENTS_8BIT),
            Kind::Norm => self.kernels.norm,
        };
        let blocks = if is_custom {
            args.tile_count.min(1) as u32
        } else {
            let measures = kind == Kind::Norm || args.part == INSTEP_PART_MEASURE;
            self.blocks(kernel, measures, args.tile_count, moved_bytes)?
        };
        args.share = share(args.tile_count, blocks);
        let launch = BucketLaunch {
            kernel,
            shape: Shape { blocks, threads: INSTEP_GPU_THREADS },
            custom: is_custom.then(|| EnqueuedParams::new(&args, &tiles, self.plan, self.assignment)),
            args: with_nothing_given(args),
        };
        Ok((launch, tiles))
    }

    /// Blocks of a launch. Those that measure end in atomics, so they are as few as are resident at a time, with even shares.
    /// Those that step have short shares, or are as many as the caller says.
    fn blocks(&self, kernel: Kernel, measures: bool, tiles: u64, moved_bytes: u64) -> Result<u32> {
        let _entered = Entered::new(&**self.driver)?;
        // SAFETY: `kernels` holds the kernel.
        let resident = unsafe { self.driver.resident_blocks(kernel, INSTEP_GPU_THREADS)? };
        let most = self.max_blocks.unwrap_or(u32::MAX);
        Ok(match self.max_blocks {
            _ if measures => even_shares(tiles, resident.min(most)),
            Some(most) => tiles.min(most.into()) as u32,
            None => short_shares(tiles, resident, moved_bytes),
        })
    }
}

/// Returns how many blocks share the tiles so that each has as many as the fullest, or one less. With `most` blocks a few
/// would have one tile more than the others, and the others would wait for them.
fn even_shares(tiles: u64, most: u32) -> u32 {
    tiles.div_ceil(tiles.div_ceil(most.into()).max(1)) as u32
}

/// Returns how many blocks share the tiles so that a share moves about [`SHARE_BYTES`], and none of the resident blocks is
/// without one. Another kernel on the GPU, such as NCCL's, leaves fewer slots than an empty GPU has. Blocks that find none
/// start when others end, and short ones end soon.
fn short_shares(tiles: u64, resident: u32, moved_bytes: u64) -> u32 {
    let short = (SHARE_BYTES * tiles).div_ceil(moved_bytes.max(1));
    tiles.div_ceil(short.min(tiles / u64::from(resident)).max(1)) as u32
}

/// Returns how many consecutive tiles each block takes, so that the blocks take all.
fn share(tiles: u64, blocks: u32) -> u64 {
    tiles.div_ceil(u64::from(blocks).max(1))
}

/// Completes the argument of a launch that reads records where they are.
fn with_nothing_given(args: InstepStepArgs) -> Box<InstepStepLaunch> {
    // SAFETY: zeros are numbers, and records of zeros.
    Box::new(InstepStepLaunch { args, given: unsafe { MaybeUninit::zeroed().assume_init() } })
}

impl BucketLaunch {
    /// Follows the caller's tensors to other addresses, but for its table of tiles.
    pub(super) fn rebind(&mut self, kind: Kind, plan: &Plan, regions: &Regions) {
        rebind(kind, (&mut self.args.args, &mut []), plan, regions);
        if let Some(custom) = &mut self.custom {
            custom.rebind(plan, regions);
        }
    }

    /// Returns its arguments.
    pub(super) fn args(&self) -> InstepStepArgs {
        self.args.args
    }

    /// Whether code of the user's runs after it.
    pub(super) fn is_custom(&self) -> bool {
        self.custom.is_some()
    }

    /// Returns its table of tiles: the address, the bytes, and that it is only read.
    pub(super) fn table(&self) -> (usize, u64, bool) {
        (self.args.args.tiles.addr(), self.args.args.tile_count * size_of::<InstepTile>() as u64, false)
    }

    /// Returns how many tiles its table has.
    pub(super) fn tile_count(&self) -> usize {
        self.args.args.tile_count as usize
    }

    /// Enqueues the launch with other arguments, which `change` completes.
    ///
    /// # Safety
    /// As for [`enqueue`](Self::enqueue), with those arguments.
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
        // SAFETY: the kernel takes this struct, and its addresses are the caller's promise.
        unsafe { driver.launch(self.kernel, self.shape, stream, ptr::from_ref(&args).cast()) }
    }

    /// Enqueues the launch.
    ///
    /// # Safety
    /// The stepper's memory is alive, and nothing else touches what the kernel touches until it has ended.
    pub(super) unsafe fn enqueue(&self, driver: &dyn Driver, stream: StreamHandle) -> Result<()> {
        if self.shape.blocks == 0 {
            return Ok(());
        }
        // SAFETY: the kernel takes this struct; the rest is the caller's promise.
        unsafe { driver.launch(self.kernel, self.shape, stream, ptr::from_ref(&*self.args).cast())? };
        match &self.custom {
            Some(custom) => custom.enqueue(stream),
            None => Ok(()),
        }
    }
}

const ELEMENT_BYTES: u64 = size_of::<f32>() as u64;

/// The calls of one launch.
pub(super) struct EnqueuedParams {
    params: Vec<EnqueuedParam>,
}

struct EnqueuedParam {
    rule: Arc<dyn StepParam>,
    name: String,
    segment: usize,
    len: u64,
    param: DevicePtr,
    grad: DevicePtr,
    states: [DevicePtr; INSTEP_MAX_STATES as usize],
    state_count: usize,
    scalars: DevicePtr,
}

impl EnqueuedParams {
    pub(super) fn new(
        args: &InstepStepArgs,
        tiles: &[InstepTile],
        plan: &Plan,
        assignment: &Assignment,
    ) -> EnqueuedParams {
        const SCALARS_AT: u64 = std::mem::offset_of!(InstepRecord, scalars) as u64;
        let call = |tile: &InstepTile| {
            let (record, segments) = (tile.record as usize, plan.segments().len());
            let (rule, name, state_count) = assignment.custom(record / segments, record % segments)?;
            let at = |base: usize, offset: u64| DevicePtr(base as u64 + offset * ELEMENT_BYTES);
            let record_at = args.records.addr() as u64 + (record * size_of::<InstepRecord>()) as u64;
            Some(EnqueuedParam {
                rule: Arc::clone(rule),
                name: name.to_owned(),
                segment: record % segments,
                len: plan.segments()[record % segments].len,
                param: DevicePtr(tile.param),
                grad: at(args.grads.addr(), tile.grad_offset),
                states: args.states.map(|base| at(base.addr(), tile.state_offset)),
                state_count,
                scalars: DevicePtr(record_at + SCALARS_AT),
            })
        };
        let params = tiles.iter().filter(|tile| tile.first != 0).filter_map(call).collect();
        EnqueuedParams { params }
    }

    /// Follows the caller's tensors to other addresses.
    pub(super) fn rebind(&mut self, plan: &Plan, regions: &Regions) {
        for param in &mut self.params {
            let segment = &plan.segments()[param.segment];
            let at = |memory| address(regions.resolve(Span::segment(memory, plan, segment)));
            (param.param, param.grad) = (at(Memory::Params), at(Memory::Grads));
        }
    }

    /// Calls the user's code for every parameter.
    pub(super) fn enqueue(&self, stream: StreamHandle) -> Result<()> {
        for param in &self.params {
            param.rule.enqueue_param(&EnqueuedStep {
                name: &param.name,
                stream,
                len: param.len,
                param: param.param,
                grad_sum: param.grad,
                states: &param.states[..param.state_count],
                scalars: param.scalars,
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{SHARE_BYTES, even_shares, share, short_shares};

    #[test]
    fn short_shares_move_no_more_than_they_should_and_leave_no_resident_block_without_one() {
        let tile_bytes = SHARE_BYTES / 4;
        for resident in [1, 7, 528] {
            for tiles in 0..3300u64 {
                let blocks = short_shares(tiles, resident, tiles * tile_bytes);
                assert!(share(tiles, blocks) <= 4, "{tiles} tiles, {resident} resident");
                assert!(u64::from(blocks) * share(tiles, blocks) >= tiles);
                assert!(
                    u64::from(blocks) >= tiles.min(resident.into()),
                    "{tiles} tiles, {resident} resident"
                );
            }
        }
    }

    #[test]
    fn every_block_has_as_many_tiles_as_the_fullest_or_one_less() {
        for most in [1, 2, 7, 8, 528] {
            for tiles in 0..3300 {
                let blocks = even_shares(tiles, most);
                assert!(
                    blocks <= most && u64::from(blocks) <= tiles,
                    "{tiles} tiles, at most {most}: {blocks}"
                );
                let fullest = tiles.div_ceil(most.into());
                assert_eq!(
                    tiles.div_ceil(u64::from(blocks).max(1)),
                    fullest,
                    "{tiles} tiles, at most {most}: {blocks}"
                );
            }
        }
    }
}
