//! One bucket's launch on a GPU beside a copy that moves as many bytes, timed by the GPU's own events.
//!
//! Steps are the device's own ops on its own memory; the copy has memory of its own. A sample starts after a plug: work
//! that keeps the stream busy until the whole sample is queued, so no host time is measured. The plug is one copy of
//! the L2 cache's size per launch; if it was too short, the sample is marked. This file must put nothing between the
//! two events but what is measured.
#![allow(unsafe_code)]

use std::slice;
use std::sync::Arc;
use std::time::Duration;

use super::{constants, plan, step_bytes};
use crate::cuda::driver::{Driver, Entered};
use crate::cuda::{Cuda, CudaDevice, Parts};
use crate::device::{Device, Executor};
use crate::error::Result;
use crate::handle::{DevicePtr, EventHandle, StreamHandle};
use crate::host::Solo;
use crate::launch::Assignment;
use crate::layout::{Layout, Plan, Storage};
use crate::op::{Action, Memory, Op, Part, Phase, Span, Stream};
use crate::optim::Optimizer;

/// A layout's memory on a GPU, stepped bucket by bucket.
pub struct GpuLauncher {
    device: CudaDevice,
    driver: Arc<dyn Driver>,
    plan: Arc<Plan>,
    states: usize,
    parts: &'static [Part],
    stream: StreamHandle,
    start: EventHandle,
    end: EventHandle,
    /// Sources and destinations of the copies.
    copied: [DevicePtr; 2],
    plug: [DevicePtr; 2],
}

/// The time of one sample.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// On the GPU, from the first launch to the end of the last.
    pub device_ns: f64,
    /// Whether the GPU began before all was queued, so that it may have waited for the host in between.
    pub starved: bool,
}

impl GpuLauncher {
    /// Builds buckets of `cap_bytes`, gradients that are sums over `world_size` ranks, and as much again as a step of
    /// every bucket moves, for copies.
    ///
    /// # Errors
    /// As `StepperBuilder::cuda`.
    pub fn new(
        layout: &Layout,
        optimizer: &dyn Optimizer,
        cap_bytes: u64,
        world_size: u32,
        cuda: &Cuda,
    ) -> Result<GpuLauncher> {
        let plan = plan(layout, cap_bytes, world_size, Storage::default())?;
        let driver = Arc::clone(cuda.driver());
        let device = CudaDevice::new(Parts {
            driver: Arc::clone(&driver),
            compute: cuda.compute,
            optim_priority: cuda.optim_priority,
            max_blocks: cuda.max_blocks,
            plan: Arc::clone(&plan),
            constants: constants(world_size),
            assignment: Arc::new(Assignment::uniform(layout, &plan, optimizer)?),
            comm: Arc::new(Solo::new(world_size)),
            deadline: Duration::from_secs(60),
            borrowed: None,
            timed: false,
        })?;
        let (states, stream) = (optimizer.state_names().len(), device.stream(Stream::Optim));
        let mut launcher = GpuLauncher {
            device,
            driver,
            plan,
            states,
            parts: Part::all(optimizer.as_rule().is_scaled()),
            stream,
            start: EventHandle::default(),
            end: EventHandle::default(),
            copied: [DevicePtr::default(); 2],
            plug: [DevicePtr::default(); 2],
        };
        let half = (0..launcher.plan.buckets().len() as u32).map(|k| launcher.step_bytes(k) / 2).sum();
        let plug = launcher.driver.l2_bytes();
        launcher.prepare([half, plug])?;
        Ok(launcher)
    }

    /// Returns buckets and offsets.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns the bytes that one step of a bucket reads and writes, by the accesses that the checker judges.
    pub fn step_bytes(&self, bucket: u32) -> u64 {
        step_bytes(&self.plan, self.states, self.parts, bucket)
    }

    /// Writes elements of a memory, from element `first` on.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Panics
    /// If they do not lie in the memory.
    pub fn write(&mut self, memory: Memory, first: u64, values: &[f32]) -> Result<()> {
        let span = Span::elements(memory, &self.plan, first, first + values.len() as u64);
        self.settle()?;
        // SAFETY: as many plain bytes as the span is long; nothing runs.
        unsafe {
            let bytes = slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values));
            self.device.write(span, bytes)
        }
    }

    /// Reads elements of a memory, from element `first` on.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Panics
    /// If they do not lie in the memory.
    pub fn read(&mut self, memory: Memory, first: u64, into: &mut [f32]) -> Result<()> {
        let span = Span::elements(memory, &self.plan, first, first + into.len() as u64);
        self.settle()?;
        // SAFETY: as in `write`, and every bit pattern is a float.
        unsafe {
            let bytes = slice::from_raw_parts_mut(into.as_mut_ptr().cast(), size_of_val(into));
            self.device.read(span, bytes)
        }
    }

    /// Runs a pass's Begin and a step of every bucket.
    ///
    /// # Errors
    /// The driver's.
    pub fn step_all(&mut self) -> Result<()> {
        self.submit(Action::Control(Phase::Begin));
        for bucket in 0..self.plan.buckets().len() as u32 {
            self.submit(Action::Step { bucket });
        }
        self.settle()
    }

    /// Times steps of these buckets, after one step that does not count. The pass's Begin comes before both.
    ///
    /// # Errors
    /// The driver's.
    pub fn time_steps(&mut self, buckets: &[u32]) -> Result<Sample> {
        self.submit(Action::Control(Phase::Begin));
        self.time(buckets, |this, bucket| {
            this.submit(Action::Step { bucket });
            Ok(())
        })
    }

    /// Times copies that move the bytes of a step of these buckets, half of them read and half written, after one copy
    /// that does not count.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Panics
    /// If a bucket is not in the plan, or buckets differ in their bytes.
    pub fn time_copies(&mut self, buckets: &[u32]) -> Result<Sample> {
        let (half, count) = (self.step_bytes(0) / 2, self.plan.buckets().len() as u32);
        assert!(
            (0..count).all(|bucket| self.step_bytes(bucket) / 2 == half),
            "buckets differ in their bytes"
        );
        assert!(buckets.iter().all(|bucket| *bucket < count), "the plan has {count} buckets");
        self.time(buckets, |this, bucket| {
            let [from, to] = this.copied.map(|base| DevicePtr(base.0 + u64::from(bucket) * half));
            // SAFETY: all buckets move as many bytes, and there is room for one copy of each, by the assertions.
            this.guarded(|driver, stream| unsafe { driver.copy(to, from, half, stream) })
        })
    }

    fn time(
        &mut self,
        buckets: &[u32],
        work: impl Fn(&mut GpuLauncher, u32) -> Result<()>,
    ) -> Result<Sample> {
        let ([from, to], bytes) = (self.plug, self.driver.l2_bytes());
        let (start, end) = (self.start, self.end);
        for _ in 0..=buckets.len() {
            // SAFETY: memory of our own, that long.
            self.guarded(|driver, stream| unsafe { driver.copy(to, from, bytes, stream) })?;
        }
        // Bring back the bucket that the plug has evicted from the cache, if it is to be there: the one that comes back
        // last.
        work(self, buckets[buckets.len() - 1])?;
        self.record(start)?;
        buckets.iter().try_for_each(|bucket| work(self, *bucket))?;
        self.record(end)?;
        // SAFETY: an event of our own, recorded above.
        let starved = self.guarded(|driver, _| unsafe { driver.is_passed(start) })?;
        self.block_on_end()?;
        // SAFETY: as above, and both are passed.
        let device_ns = self.guarded(|driver, _| unsafe { driver.elapsed_ns(start, end) })?;
        Ok(Sample { device_ns, starved })
    }

    fn submit(&mut self, action: Action) {
        self.device.submit(&[Op { stream: Stream::Optim, action }]);
    }

    fn record(&mut self, event: EventHandle) -> Result<()> {
        // SAFETY: an event of our own, the device's stream.
        self.guarded(|driver, stream| unsafe { driver.record(event, stream) })
    }

    /// Waits until everything has run.
    fn settle(&mut self) -> Result<()> {
        self.record(self.end)?;
        self.block_on_end()
    }

    fn block_on_end(&mut self) -> Result<()> {
        let end = self.end;
        self.device.guarded("a bench", |device| device.block_on(end))
    }

    /// Something of the bench's own, with the device current, unless anything has failed.
    fn guarded<T>(&mut self, work: impl FnOnce(&dyn Driver, StreamHandle) -> Result<T>) -> Result<T> {
        let (driver, stream) = (Arc::clone(&self.driver), self.stream);
        self.device.guarded("a bench", |_| work(&*driver, stream))
    }

    /// Makes the events, and memory of these sizes for copies and plug.
    fn prepare(&mut self, bytes: [u64; 2]) -> Result<()> {
        let driver = Arc::clone(&self.driver);
        let _entered = Entered::new(&*driver)?;
        (self.start, self.end) = (driver.create_event(true)?, driver.create_event(true)?);
        for (pair, bytes) in [&mut self.copied, &mut self.plug].into_iter().zip(bytes) {
            for address in pair {
                *address = driver.allocate(bytes, self.stream)?;
                // SAFETY: just allocated, on this stream. Pages that were never written may be read faster.
                unsafe { driver.zero(*address, bytes, self.stream)? };
            }
        }
        Ok(())
    }
}

impl Drop for GpuLauncher {
    fn drop(&mut self) {
        let Ok(_entered) = Entered::new(&*self.driver) else { return };
        // SAFETY: made by `prepare`, given back after its last use, or not made.
        unsafe {
            for address in self.copied.into_iter().chain(self.plug).filter(|a| *a != DevicePtr::default()) {
                self.driver.free(address, self.stream);
            }
            for event in [self.start, self.end].into_iter().filter(|e| *e != EventHandle::default()) {
                self.driver.destroy_event(event);
            }
        }
    }
}
