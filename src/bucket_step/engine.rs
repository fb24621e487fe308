//! The state that a device keeps between the steps of a bucket: settings that the next step reads, and the progress of
//! each parameter.
//!
//! The halves of the CPU and of a GPU are its two implementations. Every call that changes either is written once, on top of
//! this trait.

use crate::error::Result;
use crate::launch::{Progress, Settings};

/// A device's half of a [`BucketStep`](super::BucketStep). Nobody else can implement it.
pub trait Engine {
    /// Replaces the settings from the next step on, without waiting.
    fn write_settings(&mut self, settings: &Settings);

    /// Returns a record's progress after all steps.
    fn read_progress(&self, record: usize) -> Result<Progress>;

    /// Sets a record's progress after all steps.
    fn write_progress(&mut self, record: usize, progress: Progress) -> Result<()>;
}
