//! Captures: work on streams that becomes a graph instead of running.
//!
//! A capture begins on one stream. A stream that waits for an event of the capture joins it, and must be joined back
//! before the end. A forbidden call makes the capture invalid, and its end then fails.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::thread;

use crate::codes::Answer;
use crate::gpu::Gpu;
use crate::header::cudaError_enum as Code;
use crate::objects::{Capture, Graph, Joins, Mode, Stream};

thread_local! {
    /// The captures that forbid unsafe calls on this thread.
    static HEEDED: Cell<Mode> = const { Cell::new(Mode::Global) };
}

impl Mode {
    /// Changes which captures forbid unsafe calls on this thread, and returns the previous setting.
    pub(crate) fn exchange(self) -> Mode {
        HEEDED.replace(self)
    }
}

impl Gpu {
    pub(crate) fn begin_capture(&mut self, stream: usize, mode: u32) -> Answer<()> {
        let stream = self.stream(stream)?;
        let mode = Mode::of(mode)?;
        let row = self.streams.get(stream)?;
        if row.joins == Joins::Legacy {
            return Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        if row.capture.is_some() {
            return Err(Code::CUDA_ERROR_ILLEGAL_STATE);
        }
        let (last, thread) = (BTreeMap::from([(stream, Vec::new())]), thread::current().id());
        let capture = Capture {
            origin: stream,
            mode,
            thread,
            nodes: Vec::new(),
            last,
            branches: Vec::new(),
            invalid: None,
        };
        let handle = self.captures.insert(capture);
        self.streams.get(stream)?.capture = Some(handle);
        Ok(())
    }

    /// Ends a capture. Every stream leaves it, also if it was invalid. CUDA does not specify this for a capture that is
    /// not joined. Here all streams but the first then stay in it.
    pub(crate) fn end_capture(&mut self, stream: usize) -> Answer<usize> {
        let stream = self.stream(stream)?;
        let handle = self.streams.get(stream)?.capture.ok_or(Code::CUDA_ERROR_ILLEGAL_STATE)?;
        let capture = self.captures.get(handle)?;
        if capture.origin != stream {
            return Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
        }
        if capture.mode != Mode::Relaxed && capture.thread != thread::current().id() {
            return Err(Code::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
        }
        if capture.invalid.is_none() && !capture.is_joined() {
            capture.last.remove(&stream);
            capture.invalid = Some(Code::CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
            self.streams.get(stream)?.capture = None;
            return Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
        }
        let capture = self.captures.remove(handle)?;
        for member in capture.last.keys() {
            self.streams.get(*member)?.capture = None;
        }
        match capture.invalid {
            Some(_) => Err(Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
            None => Ok(self.graphs.insert(Graph { nodes: capture.nodes })),
        }
    }

    /// Lets a stream wait for nodes of a capture, and so take part in it.
    pub(crate) fn join_capture(&mut self, stream: usize, capture: usize, nodes: &[usize]) -> Answer<()> {
        // The event may be older than the end of its capture.
        if self.captures.iter().all(|(handle, _)| handle != capture) {
            return Err(Code::CUDA_ERROR_CAPTURED_EVENT);
        }
        let (own, joins) = {
            let row = self.streams.get(stream)?;
            (row.capture, row.joins)
        };
        match own {
            Some(own) if own != capture => {
                self.invalidate(capture, Code::CUDA_ERROR_STREAM_CAPTURE_MERGE)?;
                return self.invalidate(own, Code::CUDA_ERROR_STREAM_CAPTURE_MERGE);
            }
            None if joins == Joins::Legacy => {
                return self.invalidate(capture, Code::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
            }
            _ => self.streams.get(stream)?.capture = Some(capture),
        }
        let last = self.captures.get(capture)?.last.entry(stream).or_default();
        last.extend_from_slice(nodes);
        last.sort_unstable();
        last.dedup();
        Ok(())
    }

    /// Makes a capture invalid and returns why.
    pub(crate) fn invalidate(&mut self, capture: usize, code: Code) -> Answer<()> {
        self.captures.get(capture)?.invalid.get_or_insert(code);
        Err(code)
    }

    /// Refuses a call on a stream whose capture is invalid, and a call on a default stream while another stream is
    /// captured.
    pub(crate) fn inspect_capture(&mut self, stream: usize) -> Answer<()> {
        let (capture, joins, context) = {
            let row = self.streams.get(stream)?;
            (row.capture, row.joins, row.context)
        };
        if let Some(capture) = capture
            && self.captures.get(capture)?.invalid.is_some()
        {
            return Err(Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        if joins == Joins::Legacy {
            let blocking = |stream: &Stream| stream.context == context && stream.joins == Joins::Blocking;
            let captured = self.streams.iter().find_map(|(_, row)| row.capture.filter(|_| blocking(row)));
            if let Some(capture) = captured {
                return self.invalidate(capture, Code::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
            }
        }
        Ok(())
    }

    /// Refuses a wait for a stream that is captured.
    pub(crate) fn forbid_in_capture(&mut self, stream: usize) -> Answer<()> {
        self.inspect_capture(stream)?;
        if let Some(capture) = self.streams.get(stream)?.capture {
            return self.invalidate(capture, Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        self.forbid_unsafe_calls()
    }

    /// Refuses a call that a capture of this thread, or a global capture, forbids.
    pub(crate) fn forbid_unsafe_calls(&mut self) -> Answer<()> {
        let here = thread::current().id();
        let forbids = |capture: &Capture| match (HEEDED.get(), capture.mode) {
            _ if capture.has_ended() => false,
            (Mode::Relaxed, _) | (_, Mode::Relaxed) => false,
            (Mode::Global, Mode::Global) => true,
            _ => capture.thread == here,
        };
        let found = self.captures.iter().find(|(_, capture)| forbids(capture)).map(|(handle, _)| handle);
        match found {
            Some(capture) => self.invalidate(capture, Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
            None => Ok(()),
        }
    }
}
