//! What the screen shows: a bar or a few lines while it trains, then the verdict.
//!
//! Must never decide anything by time: the hidden share is measured and shown, what counts is accuracy, identity and
//! hazards.

use std::fmt::Debug;

use indicatif::{ProgressBar, ProgressStyle};
use instep::timeline::Exposure;
use instep::{Mode, Result, Stepper};

use crate::Flags;
use crate::model::WIDTHS;
use crate::train::{Trace, Trained};

/// Plain lines per run, where there is no terminal to draw a bar on.
const LINES: u32 = 4;

/// Shows how far one run is.
pub(crate) struct Progress {
    mode: String,
    epochs: u32,
    bar: ProgressBar,
}

impl Progress {
    /// A run that has not started.
    pub(crate) fn new(flags: &Flags, mode: Mode) -> Progress {
        let mode = name(mode);
        let bar = ProgressBar::new(u64::from(flags.epochs)).with_prefix(mode.clone());
        // The template is a constant; if it were wrong, the default style would do.
        if let Ok(style) = ProgressStyle::with_template("{prefix:10} {wide_bar} {pos}/{len} epochs  {msg}") {
            bar.set_style(style);
        }
        Progress { mode, epochs: flags.epochs, bar }
    }

    /// Says what is trained, and on what; once, in the chosen run.
    pub(crate) fn start(&self, flags: &Flags, stepper: &Stepper) -> Result<()> {
        if self.mode != name(flags.mode) {
            return Ok(());
        }
        let layout = stepper.layout();
        let mut parameters = 0;
        for id in layout.ids() {
            parameters += layout.parameter(id)?.len;
        }
        println!(
            "digits: network {}, parameters {parameters}, ranks {}, optimizer {}, precision {}, mode {}, buckets {}, \
             kernels {}",
            WIDTHS.map(|width| width.to_string()).join("-"),
            flags.ranks,
            name(flags.optimizer),
            name(flags.precision),
            self.mode,
            stepper.plan().buckets().len(),
            stepper.isa(),
        );
        Ok(())
    }

    /// Shows that an epoch is done.
    pub(crate) fn advance(&self, epoch: u32, loss: f64, accuracy: f64) {
        let message = format!("loss {loss:.4}  accuracy {accuracy:.4}");
        if self.bar.is_hidden() {
            if epoch == self.epochs || epoch.is_multiple_of(self.epochs.div_ceil(LINES)) {
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

/// Prints the verdict on the chosen run and its counterpart, and says whether all is well.
pub(crate) fn judge(chosen: &[Trained], counterpart: &[Trained], min_accuracy: f64) -> bool {
    let accurate = judge_accuracy(chosen, min_accuracy);
    let identical = judge_identity(chosen, counterpart);
    let ordered = judge_hazards(chosen, counterpart);
    show_exposure(chosen);
    accurate && identical && ordered
}

fn judge_accuracy(chosen: &[Trained], min_accuracy: f64) -> bool {
    let lowest = chosen.iter().map(|rank| rank.accuracy).fold(1.0, f64::min);
    let accurate = lowest >= min_accuracy;
    let remark = if accurate { String::new() } else { format!(" (below the minimum, {min_accuracy})") };
    println!("test accuracy: {lowest:.4}{remark}");
    accurate
}

fn judge_identity(chosen: &[Trained], counterpart: &[Trained]) -> bool {
    let difference = compare(chosen, counterpart);
    let verdict = difference.as_ref().map_or("bit-identical".to_owned(), |what| format!("DIFFERENT, {what}"));
    println!("overlapped == sequential: {verdict}");
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

fn judge_hazards(chosen: &[Trained], counterpart: &[Trained]) -> bool {
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

fn show_exposure(chosen: &[Trained]) {
    let mut total = Exposure::default();
    chosen.iter().for_each(|rank| total.add(rank.recording.exposure()));
    let share = total.hidden_share().map_or("n/a".to_owned(), |share| format!("{:.0} %", share * 100.0));
    let (busy, exposed) = (total.busy_ns as f64 / 1e6, total.exposed_ns as f64 / 1e6);
    println!(
        "optimizer time hidden: {share}  (ranks' optimizer streams busy {busy:.0} ms, of which {exposed:.0} ms with \
         the trainer waiting)"
    );
}

/// What the flag that chooses this value calls it.
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
