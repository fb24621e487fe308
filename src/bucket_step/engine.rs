//! The device's data between the steps of a bucket: the settings that the next step reads, and each parameter's
//! progress.
//!
//! The CPU and the GPU implement this trait. Calls that change settings or progress are written once, on top of this
//! trait.

use crate::error::Result;
use crate::launch::{Progress, Settings};

/// The device's part of a [`BucketStep`](super::BucketStep). Only this crate can implement it.
pub trait Engine {
    /// Replaces the settings from the next step on, without waiting.
    fn write_settings(&mut self, settings: &Settings);

    /// Waits for all steps, and returns a record's progress.
    fn read_progress(&self, record: usize) -> Result<Progress>;

    /// Waits for all steps, and sets a record's progress.
    fn write_progress(&mut self, record: usize, progress: Progress) -> Result<()>;
}
