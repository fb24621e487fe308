//! Submits the schedule's ops to the device. No other code uses both the schedule and the device.
//!
//! On the host, a `Wait` op of the compute stream is deferred. The trainer's thread executes the `Wait` before its next
//! memory access, or before the next `Record` op of that stream. On a GPU, the `Wait` is executed at once, because it
//! blocks only the stream. Every op and every access is recorded before it happens.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::hazard::Traced;
use crate::op::{Access, Action, Op, STREAMS, Span, Stream, Ticket};
use crate::schedule::Schedule;
use crate::timeline::{Exposure, Interval, Lane, TimedOp};

/// A schedule bound to a device.
pub(crate) struct Run<D> {
    pub(crate) schedule: Schedule,
    pub(crate) device: D,
    deferred: DeferredWaits,
    /// A buffer of ops for the device. The buffer is reused, so that passes in the steady state allocate nothing.
    batch: Vec<Op>,
    recording: Option<Recording>,
    /// The failure from which the stepper was rescued, if any. After a rescue, the device runs no more ops, so memory
    /// can be read.
    rescued: Option<Error>,
}

/// Deferred waits of the compute stream.
#[derive(Default)]
struct DeferredWaits {
    /// For each stream, the tick for which the trainer must wait before it continues.
    needed: [u64; STREAMS],
    done: [u64; STREAMS],
}

impl DeferredWaits {
    fn is_any_left(&self) -> bool {
        self.needed.iter().zip(&self.done).any(|(needed, done)| needed > done)
    }

    /// Executes every deferred wait.
    fn execute<D: Device>(&mut self, device: &mut D, recording: &mut Option<Recording>) -> Result<()> {
        for stream in Stream::ALL {
            let tick = self.needed[stream.index()];
            if self.done[stream.index()] >= tick {
                continue;
            }
            let start_ns = device.now_ns();
            let outcome = device.wait(Ticket { stream, tick });
            if let Some(recording) = recording.as_mut().filter(|_| !D::TRAINER_IS_A_STREAM) {
                recording.blocked.push(Interval { start_ns, end_ns: device.now_ns() });
            }
            outcome?;
            self.done[stream.index()] = tick;
        }
        Ok(())
    }
}

/// The ops and accesses of one rank in submission order, and the times at which its trainer waited.
#[derive(Clone, Debug, Default)]
pub struct Recording {
    /// Ops and trainer accesses, for [`hazard::check`](crate::hazard::check).
    pub list: Vec<Traced>,
    /// The intervals in which the trainer (a thread or a stream) waited.
    pub blocked: Vec<Interval>,
    /// The ops that the streams ran. The ops of each stream are in order.
    pub ran: Vec<TimedOp>,
}

impl Recording {
    /// Returns how much of the optimizer's time was exposed, that is, how long the trainer waited while the optimizer
    /// stream worked.
    pub fn exposure(&self) -> Exposure {
        let optim = self.ran.iter().filter(|ran| ran.op.stream == Stream::Optim);
        let busy: Vec<Interval> = optim.map(|ran| ran.interval).collect();
        crate::timeline::exposure(&busy, &self.blocked)
    }

    /// Returns the times at which ops ran, as input for [`timeline`](crate::timeline).
    pub fn lane(&self, rank: u32) -> Lane<'_> {
        Lane { rank, ran: &self.ran, blocked: &self.blocked }
    }
}

impl<D: Device> Run<D> {
    pub(crate) fn new(schedule: Schedule, device: D, record: bool) -> Self {
        let recording = record.then(Recording::default);
        Run {
            schedule,
            device,
            deferred: DeferredWaits::default(),
            batch: Vec::new(),
            recording,
            rescued: None,
        }
    }

    /// Submits the schedule's new ops to the device.
    pub(crate) fn submit(&mut self) {
        self.submit_awaiting(None);
    }

    /// Submits the schedule's new ops to the device. If one of these ops waits for the caller's sum of a bucket, `sum`
    /// is that sum.
    pub(crate) fn submit_awaiting(&mut self, mut sum: Option<D::Sum>) {
        if self.rescued.is_some() {
            // After a rescue no op runs, so there is nothing to wait for.
            return self.schedule.drain().for_each(drop);
        }
        let mut awaits = false;
        for op in self.schedule.drain() {
            awaits |= matches!(op.action, Action::AwaitSum { .. });
            if let Some(recording) = &mut self.recording {
                recording.list.push(Traced::Op(op));
            }
            match (op.stream, op.action) {
                (Stream::Compute, Action::Wait(ticket)) => {
                    self.deferred.needed[ticket.stream.index()] = ticket.tick;
                    continue;
                }
                (Stream::Compute, Action::Record(_)) if self.deferred.is_any_left() => {
                    // The deferred waits may be for ops that are still in the batch, so the batch is submitted first.
                    self.device.submit(&self.batch, sum.take_if(|_| std::mem::take(&mut awaits)));
                    self.batch.clear();
                    // In the list, this Record comes after the deferred Waits, so the trainer must execute these Waits
                    // first. Usually an earlier access has already done this. If a wait fails, later ops are skipped
                    // and the next access reports the failure.
                    let _ = self.deferred.execute(&mut self.device, &mut self.recording);
                }
                _ => {}
            }
            self.batch.push(op);
        }
        if !self.batch.is_empty() {
            self.device.submit(&self.batch, sum.filter(|_| awaits));
            self.batch.clear();
        }
        if D::TRAINER_IS_A_STREAM {
            // If a wait fails, later ops are skipped and the next access reports the failure.
            let _ = self.deferred.execute(&mut self.device, &mut self.recording);
        }
    }

    /// Informs the schedule of the trainer's next access, and waits until this access is allowed.
    pub(crate) fn touch(&mut self, announce: impl FnOnce(&mut Schedule)) -> Result<()> {
        announce(&mut self.schedule);
        self.settle()
    }

    /// Waits until the trainer may access the tensors of its own scaler. In a pass, the trainer may access only the
    /// flag. Between passes, the trainer may access the scale and the flag.
    pub(crate) fn touch_scaler(&mut self) -> Result<()> {
        self.touch(Schedule::touch_scaler)?;
        if self.schedule.is_offloaded() {
            // The scaler lies in the host's memory, so the trainer's thread itself must wait.
            self.device.synchronize()?;
        }
        let span = if self.schedule.is_open() { Span::SCALER_FLAG } else { Span::LOSS_SCALE };
        self.note(Access { span, writes: true });
        Ok(())
    }

    /// Freezes or unfreezes a parameter from the next pass on. Call [`Schedule::touch_frozen`] first.
    pub(crate) fn set_frozen(&mut self, param: usize, segment: u32, frozen: bool) {
        self.schedule.set_frozen(param, frozen);
        if let Some(recording) = &mut self.recording {
            recording.list.push(Traced::Freeze { segment, frozen });
        }
    }

    /// Submits the schedule's new ops, then executes the deferred waits of the compute stream. After a rescue, nothing
    /// is executed.
    pub(crate) fn settle(&mut self) -> Result<()> {
        self.submit();
        if self.rescued.is_some() {
            return Ok(());
        }
        self.deferred.execute(&mut self.device, &mut self.recording)
    }

    /// Waits for all ops. If the device has failed, shuts down the device, so that no further op touches memory.
    pub(crate) fn rescue(&mut self) {
        self.schedule.synchronize();
        if let Err(failure) = self.settle() {
            // `end` reports the same failure again, but still waits for running ops.
            let _ = self.device.end();
            self.schedule.forget_unsharded();
            self.rescued = Some(failure);
        }
    }

    /// After a rescue, refuses further calls and returns the failure that led to the rescue.
    pub(crate) fn refuse_rescued(&self) -> Result<()> {
        self.rescued.clone().map_or(Ok(()), Err)
    }

    /// Drops the deferred waits of a capture that has ended. Stream positions of a capture have no meaning after its
    /// end.
    pub(crate) fn drop_deferred_waits(&mut self) {
        self.deferred.done = self.deferred.needed;
    }

    /// Records that the trainer touches these bytes. Call [`settle`](Self::settle) first.
    pub(crate) fn note(&mut self, access: Access) {
        if let Some(recording) = self.recording.as_mut().filter(|_| self.rescued.is_none()) {
            recording.list.push(Traced::Trainer(access));
        }
    }

    pub(crate) fn is_recording(&self) -> bool {
        self.recording.is_some()
    }

    /// Returns what was recorded since the last `take_recording`. Even after a failure, the list has all ops that were
    /// submitted.
    pub(crate) fn take_recording(&mut self) -> Option<Recording> {
        let mut recording = self.recording.as_mut().map(std::mem::take)?;
        recording.ran = self.device.take_timed_ops().unwrap_or_default();
        if D::TRAINER_IS_A_STREAM {
            recording.blocked = self.device.take_stalls().unwrap_or_default();
        }
        Some(recording)
    }
}
