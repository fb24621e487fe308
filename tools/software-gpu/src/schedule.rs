//! Decides which work runs next. The seed decides, within what streams, events and the host's waits allow.
//!
//! Nothing runs in the background: a call that waits, or that queries, lets work run. Seed 0 runs only what a wait
//! needs, at the last moment. Other seeds also run work of other streams, and work in the call that enqueues it.

use crate::gpu::Gpu;
use crate::queue::Mark;

/// How one wait chooses work.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Choice {
    /// Only what the wait needs.
    Needed,
    /// Anything that may run.
    Any,
    /// First the work that the wait does not need.
    Others,
}

impl Gpu {
    /// Runs work until a mark is reached. Returns whether it is reached, because work of another library may not be
    /// able to end yet.
    pub(crate) fn advance_to(&mut self, mark: &Mark) -> bool {
        let target = (mark.lane, mark.position);
        let choice = match self.settings.seed {
            0 => Choice::Needed,
            _ => [Choice::Needed, Choice::Any, Choice::Others][self.random.below(3)],
        };
        let mut stuck = Vec::new();
        while !self.queue.is_done(target) {
            let needed = self.queue.needed(target);
            let is_needed = |lane: usize| self.queue.first(lane).is_some_and(|first| first <= needed[lane]);
            let ready: Vec<usize> =
                self.queue.ready().into_iter().filter(|lane| !stuck.contains(lane)).collect();
            let (wanted, others): (Vec<usize>, Vec<usize>) = ready.iter().partition(|lane| is_needed(**lane));
            let among = match choice {
                _ if wanted.is_empty() => return false,
                Choice::Needed => wanted,
                Choice::Others if !others.is_empty() => others,
                _ => ready,
            };
            let lane = among[self.random.below(among.len())];
            if !self.run_first_of(lane) {
                stuck.push(lane);
            }
        }
        self.queue.host_waited(mark);
        true
    }

    /// Returns whether a mark is reached. If it is not, a little work runs, so the next result may differ.
    pub(crate) fn ask_for(&mut self, mark: &Mark) -> bool {
        let target = (mark.lane, mark.position);
        if self.queue.is_done(target) {
            self.queue.host_waited(mark);
            return true;
        }
        self.run_some(2);
        let needed = self.queue.needed(target);
        let mut ready = self.queue.ready();
        ready.retain(|lane| self.queue.first(*lane).is_some_and(|first| first <= needed[*lane]));
        if !ready.is_empty() {
            let lane = ready[self.random.below(ready.len())];
            self.run_first_of(lane);
        }
        false
    }

    /// Lets work run after a call that has enqueued some, except with seed 0.
    pub(crate) fn run_some(&mut self, most: usize) {
        if self.settings.seed == 0 {
            return;
        }
        for _ in 0..self.random.below(most + 1) {
            let ready = self.queue.ready();
            if ready.is_empty() {
                return;
            }
            let lane = ready[self.random.below(ready.len())];
            self.run_first_of(lane);
        }
    }

    /// Runs all work that can run, as at exit.
    pub(crate) fn drain(&mut self) {
        let mut ran = true;
        while ran {
            ran = self.queue.ready().into_iter().filter(|lane| self.run_first_of(*lane)).count() > 0;
        }
    }
}
