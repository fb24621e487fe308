//! Events: a position on a stream for which other streams and the host can wait.
//!
//! An event that a capture recorded stands for nodes of its graph, and nothing outside the capture may use it.

use std::time::Instant;

use crate::codes::Answer;
use crate::contexts::same;
use crate::gpu::Gpu;
use crate::header::cudaError_enum as Code;
use crate::objects::{Event, Recorded};
use crate::queue::Mark;
use crate::settings::Plant;
use crate::work::Work;

const DISABLE_TIMING: u32 = 2;
const KNOWN_FLAGS: u32 = 0b111;

impl Gpu {
    pub(crate) fn create_event(&mut self, flags: u32) -> Answer<usize> {
        let context = self.current()?;
        if flags & !KNOWN_FLAGS != 0 {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        let is_timed = flags & DISABLE_TIMING == 0 && !self.planted(Plant::Plain);
        Ok(self.events.insert(Event { context, is_timed, recorded: Recorded::Never }))
    }

    pub(crate) fn destroy_event(&mut self, handle: usize) -> Answer<()> {
        self.current()?;
        self.events.remove(handle).map(drop)
    }

    pub(crate) fn record(&mut self, handle: usize, stream: usize) -> Answer<()> {
        let stream = self.stream(stream)?;
        let (context, event) = (self.streams.get(stream)?.context, self.events.get(handle)?.context);
        same(context, event, &format!("event {handle:#x}, recorded on stream {stream:#x},"))?;
        self.inspect_capture(stream)?;
        let (lane, capture) = {
            let row = self.streams.get(stream)?;
            (row.lane, row.capture)
        };
        let recorded = match capture {
            Some(capture) => Recorded::Captured(capture, self.captures.get(capture)?.last_of(stream)),
            None if self.planted(Plant::Early) => Recorded::At(self.queue.before_work(lane), Instant::now()),
            None => match self.enqueue(stream, "event", Work::Marker, &[])? {
                Some(mark) => Recorded::At(mark, Instant::now()),
                None => Recorded::Never,
            },
        };
        self.events.get(handle)?.recorded = recorded;
        Ok(())
    }

    /// Makes a stream wait for an event's latest record. An event without a record orders nothing.
    pub(crate) fn wait_for(&mut self, stream: usize, event: usize) -> Answer<()> {
        let stream = self.stream(stream)?;
        let recorded = self.events.get(event)?.recorded.clone();
        self.inspect_capture(stream)?;
        let capturing = self.streams.get(stream)?.capture;
        match (recorded, capturing) {
            (Recorded::Captured(capture, nodes), _) => self.join_capture(stream, capture, &nodes),
            // Work outside a capture is no part of its graph.
            (_, Some(capture)) => self.invalidate(capture, Code::CUDA_ERROR_STREAM_CAPTURE_ISOLATION),
            (Recorded::Never, None) => Ok(()),
            (Recorded::At(mark, _), None) => self.enqueue(stream, "wait", Work::Marker, &[mark]).map(drop),
        }
    }

    /// Returns the position of an event; `None` if it was never recorded.
    pub(crate) fn place_of(&mut self, event: usize) -> Answer<Option<Mark>> {
        self.current()?;
        self.forbid_unsafe_calls()?;
        match &self.events.get(event)?.recorded {
            Recorded::Never => Ok(None),
            Recorded::At(mark, _) => Ok(Some(mark.clone())),
            Recorded::Captured(..) => Err(Code::CUDA_ERROR_CAPTURED_EVENT),
        }
    }

    pub(crate) fn query_event(&mut self, event: usize) -> Answer<()> {
        let Some(mark) = self.place_of(event)? else { return Ok(()) };
        if self.ask_for(&mark) { Ok(()) } else { Err(Code::CUDA_ERROR_NOT_READY) }
    }

    /// Returns the milliseconds between two records. These are times of the calls, because no GPU's time exists here.
    pub(crate) fn elapsed(&mut self, from: usize, to: usize) -> Answer<f32> {
        self.current()?;
        let mut times = Vec::new();
        for handle in [from, to] {
            let event = self.events.get(handle)?;
            match &event.recorded {
                _ if !event.is_timed => return Err(Code::CUDA_ERROR_INVALID_HANDLE),
                Recorded::At(mark, time) => {
                    let (place, time) = ((mark.lane, mark.position), *time);
                    if !self.queue.is_done(place) {
                        return Err(Code::CUDA_ERROR_NOT_READY);
                    }
                    times.push(time);
                }
                _ => return Err(Code::CUDA_ERROR_INVALID_HANDLE),
            }
        }
        Ok(times[1].saturating_duration_since(times[0]).as_secs_f32() * 1e3)
    }
}
