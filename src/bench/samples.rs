//! Times two kinds of work on a GPU: launches, and copies that move the same number of bytes. CUDA events measure the
//! times. This file also has the trainer's stream.
//!
//! A sample starts after a plug. A plug is work that keeps the stream busy until the whole sample is queued, so no host
//! time is measured. For each launch of the sample, the plug contains one copy that is as large as the L2 cache. If the
//! plug was too short, the sample is marked as `starved`. Only the measured work may be between a sample's two events.
//! The trainer's stream is never destroyed, so it outlives every stepper.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::bench::GpuLauncher;
use crate::cuda::Cuda;
use crate::cuda::driver::{Driver, Entered};
use crate::cuda::owned::Event;
use crate::error::Result;
use crate::handle::{DevicePtr, EventHandle, StreamHandle};
use crate::op::{Action, Phase};

/// The largest number of launches that the warm-up queues at a time.
const WARM_UP_LAUNCHES: usize = 256;
/// The largest number of `Begin` ops that a sample queues. The host may be 8 passes ahead of the GPU, and one of the
/// `Begin` ops is not timed.
pub const MOST_BEGINS: usize = 6;

/// The work that a sample repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Steps of buckets.
    Step,
    /// Norms of buckets.
    Norm,
    /// The op `Begin` of a pass, without steps of buckets.
    Begin,
    /// The op that turns a norm into a clip coefficient.
    Decide,
    /// The driver's device-to-device copies. A copy moves this number of bytes in total. Half of these bytes are reads,
    /// and the other half are writes.
    Copy(u64),
    /// Copies by the copy kernel. The number of bytes has the same meaning as in [`Copy`](Self::Copy).
    SmCopy(u64),
}

/// The time of one sample.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Time on the GPU, from the start of the first launch to the end of the last launch.
    pub device_ns: f64,
    /// Whether the GPU began the sample before all its work was queued. If so, the GPU may have waited for the host
    /// during the sample.
    pub starved: bool,
}

impl GpuLauncher {
    /// Runs `work` once for each bucket, and measures the time of these runs together. Before the measurement, `work`
    /// runs once on the last bucket. If `work` is a step, a norm or a decision, the op `Begin` of a pass also runs
    /// before the measurement.
    ///
    /// # Errors
    /// `Device` if the driver refuses a call.
    ///
    /// # Panics
    /// Panics if `buckets` is empty or a bucket is not in the plan, if a copy moves more bytes than a step of the
    /// smallest bucket or a number of bytes that is not a multiple of 32, or if the kernel of `SmCopy` was not loaded.
    pub fn time(&mut self, work: Work, buckets: &[u32]) -> Result<Sample> {
        if matches!(work, Work::Step | Work::Norm | Work::Decide) {
            self.submit(Action::Control(Phase::Begin));
        }
        let (start, end) = (Event::clone(&self.start), Event::clone(&self.end));
        for _ in 0..=buckets.len() {
            self.copy_plug()?;
        }
        // The plug has evicted everything from the cache. In a loop over the buckets, the cache would hold the last
        // bucket if it fits. The last bucket therefore runs once before the timed launches.
        self.launch(work, buckets[buckets.len() - 1])?;
        self.record(&start)?;
        buckets.iter().try_for_each(|bucket| self.launch(work, *bucket))?;
        self.record(&end)?;
        let starved = self.guarded(|_, _| start.is_passed())?;
        Ok(Sample { device_ns: self.elapsed_ns()?, starved })
    }

    /// Repeats `work` on these buckets until the GPU has been busy with it for `duration`. Gives up after four times
    /// `duration` on the host's clock. Returns the nanoseconds for which the GPU was busy.
    ///
    /// # Errors
    /// `Device` if the driver refuses a call.
    ///
    /// # Panics
    /// Panics if a bucket is not in the plan, if a copy moves more bytes than a step of the smallest bucket or a number
    /// of bytes that is not a multiple of 32, or if the kernel of `SmCopy` was not loaded.
    pub fn warm_up(&mut self, work: Work, buckets: &[u32], duration: Duration) -> Result<f64> {
        let (began, goal_ns) = (Instant::now(), duration.as_nanos() as f64);
        let (mut device_ns, mut launches) = (0.0, 1);
        let (start, end) = (Event::clone(&self.start), Event::clone(&self.end));
        while device_ns < goal_ns && began.elapsed() < 4 * duration {
            if matches!(work, Work::Step | Work::Norm | Work::Decide) {
                self.submit(Action::Control(Phase::Begin));
            }
            self.record(&start)?;
            buckets.iter().cycle().take(launches).try_for_each(|bucket| self.launch(work, *bucket))?;
            self.record(&end)?;
            device_ns += self.elapsed_ns()?;
            let most = if work == Work::Begin { MOST_BEGINS } else { WARM_UP_LAUNCHES };
            launches = (2 * launches).min(most);
        }
        Ok(device_ns)
    }

    fn launch(&mut self, work: Work, bucket: u32) -> Result<()> {
        match work {
            Work::Step => self.submit(Action::Step { bucket, count: 1 }),
            Work::Norm => self.submit(Action::Norm { bucket }),
            Work::Begin => self.submit(Action::Control(Phase::Begin)),
            Work::Decide => self.submit(Action::Control(Phase::Decide)),
            Work::Copy(bytes) => self.copy_part(bytes, bucket)?,
            Work::SmCopy(bytes) => self.copy_part_by_kernel(bytes, bucket)?,
        }
        Ok(())
    }

    /// Returns the source and the destination of the copy that is compared with this bucket's step.
    pub(super) fn copied_part(&self, bytes: u64, bucket: u32) -> [DevicePtr; 2] {
        let count = self.plan.buckets().len() as u32;
        assert!(bucket < count, "the plan has {count} buckets");
        assert!((0..count).all(|k| bytes <= self.step_bytes(k)), "a copy is longer than a step");
        assert!(bytes.is_multiple_of(32), "a copy of {bytes} bytes is not made of whole words of 16");
        self.copied.map(|base| DevicePtr(base.0 + u64::from(bucket) * (bytes / 2)))
    }

    /// Waits for the end event, and returns the time between the start event and the end event.
    fn elapsed_ns(&mut self) -> Result<f64> {
        self.block_on_end()?;
        let (start, end) = (Event::clone(&self.start), Event::clone(&self.end));
        self.guarded(|_, _| end.ns_since(start.handle()))
    }
}

/// The priority of the trainer's stream. This priority is higher than the default of `Cuda::optim_priority`, so that
/// backward's kernels do not wait for thread blocks of a step that have not started yet.
const PRIORITY: i32 = -1;

/// The trainer's stream on a GPU, with the events that time a pass.
pub struct Trainer {
    cuda: Cuda,
    marks: [Event; 3],
}

/// A moment of a pass, on the trainer's stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// The time before backward.
    Start,
    /// The time at which backward's last kernel ends.
    BackwardEnd,
    /// The time from which every parameter may be read.
    End,
}

/// The times at which a pass reached its marks, in nanoseconds since the clock's zero.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// [`Mark::Start`].
    pub start_ns: f64,
    /// [`Mark::BackwardEnd`].
    pub backward_end_ns: f64,
    /// [`Mark::End`].
    pub end_ns: f64,
}

impl Trainer {
    /// Builds a trainer with its own stream. The kernels of this stream have priority over the optimizer's kernels.
    ///
    /// # Errors
    /// `Device` if the driver refuses a call.
    pub fn new(cuda: &Cuda) -> Result<Trainer> {
        let driver = cuda.driver();
        let _entered = Entered::new(&**driver)?;
        let stream = driver.create_stream(PRIORITY)?;
        let marks = [Event::new(driver, true)?, Event::new(driver, true)?, Event::new(driver, true)?];
        Ok(Trainer { cuda: cuda.clone().compute_stream(stream), marks })
    }

    /// Records a moment of the pass.
    ///
    /// # Errors
    /// `Device` if the driver refuses a call.
    pub fn mark(&self, mark: Mark) -> Result<()> {
        let driver = self.driver();
        let _entered = Entered::new(&**driver)?;
        self.marks[mark as usize].record(self.stream())
    }

    /// Waits for the last mark, and returns the times. The times count from `zero`, or from the first mark if `zero` is
    /// `None`.
    ///
    /// # Errors
    /// `Device` if the driver refuses a call.
    pub fn wait(&self, zero: Option<EventHandle>) -> Result<Times> {
        let driver = self.driver();
        let _entered = Entered::new(&**driver)?;
        let [start, backward_end, end] = &self.marks;
        let zero = zero.unwrap_or(start.handle());
        while !end.is_passed()? {
            std::thread::yield_now();
        }
        let at = |event: &Event| event.ns_since(zero);
        Ok(Times { start_ns: at(start)?, backward_end_ns: at(backward_end)?, end_ns: at(end)? })
    }

    pub(super) fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    pub(super) fn driver(&self) -> &Arc<dyn Driver> {
        self.cuda.driver()
    }

    pub(super) fn stream(&self) -> StreamHandle {
        self.cuda.compute
    }
}
