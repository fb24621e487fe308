//! What each op claims to touch, for a driver that holds the work of a GPU to it.
//!
//! The ranges are those of `Op::accesses`, and of the tables that only a GPU has. No op allocates here unless a driver
//! judges it, as the software GPU of the tests does (`judge.rs`).

use std::ffi::CString;

use super::CudaDevice;
use super::judge::{Claim, Kind, Range};
use crate::handle::{Address, StreamHandle};
use crate::launch::frozen_by;
use crate::op::{Action, Frozen, Memory, Op, Phase, Span};

impl CudaDevice {
    /// Holds the stream's work to what an op claims, until the answer is dropped; `None` if no driver judges it.
    pub(super) fn claim(&self, op: &Op, stream: StreamHandle) -> Option<Claim> {
        let judge = self.cuda.driver.judge().filter(|_| op.action.is_work())?;
        let mut ranges = Vec::new();
        let mut add = |address: usize, bytes: u64, kind: Kind| ranges.push(Range::new(address, bytes, kind));
        op.accesses(&self.plan, self.assignment.state_count(), &self.frozen(), &mut |access| {
            let kind = if access.writes { Kind::Write } else { Kind::Read };
            let always = self.engine.memory.regions.find(access.span);
            if let (None, Some(at)) = (always, self.engine.memory.unsharded.resolve(access.span)) {
                return add(at.addr(), access.span.bytes(), kind);
            }
            self.engine.memory.regions.runs(access.span).for_each(|(at, bytes)| add(at, bytes, kind));
            for at in self.of_the_callers_scaler(access.span).into_iter().flatten() {
                add(at.as_ptr().addr(), size_of::<f32>() as u64, kind);
            }
        });
        for (address, bytes, writes) in self.tables(op) {
            add(address, bytes, if writes { Kind::Write } else { Kind::Read });
        }
        if self.runs_code_of_users(op) {
            let all = self.engine.memory.regions.sizes().map(|(memory, _)| Span {
                memory,
                start: 0,
                end: u64::MAX,
            });
            all.for_each(|span| {
                self.engine.memory.regions.runs(span).for_each(|(at, bytes)| add(at, bytes, Kind::Guarded))
            });
            self.engine.memory.unsharded.runs().for_each(|(at, bytes)| add(at, bytes, Kind::Guarded));
        }
        let name = CString::new(op.to_string()).unwrap_or_default();
        Some(judge.hold(stream, &name, &ranges))
    }

    /// What the pass leaves alone; a graph runs with the settings of each replay.
    fn frozen(&self) -> Frozen {
        match self.is_capturing {
            true => Frozen::default(),
            false => frozen_by(self.engine.settings.of_pass(), &self.plan, &self.assignment),
        }
    }

    /// The caller's scale and flag, where a span of control memory stands for them.
    fn of_the_callers_scaler(&self, span: Span) -> [Option<Address>; 2] {
        let scaler = self.constants.loss_scale.external().filter(|_| span.memory == Memory::Control);
        let holds = |part: Span| span.start <= part.start && part.end <= span.end;
        [
            scaler.filter(|_| holds(Span::SCALE)).map(|scaler| scaler.scale),
            scaler.filter(|_| holds(Span::SCALER_FLAG)).map(|scaler| scaler.found_inf),
        ]
    }

    /// Memory that ops touch on a GPU alone, with whether they write it: tables of tiles, rings, constants, and the GPU's
    /// copy of the settings.
    fn tables(&self, op: &Op) -> Vec<(usize, u64, bool)> {
        match op.action {
            _ if self.is_on_host(op) => Vec::new(),
            Action::Norm { .. } | Action::Measure { .. } | Action::Step { .. } => {
                let (buckets, part) = self.launches_of(op);
                buckets.iter().flat_map(|launches| &launches[part.clone()]).map(|l| l.table()).collect()
            }
            Action::Control(Phase::Begin) => {
                let copy =
                    self.engine.memory.regions.runs(Span::SETTINGS).map(|(at, bytes)| (at, bytes, true));
                let ring = (self.engine.settings.ring().0 as usize, self.engine.settings.bytes(), false);
                copy.chain([ring]).collect()
            }
            Action::Control(Phase::Publish) => vec![(self.status.ring().addr(), self.status.bytes(), true)],
            Action::Leave { .. } => vec![(self.engine.memory.left.addr(), size_of::<u32>() as u64, false)],
            Action::Count(span) => {
                let ones = self.engine.memory.ones(span.dtype(&self.plan));
                ones.map(|at| (at.addr(), span.bytes(), false)).into_iter().collect()
            }
            _ => Vec::new(),
        }
    }

    /// Whether code that is not this library's enqueues work of the op, and may so touch memory of its own.
    fn runs_code_of_users(&self, op: &Op) -> bool {
        match op.action {
            Action::Measure { .. } | Action::Step { .. } => {
                let (buckets, part) = self.launches_of(op);
                buckets.iter().flat_map(|launches| &launches[part.clone()]).any(|launch| launch.is_custom())
            }
            Action::Collective { .. } => true,
            _ => false,
        }
    }
}
