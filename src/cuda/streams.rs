//! The streams of a stepper on a GPU, and events for positions on them.
//!
//! A ticket names a position on a stream. Each stream has a ring of events, and one event of the ring marks the
//! position. An event is recorded again only long after every wait for it was submitted. A wait that is submitted after
//! the event was recorded again waits for a later position of the same stream, so it never ends too early. All streams
//! and events are made at construction.

use std::sync::Arc;

use super::driver::Driver;
use super::owned::{Event, OwnedStream};
use crate::error::Result;
use crate::handle::StreamHandle;
use crate::layout::Plan;
use crate::op::{STREAMS, Stream, Ticket};

/// The streams that the plan uses, with a ring of events for each.
pub(crate) struct Streams {
    compute: StreamHandle,
    rings: [Vec<Event>; STREAMS],
    /// An event for positions that no ticket names.
    spare: Event,
    /// All streams except the trainer's stream.
    own: [Option<OwnedStream>; STREAMS],
}

impl Streams {
    /// Makes the streams, with the trainer's stream as `compute`. Each stream has `room` events, so ops can wait for
    /// the last `room` tickets of the stream.
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        compute: StreamHandle,
        optim_priority: i32,
        plan: &Plan,
        room: usize,
    ) -> Result<Streams> {
        let (rings, own) = Default::default();
        let mut streams = Streams { compute, rings, spare: Event::new(driver, false)?, own };
        for stream in Stream::used(plan) {
            // Sums and copies have a higher priority than steps. The driver clamps the priority.
            let priority = if *stream == Stream::Optim { optim_priority } else { i32::MIN };
            streams.own[stream.index()] = Some(OwnedStream::with_priority(driver, priority)?);
        }
        for stream in [Stream::Compute].iter().chain(Stream::used(plan)) {
            let ring = (0..room).map(|_| Event::new(driver, false));
            streams.rings[stream.index()] = ring.collect::<Result<_>>()?;
        }
        Ok(streams)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = Stream> + '_ {
        Stream::ALL.into_iter().filter(|stream| !self.rings[stream.index()].is_empty())
    }

    pub(crate) fn stream(&self, stream: Stream) -> StreamHandle {
        self.own[stream.index()].as_ref().map_or(self.compute, OwnedStream::handle)
    }

    pub(super) fn event(&self, ticket: Ticket) -> &Event {
        let ring = &self.rings[ticket.stream.index()];
        &ring[(ticket.tick % ring.len() as u64) as usize]
    }

    pub(super) fn wait(&self, stream: Stream, ticket: Ticket) -> Result<()> {
        self.event(ticket).hold(self.stream(stream))
    }

    /// Records an event after all work that is on the stream now.
    pub(super) fn here(&self, stream: Stream) -> Result<&Event> {
        self.spare.record(self.stream(stream))?;
        Ok(&self.spare)
    }

    /// Makes the stream `on` wait for all work on the other streams that `others` selects. Before memory is freed on
    /// the optim stream, this stream waits for all other streams. At the end of a failed capture, the trainer's stream
    /// waits for the streams that have joined the capture.
    pub(super) fn gather(&self, on: Stream, others: impl Fn(Stream) -> bool) -> Result<()> {
        for other in self.all().filter(|other| *other != on && others(*other)) {
            self.here(other)?.hold(self.stream(on))?;
        }
        Ok(())
    }
}
