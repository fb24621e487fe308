//! A simulated trainer, which computes nothing and only advances a clock. Forward visits the parameters in order of
//! registration, and backward in reverse order.
//!
//! The trainer makes the calls of a real trainer, in the same order. With sharded parameters, the trainer unshards the
//! current bucket and the next one, and reshards the previous one.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use instep::layout::{Gradients, Plan};
use instep::op::{Action, Memory, Span, TimedOp};
use instep::{Device, Foresight, Layout, ParamId, Stepper};

use super::speeds::Speeds;
use crate::Failure;

/// The peak number of bytes of each [`Memory`].
#[derive(Default)]
pub(super) struct Peaks {
    held: BTreeMap<Memory, u64>,
    /// For each write of a gradient, its time in nanoseconds and the gradient's range of memory.
    written: Vec<(u64, Span)>,
}

impl Peaks {
    fn note<D: Device>(&mut self, stepper: &Stepper<D>) {
        for (memory, bytes) in stepper.memory() {
            let peak = self.held.entry(memory).or_default();
            *peak = (*peak).max(bytes);
        }
    }

    fn note_gradient(&mut self, stepper: &Foresight, id: ParamId) -> instep::Result<()> {
        let plan = stepper.plan();
        let segment = plan.segment_of(stepper.layout().index(id)?);
        self.written.push((stepper.now_ns(), Span::segment(Memory::Grads, plan, segment)));
        Ok(())
    }

    /// Returns the peak number of bytes of `memory` in a run with these ops. `now` is the number of bytes of `memory`
    /// at the end of the run.
    pub(super) fn of(&self, memory: Memory, now: u64, plan: &Plan, ran: &[TimedOp]) -> u64 {
        let held = self.held.get(&memory).copied().unwrap_or(now);
        match (memory, plan.gradients()) {
            (Memory::Grads, Gradients::Release) => self.unreleased(held, plan, ran),
            _ => held,
        }
    }

    /// Returns the peak number of bytes of gradients, if each gradient takes memory only from its write to its release.
    /// `all` is the number of bytes if no gradient is released. Only full pages are released, so up to one page stays
    /// allocated at either end of a gradient.
    fn unreleased(&self, all: u64, plan: &Plan, ran: &[TimedOp]) -> u64 {
        let mut spans: Vec<Span> =
            plan.segments().iter().map(|segment| Span::segment(Memory::Grads, plan, segment)).collect();
        spans.sort_by_key(|span| span.start);
        let mut before = 0;
        let ends: Vec<(u64, u64, u64)> = spans
            .iter()
            .map(|span| {
                before += span.bytes();
                (span.start, span.end, before)
            })
            .collect();
        // Returns the number of bytes of gradients, without padding, before the offset `at` in the arena.
        let covered = |at: u64| match ends.partition_point(|(start, _, _)| *start < at).checked_sub(1) {
            None => 0,
            Some(last) => ends[last].2 - ends[last].1.saturating_sub(at),
        };
        let released = ran.iter().filter_map(|ran| match ran.op.action {
            Action::Release(span) if span.memory == Memory::Grads => Some((ran.interval.end_ns, span)),
            _ => None,
        });
        let bytes = |span: &Span| (covered(span.end) - covered(span.start)) as i64;
        // If a release and a write have the same time, the release comes first, because the write has waited for it.
        let mut changes: Vec<(u64, i64)> = released.map(|(ns, span)| (ns, -bytes(&span))).collect();
        changes.extend(self.written.iter().map(|(ns, span)| (*ns, bytes(span))));
        changes.sort_unstable();
        let (mut live, mut most) = (0, 0);
        for (_, change) in changes {
            live += change;
            most = most.max(live);
        }
        all - before + most as u64
    }
}

/// The bucket that a trainer currently uses. The trainer unshards this bucket and the next one.
#[derive(Default)]
pub(super) struct Walk {
    at: Option<u32>,
}

impl Walk {
    /// The largest number of unsharded buckets: the current one and the next.
    pub(super) const MOST: NonZeroU32 = NonZeroU32::MIN.saturating_add(1);

    /// Moves to a parameter. Returns whether the move unsharded another bucket.
    pub(super) fn arrive<D: Device>(
        &mut self,
        stepper: &mut Stepper<D>,
        id: ParamId,
        is_forward: bool,
    ) -> instep::Result<bool> {
        let bucket = stepper.plan().segment_of(stepper.layout().index(id)?).bucket;
        if !stepper.plan().shards_params() || self.at == Some(bucket) {
            return Ok(false);
        }
        if let Some(last) = self.at.replace(bucket) {
            stepper.reshard(last)?;
        }
        stepper.unshard(bucket)?;
        // Buckets are filled from the last parameter back.
        let next = if is_forward { bucket.checked_sub(1) } else { Some(bucket + 1) };
        if let Some(next) = next.filter(|next| (*next as usize) < stepper.plan().buckets().len()) {
            stepper.unshard(next)?;
        }
        Ok(true)
    }

    /// Leaves the current bucket and reshards it.
    fn leave<D: Device>(&mut self, stepper: &mut Stepper<D>) -> instep::Result<()> {
        self.at.take().map_or(Ok(()), |bucket| stepper.reshard(bucket))
    }
}

/// Predicts one pass.
pub(super) fn train(
    stepper: &mut Foresight,
    layout: &Layout,
    speeds: &Speeds,
    (peaks, micro_batches): (&mut Peaks, NonZeroU32),
) -> Result<(), Failure> {
    let elements = |id: ParamId| Ok::<u64, Failure>(layout.parameter(id)?.len);
    let mut walk = Walk::default();
    peaks.note(stepper);
    for micro_batch in 1..=micro_batches.get() {
        for id in layout.ids() {
            if walk.arrive(stepper, id, true)? {
                peaks.note(stepper);
            }
            stepper.touch(id)?;
            stepper.compute(speeds.compute_ns(2, elements(id)?));
        }
        if micro_batch == 1 {
            stepper.begin_accumulating(micro_batches)?.detach();
        }
        for id in layout.ids().rev() {
            if walk.arrive(stepper, id, false)? {
                peaks.note(stepper);
            }
            stepper.compute(speeds.compute_ns(4, elements(id)?));
            let is_first = stepper.is_first(id)?;
            stepper.touch(id.grad())?;
            if is_first {
                peaks.note_gradient(stepper, id)?;
            }
            stepper.grad_ready(id)?;
        }
        if micro_batch < micro_batches.get() {
            walk.leave(stepper)?;
            stepper.next_micro_batch()?;
        }
    }
    stepper.finish()?;
    Ok(())
}
