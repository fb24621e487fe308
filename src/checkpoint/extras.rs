//! The trainer's own scalars and texts, saved together with the stepper.
//!
//! The types here are plain data. A save returns an error for a name that checkpoints use themselves.

use std::collections::BTreeMap;

/// The trainer's own scalars and texts. A checkpoint contains them in addition to the stepper's data.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Extras {
    /// The scalars by tensor name, such as `epoch` or `random.seed`. A name must not be `crc32` or the name of a scalar
    /// that the stepper itself saves, and must not begin with `param.`, `state.` or `ema.`. A stepper without a loss
    /// scaler can therefore save a scaler's state that a load has returned.
    pub scalars: BTreeMap<String, Scalar>,
    /// Free text by key. The key `instep.checkpoint` is reserved.
    pub metadata: BTreeMap<String, String>,
}

/// A number that is saved without rounding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// A real number.
    F64(f64),
    /// A whole number, such as a count or a seed.
    U64(u64),
}
