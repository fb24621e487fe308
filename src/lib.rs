//! Fused optimizer steps over whole gradient buckets, in step with backward.
//!
//! A [`Layout`] names the parameters; a [`Stepper`] owns them, their gradients and the optimizer's state in flat
//! buckets. Inside a [`Pass`] the trainer reads parameters, writes gradients and hands them over; a complete bucket is
//! summed over the ranks of a [`Collective`] and stepped in one launch (by [`Lamb`] in two), beside the rest of
//! backward. The README has a whole program.
//!
//! | To | call |
//! |---|---|
//! | give parameters hyperparameters of their own | [`LayoutBuilder::in_group`], [`StepperBuilder::group`] |
//! | give groups, or single parameters, optimizers of their own | [`StepperBuilder::group`], [`StepperBuilder::optimizer_for`] |
//! | step a parameter by several, list them, add one later | [`StepperBuilder::then`], [`Stepper::optimizers`], [`Stepper::add_optimizer_for`] |
//! | leave some parameters to an optimizer outside | [`StepperBuilder::optimize_only`], or [`Stepper::builder_without_optimizer`] and optimizers for the others |
//! | write an optimizer, choose one by name | [`optim::StepParam`], [`overlap::Registry`] |
//! | keep a parameter to each rank | [`LayoutBuilder::local`] |
//! | change a learning rate, or let it follow a schedule | [`Stepper::set_lr`], [`StepperBuilder::lr_schedule`] |
//! | accumulate micro-batches | [`Stepper::begin_accumulating`] |
//! | clip by the global norm, skip non-finite passes | [`StepperBuilder::max_norm`], [`StepperBuilder::skip_nonfinite`] |
//! | scale the loss dynamically | [`StepperBuilder::loss_scaler`], [`Pass::loss_scale`] |
//! | clip in Eager, by an older norm or each bucket's own | [`StepperBuilder::clip_by_previous_norm`], [`StepperBuilder::clip_per_bucket`] |
//! | read what came of a pass without waiting | [`Stepper::latest_status`] |
//! | share a parameter, leave one out | [`LayoutBuilder::uses`], [`StepperBuilder::unused`], [`SegmentAction`] |
//! | freeze a parameter | [`Stepper::set_frozen`] |
//! | multiply one parameter's learning rate | [`Stepper::set_lr_multiplier`] |
//! | store tensors in 16 bits, states in 8, round stochastically | [`StepperBuilder::precision`], [`Precision`], [`Params::get_as`] |
//! | average parameters, write a copy in another type | [`StepperBuilder::ema`], [`StepperBuilder::copy_params`] |
//! | zero gradients behind their step, or give their memory back | [`StepperBuilder::gradients`] |
//! | lay buckets out in the order in which gradients arrive | [`Stepper::rebuild_buckets`] |
//! | let ranks run out of data | [`StepperBuilder::uneven_inputs`], [`Stepper::join`] |
//! | save, resume, take over a state of `torch.optim` | [`checkpoint::save`], [`checkpoint::load`], [`checkpoint::import`] |
//! | set parameters, states and step counts by hand | [`Stepper::params_mut`], [`Stepper::state_mut`], [`Stepper::set_step_count`] |
//! | work on tensors of your own | [`StepperBuilder::host_borrowing`], [`StepperBuilder::cuda_borrowing`] |
//! | compress gradients on the wire, reduce them your own way | [`overlap::Compressed`], [`overlap::Hooked`] |
//! | train several models on the same ranks | [`InProcess::split`] |
//! | run on a GPU | [`StepperBuilder::cuda`], [`cuda`] |
//! | sum over GPUs, or behind an all-reduce of your own | [`cuda::Nccl`], [`cuda::External`] |
//! | make a pass a CUDA graph | `capture`, `replay` of a [`Stepper`] on a GPU |
//! | copy tensors to the host and back, on any device | [`Stepper::read_param`], [`Pass::write_grad`] |
//! | see what ran, and prove that nothing raced | [`StepperBuilder::record`], [`Stepper::take_recording`], [`timeline`] |
//!
//! Trainers need what stands at the crate's root, and [`overlap`], [`checkpoint`], [`optim`] for what the table names
//! there. The other modules are for tools that look inside: [`layout`] (where a parameter lies), [`op`] and
//! [`schedule`] (what runs when), [`hazard`] (the proof that nothing races), [`timeline`] (when it ran).

#[doc(hidden)]
pub mod abi;
#[cfg(feature = "bench")]
#[doc(hidden)]
pub mod bench;
pub mod checkpoint;
pub mod collective;
pub mod cuda;
mod device;
pub mod dtype;
mod error;
mod handle;
pub mod hazard;
mod host;
mod launch;
pub mod layout;
pub mod op;
pub mod optim;
pub mod overlap;
mod pool;
pub mod schedule;
mod stepper;
mod sync;
mod text;
pub mod timeline;

#[doc(inline)]
pub use collective::Collective;
pub use device::Device;
pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use handle::{DevicePtr, EventHandle, Place, StreamHandle};
pub use host::{HostDevice, InProcess, Isa, Solo, in_process};
#[doc(inline)]
pub use layout::{
    DEFAULT_GROUP, ForeignBucket, Gradients, Layout, LayoutBuilder, Master, Moments, ParamId, Precision,
    Rounding, SegmentAction,
};
#[doc(inline)]
pub use optim::{Adadelta, Adagrad, Adam, AdamW, Adamax, Lamb, Lion, NAdam, RAdam, RmsProp, Rprop, Sgd};
pub use optim::{LossScaler, LrSchedule, Optimizer, ScalerState};
pub use pool::Pool;
#[doc(inline)]
pub use schedule::Mode;
pub use stepper::{
    Abandoned, Attached, Borrowed, Divisor, Grads, OptimizerId, Params, ParamsMut, Pass, Recording, Status,
    Stepper, StepperBuilder, Unused,
};

/// Runs the README's example as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
