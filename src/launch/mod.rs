//! The kernel launches of a bucket: the optimizers of its segments, the addresses and the arguments.
//!
//! This module depends on `layout`, `optim` and `op`. Both executors pass the same structs to the kernels, so their
//! launches cannot differ.

mod assignment;
mod control;
mod custom;
mod region;
mod settings;
mod step;

pub(crate) use assignment::{
    Assignment, NormStop, StepConstants, part_of_step, refuse_other_places, refuse_storage,
};
pub use control::StepCount;
pub(crate) use control::{CARRIED_RANGE, Progress, carried_fits, first_records, records_of};
pub(crate) use control::{
    begin_args, begin_block, decide_args, decide_block, first_control, first_sets, status_of, without_bucket,
};
pub(crate) use custom::CustomParam;
pub(crate) use region::{Bases, BorrowedPieces, Counts, Piece, Region, Regions};
pub(crate) use settings::{Settings, frozen_by};
pub(crate) use step::{Kind, Launch, rebind};
