//! Tests of a wait that asks again and again, on a clock that the tests turn.
//!
//! A short wait never sleeps, and a long one sleeps between its polls.

use std::cell::Cell;

use super::*;
use crate::error::Error;

/// A clock that advances by 10 us for each yield, and by the length of each sleep.
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

    fn pause(&mut self, sleep: Option<Duration>) {
        self.given_way += u32::from(sleep.is_none());
        self.sleeps += u32::from(sleep.is_some());
        self.waited += sleep.unwrap_or(Duration::from_micros(10));
    }
}

const AWAKE: Duration = Duration::from_micros(50);
const DEADLINE: Duration = Duration::from_millis(1);

/// Waits for an answer that comes at the n-th poll. Returns the clock, and how often the wait asked whether it is
/// still wanted.
fn wait(looks: u32) -> (Counting, u32) {
    let (mut clock, asked, mut left) = (Counting::default(), Cell::new(0), looks);
    let wanted = || {
        asked.set(asked.get() + 1);
        Ok(())
    };
    let look = || {
        left -= 1;
        Ok((left == 0).then_some(looks))
    };
    assert_eq!(poll(&mut clock, AWAKE, DEADLINE, wanted, look), Ok(Some(looks)));
    (clock, asked.get())
}

#[test]
fn a_call_that_ends_within_50_us_is_waited_for_without_a_sleep() {
    for looks in 1..=6 {
        let (clock, asked) = wait(looks);
        assert_eq!((clock.given_way, clock.sleeps, asked), (looks - 1, 0, 0));
    }
}

#[test]
fn a_longer_wait_sleeps_and_asks_about_the_peers_before_each_sleep() {
    let (clock, asked) = wait(12);
    assert_eq!((clock.given_way, clock.sleeps, asked), (5, 6, 6));
}

#[test]
fn a_wait_ends_at_its_deadline_or_when_it_is_no_longer_wanted_or_cannot_look() {
    let mut clock = Counting::default();
    assert_eq!(poll(&mut clock, AWAKE, DEADLINE, || Ok(()), || Ok(None::<()>)), Ok(None));
    assert_eq!(clock.waited, DEADLINE);
    let over = || Error::Hook("over".to_owned());
    let unwanted = poll(Wall::start(), AWAKE, Duration::MAX, || Err(over()), || Ok(None::<()>));
    let blind = poll(Wall::start(), AWAKE, Duration::MAX, || Ok(()), || Err::<Option<()>, _>(over()));
    assert_eq!([unwanted, blind], [Err(over()), Err(over())]);
}
