//! The streams of a stepper on a GPU, and events for positions on them.
//!
//! A ticket names a position, and a ring of events per stream holds its event. An event is recorded anew only long
//! after every wait for it was submitted; a wait that comes later still waits for a later position of the same stream,
//! which is safe. This module makes no stream or event after construction.

use std::sync::Arc;

use super::driver::Driver;
use super::owned::{Event, OwnedStream};
use crate::error::Result;
use crate::handle::StreamHandle;
use crate::op::{STREAMS, Stream, Ticket};

/// The streams that the plan uses, with a ring of events for each.
pub(super) struct Streams {
    compute: StreamHandle,
    rings: [Vec<Event>; STREAMS],
    /// Marks positions that no ticket names.
    spare: Event,
    reduce: OwnedStream,
    optim: OwnedStream,
    gather: Option<OwnedStream>,
    download: Option<OwnedStream>,
    upload: Option<OwnedStream>,
}

impl Streams {
    /// Takes the trainer's stream as `compute`. Up to `room` tickets of one stream can be waited for at a time.
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        compute: StreamHandle,
        priorities: Priorities,
        used: &[Stream],
        room: usize,
    ) -> Result<Streams> {
        let own = |stream: Stream, priority: i32| {
            used.contains(&stream).then(|| OwnedStream::new(driver, priority)).transpose()
        };
        let mut streams = Streams {
            compute,
            rings: std::array::from_fn(|_| Vec::with_capacity(room)),
            spare: Event::new(driver, false)?,
            reduce: OwnedStream::new(driver, priorities.reduce)?,
            optim: OwnedStream::new(driver, priorities.optim)?,
            gather: own(Stream::Gather, priorities.reduce)?,
            download: own(Stream::Download, priorities.reduce)?,
            upload: own(Stream::Upload, priorities.reduce)?,
        };
        let used: Vec<Stream> = streams.all().collect();
        for stream in used {
            let ring = &mut streams.rings[stream.index()];
            for _ in 0..room {
                ring.push(Event::new(driver, false)?);
            }
        }
        Ok(streams)
    }

    /// Returns the streams that there are.
    pub(super) fn all(&self) -> impl Iterator<Item = Stream> + use<> {
        let there: [bool; STREAMS] = Stream::ALL.map(|stream| match stream {
            Stream::Compute | Stream::Reduce | Stream::Optim => true,
            Stream::Gather => self.gather.is_some(),
            Stream::Download => self.download.is_some(),
            Stream::Upload => self.upload.is_some(),
        });
        Stream::ALL.into_iter().filter(move |stream| there[stream.index()])
    }

    pub(super) fn stream(&self, stream: Stream) -> StreamHandle {
        match stream {
            Stream::Compute => self.compute,
            Stream::Reduce => self.reduce.handle(),
            Stream::Optim => self.optim.handle(),
            // A plan that has no such stream has no op on it.
            Stream::Gather => self.gather.as_ref().unwrap_or(&self.optim).handle(),
            Stream::Download => self.download.as_ref().unwrap_or(&self.optim).handle(),
            Stream::Upload => self.upload.as_ref().unwrap_or(&self.optim).handle(),
        }
    }

    /// Returns the event of a position.
    pub(super) fn event(&self, ticket: Ticket) -> &Event {
        let ring = &self.rings[ticket.stream.index()];
        &ring[(ticket.tick % ring.len() as u64) as usize]
    }

    pub(super) fn record(&self, ticket: Ticket) -> Result<()> {
        self.event(ticket).record(self.stream(ticket.stream))
    }

    pub(super) fn wait(&self, stream: Stream, ticket: Ticket) -> Result<()> {
        self.event(ticket).hold(self.stream(stream))
    }

    /// Records an event after everything that is on the stream.
    pub(super) fn here(&self, stream: Stream) -> Result<&Event> {
        self.spare.record(self.stream(stream))?;
        Ok(&self.spare)
    }

    /// Makes one stream wait for everything on the others: the optim stream before memory is freed on it, the
    /// trainer's at the end of a capture.
    pub(super) fn gather(&self, on: Stream) -> Result<()> {
        for other in self.all().filter(|other| *other != on) {
            self.here(other)?.hold(self.stream(on))?;
        }
        Ok(())
    }
}

/// Priorities of the library's own streams; lower runs sooner.
#[derive(Clone, Copy, Debug)]
pub(super) struct Priorities {
    pub(super) reduce: i32,
    pub(super) optim: i32,
}
