//! Defaults that depend on the machine: the number of ranks, and the number of kernel threads of each rank.
//!
//! Overlap hides optimizer time only if a core is free for the optimizer. A rank keeps up to three threads busy at once
//! (trainer, reduce stream, optimizer stream), so a rank is added for every three cores.

use std::env;
use std::thread;

/// With more ranks, each rank would have too few images of a batch.
const MOST_RANKS: usize = 4;

/// Returns the number of cores that this process may use, or 1 if the system does not report it.
pub(crate) fn count_cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the default number of ranks.
pub(crate) fn choose_ranks() -> u32 {
    ranks_of(count_cores()) as u32
}

/// Returns the kernel threads of each rank, or `None` if `INSTEP_THREADS` sets them.
pub(crate) fn choose_threads(asked_for: Option<usize>, ranks: u32) -> Option<usize> {
    asked_for.or_else(|| env::var_os("INSTEP_THREADS").is_none().then(|| threads_of(count_cores(), ranks)))
}

fn ranks_of(cores: usize) -> usize {
    (cores / 3).clamp(1, MOST_RANKS)
}

/// Leaves one core for the trainer and one for the reduce stream.
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
