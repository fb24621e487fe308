//! Waits for a call that NCCL makes on its own thread: polls without sleeping at first, then between sleeps.
//!
//! NCCL starts a thread for each collective, which ends within microseconds unless it has to connect. A sleep takes
//! longer than that, and the trainer's thread would sleep for every bucket. Peers are checked only between sleeps.

use std::thread;
use std::time::{Duration, Instant};

use crate::error::Result;

/// Time for which a wait does not sleep.
const AWAKE: Duration = Duration::from_micros(50);
/// Length of a sleep.
const NAP: Duration = Duration::from_micros(50);

/// The clock of a wait, and its ways to let time pass.
pub(super) trait Clock {
    /// Returns the time since the wait began.
    fn waited(&self) -> Duration;
    /// Lets another thread of this core run, if one is ready.
    fn give_way(&mut self);
    fn sleep(&mut self, time: Duration);
}

/// The machine's clock.
pub(super) struct Wall(Instant);

impl Wall {
    pub(super) fn start() -> Wall {
        Wall(Instant::now())
    }
}

impl Clock for Wall {
    fn waited(&self) -> Duration {
        self.0.elapsed()
    }

    fn give_way(&mut self) {
        thread::yield_now();
    }

    fn sleep(&mut self, time: Duration) {
        thread::sleep(time);
    }
}

/// Polls until there is an answer, and returns it; `None` once the deadline has passed.
///
/// # Errors
/// An error of `wanted` ends the wait.
pub(super) fn poll<T>(
    mut clock: impl Clock,
    deadline: Duration,
    wanted: impl Fn() -> Result<()>,
    mut look: impl FnMut() -> Option<T>,
) -> Result<Option<T>> {
    loop {
        let waited = clock.waited();
        if waited < AWAKE {
            clock.give_way();
        } else {
            wanted()?;
            if waited >= deadline {
                return Ok(None);
            }
            clock.sleep(NAP);
        }
        if let Some(answer) = look() {
            return Ok(Some(answer));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::error::Error;

    /// A clock on which giving way takes 10 us and a sleep its time.
    #[derive(Default)]
    struct Counting {
        waited: Duration,
        given_way: u32,
        sleeps: u32,
    }

    impl Clock for &mut Counting {
        fn waited(&self) -> Duration {
            self.waited
        }

        fn give_way(&mut self) {
            self.given_way += 1;
            self.waited += Duration::from_micros(10);
        }

        fn sleep(&mut self, time: Duration) {
            self.sleeps += 1;
            self.waited += time;
        }
    }

    const DEADLINE: Duration = Duration::from_millis(1);

    /// Waits for an answer that is there at the n-th look; returns the clock and how often the peers were asked about.
    fn wait(looks: u32) -> (Counting, u32) {
        let (mut clock, asked, mut left) = (Counting::default(), Cell::new(0), looks);
        let wanted = || {
            asked.set(asked.get() + 1);
            Ok(())
        };
        let look = || {
            left -= 1;
            (left == 0).then_some(looks)
        };
        assert_eq!(poll(&mut clock, DEADLINE, wanted, look), Ok(Some(looks)));
        (clock, asked.get())
    }

    #[test]
    fn a_call_that_ends_within_50_us_is_waited_for_without_a_sleep() {
        for looks in 1..=5 {
            let (clock, asked) = wait(looks);
            assert_eq!((clock.given_way, clock.sleeps, asked), (looks, 0, 0));
        }
    }

    #[test]
    fn a_longer_wait_sleeps_and_asks_about_the_peers_before_each_look() {
        let (clock, asked) = wait(12);
        assert_eq!((clock.given_way, clock.sleeps, asked), (5, 7, 7));
    }

    #[test]
    fn a_wait_ends_at_its_deadline_or_when_it_is_no_longer_wanted() {
        let mut clock = Counting::default();
        assert_eq!(poll(&mut clock, DEADLINE, || Ok(()), || None::<()>), Ok(None));
        assert_eq!(clock.waited, DEADLINE);
        let unwanted = || Err(Error::Hook("over".to_owned()));
        assert_eq!(poll(Wall::start(), Duration::MAX, unwanted, || None::<()>), unwanted().map(|()| None));
    }
}
