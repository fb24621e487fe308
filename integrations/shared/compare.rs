//! Times the steps of two optimizers in turn, round by round, and prints the medians.
//!
//! A ratio compares the times of both optimizers in the same round. The first round only warms up.

use std::time::{Duration, Instant};

/// The number of layers of the network. Their parameters are stepped.
pub(crate) const LAYERS: usize = 6;

/// Returns the width of the network's layers: the program's argument, or 1024.
pub(crate) fn width() -> usize {
    std::env::args().nth(1).map_or(1024, |text| text.parse().expect("the width is a whole number"))
}

/// Calls `step`, and returns how long the call took.
pub(crate) fn timed(step: impl FnOnce()) -> Duration {
    let start = Instant::now();
    step();
    start.elapsed()
}

/// Calls `round` once per round to time both steps. Prints the medians and the ratio.
pub(crate) fn compare(theirs: &str, ours: &str, mut round: impl FnMut() -> [Duration; 2]) {
    let rounds: Vec<[f64; 2]> =
        (0..32).map(|_| round().map(|time| time.as_secs_f64() * 1e3)).skip(1).collect();
    let spread = |of: &dyn Fn(&[f64; 2]) -> f64| {
        let mut values: Vec<f64> = rounds.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        (values[values.len() / 2], values[0], values[values.len() - 1])
    };
    let elements = LAYERS * (width() * width() + width());
    println!("AdamW over {} tensors, {elements} elements; medians of {} rounds", 2 * LAYERS, rounds.len());
    for (name, side) in [(theirs, 0), (ours, 1)] {
        let (median, least, most) = spread(&|round| round[side]);
        println!("{name:<28}{median:9.2} ms ({least:.2} to {most:.2})");
    }
    let (median, least, most) = spread(&|[theirs, ours]| theirs / ours);
    println!("{:<28}{median:9.2}    ({least:.2} to {most:.2})", "ratio");
}
