//! A trainer's stream on a GPU, and marks on it that are timed.
//!
//! The stream is left to the process, so that it outlives every stepper. This file must not wait but where it says so.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use crate::cuda::Cuda;
use crate::cuda::driver::{Driver, Entered};
use crate::cuda::owned::Event;
use crate::error::Result;
use crate::handle::{EventHandle, StreamHandle};

/// One above `Cuda::optim_priority`'s default, so that backward does not queue after a step's thousands of blocks.
const PRIORITY: i32 = -1;

/// The trainer's stream on a GPU, with the events that time a pass.
pub struct Trainer {
    cuda: Cuda,
    /// Never given back.
    marks: ManuallyDrop<[Event; 3]>,
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
        let marks = [Event::new(driver, true)?, Event::new(driver, true)?, Event::new(driver, true)?];
        Ok(Trainer { cuda: cuda.clone().compute_stream(stream), marks: ManuallyDrop::new(marks) })
    }

    /// Marks a moment.
    ///
    /// # Errors
    /// The driver's.
    pub fn mark(&self, mark: Mark) -> Result<()> {
        let driver = self.driver();
        let _entered = Entered::new(&**driver)?;
        self.marks[mark as usize].record(self.stream())
    }

    /// Waits for the last mark; times are since `zero`, or else since the first mark.
    ///
    /// # Errors
    /// The driver's.
    pub fn wait(&self, zero: Option<EventHandle>) -> Result<Times> {
        let driver = self.driver();
        let _entered = Entered::new(&**driver)?;
        let [start, backward_end, end] = &*self.marks;
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
