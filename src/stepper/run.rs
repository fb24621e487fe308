//! The one place that sees schedule and device together: ops written by the one are fed to the other.
//!
//! Waits of the compute stream are not executed when they are written: the trainer is the caller's thread, so they are
//! owed, and paid when it next touches memory. Must record every op and every touch before it happens.

use crate::error::Result;
use crate::hazard::Traced;
use crate::op::{Access, Action, Device, Op, STREAMS, Stream, Ticket};
use crate::schedule::Schedule;
use crate::timeline::Interval;

/// A schedule bound to a device.
pub(crate) struct Run<D> {
    pub(crate) schedule: Schedule,
    pub(crate) device: D,
    /// Per stream, the tick that the trainer must see passed before it touches anything.
    owed: [u64; STREAMS],
    paid: [u64; STREAMS],
    recording: Option<Recording>,
}

/// What one rank did, in submission order, and when its trainer stood still.
#[derive(Clone, Debug, Default)]
pub struct Recording {
    /// Ops and trainer accesses, for [`hazard::check`](crate::hazard::check).
    pub list: Vec<Traced>,
    /// The trainer's waits.
    pub blocked: Vec<Interval>,
    /// What the streams ran, each stream in order.
    pub ran: Vec<crate::timeline::Ran>,
}

impl Recording {
    /// How much optimizer time the trainer stood waiting for.
    pub fn exposure(&self) -> crate::timeline::Exposure {
        let optim = self.ran.iter().filter(|ran| ran.op.stream == Stream::Optim);
        let busy: Vec<Interval> = optim.map(|ran| ran.interval).collect();
        crate::timeline::exposure(&busy, &self.blocked)
    }
}

impl<D: Device> Run<D> {
    pub(crate) fn new(schedule: Schedule, device: D, record: bool) -> Self {
        let recording = record.then(Recording::default);
        Run { schedule, device, owed: [0; STREAMS], paid: [0; STREAMS], recording }
    }

    /// Hands what the schedule has written to the device.
    pub(crate) fn submit(&mut self) {
        for op in self.schedule.drain() {
            if let Some(recording) = &mut self.recording {
                recording.list.push(Traced::Op(op));
            }
            if let Op { stream: Stream::Compute, action: Action::Wait(ticket) } = op {
                self.owed[ticket.stream.index()] = ticket.tick;
            }
            self.device.submit(&op);
        }
    }

    /// Submits, then blocks until every wait of the compute stream has been honoured.
    pub(crate) fn settle(&mut self) -> Result<()> {
        self.submit();
        for stream in Stream::ALL {
            let tick = self.owed[stream.index()];
            if self.paid[stream.index()] >= tick {
                continue;
            }
            let start_ns = self.device.now_ns();
            let outcome = self.device.wait(Ticket { stream, tick });
            if let Some(recording) = &mut self.recording {
                recording.blocked.push(Interval { start_ns, end_ns: self.device.now_ns() });
            }
            outcome?;
            self.paid[stream.index()] = tick;
        }
        Ok(())
    }

    /// Notes that the trainer touches these bytes, after [`settle`](Self::settle).
    pub(crate) fn note(&mut self, access: Access) {
        if let Some(recording) = &mut self.recording {
            recording.list.push(Traced::Trainer(access));
        }
    }

    /// What was recorded since the last call.
    pub(crate) fn take_recording(&mut self) -> Option<Recording> {
        self.recording.as_mut().map(std::mem::take)
    }
}
