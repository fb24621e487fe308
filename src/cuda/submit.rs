//! Runs ops as driver calls on the caller's thread.
//!
//! In a steady state, a bucket takes three driver calls: a wait for an event, a launch, and the recording of an event.
//! Only the ops decide which work runs, and in which order. `run_all` blocks only while the host is eight passes ahead
//! of the GPU, or before a copy of pageable memory.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use super::CudaDevice;
use super::driver::{Entered, Shape};
use super::full_buckets::{is_resharded, is_sharded};
use super::gpu_memory::{Reader, address};
use super::launches::BucketLaunch;
use super::pinned::SLOTS;
use crate::abi::{InstepAddArgs, InstepPublishArgs, InstepRecord};
use crate::collective::Call;
use crate::device::unknown_sum;
use crate::error::{Error, Result};
use crate::handle::{DevicePtr, EventHandle, StreamHandle};
use crate::launch::{decide_args, records_of};
use crate::layout::SegmentAction;
use crate::op::{Action, CollectiveKind, Memory, Op, Phase, Span, Stream};

impl CudaDevice {
    /// Runs ops up to the first one that fails. `sum` is the event of the caller's sum, for which an `AwaitSum` op
    /// waits.
    pub(super) fn run_all(&mut self, ops: &[Op], sum: Option<EventHandle>) {
        self.notice_host();
        if self.failed.is_some() {
            return;
        }
        let driver = Arc::clone(&self.cuda.driver);
        let entered = Entered::new(&*driver);
        if let Err(error) = entered {
            return self.fail("the device", error);
        }
        let plan = Arc::clone(&self.plan);
        // Consecutive collectives on one stream are one launch of NCCL. Some versions of NCCL refuse more than 2048
        // collectives in a launch.
        for ops in ops.chunk_by(|previous, op| op.joins(previous, &plan)).flat_map(|ops| ops.chunks(1024)) {
            let outcome = match (ops[0].action, sum) {
                // SAFETY: the caller of `bucket_ready_after` promises that the event is of this driver and alive.
                (Action::AwaitSum { .. }, Some(event)) => unsafe {
                    self.cuda.driver.wait(self.streams.stream(ops[0].stream), event)
                },
                _ => self.run_timed(ops),
            };
            if let Err(error) = outcome {
                return self.fail(&ops[0].to_string(), error);
            }
        }
    }

    fn run_timed(&mut self, ops: &[Op]) -> Result<()> {
        let works = ops[0].action.is_work() && !self.is_capturing;
        let stream = self.streams.stream(ops[0].stream);
        for op in ops {
            if let Some(timing) = self.timing.as_mut().filter(|_| works) {
                timing.start(*op, stream)?;
            }
            if let Some(bucket) = self.full_places(op) {
                let gather = self.streams.stream(Stream::Gather);
                self.engine.memory.unsharded.take(&self.cuda.driver, bucket, [stream, gather])?;
            }
        }
        let claim = self.claim(ops, stream);
        let outcome = self.run(ops);
        drop(claim);
        outcome?;
        match self.timing.as_mut().filter(|_| works) {
            Some(timing) => timing.end(ops.len(), stream),
            None => Ok(()),
        }
    }

    /// If an op writes to the full parameters or copies of a sharded bucket on this GPU (a gather, or the upload of a
    /// shard), returns two spans of this bucket: the shard on this GPU, and the full bucket. The shard's span is empty
    /// if the shard is on the host.
    pub(super) fn full_places(&self, op: &Op) -> Option<[Span; 2]> {
        let resharded = |bucket: u32| {
            let bucket = &self.plan.buckets()[bucket as usize];
            let whole = Span::shared(Memory::Params, bucket);
            is_resharded(bucket, &self.plan).then_some([Span { end: whole.start, ..whole }, whole])
        };
        match op.action {
            Action::Copy { bucket, .. } if op.stream == Stream::Upload => resharded(bucket),
            Action::Collective { kind: CollectiveKind::AllGather, src, dst, bucket, .. }
                if self.plan.shards_params() && op.stream == Stream::Gather =>
            {
                // In a group of one rank, the shard is the full bucket.
                bucket.and_then(resharded).or_else(|| (src != dst).then_some([src, dst]))
            }
            _ => None,
        }
    }

    /// Returns the address that an op uses for a span.
    pub(super) fn find(&self, span: Span) -> *mut u8 {
        let found = self.engine.memory.find(span, Reader::Op);
        found.unwrap_or_else(|| panic!("{span:?} is out of bounds"))
    }

    fn run(&mut self, ops: &[Op]) -> Result<()> {
        let op = &ops[0];
        let stream = self.streams.stream(op.stream);
        match op.action {
            // Without an event, nothing would wait for the sum, so the device fails.
            Action::AwaitSum { bucket } => Err(unknown_sum(bucket)),
            Action::Wait(ticket) => {
                self.streams.wait(op.stream, ticket)?;
                self.forked[op.stream.index()] = true;
                Ok(())
            }
            Action::Record(ticket) => {
                if !self.is_capturing {
                    self.recorded[op.stream.index()] = Some(ticket);
                }
                self.streams.event(ticket).record(self.streams.stream(ticket.stream))
            }
            Action::Control(Phase::Begin) => self.begin(op, stream),
            _ if self.is_on_host(op) => self.on_host(op, stream),
            Action::Control(Phase::Decide) => self.decide(None, stream),
            Action::Control(Phase::DecideBucket { bucket }) => self.decide(Some(bucket), stream),
            Action::Control(Phase::Publish) => {
                let control = self.engine.memory.regions.control();
                let ring = ptr::with_exposed_provenance_mut(self.status.ring.device().0 as usize);
                let args = InstepPublishArgs { control, ring, slot_count: SLOTS as u64 };
                self.engine.launch(
                    self.engine.kernels.publish,
                    Shape { blocks: 1, threads: 1 },
                    stream,
                    &args,
                )
            }
            Action::Norm { .. } | Action::Measure { .. } | Action::Step { .. } => self.launch(op, stream),
            Action::Leave { segment } => self.leave(segment, stream),
            Action::Zero(span) => self.fill(span, &[0], stream),
            Action::Copy { src, dst, .. } => self.copy(op.stream, [src, dst]),
            Action::Add { bucket, src, dst } => self.add(bucket, [src, dst], stream),
            Action::Count(span) => self.fill(span, span.dtype(&self.plan).one(), stream),
            Action::Release(span) if is_sharded(span.memory, &self.plan) => {
                self.engine.memory.unsharded.release(span);
                Ok(())
            }
            Action::Release(_) => {
                let remedy = "use Gradients::Keep or Gradients::Zero";
                Err(Error::unsupported("Gradients::Release", "a GPU's memory cannot be given back", remedy))
            }
            Action::Collective { .. } => self.comms.enqueue(ops, &self.plan, |key, ranks, spans| {
                let [src, dst] = spans.map(|span| self.find(span));
                // SAFETY: the spans are in bounds by `find`. The schedule lets no other op touch them at the same time,
                // which the checker proves.
                unsafe { Call::new(key, ranks, src, dst, self.comms.deadline, Some(stream)) }
            }),
        }
    }

    pub(super) fn is_on_host(&self, op: &Op) -> bool {
        self.host.as_ref().is_some_and(|host| host.runs(op, &self.plan))
    }

    fn on_host(&mut self, op: &Op, stream: StreamHandle) -> Result<()> {
        let Some(host) = &mut *self.host else { return Ok(()) };
        host.enqueue(&*self.cuda.driver, op, stream)
    }

    /// Copies a span within the GPU's memory, or between the GPU's memory and the host's memory.
    fn copy(&self, on: Stream, [src, dst]: [Span; 2]) -> Result<()> {
        let (stream, bytes) = (self.streams.stream(on), src.bytes());
        let is_offloaded = |span: Span| span.memory.is_offloaded(&self.plan);
        if self.host.as_ref().is_some_and(|host| !host.is_pinned) && (is_offloaded(src) || is_offloaded(dst))
        {
            // The driver copies pageable memory during the call, so the stream's earlier work must have ended.
            self.block_on(self.streams.here(on)?)?;
        }
        let [from, to] = [src, dst].map(|span| self.find(span));
        // SAFETY: the spans are in bounds by `find`. They do not overlap, because they are of two kinds of memory
        // (`Memory`). The schedule lets no other op touch them at the same time.
        unsafe {
            match (is_offloaded(src), is_offloaded(dst)) {
                (true, _) => self.cuda.driver.copy_up(address(to), from, bytes, stream),
                (_, true) => self.cuda.driver.copy_down(to, address(from), bytes, stream),
                _ => self.cuda.driver.copy(address(to), address(from), bytes, stream),
            }
        }
    }

    fn begin(&mut self, op: &Op, stream: StreamHandle) -> Result<()> {
        if !self.is_capturing {
            self.fill_slot()?;
        }
        if self.is_on_host(op) {
            self.on_host(op, stream)?;
        } else {
            self.engine.begin(|_| {}, stream)?;
        }
        if self.is_capturing {
            return Ok(());
        }
        self.engine.settings.mark_read(stream).map(drop)
    }

    fn fill(&self, span: Span, element: &[u8], stream: StreamHandle) -> Result<()> {
        let at = address(self.engine.memory.regions.resolve(span));
        // SAFETY: the span is in bounds by `resolve`. Nothing else touches it at the same time. The schedule guarantees
        // this and the checker proves it for every op.
        unsafe { self.cuda.driver.fill(at, element, span.bytes(), stream) }
    }

    /// Makes the open pass leave a segment unchanged. A fill on the stream writes the action `Leave` into the segment's
    /// records, and a captured pass contains this fill too. The Begin of the next pass writes the usual action again,
    /// so only this pass leaves the segment unchanged.
    fn leave(&self, segment: u32, stream: StreamHandle) -> Result<()> {
        let (driver, action) = (&self.cuda.driver, (SegmentAction::Leave as u32).to_ne_bytes());
        records_of(&self.plan, &self.engine.memory.regions, segment).try_for_each(|record| {
            let at = address(self.engine.memory.regions.records().wrapping_add(record));
            let at = DevicePtr(at.0 + std::mem::offset_of!(InstepRecord, action) as u64);
            // SAFETY: this is a word of a record of this device. As for every op, nothing else touches it at the same
            // time.
            unsafe { driver.fill(at, &action, action.len() as u64, stream) }
        })
    }

    /// Adds each element of `src`, a part of a bucket's gradients, to the same element of `dst`.
    fn add(&self, bucket: u32, [src, dst]: [Span; 2], stream: StreamHandle) -> Result<()> {
        let dtype = self.plan.buckets()[bucket as usize].storage.precision.grad;
        let count = src.bytes() / dtype.bytes();
        let [from, to] = [src, dst].map(|span| self.engine.memory.regions.resolve(span).cast::<c_void>());
        let args = InstepAddArgs { from, to, count, dtype: dtype as u32, reserved: 0 };
        let shape = Shape::of_elements(count, self.cuda.max_blocks);
        self.engine.launch(self.engine.kernels.add, shape, stream, &args)
    }

    fn decide(&self, bucket: Option<u32>, stream: StreamHandle) -> Result<()> {
        let args = decide_args(&self.plan, &self.engine.memory.regions, &self.engine.constants, bucket);
        self.engine.launch(self.engine.kernels.decide, Shape { blocks: 1, threads: 1 }, stream, &args)
    }

    /// Writes the next pass's settings to the slot that the pass's Begin reads.
    pub(super) fn fill_slot(&mut self) -> Result<()> {
        self.block_on(self.engine.settings.reader())?;
        self.engine.settings.write();
        Ok(())
    }

    fn launch(&self, op: &Op, stream: StreamHandle) -> Result<()> {
        let (buckets, mut part) = self.launches_of(op);
        part.try_for_each(|place| {
            let launches = buckets.iter().map(|launches| &launches[place]);
            // SAFETY: this device keeps the memory. As for every op, nothing else touches it at the same time.
            unsafe { BucketLaunch::enqueue(launches, &*self.cuda.driver, stream) }
        })
    }
}
