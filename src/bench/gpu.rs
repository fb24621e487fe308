//! A layout's memory on a GPU, with launches that step one bucket each.
//!
//! A step is an op of `CudaDevice` on the device's memory. Benches compare steps with copies. The copies use separate
//! memory. `samples.rs` times steps and copies. This file must add no work to a launch, because a bench would time that
//! work too.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use super::{constants, plan};
use crate::collective::{Comms, NoCalls};
use crate::cuda::driver::{Driver, Entered, Kernel, Module, Shape};
use crate::cuda::owned::Event;
use crate::cuda::{Cuda, CudaDevice};
use crate::device::{Blueprint, Claimed, Device, Executor};
use crate::error::Result;
use crate::handle::{DevicePtr, StreamHandle};
use crate::launch::{Assignment, StepConstants};
use crate::layout::{Layout, Plan, Storage};
use crate::op::{Action, Memory, Op, Part, Phase, Span, Stream, step_bytes};
use crate::optim::{Clip, Optimizer};

const COPY_THREADS: u32 = 256;
/// The number of 16-byte elements that one thread block of the copy kernel copies.
const COPY_BLOCK_ELEMENTS: u64 = 512;

#[repr(C)]
struct CopyArgs {
    from: u64,
    to: u64,
    count: u64,
}

/// A layout's memory on a GPU, stepped bucket by bucket.
pub struct GpuLauncher {
    device: CudaDevice,
    pub(super) driver: Arc<dyn Driver>,
    pub(super) plan: Arc<Plan>,
    states: usize,
    parts: &'static [Part],
    stream: StreamHandle,
    pub(super) start: Event,
    pub(super) end: Event,
    /// The source and the destination of the copies.
    pub(super) copied: [DevicePtr; 2],
    pub(super) plug: [DevicePtr; 2],
    /// The copy kernel, if it was loaded.
    pub(super) sm_copy: Option<(Module, Kernel)>,
}

/// The options of a [`GpuLauncher`].
#[derive(Clone, Copy, Debug)]
pub struct GpuCase {
    /// Bytes of gradients per bucket.
    pub cap_bytes: u64,
    /// The number of ranks over which gradients are summed.
    pub world_size: u32,
    /// Element types.
    pub storage: Storage,
    /// Whether the op `Decide` derives a clip coefficient from the norm.
    pub clips: bool,
}

impl GpuLauncher {
    /// Builds the buckets of a case. Also allocates the memory for copies that move as many bytes as the steps of all
    /// buckets.
    ///
    /// # Errors
    /// Errors as for `StepperBuilder::cuda`.
    pub fn new(
        layout: &Layout,
        optimizer: &dyn Optimizer,
        case: GpuCase,
        cuda: &Cuda,
    ) -> Result<GpuLauncher> {
        let GpuCase { cap_bytes, world_size, storage, clips } = case;
        let plan = plan(layout, cap_bytes, world_size, storage)?;
        let constants = StepConstants { clip: clips.then_some(Clip::Global(1.0)), ..constants(world_size) };
        let driver = Arc::clone(cuda.driver());
        let no_calls = Arc::new(NoCalls { rank: 0, world_size, supports_all: false });
        let blueprint = Blueprint {
            plan: Arc::clone(&plan),
            assignment: Arc::new(Assignment::uniform(layout, &plan, constants, optimizer)?),
            comms: Comms::new(no_calls, Duration::from_secs(60), Arc::default()),
            borrowed: None,
            timed: false,
        };
        let device = CudaDevice::new(cuda.clone(), blueprint, None)?;
        let (start, end) = {
            let _entered = Entered::new(&*driver)?;
            (Event::new(&driver, true)?, Event::new(&driver, true)?)
        };
        let (states, stream) = (optimizer.state_names().len(), device.streams.stream(Stream::Optim));
        let mut launcher = GpuLauncher {
            device,
            driver,
            plan,
            states,
            parts: Part::all(optimizer.as_rule().is_scaled()),
            stream,
            start,
            end,
            copied: [DevicePtr::default(); 2],
            plug: [DevicePtr::default(); 2],
            sm_copy: None,
        };
        let half = (0..launcher.plan.buckets().len() as u32).map(|k| launcher.step_bytes(k) / 2).sum();
        let plug = launcher.driver.gpu().l2_bytes;
        launcher.prepare([half, plug])?;
        Ok(launcher)
    }

    /// Returns the plan: buckets and offsets.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Loads the copy kernel from `image`, a file that `scripts/bench-kernels.sh` builds.
    ///
    /// # Errors
    /// `Device` if the driver refuses the file, for example because it has other kernels.
    pub fn load_sm_copy(&mut self, image: &[u8]) -> Result<()> {
        let driver = Arc::clone(&self.driver);
        let _entered = Entered::new(&*driver)?;
        let module = driver.load(image)?;
        self.sm_copy = Some((module, driver.kernel(module, c"bench_copy")?));
        Ok(())
    }

    /// Returns whether the copy kernel was loaded.
    pub fn has_sm_copy(&self) -> bool {
        self.sm_copy.is_some()
    }

    /// Returns the number of bytes that one step of a bucket reads and writes. The number is the sum over the memory
    /// accesses of the step's op, without control memory.
    pub fn step_bytes(&self, bucket: u32) -> u64 {
        step_bytes(&self.plan, self.states, self.parts, bucket)
    }

    /// Returns the number of bytes that the norm of a bucket reads. The norm reads only the bucket's gradients.
    pub fn norm_bytes(&self, bucket: u32) -> u64 {
        Span::bucket(&self.plan.buckets()[bucket as usize]).bytes()
    }

    /// Writes `bytes` to a range of elements of `memory`.
    ///
    /// # Errors
    /// `Device` if the driver refuses a call.
    ///
    /// # Panics
    /// Panics if the range is not inside `memory`, or if its elements do not have `bytes.len()` bytes in total.
    pub fn write(&mut self, memory: Memory, elements: Range<u64>, bytes: &[u8]) -> Result<()> {
        let span = Span::elements(memory, &self.plan, elements.start, elements.end);
        assert_eq!(span.bytes(), bytes.len() as u64, "{memory:?}");
        self.settle()?;
        // SAFETY: the span is as long as the bytes, and `settle` has waited for all work.
        self.device.write(span, bytes, unsafe { Claimed::promise() })
    }

    /// Reads a range of elements of `memory` into `into`.
    ///
    /// # Errors
    /// `Device` if the driver refuses a call.
    ///
    /// # Panics
    /// Panics if the range is not inside `memory`, or if its elements do not have `into.len()` bytes in total.
    pub fn read(&mut self, memory: Memory, elements: Range<u64>, into: &mut [u8]) -> Result<()> {
        let span = Span::elements(memory, &self.plan, elements.start, elements.end);
        assert_eq!(span.bytes(), into.len() as u64, "{memory:?}");
        self.settle()?;
        // SAFETY: the span is as long as the bytes, and `settle` has waited for all work.
        self.device.read(span, into, unsafe { Claimed::promise() })
    }

    /// Runs the op `Begin` of a pass, and then a step of every bucket.
    ///
    /// # Errors
    /// `Device` if the driver refuses a call.
    pub fn step_all(&mut self) -> Result<()> {
        self.submit(Action::Control(Phase::Begin));
        for bucket in 0..self.plan.buckets().len() as u32 {
            self.submit(Action::Step { bucket, count: 1 });
        }
        self.settle()
    }

    pub(super) fn submit(&mut self, action: Action) {
        self.device.submit(&[Op { stream: Stream::Optim, action }], None);
    }

    pub(super) fn record(&mut self, event: &Event) -> Result<()> {
        self.guarded(|_, stream| event.record(stream))
    }

    /// Copies one of the plug's two buffers to the other. The copy evicts all other data from the L2 cache.
    /// `samples.rs` explains the plug.
    pub(super) fn copy_plug(&mut self) -> Result<()> {
        let ([from, to], bytes) = (self.plug, self.driver.gpu().l2_bytes);
        // SAFETY: both addresses are of our own memory, which has this many bytes.
        self.guarded(|driver, stream| unsafe { driver.copy(to, from, bytes, stream) })
    }

    /// Enqueues a copy that moves `bytes` bytes in total. Half of these bytes are reads, and the other half are writes.
    pub(super) fn copy_part(&mut self, bytes: u64, bucket: u32) -> Result<()> {
        let [from, to] = self.copied_part(bytes, bucket);
        // SAFETY: there is room for one copy of each bucket, by `copied_part`.
        self.guarded(|driver, stream| unsafe { driver.copy(to, from, bytes / 2, stream) })
    }

    /// Enqueues the same copy as [`copy_part`](Self::copy_part), but with the copy kernel instead of a driver call.
    pub(super) fn copy_part_by_kernel(&mut self, bytes: u64, bucket: u32) -> Result<()> {
        let [from, to] = self.copied_part(bytes, bucket);
        let args = CopyArgs { from: from.0, to: to.0, count: bytes / 2 / 16 };
        let blocks = args.count.div_ceil(COPY_BLOCK_ELEMENTS) as u32;
        let shape = Shape { blocks, threads: COPY_THREADS };
        let Some((_, kernel)) = self.sm_copy else { panic!("load_sm_copy comes first") };
        let at: *const c_void = ptr::from_ref(&args).cast();
        // SAFETY: `args` is the kernel's argument struct, and the memory is that of `copy_part`.
        self.guarded(|driver, stream| unsafe { driver.launch(kernel, shape, stream, at) })
    }

    /// Waits until all queued work has run.
    fn settle(&mut self) -> Result<()> {
        let end = Event::clone(&self.end);
        self.record(&end)?;
        self.block_on_end()
    }

    pub(super) fn block_on_end(&mut self) -> Result<()> {
        let end = &self.end;
        self.device.guarded("a bench", |device| device.block_on(end))
    }

    /// Calls `work` with the device's context current. If the device has failed before, returns its error and does not
    /// call `work`.
    pub(super) fn guarded<T>(
        &mut self,
        work: impl FnOnce(&dyn Driver, StreamHandle) -> Result<T>,
    ) -> Result<T> {
        let (driver, stream) = (Arc::clone(&self.driver), self.stream);
        self.device.guarded("a bench", |_| work(&*driver, stream))
    }

    /// Allocates two buffers for the copies and two for the plug. `bytes` has the size of one copy buffer and the size
    /// of one plug buffer.
    fn prepare(&mut self, bytes: [u64; 2]) -> Result<()> {
        let driver = Arc::clone(&self.driver);
        let _entered = Entered::new(&*driver)?;
        for (pair, bytes) in [&mut self.copied, &mut self.plug].into_iter().zip(bytes) {
            for address in pair {
                *address = driver.allocate(bytes, self.stream)?;
                // SAFETY: the memory was just allocated on this stream. (It is zeroed because reads of pages that were
                // never written may be faster.)
                unsafe { driver.fill(*address, &[0], bytes, self.stream)? };
            }
        }
        Ok(())
    }
}

impl Drop for GpuLauncher {
    fn drop(&mut self) {
        let Ok(_entered) = Entered::new(&*self.driver) else { return };
        // SAFETY: each address that is not 0 is of memory that `prepare` allocated, and nothing uses that memory any
        // more.
        unsafe {
            for address in self.copied.into_iter().chain(self.plug).filter(|a| *a != DevicePtr::default()) {
                self.driver.free(address, self.stream);
            }
            if let Some((module, _)) = self.sm_copy {
                self.driver.unload(module);
            }
        }
    }
}
