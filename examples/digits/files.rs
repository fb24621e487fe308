//! Files that show when each operation ran: a trace of every rank for ui.perfetto.dev, and a picture of two passes.
//!
//! The files are written after the training and the verdict, and change neither.

use std::fs;
use std::path::Path;

use instep::timeline::{Interval, Lane, draw_picture, window_of_passes, write_trace};

use crate::Flags;
use crate::data::GLOBAL_BATCH;
use crate::report::name;
use crate::train::Trained;

/// Passes that a picture shows.
const SHOWN: u64 = 2;

/// Writes the requested files for the chosen run.
pub(crate) fn write_files(flags: &Flags, chosen: &[Trained], images: usize) -> Result<(), String> {
    let lanes: Vec<Lane> =
        chosen.iter().zip(0..).map(|(trained, rank)| trained.recording.lane(rank)).collect();
    if let Some(path) = &flags.trace {
        let mut text = String::new();
        write_trace(&mut text, &lanes).map_err(|error| describe(path, &error))?;
        write(path, &text)?;
        println!("trace: {} (ui.perfetto.dev opens it)", path.display());
    }
    if let Some(path) = &flags.picture {
        let passes = (images / GLOBAL_BATCH) as u64;
        let first = find_middle(u64::from(flags.epochs), passes);
        let window = lanes.first().and_then(|lane| window_of_passes(lane, first, SHOWN));
        let window = window.ok_or_else(|| describe(path, &"the passes in the middle were not recorded"))?;
        let window = widen(window);
        let title = format!(
            "instep digits: {}, {}, rank 0 of {}, passes {first} and {} of {}",
            name(flags.mode),
            flags.optimizer.key(),
            flags.ranks,
            first + 1,
            u64::from(flags.epochs) * passes,
        );
        write(path, &draw_picture(&title, &lanes[..1], window))?;
        println!("picture: {}", path.display());
    }
    Ok(())
}

/// Returns the middle pass of the middle epoch, counted from 1. A pass between two epochs would also show how rank 0
/// evaluates held-out images.
fn find_middle(epochs: u64, passes: u64) -> u64 {
    (epochs - 1) / 2 * passes + passes / 2
}

/// Adds a margin on both sides, to show work that crosses the start or the end of these passes.
fn widen(window: Interval) -> Interval {
    let more_ns = window.ns() / 20;
    Interval { start_ns: window.start_ns.saturating_sub(more_ns), end_ns: window.end_ns + more_ns }
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|error| describe(path, &error))
}

fn describe(path: &Path, why: &dyn std::fmt::Display) -> String {
    format!("cannot write {}: {why}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_passes_shown_lie_inside_one_epoch() {
        for epochs in 1..=21 {
            let first = find_middle(epochs, 22);
            // The pass after the last one shown is of the same epoch too, since its opening ends the picture.
            let epoch_of = |pass: u64| (pass - 1) / 22;
            assert_eq!(epoch_of(first), epoch_of(first + SHOWN));
            assert_eq!(epoch_of(first), (epochs - 1) / 2);
        }
    }

    #[test]
    fn a_file_that_cannot_be_written_is_named() {
        let error = write(Path::new("/nowhere/at/all.json"), "").unwrap_err();
        assert!(error.starts_with("cannot write /nowhere/at/all.json: "), "{error}");
    }
}
