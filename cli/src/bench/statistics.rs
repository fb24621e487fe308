//! Medians with their spread.
//!
//! A spread covers all given samples. No sample is dropped as an outlier, because users meet slow rounds too. The
//! benches leave out warm-up rounds before they compute a spread.

use serde::Serialize;

/// Median, minimum and maximum of some samples.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

impl Spread {
    /// Computes the spread of one or more samples. For an even number of samples, the median is the lower of the middle
    /// two.
    pub(super) fn of(samples: impl IntoIterator<Item = f64>) -> Spread {
        let mut sorted: Vec<f64> = samples.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        Spread { median: sorted[(sorted.len() - 1) / 2], min: sorted[0], max: sorted[sorted.len() - 1] }
    }

    /// Multiplies all three figures by a factor, for example to convert them to another unit.
    pub(super) fn scaled(self, factor: f64) -> Spread {
        let Spread { median, min, max } = self;
        Spread { median: median * factor, min: min * factor, max: max * factor }
    }

    /// Returns the median as text with about five digits, so that columns stay aligned for times of up to a second. The
    /// median is in microseconds.
    pub(super) fn median_us(&self) -> String {
        let digits = match self.median {
            ..1e3 => 2,
            ..1e5 => 1,
            _ => 0,
        };
        format!("{:.digits$}", self.median)
    }

    /// Returns the text `median (min-max)`.
    pub(super) fn show(&self, digits: usize) -> String {
        format!("{:.digits$} ({:.digits$}-{:.digits$})", self.median, self.min, self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn microseconds_take_no_more_room_than_their_column_has() {
        for us in [0.5, 999.999, 4183.35, 32_634.98, 1e6] {
            assert!(Spread::of([us, us]).median_us().len() < 11, "{us}");
        }
        assert_eq!(Spread::of([1.25]).median_us(), "1.25");
    }

    #[test]
    fn the_median_is_a_sample_and_lies_between_the_ends() {
        let spread = Spread::of([3.0, 1.0, 2.0, 10.0]);
        assert_eq!((spread.median, spread.min, spread.max), (2.0, 1.0, 10.0));
    }
}
