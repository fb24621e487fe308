//! A device without memory and threads. The forecast computes the time at which each op would run, from the durations
//! of the ops.
//!
//! A stepper on this device has the same schedule and the same byte counts as a real stepper, and refuses the same
//! calls. A laptop can therefore plan a thousand ranks. The ops of a stream run in order. No op runs before it was
//! submitted. A `Wait` ends when the `Record` with its ticket has run. The forecast assumes that all ranks take the
//! same time, so it computes the times of one rank only.

use std::collections::HashMap;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::abi::{InstepControl, InstepStatus};
use crate::device::{Claimed, Device, Executor};
use crate::error::{Error, Result};
use crate::handle::Place;
use crate::launch::{
    Assignment, BorrowedPieces, Progress, Region, Regions, Settings, StepConstants, first_control,
};
use crate::layout::Plan;
use crate::op::{
    Action, Interval, Memory, Op, Part, STREAMS, Span, Stream, Ticket, TimedOp, Words, step_bytes,
};

/// A function that returns how many nanoseconds an op takes. The function's second argument is the number of bytes that
/// the op moves. For a step or a norm, these are the bytes on the memory bus. For a collective, they are the bytes of
/// its buffer. Clocks saturate at 2^64 - 1 nanoseconds.
pub(crate) type Cost = Box<dyn FnMut(&Op, u64) -> u64 + Send>;

/// The device of a [`Stepper`](crate::Stepper) that forecasts when ops would run. See [`StepperBuilder::forecast`].
///
/// [`StepperBuilder::forecast`]: crate::StepperBuilder::forecast
pub struct Forecast {
    plan: Arc<Plan>,
    constants: StepConstants,
    regions: Regions,
    /// For each bucket, the bytes that its step moves, and the bytes that each `Measure` before the step moves. The
    /// numbers are for a step in which no parameter is frozen.
    step_bytes: Vec<(u64, u64)>,
    cost: Option<Cost>,
    /// The time at which each stream has run all its ops. The compute stream stands for the trainer.
    clocks: [u64; STREAMS],
    passed: HashMap<Ticket, u64>,
    ran: Vec<TimedOp>,
}

impl Forecast {
    pub(crate) fn new(plan: Arc<Plan>, assignment: &Assignment, cost: Cost) -> Result<Forecast> {
        let nowhere = |bytes: u64| Region::whole(NonNull::dangling(), bytes);
        let given = [Memory::Params, Memory::Grads].map(|memory| nowhere(Span::whole(memory, &plan).bytes()));
        let given = [Memory::Params, Memory::Grads].into_iter().zip(given);
        let regions = Regions::new(&plan, assignment.counts(&plan), given, |_, bytes| Ok(nowhere(bytes)))?;
        Ok(Forecast {
            step_bytes: (0..)
                .zip(plan.buckets())
                .map(|(k, _)| {
                    let bytes = |parts| step_bytes(&plan, assignment.state_count(), parts, k);
                    match assignment.stops(&plan, k).len() as u64 {
                        0 => (bytes(assignment.parts(&plan, k)), 0),
                        stages => (bytes(&[Part::Apply]), bytes(&[Part::Measure]) / stages),
                    }
                })
                .collect(),
            plan,
            constants: assignment.constants,
            regions,
            cost: Some(cost),
            clocks: [0; STREAMS],
            passed: HashMap::new(),
            ran: Vec::new(),
        })
    }

    /// Advances the trainer's clock by `ns` nanoseconds.
    pub(crate) fn compute(&mut self, ns: u64) {
        let clock = &mut self.clocks[Stream::Compute.index()];
        *clock = clock.saturating_add(ns);
    }

    fn moved_bytes(&self, op: &Op) -> u64 {
        match op.action {
            Action::Collective { src, dst, .. } => src.bytes().max(dst.bytes()),
            Action::Zero(span) | Action::Copy { src: span, .. } => span.bytes(),
            // An addition reads two buffers and writes one.
            Action::Add { src, .. } => 3 * src.bytes(),
            Action::Norm { bucket } => Span::bucket(&self.plan.buckets()[bucket as usize]).bytes(),
            Action::Measure { bucket, .. } => self.step_bytes[bucket as usize].1,
            Action::Step { bucket, count } => {
                self.step_bytes[bucket as usize..][..count as usize].iter().map(|bytes| bytes.0).sum()
            }
            _ => 0,
        }
    }

    fn run(&mut self, op: &Op) {
        let submitted_ns = self.clocks[Stream::Compute.index()];
        let free_ns = self.clocks[op.stream.index()].max(submitted_ns);
        match op.action {
            Action::Wait(ticket) => {
                // A schedule submits a Record before the Wait for its position. A stream's first position needs no
                // Record and has always been passed.
                let passed_ns = self.passed.get(&ticket).copied().unwrap_or_default();
                let clock = &mut self.clocks[op.stream.index()];
                *clock = (*clock).max(passed_ns);
            }
            Action::Record(ticket) => {
                self.passed.insert(ticket, self.clocks[op.stream.index()]);
            }
            // The forecast assumes that the caller's sum ends at the hand-over, like the trainer's own work.
            Action::AwaitSum { .. } => self.clocks[op.stream.index()] = free_ns,
            _ => {
                let bytes = self.moved_bytes(op);
                let taken_ns = self.cost.as_mut().map_or(0, |cost| cost(op, bytes));
                let interval = Interval { start_ns: free_ns, end_ns: free_ns.saturating_add(taken_ns) };
                self.clocks[op.stream.index()] = interval.end_ns;
                self.ran.push(TimedOp { op: *op, interval });
            }
        }
    }

    fn no_values() -> Error {
        Error::unsupported(
            "values of a forecast",
            "it has no memory",
            "build the stepper with `host` or `cuda`",
        )
    }
}

impl Executor for Forecast {
    const TRAINER_IS_A_STREAM: bool = false;

    type Sum = ();

    fn place(&self) -> Place {
        Place::Host
    }

    fn resolve(&self, _: Span) -> *mut u8 {
        ptr::null_mut()
    }

    fn sizes(&self) -> Vec<(Memory, u64)> {
        self.regions.sizes().collect()
    }

    fn write_settings(&mut self, _: &Settings, _: Claimed) {}

    fn write_progress(&mut self, _: usize, _: Progress, _: Claimed) -> Result<()> {
        Err(Forecast::no_values())
    }

    fn read_progress(&mut self, _: usize, _: Claimed) -> Result<Progress> {
        Err(Forecast::no_values())
    }

    fn read_control(&mut self, _: Claimed) -> Result<InstepControl> {
        Ok(first_control(&self.constants))
    }

    fn latest(&self) -> Option<InstepStatus> {
        None
    }

    fn read(&mut self, _: Span, _: &mut [u8], _: Claimed) -> Result<()> {
        Err(Forecast::no_values())
    }

    fn write(&mut self, _: Span, _: &[u8], _: Claimed) -> Result<()> {
        Err(Forecast::no_values())
    }

    fn rebind(&mut self, _: BorrowedPieces, _: Claimed) -> Result<()> {
        Err(Forecast::no_values())
    }

    fn rebuilt(
        &mut self,
        plan: &Arc<Plan>,
        assignment: &Arc<Assignment>,
        _: Option<BorrowedPieces>,
        _: &Arc<Words>,
        _: Claimed,
    ) -> Result<Self> {
        // The old device now counts every op as 0 ns. This does no harm, because the stepper drops the old device.
        let cost = self.cost.take().unwrap_or_else(|| Box::new(|_, _| 0));
        let now_ns = self.clocks.iter().copied().max().unwrap_or_default();
        let mut device = Forecast::new(Arc::clone(plan), assignment, cost)?;
        device.clocks = [now_ns; STREAMS];
        Ok(device)
    }

    fn take_timed_ops(&mut self) -> Result<Vec<TimedOp>> {
        Ok(std::mem::take(&mut self.ran))
    }
}

impl Device for Forecast {
    fn submit(&mut self, ops: &[Op], _: Option<()>) {
        ops.iter().for_each(|op| self.run(op));
    }

    fn wait(&mut self, ticket: Ticket) -> Result<()> {
        let passed_ns = self.passed.get(&ticket).copied().unwrap_or_default();
        let trainer = &mut self.clocks[Stream::Compute.index()];
        *trainer = (*trainer).max(passed_ns);
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        Ok(())
    }

    fn now_ns(&self) -> u64 {
        self.clocks[Stream::Compute.index()]
    }
}
