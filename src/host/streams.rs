//! Streams of the host device. Each stream has a thread, a queue of ops, and a counter that its `Record` ops advance.
//!
//! A ticket has passed once its stream's counter has reached the ticket's tick. An event therefore needs no allocation
//! and no reset. After a failure, every op except `Record` is skipped, so no wait can hang. Without threads, ops run on
//! the caller's thread in the order of submission. In this order, everything that a `Wait` op waits for has already
//! run. This file handles `Wait` and `Record` ops, and passes all other ops to [`Run`].

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use crate::error::{Error, Result};
use crate::op::{Action, Interval, Op, STREAMS, Stream, Ticket, TimedOp};
use crate::sync::{Builder, Condvar, Mutex, MutexGuard};

/// Runs the ops of the streams.
pub(crate) trait Run: Send + Sync + 'static {
    /// Returns the rank, for errors. Only `Streams::new` calls this function. A user's collective may compute the rank,
    /// and if it panicked in a later call, nothing would catch the panic.
    fn rank(&self) -> u32;

    /// Returns the largest number of ops that one pass queues on a stream.
    fn op_room(&self) -> usize;

    /// Returns the streams that have ops, except the trainer's stream.
    fn streams(&self) -> &'static [Stream];

    /// Runs one op to its end on the calling thread. The op may panic. The streams themselves handle `Wait` and
    /// `Record` ops.
    fn run(&self, op: &Op) -> Result<()>;

    /// Reports to the group that this rank has failed.
    fn abort(&self, cause: &Error);
}

/// The state that the stepper and its stream threads share. The threads keep this state alive until the streams are
/// closed and the queues are empty.
pub(crate) struct Streams<E> {
    executor: E,
    rank: u32,
    origin: Instant,
    timed: bool,
    is_inline: bool,
    state: Mutex<State>,
    work: [Condvar; STREAMS],
    passed: Condvar,
}

#[derive(Default)]
struct State {
    queues: [VecDeque<Op>; STREAMS],
    ticks: [u64; STREAMS],
    failed: Option<Error>,
    /// Whether the failure has been reported to the group.
    told: bool,
    closed: bool,
    /// Number of threads that have not ended.
    serving: usize,
    ran: Vec<TimedOp>,
}

impl<E: Run> Streams<E> {
    /// Makes streams without starting their threads. Measured times count from `origin`, and `timed` turns measuring
    /// on. With `is_inline` there are no threads.
    pub(crate) fn new(executor: E, origin: Instant, timed: bool, is_inline: bool) -> Arc<Streams<E>> {
        let work = [const { Condvar::new() }; STREAMS];
        let rank = executor.rank();
        // Queues have room for one pass. If a trainer runs further ahead, the queues grow once.
        let room = executor.op_room();
        let queues = std::array::from_fn(|_| VecDeque::with_capacity(room));
        let state = Mutex::new(State { queues, ..State::default() });
        Arc::new(Streams { executor, rank, origin, timed, is_inline, state, work, passed: Condvar::new() })
    }

    /// Starts the threads. If the system cannot start a thread, the device is poisoned.
    pub(crate) fn start(self: &Arc<Self>) {
        if self.is_inline {
            return;
        }
        let rank = self.rank;
        for stream in self.executor.streams() {
            let (stream, streams) = (*stream, Arc::clone(self));
            let name = format!("instep-{rank}-{stream:?}").to_lowercase();
            self.lock().serving += 1;
            if let Err(error) = Builder::new().name(name).spawn(move || streams.serve(stream)) {
                self.lock().serving -= 1;
                self.fail("start of a stream", Error::Rank { rank, message: error.to_string() });
            }
        }
    }

    /// Queues ops. A `Record` op of the compute stream passes at once, because that stream is the calling thread. Each
    /// thread is woken at most once, after the last op: waking a thread is slow, and a woken thread competes for the
    /// lock.
    pub(crate) fn submit(&self, ops: &[Op]) {
        if self.is_inline {
            return ops.iter().for_each(|op| self.run_now(op));
        }
        let (mut queued, mut recorded) = ([false; STREAMS], false);
        let mut state = self.lock();
        for op in ops {
            match (op.stream, op.action) {
                (Stream::Compute, Action::Record(ticket)) => {
                    state.ticks[Stream::Compute.index()] = ticket.tick;
                    recorded = true;
                }
                (Stream::Compute, _) => {}
                (stream, _) => {
                    state.queues[stream.index()].push_back(*op);
                    queued[stream.index()] = true;
                }
            }
        }
        drop(state);
        if recorded {
            self.passed.notify_all();
        }
        for (work, queued) in self.work.iter().zip(queued) {
            if queued {
                work.notify_one();
            }
        }
    }

    /// Runs an op on the caller's thread.
    fn run_now(&self, op: &Op) {
        let mut state = self.lock();
        match op.action {
            // A Record is submitted before the Wait for it, so the Wait's ticket has already passed.
            Action::Wait(ticket) => {
                debug_assert!(state.failed.is_some() || state.ticks[ticket.stream.index()] >= ticket.tick)
            }
            Action::Record(ticket) => state.ticks[op.stream.index()] = ticket.tick,
            _ if op.stream == Stream::Compute || state.failed.is_some() => {}
            _ => {
                drop(state);
                self.execute(op);
            }
        }
    }

    /// Blocks until the ticket has been passed or the device has failed.
    pub(crate) fn wait(&self, ticket: Ticket) -> Result<()> {
        let mut state = self.wait_passed(self.lock(), ticket);
        // The group must learn of the failure before the trainer does. Otherwise the trainer could end its rank first,
        // and the other ranks would see this end instead of its cause.
        while state.failed.is_some() && !state.told {
            state = self.passed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        match &state.failed {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Lets the threads end once their queues are empty.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.work.iter().for_each(Condvar::notify_all);
    }

    /// Waits until the threads have ended. After that, this device touches no memory.
    pub(crate) fn end(&self) {
        self.close();
        let mut state = self.lock();
        while state.serving > 0 {
            state = self.passed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(crate) fn executor(&self) -> &E {
        &self.executor
    }

    pub(crate) fn is_timed(&self) -> bool {
        self.timed
    }

    pub(crate) fn is_inline(&self) -> bool {
        self.is_inline
    }

    /// Returns the ops that ran since this function was last called, if ops are timed.
    pub(crate) fn take_timed_ops(&self) -> Vec<TimedOp> {
        std::mem::take(&mut self.lock().ran)
    }

    /// Returns the current time on the clock of the measured times.
    pub(crate) fn now_ns(&self) -> u64 {
        // The cast does not overflow, because 2^64 ns are 584 years.
        self.origin.elapsed().as_nanos() as u64
    }

    /// Returns how many `Record` ops each stream has passed.
    #[cfg(all(test, shuttle))]
    pub(super) fn ticks(&self) -> [u64; STREAMS] {
        self.lock().ticks
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A poisoned lock is safe to use: every critical section is a few assignments, so no panic leaves the state
        // half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_passed<'a>(&'a self, mut state: MutexGuard<'a, State>, ticket: Ticket) -> MutexGuard<'a, State> {
        while state.ticks[ticket.stream.index()] < ticket.tick && state.failed.is_none() {
            state = self.passed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    fn serve(&self, stream: Stream) {
        let _serving = Serving(self);
        let mut state = self.lock();
        loop {
            let Some(op) = state.queues[stream.index()].pop_front() else {
                if state.closed {
                    return;
                }
                state = self.work[stream.index()].wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            match op.action {
                Action::Wait(ticket) => state = self.wait_passed(state, ticket),
                Action::Record(ticket) => {
                    state.ticks[stream.index()] = ticket.tick;
                    self.passed.notify_all();
                }
                _ if state.failed.is_some() => {}
                _ => {
                    drop(state);
                    self.execute(&op);
                    state = self.lock();
                }
            }
        }
    }

    fn execute(&self, op: &Op) {
        let is_timed = self.timed && op.action.is_work();
        let start_ns = if is_timed { self.now_ns() } else { 0 };
        // The thread must go on after a panic, because other streams wait for it.
        if let Err(error) = caught(self.rank, || self.executor.run(op)) {
            self.fail(&op.to_string(), error);
        }
        if is_timed {
            let interval = Interval { start_ns, end_ns: self.now_ns() };
            self.lock().ran.push(TimedOp { op: *op, interval });
        }
    }

    fn fail(&self, op: &str, error: Error) {
        let first = {
            let mut state = self.lock();
            if state.failed.is_some() {
                return;
            }
            state.failed = Some(Error::Poisoned { op: op.to_owned(), first: Arc::new(error.clone()) });
            self.passed.notify_all();
            error
        };
        let _ = caught(self.rank, || {
            self.executor.abort(&first);
            Ok(())
        });
        self.lock().told = true;
        self.passed.notify_all();
    }
}

/// Counts a thread as ended when this value is dropped, even after a panic. Code that waits for the thread's end is
/// therefore always woken.
struct Serving<'a, E: Run>(&'a Streams<E>);

impl<E: Run> Drop for Serving<'_, E> {
    fn drop(&mut self) {
        self.0.lock().serving -= 1;
        self.0.passed.notify_all();
    }
}

/// Runs code that a user may have written, and turns a panic into an error of this rank.
pub(crate) fn caught(rank: u32, run: impl FnOnce() -> Result<()>) -> Result<()> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let message = message_of(&*panic);
        // Dropping the panic's payload could run user code again.
        std::mem::forget(panic);
        Err(Error::Rank { rank, message })
    })
}

pub(crate) fn message_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panicked".to_owned())
}
