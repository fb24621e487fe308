//! Decides whether two elements count as equal: either all bits are equal, or the values are close enough.
//!
//! `elements.rs` computes the distances between values. Whole numbers, such as step counts, are never rounded, so they
//! must always be equal.

use super::elements::Element;

/// How far values may differ. Without any of these options every bit must be equal.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
#[command(
    next_help_heading = "Tolerances: an element is accepted if --max-ulp accepts it, or --atol and --rtol do"
)]
pub struct Tolerance {
    /// Accept two values that are at most N representable numbers apart.
    #[arg(long, value_name = "N")]
    pub max_ulp: Option<u64>,
    /// Accept |a - b| <= X + Y * |b|, where b is the value in the second file [default: 0 with --rtol].
    #[arg(long, value_name = "X", value_parser = parse_bound, allow_negative_numbers = true)]
    pub atol: Option<f64>,
    /// The Y in the formula of --atol [default: 0 with --atol].
    #[arg(long, value_name = "Y", value_parser = parse_bound, allow_negative_numbers = true)]
    pub rtol: Option<f64>,
}

impl Tolerance {
    /// Returns whether every bit must be equal.
    pub fn is_exact(&self) -> bool {
        self.max_ulp.is_none() && self.atol.is_none() && self.rtol.is_none()
    }

    /// Returns whether two elements of one type with different bits count as equal.
    ///
    /// With a tolerance, NaN equals NaN and an infinity equals only itself.
    pub(super) fn accepts(&self, a: Element, b: Element) -> bool {
        let (Some(x), Some(y)) = (a.real(), b.real()) else { return false };
        if self.is_exact() {
            return false;
        }
        if x.is_nan() && y.is_nan() {
            return true;
        }
        if !x.is_finite() || !y.is_finite() {
            return false;
        }
        let by_ulp = self.max_ulp.is_some_and(|most| a.distance(b).is_some_and(|ulp| ulp <= most));
        let absolute_or_relative = self.atol.is_some() || self.rtol.is_some();
        let bound = self.atol.unwrap_or(0.0) + self.rtol.unwrap_or(0.0) * y.abs();
        by_ulp || absolute_or_relative && (x - y).abs() <= bound
    }
}

fn parse_bound(text: &str) -> Result<f64, String> {
    let bound = text.parse::<f64>().ok().filter(|bound| bound.is_finite() && *bound >= 0.0);
    bound.ok_or_else(|| "use a finite number of 0 or more".to_owned())
}
