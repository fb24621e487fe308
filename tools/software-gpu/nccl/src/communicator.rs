//! A communicator: its ranks' memory, the call in progress, and its error.
//!
//! Its handle is never reused, and a use of a destroyed handle ends the program.
//!
//! Each query of its state advances the call in progress. A thread also queries, and lets the driver work, if nothing
//! has advanced for a while. Another rank may wait for work for which this process has no reason to ask.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::Duration;

use crate::driver::{Work, driver};
use crate::header::{ncclComm_t, ncclResult_t as Code};
use crate::settings;
use crate::shared::Shared;

/// Calls that the driver holds.
pub(crate) static OUTSTANDING: AtomicUsize = AtomicUsize::new(0);
/// A count that grows with each piece that is moved.
pub(crate) static PROGRESS: AtomicU64 = AtomicU64::new(0);

/// The time without progress after which a thread helps.
const PATIENCE: Duration = Duration::from_millis(5);

/// The task of a communicator.
pub(crate) enum Task {
    /// All ranks must join.
    Join,
    /// This work is not on its streams yet: a collective, or those of a group.
    Enqueue(Vec<(usize, Work)>),
    /// All collectives, and all graphs with some, have to end, on all ranks.
    Finalize,
}

// SAFETY: the work's call is a box that nothing else has.
unsafe impl Send for Task {}

#[derive(Default)]
struct State {
    task: Option<(Task, u64)>,
    error: Option<Code>,
    finalized: bool,
}

pub(crate) struct Communicator {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) device: u64,
    pub(crate) blocking: bool,
    pub(crate) shared: Shared,
    /// Number of pieces that this rank has finished.
    pub(crate) pieces: AtomicU64,
    /// Calls that streams and graphs have.
    pub(crate) calls: AtomicUsize,
    aborted: AtomicBool,
    state: Mutex<State>,
}

impl Communicator {
    pub(crate) fn new(
        rank: usize,
        ranks: usize,
        device: u64,
        blocking: bool,
        shared: Shared,
    ) -> Communicator {
        shared.join(device);
        let state = State { task: Some((Task::Join, settings::looks())), ..State::default() };
        let (pieces, calls, aborted) = (AtomicU64::new(0), AtomicUsize::new(0), AtomicBool::new(false));
        Communicator {
            rank,
            ranks,
            device,
            blocking,
            shared,
            pieces,
            calls,
            aborted,
            state: Mutex::new(state),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// Begins a task. An earlier task must have ended, because the real library refuses a call while another one is in
    /// progress.
    ///
    /// # Errors
    /// The reason why the call is refused, with the task.
    pub(crate) fn begin(&self, task: Task) -> Result<(), (Code, Task)> {
        let mut state = self.state();
        match state.error {
            Some(code) => Err((code, task)),
            None if state.task.is_some() || state.finalized => Err((Code::ncclInvalidArgument, task)),
            None => {
                state.task = Some((task, settings::looks()));
                Ok(())
            }
        }
    }

    /// Returns the result of a call after its task has begun.
    pub(crate) fn begun(&self) -> Code {
        if !self.blocking {
            return Code::ncclInProgress;
        }
        loop {
            match self.look() {
                Code::ncclInProgress => thread::sleep(Duration::from_micros(50)),
                code => return code,
            }
        }
    }

    /// Advances the task, and returns the state.
    pub(crate) fn look(&self) -> Code {
        let mut state = self.state();
        // A number must mean one call. How often a program looks while nothing is in progress, or until the other ranks have
        // come too, depends on time.
        let counts = match state.task {
            None | Some((Task::Join | Task::Finalize, 0)) => false,
            Some(_) => true,
        };
        let told = if counts { settings::failure("look") } else { None };
        if told == Some(Code::ncclSuccess.0) && state.error.is_none() {
            // A lie: the call is in progress as before.
            return Code::ncclSuccess;
        }
        if let Some(code) = told {
            state.error.get_or_insert(Code(code));
        }
        self.advance(&mut state)
    }

    /// Moves the task on, and returns the state.
    fn advance(&self, state: &mut State) -> Code {
        if let Some(code) = state.error {
            return code;
        }
        let Some((task, looks)) = state.task.take() else { return Code::ncclSuccess };
        if looks > 0 {
            state.task = Some((task, looks - 1));
            return Code::ncclInProgress;
        }
        let outcome = match task {
            Task::Join => match self.shared.joined() {
                Some(devices) => self.may_share(&devices),
                None => Err(Task::Join),
            },
            Task::Enqueue(works) => Ok(enqueue(&works)),
            Task::Finalize if self.calls.load(Ordering::Acquire) > 0 => Err(Task::Finalize),
            Task::Finalize => {
                self.shared.end();
                state.finalized = self.shared.all_ended();
                if state.finalized { Ok(Code::ncclSuccess) } else { Err(Task::Finalize) }
            }
        };
        match outcome {
            Ok(Code::ncclSuccess) => Code::ncclSuccess,
            Ok(code) => *state.error.insert(code),
            Err(task) => {
                state.task = Some((task, 0));
                Code::ncclInProgress
            }
        }
    }

    /// Refuses two ranks on one device unless the environment permits them.
    fn may_share(&self, devices: &[u64]) -> Result<Code, Task> {
        let alone = devices.iter().filter(|device| **device == self.device).count() == 1;
        let permitted = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").as_deref() == Ok("1");
        Ok(if alone || permitted { Code::ncclSuccess } else { Code::ncclInvalidUsage })
    }

    /// Ends all collectives of this rank, complete or not.
    pub(crate) fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        self.shared.end();
        if let Some((Task::Enqueue(works), _)) = self.state().task.take() {
            release(&works);
        }
    }

    /// Puts a communicator into an error.
    pub(crate) fn fail(&self, code: Code) {
        self.state().error.get_or_insert(code);
    }
}

/// Frees work that never got to a stream.
pub(crate) fn release(works: &[(usize, Work)]) {
    // SAFETY: nothing else has the calls.
    works.iter().for_each(|(_, work)| unsafe { (work.release)(work.call) });
}

fn enqueue(works: &[(usize, Work)]) -> Code {
    let Some(driver) = driver() else { return Code::ncclSystemError };
    for (at, (stream, work)) in works.iter().enumerate() {
        // SAFETY: a resolved stream, and work as the driver describes it.
        if unsafe { (driver.enqueue)(*stream, work) } != 0 {
            release(&works[at + 1..]);
            return Code::ncclUnhandledCudaError;
        }
    }
    Code::ncclSuccess
}

/// The number of communicators made so far, and the live communicators by their handles.
type Table = (usize, BTreeMap<usize, Arc<Communicator>>);

fn table() -> MutexGuard<'static, Table> {
    static ALL: Mutex<Table> = Mutex::new((0, BTreeMap::new()));
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns all communicators that are alive.
fn all() -> Vec<Arc<Communicator>> {
    table().1.values().cloned().collect()
}

/// Gives a communicator a handle.
pub(crate) fn insert(made: Arc<Communicator>) -> ncclComm_t {
    let mut table = table();
    table.0 += 1;
    let number = 0x20_0000_0000 + 0x40 * table.0;
    table.1.insert(number, made);
    ptr::with_exposed_provenance_mut(number)
}

pub(crate) fn remove(handle: ncclComm_t) {
    table().1.remove(&handle.expose_provenance());
}

/// Returns the communicator of a handle. A destroyed one ends the program.
pub(crate) fn found(handle: ncclComm_t, call: &str) -> Arc<Communicator> {
    let number = handle.expose_provenance();
    let communicator = table().1.get(&number).cloned();
    communicator.unwrap_or_else(|| {
        let what = format!("{call} of {number:#x}, which is no communicator any more");
        eprintln!("software nccl: stale handle: {what}");
        std::process::abort()
    })
}

/// Starts the helping thread, once.
pub(crate) fn start_helper() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| drop(thread::Builder::new().name("software-nccl".to_owned()).spawn(help)));
}

fn help() {
    let mut seen = 0;
    loop {
        thread::sleep(PATIENCE);
        let now = PROGRESS.load(Ordering::Relaxed);
        if OUTSTANDING.load(Ordering::Relaxed) > 0 && now == seen {
            for communicator in all() {
                communicator.advance(&mut communicator.state());
            }
            if let Some(driver) = driver() {
                (driver.pump)();
            }
        }
        seen = now;
    }
}
