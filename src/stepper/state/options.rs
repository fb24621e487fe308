//! Options that are types of their own: unused parameters, and the mean over uneven inputs.
//!
//! Plain values. The builder decides which of them fit together.

/// The treatment of a parameter whose gradient was not written in a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Unused {
    /// If no rank wrote it: value, state and step count stay. A parameter that *some* rank used is stepped on all.
    #[default]
    Skip,
    /// It is stepped with a zero gradient, so momentum and decay still move it. **On borrowed memory the zeros are
    /// written over what lies there**, also over what you wrote through your own pointer without asking for the
    /// gradient first.
    StepZero,
    /// [`Pass::finish`](crate::Pass::finish) is an `Order` that names it, and the pass is abandoned. Each rank must
    /// write every gradient, except of frozen parameters and those with
    /// [`SegmentAction::Leave`](crate::SegmentAction); one that forgets a gradient alone ends the group, as one that
    /// abandons alone. The choice for borrowed memory, if every pass uses every parameter.
    Refuse,
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
