//! The streams of a stepper on a GPU, and events for positions on them.
//!
//! A ticket names a position, and a ring of events per stream holds its event. An event is recorded anew only long
//! after every wait for it was submitted; a wait that comes later still waits for a later position of the same stream,
//! which is safe. This module makes no stream or event after construction.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::driver::Driver;
use crate::error::Result;
use crate::handle::{EventHandle, StreamHandle};
use crate::op::{STREAMS, Stream, Ticket};

/// The compute, reduce and optim streams, with a ring of events for each.
pub(super) struct Streams {
    driver: Arc<dyn Driver>,
    streams: [StreamHandle; STREAMS],
    rings: [Vec<EventHandle>; STREAMS],
    /// Marks positions that no ticket names.
    spare: EventHandle,
}

impl Streams {
    /// Takes the trainer's stream as `compute`. Up to `room` tickets of one stream can be waited for at a time.
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        compute: StreamHandle,
        priorities: Priorities,
        room: usize,
    ) -> Result<Streams> {
        let mut streams = Streams {
            driver: Arc::clone(driver),
            streams: [StreamHandle::default(); STREAMS],
            rings: std::array::from_fn(|_| Vec::with_capacity(room)),
            spare: driver.create_event(false)?,
        };
        streams.streams[Stream::Compute.index()] = compute;
        streams.streams[Stream::Reduce.index()] = driver.create_stream(priorities.reduce)?;
        streams.streams[Stream::Optim.index()] = driver.create_stream(priorities.optim)?;
        for ring in &mut streams.rings {
            for _ in 0..room {
                ring.push(driver.create_event(false)?);
            }
        }
        Ok(streams)
    }

    pub(super) fn stream(&self, stream: Stream) -> StreamHandle {
        self.streams[stream.index()]
    }

    /// Returns the event of a position.
    pub(super) fn event(&self, ticket: Ticket) -> EventHandle {
        let ring = &self.rings[ticket.stream.index()];
        ring[(ticket.tick % ring.len() as u64) as usize]
    }

    pub(super) fn record(&self, ticket: Ticket) -> Result<()> {
        // SAFETY: both are alive as long as this is; the trainer's stream by the promise of the caller who named it.
        unsafe { self.driver.record(self.event(ticket), self.stream(ticket.stream)) }
    }

    pub(super) fn wait(&self, stream: Stream, ticket: Ticket) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.driver.wait(self.stream(stream), self.event(ticket)) }
    }

    /// Records an event after everything that is on the stream.
    pub(super) fn here(&self, stream: Stream) -> Result<EventHandle> {
        // SAFETY: as above.
        unsafe { self.driver.record(self.spare, self.stream(stream))? };
        Ok(self.spare)
    }

    /// Makes one stream wait for everything on the others: the optim stream before memory is freed on it, the
    /// trainer's at the end of a capture.
    pub(super) fn gather(&self, on: Stream) -> Result<()> {
        for other in Stream::ALL.into_iter().filter(|other| *other != on) {
            let event = self.here(other)?;
            // SAFETY: as above.
            unsafe { self.driver.wait(self.stream(on), event)? };
        }
        Ok(())
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        // SAFETY: made by `new`, but for the trainer's stream; the driver keeps each until what is queued has run.
        unsafe {
            self.rings.iter().flatten().for_each(|event| self.driver.destroy_event(*event));
            self.driver.destroy_event(self.spare);
            for stream in [Stream::Reduce, Stream::Optim].map(|stream| self.stream(stream)) {
                if stream != StreamHandle::default() {
                    self.driver.destroy_stream(stream);
                }
            }
        }
    }
}

/// Priorities of the library's own streams; lower runs sooner.
#[derive(Clone, Copy, Debug)]
pub(super) struct Priorities {
    pub(super) reduce: i32,
    pub(super) optim: i32,
}
