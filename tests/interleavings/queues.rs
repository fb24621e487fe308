//! Tickets and poisoning: the streams run a script in place of the executor.
//!
//! The script is a bucket's gradient, reduce and step, with a failure at any place. The tests check order by what has
//! run, never by time.

use std::collections::HashSet;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use shuttle::thread::yield_now;

use super::explore;
use crate::error::{Error, Result};
use crate::host::streams::{Run, Streams};
use crate::op::{Action, Op, Stream, Ticket};
use crate::sync::{Condvar, Mutex, MutexGuard};

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    Error,
    Panic,
}

/// Runs "reduces" and "steps", one of which may fail. A step that runs without its reduce is a bug, and so is any work
/// after the failure on its own stream.
struct Script {
    fault: Option<(Stream, u32, Fault)>,
    seen: Arc<Seen>,
}

#[derive(Default)]
struct Seen {
    ran: Mutex<HashSet<(Stream, u32)>>,
    failed: Mutex<Option<Stream>>,
    aborts: AtomicUsize,
    /// Whether the last thread has ended and dropped the script.
    over: Mutex<bool>,
    changed: Condvar,
}

impl Seen {
    fn ran(&self, stream: Stream, work: u32) -> bool {
        self.ran.lock().unwrap_or_else(PoisonError::into_inner).contains(&(stream, work))
    }

    fn wait_over(&self) {
        let mut over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
        while !*over {
            over = self.changed.wait(over).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Run for Script {
    fn rank(&self) -> u32 {
        0
    }

    fn op_room(&self) -> usize {
        0
    }

    fn streams(&self) -> &'static [Stream] {
        &[Stream::Reduce, Stream::Optim]
    }

    fn run(&self, op: &Op) -> Result<()> {
        let Action::Step { bucket: work, .. } = op.action else { panic!("only work is run") };
        assert!(
            op.stream == Stream::Reduce || self.seen.ran(Stream::Reduce, work),
            "step {work} before its reduce"
        );
        let failed = || self.seen.failed.lock().unwrap_or_else(PoisonError::into_inner);
        assert_ne!(*failed(), Some(op.stream), "{op} after a failure");
        yield_now();
        if self.fault.is_some_and(|(stream, at, _)| (stream, at) == (op.stream, work)) {
            *failed() = Some(op.stream);
        }
        match self.fault {
            Some((stream, at, fault)) if (stream, at) == (op.stream, work) => match fault {
                Fault::Error => return Err(Error::order("test", "made up", "")),
                // This panic skips the panic hook, with which shuttle would end the test.
                Fault::Panic => resume_unwind(Box::new("made up")),
            },
            _ => {}
        }
        let first = self.seen.ran.lock().unwrap_or_else(PoisonError::into_inner).insert((op.stream, work));
        assert!(first, "{op} ran twice");
        Ok(())
    }

    fn abort(&self, _: &Error) {
        self.seen.aborts.fetch_add(1, SeqCst);
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        *self.over_flag() = true;
        self.seen.changed.notify_all();
    }
}

impl Script {
    fn over_flag(&self) -> MutexGuard<'_, bool> {
        self.seen.over.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs three buckets in a schedule's order: gradient, reduce, step. The trainer waits for some steps in between.
fn train(fault: Option<(Stream, u32, Fault)>) {
    const BUCKETS: u32 = 3;
    let seen = Arc::new(Seen::default());
    let streams = Streams::new(Script { fault, seen: Arc::clone(&seen) }, Instant::now(), false, false);
    streams.start();
    let ticket = |stream, tick: u32| Ticket { stream, tick: tick.into() };
    let wait = |tick: u32| {
        let outcome = streams.wait(ticket(Stream::Optim, tick));
        match &outcome {
            Ok(()) => {
                assert!((0..tick).all(|work| seen.ran(Stream::Optim, work)), "a wait before its record")
            }
            Err(error) => assert!(fault.is_some() && matches!(error, Error::Poisoned { .. }), "{error}"),
        }
        outcome
    };
    for work in 0..BUCKETS {
        let tick = work + 1;
        let ops = [
            (Stream::Reduce, Action::Wait(ticket(Stream::Compute, tick))),
            (Stream::Reduce, Action::Step { bucket: work, count: 1 }),
            (Stream::Reduce, Action::Record(ticket(Stream::Reduce, tick))),
            (Stream::Optim, Action::Wait(ticket(Stream::Reduce, tick))),
            (Stream::Optim, Action::Step { bucket: work, count: 1 }),
            (Stream::Optim, Action::Record(ticket(Stream::Optim, tick))),
            (Stream::Compute, Action::Record(ticket(Stream::Compute, tick))),
        ]
        .map(|(stream, action)| Op { stream, action });
        // Submits the ops in one batch, or each alone.
        let batches = ops.chunks(if work == 1 { 1 } else { ops.len() });
        batches.for_each(|batch| streams.submit(batch));
        if work == 1 {
            let _ = wait(tick);
        }
    }
    assert_eq!(
        wait(BUCKETS).is_err(),
        fault.is_some_and(|(stream, at, _)| (stream, at) != (Stream::Compute, 0))
    );
    streams.close();
    // Even a failed device must run every Record.
    for stream in [Stream::Reduce, Stream::Optim] {
        while streams.ticks()[stream.index()] < BUCKETS.into() {
            yield_now();
        }
    }
    drop(streams);
    seen.wait_over();
    assert_eq!(seen.aborts.load(SeqCst), usize::from(fault.is_some()), "the group is told once");
}

#[test]
fn steps_run_behind_their_reduces_and_waits_return_behind_their_records() {
    explore(|| train(None));
}

#[test]
fn after_a_failure_of_any_op_no_wait_hangs_and_no_record_is_skipped() {
    for stream in [Stream::Reduce, Stream::Optim] {
        for (at, fault) in [(0, Fault::Error), (1, Fault::Panic), (2, Fault::Error)] {
            explore(move || train(Some((stream, at, fault))));
        }
    }
}
