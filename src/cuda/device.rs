//! Ops as driver calls on the caller's thread.
//!
//! In a steady state a bucket takes one stream wait and one launch; construction prepares all arguments. Ops alone
//! decide what runs and in which order. `submit` never blocks, except while the host is eight passes ahead of the GPU.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::mem::{self, ManuallyDrop};
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::custom::EnqueuedParams;
use super::driver::{Driver, Entered, Kernel, Shape};
use super::kernels::Kernels;
use super::memory::{DeviceMemory, address};
use super::pinned::{SLOTS, Settings, StatusRing};
use super::streams::{Priorities, Streams};
use super::timing::Timing;
use crate::abi::{
    INSTEP_GPU_THREADS, INSTEP_OPTIMIZER_CUSTOM, InstepBeginArgs, InstepPublishArgs, InstepStepArgs,
};
use crate::collective::{Call, Collective};
use crate::error::{Error, Result};
use crate::handle::{EventHandle, StreamHandle};
use crate::launch::{Assignment, BorrowedPieces, Kind, Launch, StepConstants, begin_args, decide_args};
use crate::layout::Plan;
use crate::op::{Action, Op, Phase, STREAMS, Stream, Ticket};

/// Blocks of the norm per multiprocessor. Each block ends in atomics, so no more run than fill the GPU.
const NORM_BLOCKS_PER_MULTIPROCESSOR: u32 = 4;

/// One rank's GPU. Its drop frees everything that takes driver calls, between the driver's enter and leave.
pub struct CudaDevice {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) plan: Arc<Plan>,
    constants: StepConstants,
    pub(super) comm: Arc<dyn Collective>,
    pub(super) rank: u32,
    pub(super) deadline: Duration,
    optim_priority: i32,
    max_blocks: Option<u32>,
    kernels: ManuallyDrop<Kernels>,
    norms: Vec<Vec<BucketLaunch>>,
    steps: Vec<Vec<BucketLaunch>>,
    pub(super) memory: ManuallyDrop<DeviceMemory>,
    pub(super) settings: ManuallyDrop<Settings>,
    pub(super) status: ManuallyDrop<StatusRing>,
    pub(super) timing: ManuallyDrop<Option<Timing>>,
    pub(super) streams: ManuallyDrop<Streams>,
    /// Passes begun, which selects the slot of the next pass's settings.
    pub(super) begun: u64,
    pub(super) is_capturing: bool,
    /// Per stream, the latest position recorded outside captures.
    pub(super) recorded: [Option<Ticket>; STREAMS],
    /// The event after the latest replay.
    pub(super) replayed: Option<EventHandle>,
    pub(super) failed: Option<Error>,
    origin: Instant,
}

/// One launch of a bucket, and the user's own code that runs after it.
struct BucketLaunch {
    kernel: Kernel,
    shape: Shape,
    args: InstepStepArgs,
    custom: Option<EnqueuedParams>,
}

/// The arguments of [`CudaDevice::new`].
pub(crate) struct Parts {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) compute: StreamHandle,
    pub(crate) optim_priority: i32,
    pub(crate) max_blocks: Option<u32>,
    pub(crate) plan: Arc<Plan>,
    pub(crate) constants: StepConstants,
    pub(crate) assignment: Arc<Assignment>,
    pub(crate) comm: Arc<dyn Collective>,
    pub(crate) deadline: Duration,
    pub(crate) borrowed: Option<BorrowedPieces>,
    pub(crate) timed: bool,
}

// SAFETY: the pointers in the arguments lead into the device's own memory, or into the caller's by the promise that it
// made when the stepper was built; methods use them only through the driver.
unsafe impl Send for CudaDevice {}

impl CudaDevice {
    pub(crate) fn new(parts: Parts) -> Result<CudaDevice> {
        let Parts { driver, compute, plan, constants, assignment, comm, deadline, timed, .. } = parts;
        let _entered = Entered::new(&*driver)?;
        // SAFETY: the builder's caller promises that the stream is alive.
        unsafe { driver.inspect_stream(compute)? };
        let kernels = Kernels::load(&driver, &assignment.kernels(&plan), plan.storage().precision.moments)?;
        let priorities = Priorities { reduce: i32::MIN, optim: parts.optim_priority };
        // Most that one stream records in two passes.
        let room = 16 + 8 * plan.buckets().len();
        let streams = Streams::new(&driver, compute, priorities, room)?;
        let optim = streams.stream(Stream::Optim);
        let mut memory =
            DeviceMemory::new(&driver, optim, &plan, (&constants, &assignment), &*comm, parts.borrowed)?;
        let settings = Settings::new(&driver, (&plan, &assignment), memory.regions.counts())?;
        let status = StatusRing::new(&driver)?;
        let most = parts.max_blocks.unwrap_or(i32::MAX as u32);
        let norm_most = most.min(NORM_BLOCKS_PER_MULTIPROCESSOR * driver.multiprocessors());
        let mut launches = |kind: Kind, most: u32| {
            let mut of_buckets = Vec::new();
            for bucket in 0..plan.buckets().len() as u32 {
                let mut of_bucket = Vec::new();
                for Launch { mut args, tiles, .. } in
                    Launch::all(kind, bucket, &plan, &memory.regions, (&constants, &assignment))
                {
                    args.tiles = memory.keep(&driver, optim, &tiles)?;
                    let is_custom = kind == Kind::Step && args.optimizer == INSTEP_OPTIMIZER_CUSTOM;
                    let most = if is_custom { 1 } else { most.into() };
                    let shape =
                        Shape { blocks: args.tile_count.min(most) as u32, threads: INSTEP_GPU_THREADS };
                    of_bucket.push(BucketLaunch {
                        kernel: if kind == Kind::Step { kernels.step(args.optimizer) } else { kernels.norm },
                        shape,
                        custom: is_custom.then(|| EnqueuedParams::new(&args, &tiles, &plan, &assignment)),
                        args,
                    });
                }
                of_buckets.push(of_bucket);
            }
            Ok::<_, Error>(of_buckets)
        };
        let (norms, steps) = (launches(Kind::Norm, norm_most)?, launches(Kind::Step, most)?);
        let timing = timed.then(|| Timing::new(&driver, compute)).transpose()?;
        let mut device = CudaDevice {
            rank: comm.rank(),
            driver: Arc::clone(&driver),
            plan,
            constants,
            comm,
            deadline,
            optim_priority: parts.optim_priority,
            max_blocks: parts.max_blocks,
            kernels: ManuallyDrop::new(kernels),
            norms,
            steps,
            memory: ManuallyDrop::new(memory),
            settings: ManuallyDrop::new(settings),
            status: ManuallyDrop::new(status),
            timing: ManuallyDrop::new(timing),
            streams: ManuallyDrop::new(streams),
            begun: 0,
            is_capturing: false,
            recorded: [None; STREAMS],
            replayed: None,
            failed: None,
            origin: Instant::now(),
        };
        // Zeros and tables are in place before another stream reads them.
        let ready = device.streams.here(Stream::Optim)?;
        device.block_on(ready)?;
        if let Some(timing) = &*device.timing {
            device.block_on(timing.origin())?;
            device.origin = Instant::now();
        }
        Ok(device)
    }

    /// Returns the same arguments for another plan, with new memory.
    pub(super) fn parts_for(&self, plan: &Arc<Plan>, assignment: &Arc<Assignment>) -> Parts {
        Parts {
            driver: Arc::clone(&self.driver),
            compute: self.streams.stream(Stream::Compute),
            optim_priority: self.optim_priority,
            max_blocks: self.max_blocks,
            plan: Arc::clone(plan),
            constants: self.constants,
            assignment: Arc::clone(assignment),
            comm: Arc::clone(&self.comm),
            deadline: self.deadline,
            borrowed: None,
            timed: self.timing.is_some(),
        }
    }

    /// Runs ops up to the first that fails.
    pub(super) fn run_all(&mut self, ops: &[Op]) {
        if self.failed.is_some() {
            return;
        }
        let driver = Arc::clone(&self.driver);
        let entered = Entered::new(&*driver);
        if let Err(error) = entered {
            return self.fail("the device", error);
        }
        for op in ops {
            if let Err(error) = self.run_timed(op) {
                return self.fail(&op.to_string(), error);
            }
        }
    }

    fn run_timed(&mut self, op: &Op) -> Result<()> {
        let works = !matches!(op.action, Action::Wait(_) | Action::Record(_)) && !self.is_capturing;
        let stream = self.streams.stream(op.stream);
        if let Some(timing) = self.timing.as_mut().filter(|_| works) {
            timing.start(*op, stream)?;
        }
        self.run(op)?;
        match self.timing.as_mut().filter(|_| works) {
            Some(timing) => timing.end(stream),
            None => Ok(()),
        }
    }

    fn run(&mut self, op: &Op) -> Result<()> {
        let stream = self.streams.stream(op.stream);
        match op.action {
            // The trainer's stream waits when the trainer next touches the bucket: `wait`.
            Action::Wait(_) if op.stream == Stream::Compute => Ok(()),
            Action::Wait(ticket) => self.streams.wait(op.stream, ticket),
            Action::Record(ticket) => {
                if !self.is_capturing {
                    self.recorded[op.stream.index()] = Some(ticket);
                }
                self.streams.record(ticket)
            }
            Action::Control(Phase::Begin) => self.begin(stream),
            Action::Control(Phase::Decide) => self.decide(None, stream),
            Action::Control(Phase::DecideBucket { bucket }) => self.decide(Some(bucket), stream),
            Action::Control(Phase::Publish) => {
                let (control, ring) = (self.memory.regions.control(), self.status.ring());
                let args = InstepPublishArgs { control, ring, slot_count: SLOTS as u64 };
                self.launch_one(self.kernels.publish, 1, stream, &args)
            }
            Action::Norm { bucket } => self.launch_bucket(&self.norms[bucket as usize], stream),
            Action::Step { bucket } => self.launch_bucket(&self.steps[bucket as usize], stream),
            Action::Zero(span) => {
                let at = address(self.memory.regions.resolve(span));
                // SAFETY: in bounds by `resolve`; nothing else touches the span meanwhile, which the schedule
                // guarantees and the checker proves for every op.
                unsafe { self.driver.zero(at, span.bytes(), stream) }
            }
            Action::Release(_) => {
                let what = "giving back the memory of gradients on a GPU".to_owned();
                Err(Error::Unsupported { what, have: "Gradients::Keep and Gradients::Zero".into() })
            }
            Action::Collective { kind, pass, agreement, bucket, src, dst } => {
                let call = Call {
                    kind,
                    pass,
                    bucket,
                    dtype: src.dtype(&self.plan),
                    src: self.memory.regions.resolve(src),
                    dst: self.memory.regions.resolve(dst),
                    bytes: src.bytes(),
                    agreement,
                    deadline: self.deadline,
                    stream,
                };
                // SAFETY: as for `Zero`.
                unsafe { self.comm.enqueue(&call) }
            }
        }
    }

    fn begin(&mut self, stream: StreamHandle) -> Result<()> {
        if !self.is_capturing {
            self.fill_slot()?;
        }
        let args = InstepBeginArgs {
            ring: ptr::with_exposed_provenance(self.settings.ring().0 as usize),
            slot_words: self.settings.slot_words(),
            slot_count: SLOTS as u64,
            ..begin_args(&self.plan, &self.memory.regions, &self.constants)
        };
        self.launch_one(self.kernels.begin, INSTEP_GPU_THREADS, stream, &args)?;
        if self.is_capturing {
            return Ok(());
        }
        self.settings.mark_read(self.begun, stream)?;
        self.begun += 1;
        Ok(())
    }

    fn decide(&self, bucket: Option<u32>, stream: StreamHandle) -> Result<()> {
        let args = decide_args(&self.plan, &self.memory.regions, &self.constants, bucket);
        self.launch_one(self.kernels.decide, 1, stream, &args)
    }

    /// Writes the next pass's settings to the slot that its Begin reads.
    pub(super) fn fill_slot(&mut self) -> Result<()> {
        if let Some(event) = self.settings.reader(self.begun) {
            self.block_on(event)?;
        }
        self.settings.write(self.begun);
        Ok(())
    }

    fn launch_bucket(&self, launches: &[BucketLaunch], stream: StreamHandle) -> Result<()> {
        for BucketLaunch { kernel, shape, args, custom } in launches {
            if shape.blocks == 0 {
                continue;
            }
            // SAFETY: the kernel takes this struct, whose addresses are of memory that this device keeps; untouched by
            // others meanwhile as for every op.
            unsafe { self.driver.launch(*kernel, *shape, stream, ptr::from_ref(args).cast())? };
            if let Some(custom) = custom {
                custom.enqueue(&*self.driver, stream)?;
            }
        }
        Ok(())
    }

    fn launch_one<Args>(
        &self,
        kernel: Kernel,
        threads: u32,
        stream: StreamHandle,
        args: &Args,
    ) -> Result<()> {
        let args: *const c_void = ptr::from_ref(args).cast();
        // SAFETY: as in `launch_bucket`.
        unsafe { self.driver.launch(kernel, Shape { blocks: 1, threads }, stream, args) }
    }

    /// Returns the driver's handle of a stream.
    #[cfg(feature = "bench")]
    pub(crate) fn stream(&self, stream: Stream) -> StreamHandle {
        self.streams.stream(stream)
    }

    /// Returns the event that is zero on the clock of measured ops, if ops are measured.
    pub(crate) fn clock_zero(&self) -> Option<EventHandle> {
        self.timing.as_ref().map(Timing::origin)
    }

    pub(super) fn now(&self) -> u64 {
        // 2^64 ns are 584 years.
        self.origin.elapsed().as_nanos() as u64
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        let driver = Arc::clone(&self.driver);
        let Ok(_entered) = Entered::new(&*driver) else { return };
        // Stream-ordered memory is freed after the work that still runs. The rest is freed only if the GPU is idle,
        // because a drop does not wait; otherwise it is leaked.
        let gathered = self.streams.gather().and_then(|()| self.streams.here(Stream::Optim));
        let is_idle = gathered.is_ok_and(|event| self.is_passed_soon(event));
        // SAFETY: each dropped once, here, and not used below; memory before the stream that frees it.
        unsafe {
            if is_idle {
                ManuallyDrop::drop(&mut self.kernels);
                ManuallyDrop::drop(&mut self.settings);
                ManuallyDrop::drop(&mut self.status);
            } else {
                mem::forget(self.memory.reduced.take());
            }
            ManuallyDrop::drop(&mut self.memory);
            ManuallyDrop::drop(&mut self.timing);
            ManuallyDrop::drop(&mut self.streams);
        }
    }
}
