//! Names inside a checkpoint: prefixes of tensors' names, names of single tensors, and metadata keys.
//!
//! The names are a part of the file format, so they must not change.

/// The prefix of a parameter's name.
pub(super) const PARAM: &str = "param.";
/// The prefix of `NAME.STATE`: a parameter's name, a dot, and the name of one of its states.
pub(super) const STATE: &str = "state.";
/// The prefix of a parameter's name, for its moving average.
pub(super) const EMA: &str = "ema.";
/// The step count's name. It is used like a state's name.
pub(super) const STEP: &str = "step";
/// The name of the tensor that has the checksums.
pub const CHECKSUMS: &str = "crc32";
/// The names of the stepper's scalars.
pub(super) const SCALE: &str = "scaler.scale";
pub(super) const GROWTH_TRACKER: &str = "scaler.growth_tracker";
pub(super) const SCHEDULE_STEP: &str = "schedule.step";
pub(super) const PREVIOUS_NORM: &str = "clip.previous_norm";
/// The metadata key that marks a file as a checkpoint of this library. Its value is the version of the format.
pub const VERSION_KEY: &str = "instep.checkpoint";
pub(super) const VERSION: &str = "1";
