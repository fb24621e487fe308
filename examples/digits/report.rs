//! Terminal output: a bar or a few lines during training, then the stages and the verdict.
//!
//! The verdict depends on accuracy, on equal bits and on races, and never on a time.

use std::fmt::Debug;

use indicatif::{ProgressBar, ProgressStyle};
use instep::{Mode, Result, Stepper};

use crate::Flags;
use crate::machine::{choose_threads, count_cores};
use crate::model::WIDTHS;
use crate::stages;
use crate::train::{Trace, Trained};

/// The approximate number of progress lines of the chosen run, if there is no terminal for a bar.
const LINES: u32 = 4;

/// Shows how far one training has come.
pub(crate) struct Progress {
    mode: String,
    is_chosen: bool,
    epochs: u32,
    bar: ProgressBar,
}

impl Progress {
    /// Makes the progress display of a training that has not started.
    pub(crate) fn new(flags: &Flags, mode: Mode) -> Progress {
        let mode = name(mode);
        let bar = ProgressBar::new(u64::from(flags.epochs)).with_prefix(mode.clone());
        // The template is a constant; if it were wrong, the default style would do.
        if let Ok(style) = ProgressStyle::with_template("{prefix:10} {wide_bar} {pos}/{len} epochs  {msg}") {
            bar.set_style(style);
        }
        Progress { is_chosen: mode == name(flags.mode), mode, epochs: flags.epochs, bar }
    }

    /// Prints the network, the options and the machine.
    pub(crate) fn start(&self, flags: &Flags, stepper: &Stepper) -> Result<()> {
        if !self.is_chosen {
            println!("{:10}  the same training once more, to compare", self.mode);
            return Ok(());
        }
        let layout = stepper.layout();
        let mut parameters = 0;
        for id in layout.ids() {
            parameters += layout.parameter(id)?.len;
        }
        let threads = choose_threads(flags.threads, flags.ranks);
        println!(
            "digits: network {}, {parameters} parameters in {} buckets, optimizer {}, precision {}, strategy {}{}{}",
            WIDTHS.map(|width| width.to_string()).join("-"),
            stepper.plan().buckets().len(),
            flags.optimizer.key(),
            name(flags.precision),
            name(flags.strategy),
            flags.shard_size.map_or(String::new(), |ranks| format!(" among {ranks} ranks each")),
            if flags.offload { " with offload" } else { "" },
        );
        println!(
            "machine: {} cores, ranks {}, kernel threads of each rank {}, kernels {}",
            count_cores(),
            flags.ranks,
            threads.map_or("as INSTEP_THREADS says".to_owned(), |threads| threads.to_string()),
            stepper.isa(),
        );
        Ok(())
    }

    /// Shows that an epoch has ended, with its loss and accuracy. Without a terminal, shows only some epochs of the
    /// chosen run.
    pub(crate) fn advance(&self, epoch: u32, loss: f64, accuracy: f64) {
        let message = format!("loss {loss:.4}  accuracy {accuracy:.4}");
        if self.bar.is_hidden() {
            let is_shown = epoch == self.epochs || epoch.is_multiple_of(self.epochs.div_ceil(LINES));
            if self.is_chosen && is_shown {
                println!("{:10}  epoch {epoch:2} of {}  {message}", self.mode, self.epochs);
            }
            return;
        }
        self.bar.set_message(message);
        self.bar.set_position(u64::from(epoch));
        if epoch == self.epochs {
            self.bar.finish();
        }
    }
}

/// Prints the stages and the verdict on both runs. Returns whether the accuracy, the bits and the order of operations
/// are right.
pub(crate) fn judge(chosen: (Mode, &[Trained]), counterpart: (Mode, &[Trained]), min_accuracy: f64) -> bool {
    let modes = [name(chosen.0), name(counterpart.0)];
    println!("{}", stages::describe((&modes[0], chosen.1), (&modes[1], counterpart.1)));
    let accurate = judge_accuracy(chosen.1, min_accuracy);
    let identical = judge_identity(chosen.1, counterpart.1);
    let ordered = judge_races(chosen.1, counterpart.1);
    accurate && identical && ordered
}

pub(crate) fn judge_accuracy(chosen: &[Trained], min_accuracy: f64) -> bool {
    let lowest = chosen.iter().map(|rank| rank.accuracy).fold(1.0, f64::min);
    let accurate = lowest >= min_accuracy;
    let remark = if accurate { String::new() } else { format!(" (below the minimum, {min_accuracy})") };
    println!("test accuracy: {lowest:.4}{remark}");
    accurate
}

fn judge_identity(chosen: &[Trained], counterpart: &[Trained]) -> bool {
    let difference = compare(chosen, counterpart);
    let verdict = difference.as_ref().map_or("bit-identical".to_owned(), |what| format!("DIFFERENT, {what}"));
    println!("both runs: {verdict}");
    difference.is_none()
}

/// Finds the first difference between two runs.
fn compare(chosen: &[Trained], counterpart: &[Trained]) -> Option<String> {
    for (rank, (left, right)) in chosen.iter().zip(counterpart).enumerate() {
        for (left, right) in left.parameters.iter().zip(&right.parameters) {
            if let Some(what) = find_difference(left, right) {
                return Some(format!("rank {rank}, {what}"));
            }
        }
    }
    None
}

fn find_difference(left: &Trace, right: &Trace) -> Option<String> {
    if left.steps != right.steps {
        return Some(format!("{}: {} steps, not {}", left.name, left.steps, right.steps));
    }
    left.tensors.iter().zip(&right.tensors).find_map(|((tensor, left_values), (_, right_values))| {
        let mut pairs = left_values.iter().zip(right_values);
        // Bits, because zero equals minus zero and NaN differs from itself.
        let element = pairs.position(|(a, b)| a.to_bits() != b.to_bits())?;
        let (a, b) = (left_values[element], right_values[element]);
        Some(format!("{} {tensor}[{element}]: {a:e}, not {b:e}", left.name))
    })
}

fn judge_races(chosen: &[Trained], counterpart: &[Trained]) -> bool {
    let mut hazards = Vec::new();
    for (run, ranks) in [("chosen", chosen), ("other", counterpart)] {
        for (rank, trained) in ranks.iter().enumerate() {
            let describe = |hazard| format!("{run} run, rank {rank}: {hazard}");
            hazards.extend(trained.hazards.iter().map(describe));
        }
    }
    println!("hazards: {}", hazards.len());
    hazards.iter().take(3).for_each(|hazard| println!("  {hazard}"));
    hazards.is_empty()
}

/// Returns a flag's value as it is spelled on the command line.
pub(crate) fn name(choice: impl Debug) -> String {
    format!("{choice:?}").to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leave_trace(steps: u64, value: f32, state: f32) -> Trace {
        let tensors = vec![("value".into(), vec![0.5, value]), ("exp_avg".into(), vec![state])];
        Trace { name: "layer0.bias".into(), steps, tensors }
    }

    #[test]
    fn a_difference_in_one_bit_is_found_and_named() {
        let trace = leave_trace(3, 0.0, f32::NAN);
        assert_eq!(find_difference(&trace, &leave_trace(3, 0.0, f32::NAN)), None);
        let cases = [
            (leave_trace(4, 0.0, f32::NAN), "layer0.bias: 3 steps, not 4"),
            (leave_trace(3, -0.0, f32::NAN), "layer0.bias value[1]: 0e0, not -0e0"),
            (leave_trace(3, 0.0, 1.0), "layer0.bias exp_avg[0]: NaN, not 1e0"),
        ];
        for (other, what) in cases {
            assert_eq!(find_difference(&trace, &other).as_deref(), Some(what));
        }
    }
}
