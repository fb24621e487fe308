//! A trainer's stream on a GPU, and marks on it that are timed.
//!
//! The stream is left to the process, so that it outlives every stepper. This file must not wait but where it says so.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::collective::Collective;
use crate::cuda::driver::{Driver, Entered};
use crate::cuda::{CapturedPass, Cuda, CudaDevice};
use crate::error::Result;
use crate::handle::{EventHandle, StreamHandle};
use crate::stepper::{Stepper, StepperBuilder};

/// One above `Cuda::optim_priority`'s default, so that backward does not queue after a step's thousands of blocks.
const PRIORITY: i32 = -1;

/// The trainer's stream on a GPU, with the events that time a pass.
pub struct Trainer {
    cuda: Cuda,
    marks: [EventHandle; 3],
}

/// A moment of a pass, on the trainer's stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// Before backward.
    Start,
    /// After backward's last kernel.
    BackwardEnd,
    /// Point at which every parameter may be read.
    End,
}

/// When a pass's marks were reached, in nanoseconds since the clock's zero.
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
    /// Builds a trainer with a stream of its own, whose kernels go before the optimizer's.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(cuda: &Cuda) -> Result<Trainer> {
        let driver = cuda.driver();
        let _entered = Entered::new(&**driver)?;
        let stream = driver.create_stream(PRIORITY)?;
        let marks = [driver.create_event(true)?, driver.create_event(true)?, driver.create_event(true)?];
        Ok(Trainer { cuda: cuda.clone().compute_stream(stream), marks })
    }

    /// Builds a stepper on the stream, whose steps take at most so many blocks.
    ///
    /// # Errors
    /// As `StepperBuilder::cuda`.
    pub fn stepper(
        &self,
        builder: StepperBuilder<'_>,
        comm: impl Collective + 'static,
        max_blocks: Option<u32>,
    ) -> Result<Stepper<CudaDevice>> {
        let cuda = Cuda { max_blocks, ..self.cuda.clone() };
        // SAFETY: nobody destroys the stream.
        unsafe { builder.cuda(comm, &cuda) }
    }

    /// Makes a captured pass in which the trainer has no work of its own.
    ///
    /// # Errors
    /// As `Stepper::replay`.
    pub fn replay(&self, stepper: &mut Stepper<CudaDevice>, captured: &CapturedPass) -> Result<()> {
        // SAFETY: the capture is of the stepper's own work on the stepper's own memory.
        unsafe { stepper.replay(captured) }
    }

    /// Marks a moment.
    ///
    /// # Errors
    /// The driver's.
    pub fn mark(&self, mark: Mark) -> Result<()> {
        let driver = self.driver();
        let _entered = Entered::new(&**driver)?;
        // SAFETY: both are of this driver, and never given back.
        unsafe { driver.record(self.marks[mark as usize], self.stream()) }
    }

    /// Waits for the last mark; times are since `zero`, or else since the first mark.
    ///
    /// # Errors
    /// The driver's.
    pub fn wait(&self, zero: Option<EventHandle>) -> Result<Times> {
        let driver = self.driver();
        let _entered = Entered::new(&**driver)?;
        let [start, backward_end, end] = self.marks;
        let zero = zero.unwrap_or(start);
        // SAFETY: events of this driver, all of them recorded before the last one.
        unsafe {
            while !driver.is_passed(end)? {
                std::thread::yield_now();
            }
            let at = |event| driver.elapsed_ns(zero, event);
            Ok(Times { start_ns: at(start)?, backward_end_ns: at(backward_end)?, end_ns: at(end)? })
        }
    }

    pub(super) fn driver(&self) -> &Arc<dyn Driver> {
        self.cuda.driver()
    }

    pub(super) fn stream(&self) -> StreamHandle {
        self.cuda.compute
    }
}
