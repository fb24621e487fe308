//! Names inside a checkpoint: prefixes of tensors' names, names of single tensors, and metadata keys.
//!
//! The names are a part of the file format, so they must not change.

/// The name of a parameter's tensor consists of this prefix and the parameter's name.
pub(super) const PARAM: &str = "param.";
/// The name of a state's tensor consists of this prefix, the parameter's name, a dot and the state's name.
pub(super) const STATE: &str = "state.";
/// The name of a moving average's tensor consists of this prefix and the parameter's name.
pub(super) const EMA: &str = "ema.";
/// The name of a step count's tensor contains this word in place of a state's name.
pub(super) const STEP: &str = "step";
/// The name of the tensor that has the checksums.
pub const CHECKSUMS: &str = "crc32";
/// This constant and the next three are the names of the stepper's own scalars.
pub(super) const SCALE: &str = "scaler.scale";
pub(super) const GROWTH_TRACKER: &str = "scaler.growth_tracker";
pub(super) const SCHEDULE_STEP: &str = "schedule.step";
pub(super) const PREVIOUS_NORM: &str = "clip.previous_norm";
/// The metadata key that marks a file as a checkpoint of this library. The value of this key is the version of the
/// format.
pub const VERSION_KEY: &str = "instep.checkpoint";
pub(super) const VERSION: &str = "1";
