//! The device of one rank on a GPU: its parts, its construction, and a drop that does not wait long.
//!
//! Construction prepares the arguments of all launches before the first pass. Fields that the GPU may still use are
//! dropped explicitly, in the order that `drop` describes.
#![allow(unsafe_code)]

use std::mem::{self, ManuallyDrop};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::Cuda;
use super::driver::Entered;
use super::engine::Engine;
use super::gpu_memory::{DeviceMemory, HostMemory};
use super::host_steps::{HostSide, HostSteps};
use super::kernels::Kernels;
use super::launches::{BucketLaunch, Preparation};
use super::owned::Event;
use super::pinned::{SettingsRing, StatusRing};
use super::streams::Streams;
use super::tile_tables::MovingTiles;
use super::timing::Timing;
use crate::collective::Comms;
use crate::device::Blueprint;
use crate::error::{Error, Result};
use crate::launch::{Assignment, Kind, NormStop, Settings, part_of_step};
use crate::layout::Plan;
use crate::op::{Action, Op, STREAMS, Stream, Ticket};

/// One rank's GPU.
pub struct CudaDevice {
    pub(super) cuda: Cuda,
    pub(super) plan: Arc<Plan>,
    pub(super) assignment: Arc<Assignment>,
    pub(super) comms: Comms,
    pub(super) engine: ManuallyDrop<Engine>,
    pub(super) norms: Vec<Vec<BucketLaunch>>,
    pub(super) steps: Vec<Vec<BucketLaunch>>,
    /// For each bucket, the points at which its step stops so that ranks can add up the norms of full parameters.
    stops: Vec<Vec<NormStop>>,
    /// Tiles of all steps, or `None` until the caller first moves a parameter.
    pub(super) moving: ManuallyDrop<Option<MovingTiles>>,
    /// With offload, the host's part, which runs the steps.
    pub(super) host: ManuallyDrop<Option<HostSteps>>,
    /// How often the caller's tensors have moved. A pass that was captured before the last move has old addresses.
    pub(super) bindings: u64,
    pub(super) status: ManuallyDrop<StatusRing>,
    pub(crate) timing: Option<Timing>,
    pub(crate) streams: Streams,
    pub(super) is_capturing: bool,
    /// The streams that a wait has added to the latest capture.
    pub(super) forked: [bool; STREAMS],
    /// For each stream, the latest position that was recorded outside captures.
    pub(super) recorded: [Option<Ticket>; STREAMS],
    pub(super) replayed: Option<Event>,
    pub(super) failed: Option<Error>,
    pub(super) origin: Instant,
}

// SAFETY: the pointers in the arguments lead into the device's own memory, or into memory that the caller has promised
// to keep valid. Methods use them only through the driver.
unsafe impl Send for CudaDevice {}

impl CudaDevice {
    /// Builds the device. `host` has the kernels and threads of the host's steps, if the plan is offloaded.
    pub(crate) fn new(cuda: Cuda, blueprint: Blueprint, host: Option<HostSide>) -> Result<CudaDevice> {
        let Blueprint { plan, assignment, comms, borrowed, timed } = blueprint;
        let (driver, compute) = (Arc::clone(&cuda.driver), cuda.compute);
        let _entered = Entered::new(&*driver)?;
        // SAFETY: the builder's caller promises that the stream is alive.
        unsafe { driver.inspect_stream(compute)? };
        let on_gpu = if plan.is_offloaded() { Vec::new() } else { assignment.kernels(&plan) };
        let kernels = Kernels::load(&driver, &on_gpu)?;
        // An upper bound of the positions that one stream records for a bucket in two passes. With shards or offload,
        // these are the bucket's sums, decision, step, copies and gathers. If a bucket is unsharded more than twice in
        // a pass, some waits are for a later position than needed.
        let of_bucket = if plan.is_sharded() || plan.is_offloaded() { 16 } else { 8 };
        let room = 16 + of_bucket * plan.buckets().len();
        let streams = Streams::new(&driver, compute, cuda.optim_priority, &plan, room)?;
        let optim = streams.stream(Stream::Optim);
        let mut memory = DeviceMemory::new(
            &driver,
            optim,
            &plan,
            &assignment,
            &*comms.world,
            borrowed,
            host.as_ref().map(|side| HostMemory::new(side.is_pinned)),
        )?;
        let settings = SettingsRing::new(&driver, &Settings::new(&plan, &assignment))?;
        let status = StatusRing::new(&driver)?;
        let preparation = Preparation {
            kernels: &kernels,
            plan: &plan,
            assignment: &assignment,
            max_blocks: cuda.max_blocks,
        };
        let mut launches = |kind| match host {
            Some(_) => Ok(Vec::new()),
            None => preparation.launches(kind, &mut memory),
        };
        let [norms, steps] = [launches(Kind::Norm)?, launches(Kind::Step)?];
        let inputs = (&plan, &assignment);
        let host = host.map(|side| HostSteps::new(side, &memory.regions, inputs, &comms, &settings));
        let host = host.transpose()?;
        let stops = (0..).zip(plan.buckets()).map(|(bucket, _)| assignment.stops(&plan, bucket)).collect();
        let timing = timed.then(|| Timing::new(&driver, compute)).transpose()?;
        let mut device = CudaDevice {
            plan,
            engine: ManuallyDrop::new(Engine { kernels, settings, memory, constants: assignment.constants }),
            assignment,
            comms,
            cuda,
            norms,
            steps,
            stops,
            moving: ManuallyDrop::new(None),
            host: ManuallyDrop::new(host),
            bindings: 0,
            status: ManuallyDrop::new(status),
            timing,
            streams,
            is_capturing: false,
            forked: [false; STREAMS],
            recorded: [None; STREAMS],
            replayed: None,
            failed: None,
            origin: Instant::now(),
        };
        // The host waits until zeros and tables are written, so every other stream finds them.
        let ready = device.streams.here(Stream::Optim)?;
        device.block_on(ready)?;
        if let Some(timing) = &device.timing {
            device.block_on(&timing.origin)?;
            device.origin = Instant::now();
        }
        Ok(device)
    }

    /// Returns all launches of the op's buckets. The range selects the launches that the op runs in each bucket.
    pub(super) fn launches_of(&self, op: &Op) -> (&[Vec<BucketLaunch>], Range<usize>) {
        let part = |bucket: u32, count: u32, stage: Option<u32>| {
            // With offload, the host runs these launches.
            let Some(buckets) = self.steps.get(bucket as usize..(bucket + count) as usize) else {
                return (&[][..], 0..0);
            };
            // Steps of buckets that share launches have no stops.
            let stops = &self.stops[bucket as usize];
            let stage = stage.map_or(stops.len(), |stage| stage as usize);
            (buckets, part_of_step(stops, stage, buckets[0].len()))
        };
        match op.action {
            Action::Norm { bucket } => {
                let norms = self.norms.get(bucket as usize..=bucket as usize).unwrap_or_default();
                (norms, 0..norms.first().map_or(0, Vec::len))
            }
            Action::Measure { bucket, stage } => part(bucket, 1, Some(stage)),
            Action::Step { bucket, count } => part(bucket, count, None),
            _ => (&[], 0..0),
        }
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        let driver = Arc::clone(&self.cuda.driver);
        let Ok(_entered) = Entered::new(&*driver) else { return };
        // Stream-ordered memory is freed after the work that still runs. All other memory is freed only if the GPU is
        // idle soon. Otherwise it is leaked, because a drop must not wait long.
        let gathered =
            self.streams.gather(Stream::Optim, |_| true).and_then(|()| self.streams.here(Stream::Optim));
        let is_idle = gathered.is_ok_and(|event| event.is_passed_soon(|| self.is_host_busy()));
        // SAFETY: each value is dropped once, here, and not used below. Memory is dropped before the stream that frees
        // it.
        unsafe {
            let Engine { kernels, settings, mut memory, .. } = ManuallyDrop::take(&mut self.engine);
            if is_idle {
                ManuallyDrop::drop(&mut self.moving);
                ManuallyDrop::drop(&mut self.host);
                ManuallyDrop::drop(&mut self.status);
                drop((kernels, settings));
            } else {
                mem::forget((kernels, settings, mem::take(&mut memory.lent), memory.host.take()));
            }
            // The optim stream waits for all other streams, by `gather` above.
            memory.unsharded.free_on(self.streams.stream(Stream::Optim));
        }
    }
}
