//! The trainer's own scalars and texts, saved beside the stepper.
//!
//! Plain data. Saving refuses names that a checkpoint uses itself.

use std::collections::BTreeMap;

/// The trainer's own scalars and texts, which a checkpoint holds beside the stepper.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Extras {
    /// By tensor name: `epoch`, `random.seed`. Not a name of the table above, nor anything that begins with `param.`,
    /// `state.` or `ema.`.
    pub scalars: BTreeMap<String, Scalar>,
    /// The texts: free text by key, but for `instep.checkpoint`.
    pub metadata: BTreeMap<String, String>,
}

/// A number that keeps its bits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// A real number.
    F64(f64),
    /// A count, a seed.
    U64(u64),
}
