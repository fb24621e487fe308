//! The ops and waits of passes over two buckets, for the tests of timelines.
//!
//! Between two whole passes, one was abandoned and has no work but its Begin.

use super::*;
use crate::op::{CollectiveKind, Memory, Span};
use crate::timeline::TimedOp;

const SPAN: Span = Span { memory: Memory::Grads, start: 0, end: 1024 };

fn at(stream: Stream, action: Action, start_ns: u64, end_ns: u64) -> TimedOp {
    TimedOp { op: Op { stream, action }, interval: Interval { start_ns, end_ns } }
}

/// Passes 7 and 9 of two buckets, and the abandoned pass 8, stream by stream.
pub(in crate::timeline) fn two_passes() -> (Vec<TimedOp>, Vec<Interval>) {
    let reduce = |pass, bucket, start_ns, end_ns| {
        let kind = CollectiveKind::AllReduce;
        let action = Action::Collective {
            kind,
            group: Group::World,
            pass,
            agreement: 0,
            bucket: Some(bucket),
            src: SPAN,
            dst: SPAN,
        };
        at(Stream::Reduce, action, start_ns, end_ns)
    };
    let optim = |action, start_ns, end_ns| at(Stream::Optim, action, start_ns, end_ns);
    let (begin, decide) = (Action::Control(Phase::Begin), Action::Control(Phase::Decide));
    let ran = vec![
        at(Stream::Reduce, Action::Zero(SPAN), 900, 1_000),
        reduce(7, 0, 1_000, 2_001),
        reduce(7, 1, 3_000, 4_000),
        reduce(9, 0, 12_000, 13_000),
        optim(begin, 500, 700),
        optim(Action::Norm { bucket: 0 }, 2_100, 2_600),
        optim(decide, 4_000, 4_200),
        optim(Action::Step { bucket: 1, count: 1 }, 4_200, 6_200),
        optim(Action::Step { bucket: 0, count: 1 }, 6_200, 8_200),
        optim(begin, 9_000, 9_100),
        optim(begin, 10_000, 10_100),
        optim(Action::Step { bucket: 0, count: 1 }, 13_100, 14_100),
    ];
    let waits = [(5_200, 6_700), (13_600, 15_000), (15_000, 15_000)];
    (ran, waits.map(|(start_ns, end_ns)| Interval { start_ns, end_ns }).to_vec())
}
