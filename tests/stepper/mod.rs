//! The options of a stepper on one rank: clipping, groups, schedules, frozen parameters, borrowed memory.
//!
//! Each feature is compared, bit for bit, with a plain run that does not use it.

pub(crate) mod accumulation;
pub(crate) mod borrowed;
pub(crate) mod bucket_clips;
pub(crate) mod clipping;
pub(crate) mod delayed_clips;
pub(crate) mod detached;
pub(crate) mod endings;
pub(crate) mod freeze_thaw;
pub(crate) mod freezing;
mod grad_scaler;
pub(crate) mod gradients;
pub(crate) mod group_clips;
pub(crate) mod groups;
pub(crate) mod hypers;
pub(crate) mod late_groups;
pub(crate) mod loss_scaling;
pub(crate) mod lr_multipliers;
pub(crate) mod lr_schedules;
pub(crate) mod mean_gradients;
mod mixed_precision;
pub(crate) mod nadam_product;
pub(crate) mod named_unused;
pub(crate) mod orders;
pub(crate) mod passes;
pub(crate) mod rebinding;
pub(crate) mod rebuild;
pub(crate) mod refusals;
pub(crate) mod registry;
pub(crate) mod resume;
pub(crate) mod several_optimizers;
pub(crate) mod state_counts;
pub(crate) mod unused;
pub(crate) mod unused_edges;
