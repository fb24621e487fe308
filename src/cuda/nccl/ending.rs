//! Threads that end communicators, so that a drop or an abort does not wait for NCCL.
//!
//! At exit, the process waits for all of these threads, but only for a bounded time. A forked child does not wait at
//! exit.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Runs `work`, which may block, on a new thread. The process's exit waits for that thread, because exit destroys
/// objects that NCCL's threads use. Without this wait, the process could crash and lose its exit status. If no thread
/// can be started, the communicator is leaked.
pub(super) fn detached(work: impl FnOnce() + Send + 'static) {
    PROCESS.get_or_init(|| {
        // SAFETY: the function may run at any time, and touches only statics that nothing destroys. NCCL and the driver
        // are loaded already, so their exit handlers run after this function.
        unsafe { atexit(await_detached) };
        std::process::id()
    });
    let running = Running::new();
    let work = move || {
        let _running = running;
        work();
    };
    drop(thread::Builder::new().name("instep-nccl-end".to_owned()).spawn(work));
}

/// The number of running threads of [`detached`], and the time of the last abort.
struct Endings {
    running: u32,
    aborted: Option<Instant>,
}

static ENDINGS: Mutex<Endings> = Mutex::new(Endings { running: 0, aborted: None });
static ENDED: Condvar = Condvar::new();
/// The id of the process that waits at exit. A forked child has another id and none of the threads, so it does not
/// wait.
static PROCESS: OnceLock<u32> = OnceLock::new();

/// Records that a communicator was aborted at this moment.
pub(super) fn note_abort() {
    endings().aborted = Some(Instant::now());
}

fn endings() -> MutexGuard<'static, Endings> {
    ENDINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Running;

impl Running {
    fn new() -> Running {
        endings().running += 1;
        Running
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        endings().running -= 1;
        ENDED.notify_all();
    }
}

/// The longest time for which an exit waits for threads that end communicators. If a thread waits longer than this for
/// a peer, the process exits before the thread ends.
const EXIT_PATIENCE: Duration = Duration::from_secs(10);
/// The least time between an abort and the exit. NCCL may free an aborted communicator later, on a separate thread. On
/// an H200, ranks that exited right after an abort ended with SIGSEGV.
const ABORT_PATIENCE: Duration = Duration::from_secs(1);

extern "C" fn await_detached() {
    if PROCESS.get() != Some(&std::process::id()) {
        return;
    }
    let waited = ENDED.wait_timeout_while(endings(), EXIT_PATIENCE, |endings| endings.running > 0);
    let aborted = waited.map_or_else(|poisoned| poisoned.into_inner().0.aborted, |waited| waited.0.aborted);
    if let Some(at) = aborted {
        thread::sleep(ABORT_PATIENCE.saturating_sub(at.elapsed()));
    }
}

unsafe extern "C" {
    /// Registers a function that the C library calls when the process exits.
    fn atexit(function: extern "C" fn()) -> c_int;
}
