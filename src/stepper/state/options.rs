//! Options that are types of their own: unused parameters, and the mean over uneven inputs.
//!
//! Plain values. The builder decides which of them fit together.

/// The treatment of a parameter that no rank had a gradient for in a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Unused {
    /// Nothing: value, state and step count stay. A parameter that *some* rank used is stepped on all of them.
    #[default]
    Skip,
    /// It is stepped with a zero gradient, so momentum and decay still move it.
    StepZero,
}

/// The divisor of the sum of gradients once ranks run out of data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Divisor {
    /// The number of ranks, those without data included: each sample keeps its weight.
    #[default]
    WorldSize,
    /// The number of ranks that had data in this pass.
    ContributingRanks,
}
