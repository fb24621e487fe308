//! The common code of every exported function: the lock, the rules for all calls, and waits that release the lock.
//!
//! A panic in this driver ends the program, because no C function may unwind.

use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::Duration;

use crate::codes::Answer;
use crate::gpu::Gpu;
use crate::header::{CUresult, cudaError_enum as Code};
use crate::queue::Mark;
use crate::report;
use crate::settings::Settings;
use crate::trace::{self, Call};

static GPU: Mutex<Option<Gpu>> = Mutex::new(None);

/// Calls that still work after a failure, so that a program can end.
const AFTER_FAILURE: [&str; 6] = [
    "cuGetErrorName",
    "cuGetErrorString",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxSetCurrent",
    "cuCtxGetCurrent",
];

thread_local! {
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

fn lock() -> MutexGuard<'static, Option<Gpu>> {
    GPU.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the GPU, once.
pub(crate) fn initialise() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        *lock() = Some(Gpu::new(Settings::read()));
        at_exit();
    });
}

#[allow(unsafe_code)]
fn at_exit() {
    extern "C" fn ended() {
        // A thread that still holds the lock will never let go of it.
        let Ok(mut gpu) = GPU.try_lock() else { return };
        let Some(gpu) = gpu.as_mut() else { return };
        gpu.drain();
        let leaks = gpu.leaks();
        if gpu.settings.leaks && !leaks.is_empty() {
            report::fault("leak", &format!("alive at exit: {}", leaks.join(", ")));
        }
    }
    // SAFETY: a function that may run at any exit.
    unsafe { libc::atexit(ended) };
}

/// Runs one call, with the lock held.
pub(crate) fn call(call: &Call<'_>, work: impl FnOnce(&mut Gpu) -> Answer<()>) -> CUresult {
    answer(call, |gpu| answer_of(call.name, gpu, work)).err().unwrap_or(Code::CUDA_SUCCESS)
}

/// Runs one call as [`call`] does, and returns once the marks that `work` returns are reached.
pub(crate) fn wait(call: &Call<'_>, work: impl FnOnce(&mut Gpu) -> Answer<Vec<Mark>>) -> CUresult {
    let marks = match answer(call, |gpu| answer_of(call.name, gpu, work)) {
        Ok(marks) => marks,
        Err(code) => return code,
    };
    for mark in marks {
        loop {
            let reached = lock().as_mut().is_some_and(|gpu| gpu.advance_to(&mark));
            if reached {
                break;
            }
            // Another thread or process has to do its part first.
            thread::sleep(Duration::from_micros(50));
        }
    }
    let mut gpu = lock();
    let Some(gpu) = gpu.as_mut() else { return Code::CUDA_SUCCESS };
    gpu.pools.trim();
    gpu.failed.unwrap_or(Code::CUDA_SUCCESS)
}

/// Runs one call that needs no GPU. The program may make it before `cuInit`.
pub(crate) fn always(call: &Call<'_>, work: impl FnOnce(Option<&mut Gpu>) -> Answer<()>) -> CUresult {
    answer(call, work).err().unwrap_or(Code::CUDA_SUCCESS)
}

fn answer<T>(call: &Call<'_>, work: impl FnOnce(Option<&mut Gpu>) -> Answer<T>) -> Answer<T> {
    if IN_HOST_FUNCTION.get() {
        report::fault(
            "call in a host function",
            &format!("{}; a host function may make no driver calls", call.name),
        );
    }
    let mut gpu = lock();
    trace::begin(call, gpu.as_ref());
    let answer = work(gpu.as_mut());
    trace::end(call, gpu.as_ref(), answer.as_ref().err().copied());
    answer
}

fn answer_of<T>(name: &str, gpu: Option<&mut Gpu>, work: impl FnOnce(&mut Gpu) -> Answer<T>) -> Answer<T> {
    let gpu = gpu.ok_or(Code::CUDA_ERROR_NOT_INITIALIZED)?;
    if let Some(code) = gpu.injected(name) {
        return Err(Code(code));
    }
    match gpu.failed {
        Some(code) if !AFTER_FAILURE.contains(&name) => Err(code),
        _ => work(gpu),
    }
}

/// Runs a function of the program. The function may make no call.
pub(crate) fn in_host_function(work: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    work();
    IN_HOST_FUNCTION.set(false);
}

/// Runs all work that can run, because another thread or process waits for it.
pub(crate) fn pump() {
    if let Ok(mut gpu) = GPU.try_lock()
        && let Some(gpu) = gpu.as_mut()
    {
        gpu.drain();
    }
}
