//! Defaults that follow from the machine: how many ranks to train, and how many kernel threads each of them gets.
//!
//! Overlap hides optimizer time only if a core is free for the optimizer. A rank keeps up to three threads busy at once
//! (trainer, reduce stream, optimizer stream), so a rank is added for every three cores.

use std::env;
use std::thread;

/// Ranks beyond this number make the images of a batch too few to be worth dividing.
const MOST_RANKS: usize = 4;

/// Cores that this process may use; 1 if the system does not say.
pub(crate) fn count_cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the default number of ranks.
pub(crate) fn choose_ranks() -> u32 {
    ranks_of(count_cores()) as u32
}

/// Returns the kernel threads of each rank, or `None` where `INSTEP_THREADS` decides.
pub(crate) fn choose_threads(asked_for: Option<usize>, ranks: u32) -> Option<usize> {
    asked_for.or_else(|| env::var_os("INSTEP_THREADS").is_none().then(|| threads_of(count_cores(), ranks)))
}

fn ranks_of(cores: usize) -> usize {
    (cores / 3).clamp(1, MOST_RANKS)
}

/// Leaves a core to the trainer and one to the reduce stream.
fn threads_of(cores: usize, ranks: u32) -> usize {
    (cores / ranks.max(1) as usize).saturating_sub(2).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_cores_for_its_streams_and_small_machines_train_one_rank() {
        let chosen: Vec<_> = [1, 2, 4, 6, 8, 16, 64]
            .map(|cores| (ranks_of(cores), threads_of(cores, ranks_of(cores) as u32)))
            .into();
        assert_eq!(chosen, [(1, 1), (1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (4, 14)]);
        assert_eq!(threads_of(2, 0), 1, "no ranks are refused elsewhere, and must not divide by zero");
    }

    #[test]
    fn threads_that_were_asked_for_are_taken() {
        assert_eq!(choose_threads(Some(7), 2), Some(7));
    }
}
