//! Waits for events that send no notification. A wait first polls without sleeping, unless `awake` is zero.
//!
//! NCCL calls, MPI calls and GPU events often complete within microseconds. A sleep lasts tens of microseconds or more,
//! and would delay the trainer's thread once per bucket. A long wait sleeps between polls, and also checks whether the
//! caller still needs the event.

use std::thread;
use std::time::{Duration, Instant};

use crate::error::Result;

const NAP: Duration = Duration::from_micros(50);

/// Measures the time of a wait, and pauses between polls.
pub(crate) trait Clock {
    /// Returns the time since the wait began.
    fn waited(&self) -> Duration;
    /// Sleeps for this time. If `sleep` is `None`, yields to another thread that is ready on this core.
    fn pause(&mut self, sleep: Option<Duration>);
}

pub(crate) struct Wall(Instant);

impl Wall {
    pub(crate) fn start() -> Wall {
        Wall(Instant::now())
    }
}

impl Clock for Wall {
    fn waited(&self) -> Duration {
        self.0.elapsed()
    }

    fn pause(&mut self, sleep: Option<Duration>) {
        sleep.map_or_else(thread::yield_now, thread::sleep);
    }
}

/// Calls `look` until it returns an answer, and returns that answer. Returns `None` once the deadline has passed.
/// Sleeps between calls only if the wait has already lasted for `awake`.
///
/// # Errors
/// The first error of `wanted` or of `look`. It ends the wait.
pub(crate) fn poll<T>(
    mut clock: impl Clock,
    awake: Duration,
    deadline: Duration,
    wanted: impl Fn() -> Result<()>,
    mut look: impl FnMut() -> Result<Option<T>>,
) -> Result<Option<T>> {
    loop {
        if let Some(answer) = look()? {
            return Ok(Some(answer));
        }
        let waited = clock.waited();
        if waited < awake {
            clock.pause(None);
            continue;
        }
        wanted()?;
        if waited >= deadline {
            return Ok(None);
        }
        clock.pause(Some(NAP));
    }
}

#[cfg(test)]
#[path = "../tests/unit/poll.rs"]
mod tests;
