//! Steppers that predict a training run. Options, refusals, byte counts and the schedule are the same as in real
//! training, but no memory is allocated.
//!
//! `src/forecast.rs` defines the device of such a stepper. This file builds the stepper, and has the calls that advance
//! the trainer's clock.

use std::ops::{Deref, DerefMut};

use crate::collective::NoCalls;
use crate::device::Device;
use crate::error::Result;
use crate::forecast::{Cost, Forecast};
use crate::op::{Memory, Op};
use crate::stepper::builder::StepperBuilder;
use crate::stepper::stepper::Stepper;
use crate::stepper::tensor::TensorId;

impl StepperBuilder<'_> {
    /// Builds a stepper that predicts the training of one rank: which ops run, when they run, and how many bytes the
    /// rank needs. `cost` receives an op and the number of bytes that the op moves, and returns the nanoseconds that
    /// the op takes. The trainer calls this stepper like a real stepper, and advances its own clock with
    /// [`Foresight::compute`]. Nothing is allocated, sent or stepped. Clocks stop at 2^64 - 1 nanoseconds.
    ///
    /// ```
    /// use instep::op::{Action, Stream};
    /// use instep::{Layout, Sgd, Stepper};
    ///
    /// let layout = Layout::builder().param("w", 1 << 30).build()?;
    /// let cost = |op: &instep::op::Op, bytes: u64| match op.action {
    ///     Action::Collective { .. } => 30_000 + bytes / 200, // 200 GB/s
    ///     _ => 5_000 + bytes / 3_000,                        // 3 TB/s
    /// };
    /// let mut stepper = Stepper::builder(&layout, Sgd::default()).record(true).forecast(0, 1024, cost)?;
    /// stepper.begin()?.detach();
    /// stepper.compute(1_000_000);
    /// stepper.touch(layout.id("w")?.grad())?;
    /// stepper.grad_ready(layout.id("w")?)?;
    /// stepper.finish()?;
    /// stepper.touch(layout.id("w")?)?;
    /// assert!(stepper.now_ns() > 1_000_000);
    /// let run = stepper.take_recording().expect("recorded");
    /// assert!(run.ran.iter().any(|ran| ran.op.stream == Stream::Optim));
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns those errors of [`host`](Self::host) that concern options.
    pub fn forecast(
        self,
        rank: u32,
        world_size: u32,
        cost: impl FnMut(&Op, u64) -> u64 + Send + 'static,
    ) -> Result<Foresight> {
        let cost: Cost = Box::new(cost);
        let comm = NoCalls { rank, world_size, supports_all: true };
        let stepper = self.assemble(comm.into(), None, |parts| {
            Ok((Forecast::new(parts.plan, &parts.assignment, cost)?, parts.comms))
        })?;
        Ok(Foresight(stepper))
    }
}

/// A stepper that predicts a training run, together with the trainer's clock. It dereferences to the stepper.
pub struct Foresight(Stepper<Forecast>);

impl Foresight {
    /// Advances the trainer's clock by `ns` nanoseconds of the trainer's work.
    pub fn compute(&mut self, ns: u64) {
        self.0.run.get_mut().device.compute(ns);
    }

    /// Makes the stepper predict the launches of a GPU. On a GPU, neighbouring buckets share a launch in `Normed` and
    /// `Sequential` mode. Call this before the first pass.
    pub fn share_launches(&mut self) {
        let with_next = self.0.assignment.shares_with_next(&self.0.plan);
        self.0.run.get_mut().schedule.share_launches(with_next);
    }

    /// Advances the trainer's clock to the time at which an access to a real stepper would return. The access is a read
    /// of a parameter or, in a pass, a write of a gradient.
    ///
    /// # Errors
    /// Returns those errors of [`Stepper::read`] that concern the tensor. A tensor of which this rank has only a shard
    /// is not refused.
    pub fn touch<'n>(&mut self, tensor: impl Into<TensorId<'n>>) -> Result<()> {
        let (id, memory) = self.0.find(tensor.into())?;
        let writes = self.0.run.get_mut().schedule.is_open() && memory == Memory::Grads;
        self.0.claim(id, memory, writes)?;
        if writes { self.0.note_written(id, memory) } else { Ok(()) }
    }

    /// Returns the trainer's time in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.0.run.borrow().device.now_ns()
    }
}

impl Deref for Foresight {
    type Target = Stepper<Forecast>;

    fn deref(&self) -> &Stepper<Forecast> {
        &self.0
    }
}

impl DerefMut for Foresight {
    fn deref_mut(&mut self) -> &mut Stepper<Forecast> {
        &mut self.0
    }
}
