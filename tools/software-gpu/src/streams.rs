//! Streams: lanes of work, and the implicit waits between them.
//!
//! The legacy default stream and the blocking streams of a context wait for each other at every call, as `cuda.h` says.
//! A stream that is being captured runs nothing; its work becomes nodes of a graph.

use std::sync::Arc;

use crate::claims::Claim;
use crate::codes::Answer;
use crate::foreign::Foreign;
use crate::gpu::Gpu;
use crate::header::cudaError_enum as Code;
use crate::objects::{Joins, Stream};
use crate::queue::Mark;
use crate::report;
use crate::settings::Plant;
use crate::work::Work;

impl Gpu {
    pub(crate) fn create_stream(&mut self, context: usize, joins: Joins) -> usize {
        let lane = self.queue.open_lane(context, |lane| match joins {
            Joins::Legacy => "default stream".to_owned(),
            _ => format!("stream {lane}"),
        });
        self.streams.insert(Stream {
            context,
            lane,
            joins,
            capture: None,
            made_by_the_program: false,
            green: None,
            claim: None,
        })
    }

    /// Creates a stream for the program.
    pub(crate) fn new_stream(&mut self, flags: u32) -> Answer<usize> {
        let context = self.current()?;
        let joins = match flags {
            0 => Joins::Blocking,
            1 => Joins::Nothing,
            _ => return Err(Code::CUDA_ERROR_INVALID_VALUE),
        };
        let handle = self.create_stream(context, joins);
        self.streams.get(handle)?.made_by_the_program = true;
        Ok(handle)
    }

    /// Creates a stream in a green context, whose streams wait for no other stream.
    pub(crate) fn new_green_stream(&mut self, green: usize, flags: u32) -> Answer<usize> {
        let device = self.contexts.get(green)?.device;
        let primary = *self.primaries.get(&device).ok_or(Code::CUDA_ERROR_INVALID_CONTEXT)?;
        if flags != 1 {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        let handle = self.create_stream(primary, Joins::Nothing);
        let stream = self.streams.get(handle)?;
        (stream.made_by_the_program, stream.green) = (true, Some(green));
        Ok(handle)
    }

    /// Destroys a stream; its work still runs.
    pub(crate) fn destroy_stream(&mut self, handle: usize) -> Answer<()> {
        let handle = self.stream(handle)?;
        let stream = self.streams.get(handle)?;
        if !stream.made_by_the_program {
            return Err(Code::CUDA_ERROR_INVALID_HANDLE);
        }
        if stream.capture.is_some() {
            report::fault("capture", &format!("stream {handle:#x} is destroyed while it is captured"));
        }
        self.streams.remove(handle).map(drop)
    }

    /// Returns the handle of a stream, also of a default stream by its number.
    pub(crate) fn stream(&mut self, handle: usize) -> Answer<usize> {
        self.current()?;
        if handle <= 2 {
            return self.default_stream(handle);
        }
        self.streams.get(handle)?;
        Ok(handle)
    }

    /// Returns the marks before a new piece of work, except those of its own stream.
    fn joined(&mut self, handle: usize) -> Answer<Vec<Mark>> {
        let (context, joins) = {
            let stream = self.streams.get(handle)?;
            (stream.context, stream.joins)
        };
        let lanes: Vec<usize> = match joins {
            Joins::Nothing => Vec::new(),
            Joins::Blocking => {
                let legacy = self.contexts.get(context)?.legacy;
                vec![self.streams.get(legacy)?.lane]
            }
            Joins::Legacy => {
                let blocking = self.streams.iter().filter(|(_, stream)| stream.context == context);
                blocking
                    .filter(|(_, stream)| stream.joins == Joins::Blocking)
                    .map(|(_, stream)| stream.lane)
                    .collect()
            }
        };
        Ok(lanes.into_iter().map(|lane| self.queue.tail(lane)).collect())
    }

    /// Restricts the work that is enqueued on a stream from now on to a claim, or ends the restriction.
    pub(crate) fn claim(&mut self, stream: usize, claim: Option<Claim>) -> Answer<()> {
        let stream = self.stream(stream)?;
        let claim = match claim {
            Some(claim) if self.planted(Plant::Narrow) => Some(claim.narrower()),
            claim => claim,
        };
        self.streams.get(stream)?.claim = claim.map(Arc::new);
        Ok(())
    }

    /// Returns work with the claim of its stream, if it touches memory and there is a claim.
    pub(crate) fn claimed(&mut self, stream: usize, work: Work) -> Answer<Work> {
        let claim = self.streams.get(stream)?.claim.clone();
        Ok(match (claim, work) {
            (
                Some(claim),
                work @ (Work::Copy { .. }
                | Work::Fill { .. }
                | Work::Kernel(_)
                | Work::Foreign(_)
                | Work::Host { .. }),
            ) => Work::Claimed(claim, Box::new(work)),
            (_, work) => work,
        })
    }

    /// Enqueues work on a stream, or adds it to the graph that captures the stream. Returns its position on the stream.
    pub(crate) fn enqueue(
        &mut self,
        handle: usize,
        what: &str,
        work: Work,
        after: &[Mark],
    ) -> Answer<Option<Mark>> {
        self.inspect_capture(handle)?;
        let work = self.claimed(handle, work)?;
        if let Some(capture) = self.streams.get(handle)?.capture {
            self.captures.get(capture)?.add(handle, what, work);
            return Ok(None);
        }
        let mut all = self.joined(handle)?;
        all.extend_from_slice(after);
        let lane = self.streams.get(handle)?.lane;
        let mark = self.queue.add(lane, what, work, &all);
        self.run_some(3);
        Ok(Some(mark))
    }

    /// Enqueues work of another library on a stream, after earlier work of the same order.
    pub(crate) fn enqueue_foreign(&mut self, stream: usize, foreign: Foreign) -> Answer<()> {
        let (order, what) = (foreign.work.order, foreign.name.clone());
        // It runs after that work, and yet no stream may count on it.
        let before = self.orders.get(&order).map(|(lane, position)| Mark {
            lane: *lane,
            position: *position,
            ..Mark::default()
        });
        let before: Vec<Mark> = before.into_iter().collect();
        if let Some(mark) = self.enqueue(stream, &what, Work::Foreign(Arc::new(foreign)), &before)? {
            self.orders.insert(order, (mark.lane, mark.position));
        }
        Ok(())
    }

    /// Returns the position after all work of a stream, which must not be captured.
    pub(crate) fn end_of(&mut self, handle: usize) -> Answer<Mark> {
        let handle = self.stream(handle)?;
        self.forbid_in_capture(handle)?;
        let lane = self.streams.get(handle)?.lane;
        Ok(self.queue.tail(lane))
    }

    /// Returns the positions after all work of the current context.
    pub(crate) fn ends(&mut self) -> Answer<Vec<Mark>> {
        let context = self.current()?;
        Ok(self.queue.tails(context))
    }
}
