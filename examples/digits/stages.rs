//! The time of each stage of both runs, side by side, and one line about the time that overlap hid.
//!
//! The times are means over the ranks of this one run. The verdict does not depend on these times.

use instep::op::{Action, Stream};
use instep::timeline::Exposure;

use crate::machine::count_cores;
use crate::train::Trained;

/// Nanoseconds of one run's stages, added up over its ranks.
#[derive(Default)]
struct Stages {
    ranks: u64,
    training_ns: u64,
    waiting_ns: u64,
    reduce_ns: u64,
    optimizer: Exposure,
}

impl Stages {
    fn of(run: &[Trained]) -> Stages {
        let mut stages = Stages { ranks: run.len() as u64, ..Stages::default() };
        for rank in run {
            stages.training_ns += rank.training.as_nanos() as u64;
            stages.waiting_ns += rank.recording.blocked.iter().map(|wait| wait.ns()).sum::<u64>();
            let reduces = rank.recording.ran.iter().filter(|ran| {
                ran.op.stream == Stream::Reduce && matches!(ran.op.action, Action::Collective { .. })
            });
            stages.reduce_ns += reduces.map(|ran| ran.interval.ns()).sum::<u64>();
            stages.optimizer.add(rank.recording.exposure());
        }
        stages
    }

    fn mean(&self, total_ns: u64) -> String {
        format!("{:.0} ms", total_ns as f64 / 1e6 / self.ranks as f64)
    }

    fn hidden(&self) -> String {
        self.optimizer.hidden_share().map_or("n/a".to_owned(), |share| format!("{:.0} %", share * 100.0))
    }
}

/// Describes both runs, each with the name of its mode.
pub(crate) fn describe(chosen: (&str, &[Trained]), counterpart: (&str, &[Trained])) -> String {
    let runs = [Stages::of(chosen.1), Stages::of(counterpart.1)];
    let mut text = format!("{:<26}{:>12}{:>12}\n", "mean over the ranks", chosen.0, counterpart.0);
    let mut row = |stage: &str, cells: [String; 2]| {
        text.push_str(&format!("{stage:<26}{:>12}{:>12}\n", cells[0], cells[1]));
    };
    row("training", runs.each_ref().map(|run| run.mean(run.training_ns)));
    row("trainer waiting", runs.each_ref().map(|run| run.mean(run.waiting_ns)));
    row("all-reduce", runs.each_ref().map(|run| run.mean(run.reduce_ns)));
    row("optimizer", runs.each_ref().map(|run| run.mean(run.optimizer.busy_ns)));
    row("  while trainer waits", runs.each_ref().map(|run| run.mean(run.optimizer.exposed_ns)));
    row("  hidden behind trainer", runs.each_ref().map(Stages::hidden));
    text.push_str(&conclude((chosen.0, &runs[0]), (counterpart.0, &runs[1]), count_cores()));
    text
}

/// Says in one line what the table means.
fn conclude(chosen: (&str, &Stages), counterpart: (&str, &Stages), cores: usize) -> String {
    let (mode, run) = chosen;
    let mut line = format!(
        "{mode}: {} of the optimizer's {} ran while the trainer worked; the trainer waited {} for it ({}: {})",
        run.hidden(),
        run.mean(run.optimizer.busy_ns),
        run.mean(run.optimizer.exposed_ns),
        counterpart.0,
        counterpart.1.mean(counterpart.1.optimizer.exposed_ns),
    );
    if cores == 1 {
        line.push_str(
            "\nThere is one core: trainer and optimizer take turns, so hidden time is not saved time.",
        );
    } else if cores < 2 * run.ranks as usize {
        line.push_str("\nThere are fewer than two cores per rank: the optimizer has no core of its own.");
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stages(ranks: u64, busy_ns: u64, exposed_ns: u64) -> Stages {
        Stages { ranks, optimizer: Exposure { busy_ns, exposed_ns }, ..Stages::default() }
    }

    #[test]
    fn the_conclusion_says_what_was_hidden_and_when_that_saves_nothing() {
        let (eager, sequential) = (stages(2, 80_000_000, 8_000_000), stages(2, 80_000_000, 76_000_000));
        let line = |cores| conclude(("eager", &eager), ("sequential", &sequential), cores);
        assert_eq!(
            line(4),
            "eager: 90 % of the optimizer's 40 ms ran while the trainer worked; the trainer waited 4 ms for it \
             (sequential: 38 ms)"
        );
        assert!(line(3).ends_with("the optimizer has no core of its own."));
        assert!(line(1).ends_with("hidden time is not saved time."));
        assert!(conclude(("eager", &stages(1, 0, 0)), ("sequential", &sequential), 4).contains("n/a"));
    }
}
