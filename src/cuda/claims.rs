//! Makes claims: a claim declares the memory that an op may access. A driver can check the GPU's work against the
//! claims.
//!
//! A claim contains the ranges of `Op::accesses`, and the ranges of the tables that only a GPU has. Only the software
//! GPU of the tests checks claims (`judge.rs`). With any other driver, this file allocates nothing.

use std::ffi::CString;

use super::CudaDevice;
use super::judge::{Claim, Kind, Range};
use super::launches::BucketLaunch;
use crate::handle::{Address, StreamHandle};
use crate::launch::frozen_by;
use crate::op::{Action, Frozen, Memory, Op, Phase, Span};

impl CudaDevice {
    /// Makes one claim for ops that share one launch, and passes the claim to the driver. Until the returned claim is
    /// dropped, the driver checks the stream's work against this claim. Returns `None` if the driver checks nothing.
    pub(super) fn claim(&self, ops: &[Op], stream: StreamHandle) -> Option<Claim> {
        let judge = self.cuda.driver.judge().filter(|_| ops[0].action.is_work())?;
        let (regions, unsharded) = (&self.engine.memory.regions, &self.engine.memory.unsharded);
        let mut ranges = Vec::new();
        let mut add = |(address, bytes), kind: Kind| ranges.push(Range::new(address, bytes, kind));
        for op in ops {
            op.accesses(&self.plan, self.assignment.state_count(), &self.certainly_frozen(), &mut |access| {
                let (kind, span) = (if access.writes { Kind::Write } else { Kind::Read }, access.span);
                if let (None, Some(at)) = (regions.find(span), unsharded.find(span)) {
                    return add((at.addr(), span.bytes()), kind);
                }
                regions.runs(span).for_each(|run| add(run, kind));
                for at in self.of_the_callers_scaler(span).into_iter().flatten() {
                    add((at.as_ptr().addr(), size_of::<f32>() as u64), kind);
                }
            });
            self.tables(op, &mut add);
            // NCCL and the user's code also touch memory of their own, so the claim restricts only the stepper's
            // memory.
            let is_foreign = match op.action {
                Action::Measure { .. } | Action::Step { .. } => {
                    self.each_launch_of(op).any(|launch| launch.custom.is_some())
                }
                action => matches!(action, Action::Collective { .. }),
            };
            if is_foreign {
                let all = regions.sizes().map(|(memory, _)| Span { memory, start: 0, end: u64::MAX });
                all.for_each(|span| regions.runs(span).for_each(|run| add(run, Kind::Guarded)));
                unsharded.runs().for_each(|run| add(run, Kind::Guarded));
            }
        }
        let name = CString::new(ops[0].to_string()).unwrap_or_default();
        Some(judge.hold(stream, &name, &ranges))
    }

    /// Returns the segments that no run of these ops steps: the segments that are frozen in this pass. In a capture,
    /// returns no segments, because each replay has its own settings and may step any segment.
    fn certainly_frozen(&self) -> Frozen {
        if self.is_capturing {
            return Frozen::default();
        }
        frozen_by(&self.engine.settings.of_pass, &self.plan, &self.assignment)
    }

    /// Returns the addresses of the caller's loss scale and skip flag. An address is `None` if the caller has no
    /// scaler, or if the span does not include the bytes that stand for its value.
    fn of_the_callers_scaler(&self, span: Span) -> [Option<Address>; 2] {
        let scaler =
            self.assignment.constants.loss_scale.external().filter(|_| span.memory == Memory::Control);
        let holds = |part: Span| span.start <= part.start && part.end <= span.end;
        [
            scaler.filter(|_| holds(Span::SCALE)).map(|scaler| scaler.scale),
            scaler.filter(|_| holds(Span::SCALER_FLAG)).map(|scaler| scaler.found_inf),
        ]
    }

    /// Adds memory that ops touch only on a GPU: tables of tiles, rings, and the GPU's copy of the settings.
    fn tables(&self, op: &Op, add: &mut impl FnMut((usize, u64), Kind)) {
        let (memory, settings) = (&self.engine.memory, &self.engine.settings);
        match op.action {
            _ if self.is_on_host(op) => {}
            Action::Norm { .. } | Action::Measure { .. } | Action::Step { .. } => {
                self.each_launch_of(op).for_each(|launch| add(launch.table(), Kind::Read));
            }
            Action::Control(Phase::Begin) => {
                memory.regions.runs(Span::SETTINGS).for_each(|run| add(run, Kind::Write));
                add(settings.ring.run(), Kind::Read);
            }
            Action::Control(Phase::Publish) => add(self.status.ring.run(), Kind::Write),
            _ => {}
        }
    }

    fn each_launch_of(&self, op: &Op) -> impl Iterator<Item = &BucketLaunch> {
        let (buckets, part) = self.launches_of(op);
        buckets.iter().flat_map(move |launches| &launches[part.clone()])
    }
}
