//! Fused optimizer steps over whole gradient buckets, overlapped with backward.
//!
//! A [`Layout`] names the parameters. A [`Stepper`] keeps them in flat buckets, together with their gradients and the
//! optimizer's states, or [borrows](StepperBuilder::host_borrowing) parameters and gradients from you. Inside a
//! [`Pass`], the trainer reads parameters, writes gradients and hands them over. Once a bucket is complete, a
//! [`Collective`] sums it over the ranks and one kernel launch steps it, while the rest of backward runs. ([`Lamb`]
//! takes two launches.)
//!
//! docs/rust.md has a program on borrowed memory. In the following program, instep owns the memory and makes the
//! all-reduce. Two ranks run in one process, and each rank fits its own points of y = 3x - 1:
//!
//! ```
//! use instep::{AdamW, Layout, Stepper, in_process};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let layout = Layout::builder().param("slope", 1).param("offset", 1).build()?;
//!     let (slope, offset) = (layout.id("slope")?, layout.id("offset")?);
//!     let lines = in_process(2, |comm| {
//!         let rank = comm.rank() as f32;
//!         let mut stepper = Stepper::host(&layout, AdamW { lr: 0.05, ..Default::default() }, comm)?;
//!         for step in 0..500 {
//!             let x = (step % 8) as f32 / 4.0 - rank;
//!             let mut pass = stepper.begin()?;
//!             let (params, mut grads) = pass.split(); // reading a parameter waits for its previous step
//!             let error = params.get(slope)?[0] * x + params.get(offset)?[0] - (3.0 * x - 1.0);
//!             grads.write(slope, &[error * x])?;
//!             grads.write(offset, &[error])?;
//!             pass.grad_ready(offset)?;
//!             pass.grad_ready(slope)?; // the bucket is complete: all-reduce and step start now
//!             pass.finish()?; // returns at once
//!         }
//!         let params = stepper.params();
//!         Ok((params.get(slope)?[0], params.get(offset)?[0]))
//!     })?;
//!     assert!((lines[0].0 - 3.0).abs() < 0.05 && (lines[0].1 + 1.0).abs() < 0.05);
//!     assert_eq!(lines[0], lines[1]); // every rank holds the same bits
//!     Ok(())
//! }
//! ```
//!
//! # Modes
//!
//! All [modes](Mode) give the same bits if nothing is clipped or skipped.
//!
//! | [`Mode`] | steps a bucket | can clip by the global norm of this pass |
//! |---|---|---|
//! | `Eager` | as soon as it is reduced | no |
//! | `Normed` | once the last bucket is reduced and the norm is known; the steps run during the next forward | yes |
//! | `Sequential` | after the last reduce; the reference | yes |
//!
//! # What to call
//!
//! | To | call |
//! |---|---|
//! | step one bucket now, without a pass or a collective | [`BucketStep`], [`GradNorm`] |
//! | start no threads | [`StepperBuilder::inline`] |
//! | step parameters and gradients that your framework owns | [`StepperBuilder::host_borrowing`], [`StepperBuilder::cuda_borrowing`] |
//! | give parameters hyperparameters of their own | [`LayoutBuilder::in_group`], [`StepperBuilder::group`] |
//! | give groups, or single parameters, types of their own | [`StepperBuilder::group_precision`], [`LayoutBuilder::dtype`] |
//! | give groups, or single parameters, optimizers of their own | [`StepperBuilder::group`], [`StepperBuilder::optimizer_for`] |
//! | step a parameter by several optimizers, list them, add one later | [`StepperBuilder::then`], [`StepperBuilder::then_for`], [`Stepper::optimizers`], [`Stepper::add_optimizer_for`] |
//! | leave some parameters to an optimizer outside | [`StepperBuilder::optimize_only`], or [`Stepper::builder_without_optimizer`] and optimizers for the others |
//! | write an optimizer, choose one by name | [`optim::StepParam`], [`overlap::Registry`] |
//! | keep a parameter local to each rank | [`LayoutBuilder::local`] |
//! | change a learning rate, or let it follow a schedule | [`Stepper::set_lr`], [`StepperBuilder::lr_schedule`], [`Stepper::set_lr_schedule`] |
//! | change any other hyperparameter | [`Stepper::set_hyper`] |
//! | multiply one parameter's learning rate | [`Stepper::set_lr_multiplier`] |
//! | accumulate micro-batches | [`Stepper::begin_accumulating`], and in shards [`StepperBuilder::accumulation`] |
//! | clip by the global norm, skip non-finite passes (Normed and Sequential) | [`StepperBuilder::clip`], [`StepperBuilder::skip_nonfinite`] |
//! | scale the loss dynamically | [`StepperBuilder::loss_scale`], [`LossScaler`], [`Stepper::loss_scale`]; [`StepperBuilder::grad_scaler`] for PyTorch's |
//! | clip a group alone or not at all | [`StepperBuilder::group_clip`], [`Stepper::group_norm`] |
//! | clip in Eager, by the previous pass's norm or by each bucket's own | [`Clip::Previous`], [`Clip::PerBucket`] |
//! | read a pass's norm and outcome without waiting | [`Stepper::latest_status`] |
//! | share a parameter, leave one out, or have a parameter without a gradient refused | [`LayoutBuilder::uses`], [`StepperBuilder::unused`], [`SegmentAction`] |
//! | say which parameters no rank used | [`Stepper::set_unused`] |
//! | freeze a parameter | [`Stepper::set_frozen`] |
//! | store tensors in 16 bits, states in 8, round stochastically | [`StepperBuilder::precision`], [`Precision`], [`Params::get_as`] |
//! | average parameters, write a copy in another type | [`StepperBuilder::ema`], [`StepperBuilder::copy_params`] |
//! | keep states and steps in the host's memory (offload) | [`StepperBuilder::offload`] |
//! | zero gradients after their step, or release their memory | [`StepperBuilder::gradients`] |
//! | rebuild buckets in the order in which gradients arrive | [`Stepper::rebuild_buckets`] |
//! | move borrowed tensors, or rebuild borrowed buckets | [`Stepper::rebind`] |
//! | let ranks run out of data | [`StepperBuilder::uneven_inputs`], [`Stepper::join`] |
//! | save, resume, import a state of `torch.optim` | [`checkpoint::save`], [`checkpoint::load`], [`checkpoint::import`] |
//! | exchange only parameters with PyTorch or candle | [`checkpoint::export`], [`checkpoint::import_params`] |
//! | save the training after another rank has died | [`Stepper::rescue`] |
//! | set parameters, states and step counts by hand | [`Stepper::write`], [`Stepper::view_mut`], [`Stepper::set_step_count`] |
//! | compress gradients for the all-reduce, or replace the all-reduce | [`overlap::Compressed`], [`overlap::Hooked`] |
//! | see or change each sum before its step, whole or of shards | [`overlap::SumHooked`] |
//! | train several models on the same ranks | [`InProcess::split`] |
//! | run on a GPU | [`StepperBuilder::cuda`], [`cuda`] |
//! | all-reduce over GPUs | [`cuda::Nccl`] |
//! | step buckets after your own all-reduce, in any order | [`Sums::by_caller`], [`bucket_ready_after`](Stepper::bucket_ready_after) |
//! | all-reduce over processes on the host | feature `mpi`: `Mpi`, with the bits of ranks in one process |
//! | test a transport of your own | [`collective::conformance`] |
//! | capture a pass as a CUDA graph | `capture`, `replay` of a [`Stepper`] on a GPU |
//! | copy tensors to the host and back, on any device | [`Stepper::read`], [`Stepper::write`] |
//! | predict memory, schedule and times of any number of ranks | [`StepperBuilder::forecast`], [`forecast`] |
//! | see what ran, and check it for races | [`StepperBuilder::record`], [`Stepper::take_recording`], [`timeline`] |
//!
//! Trainers need the items at the crate's root, [`cuda`] on a GPU, and [`bucket_step`], [`overlap`], [`checkpoint`],
//! [`collective`], [`forecast`] and [`optim`] as the table says. The other modules are for tools that inspect a
//! stepper: [`layout`] (offsets of parameters), [`op`] and [`schedule`] (operations and their order), [`hazard`] (the
//! race checker), [`timeline`] (times of operations).
//!
//! # Environment
//!
//! Options of the builder have precedence. If an option is unset, these variables apply:
//!
//! | Variable | What it sets |
//! |---|---|
//! | `INSTEP_ISA` | the kernels' instruction set: `baseline`, `avx2` or `avx512` |
//! | `INSTEP_THREADS` | a stepper's kernel threads, and those of a [`BucketStep`] that is built with `.pool(Pool::from_environment()?)` |
//! | `INSTEP_SPIN_US` | microseconds for which kernel threads stay awake after a step, 200 by default |
//! | `INSTEP_PREFETCH` | whether steps prefetch: `on` or `off`. If unset, each launch of a step beyond 32 MiB of tensors compares both |
//! | `INSTEP_DEADLINE_MS` | how long a rank waits for the others, 60,000 by default |
//! | `INSTEP_ID_FILE` | the file by which [`cuda::Nccl::from_environment`] joins several ranks |
//!
//! # GPUs
//!
//! Feature `cuda` builds the GPU kernels with an nvcc from `NVCC`, `CUDA_HOME` or `PATH`, and
//! `NVCC=$(scripts/cuda-toolchain.sh)` installs one. The driver is needed only at run time. It must support CUDA 12.0
//! or newer, and at least the major release of the nvcc. The crate loads `libcuda.so`, or the file that `INSTEP_CUDA`
//! names. `INSTEP_NCCL` names NCCL's library.
//!
//! The crate calls the driver through cudarc. Streams and events of cudarc convert to [`StreamHandle`] and
//! [`EventHandle`]. If the nvcc on `PATH` is newer than cudarc knows, the build of cudarc stops. Set
//! `CUDARC_CUDA_VERSION=13000` in that case (docs/cudarc.md).
//!
//! # MPI
//!
//! Feature `mpi` adds `Mpi`. Building it needs an MPI library and libclang (on Debian: `libopenmpi-dev`,
//! `libclang-dev`).
//!
//! # Benches
//!
//! Feature `bench` adds the hidden module `instep::bench`, which times single launches. Its interface is not stable.

#[doc(hidden)]
pub mod abi;
#[cfg(feature = "bench")]
#[doc(hidden)]
pub mod bench;
pub mod bucket_step;
pub mod checkpoint;
pub mod collective;
pub mod cuda;
mod device;
pub mod dtype;
mod error;
pub mod forecast;
mod handle;
pub mod hazard;
mod host;
mod launch;
pub mod layout;
pub mod op;
pub mod optim;
pub mod overlap;
mod poll;
mod pool;
pub mod schedule;
mod stepper;
mod sync;
mod text;
pub mod timeline;

#[doc(inline)]
pub use bucket_step::{BucketStep, GradNorm, Scaling};
#[doc(inline)]
pub use collective::{Collective, Sums};
pub use device::Device;
pub use dtype::{DType, Element};
pub use error::{Error, Refusal, Result};
pub use half::{bf16, f16};
pub use handle::{DevicePtr, EventHandle, Place, StreamHandle};
#[cfg(feature = "mpi")]
pub use host::Mpi;
pub use host::{HostDevice, InProcess, Isa, Solo, cast, in_process};
#[doc(inline)]
pub use layout::{
    DEFAULT_GROUP, ForeignBucket, Gradients, Layout, LayoutBuilder, Master, MixedPrecisionPolicy, Moments,
    ParamId, Precision, Rounding, SegmentAction,
};
#[doc(inline)]
pub use optim::table::*;
pub use optim::{Clip, LossScale, LossScaler, LrSchedule, Optimizer, ScalerState};
pub use pool::{Pool, Team};
#[doc(inline)]
pub use schedule::Mode;
pub use stepper::{
    Abandoned, Accumulation, Attached, Borrowed, Divisor, Foresight, Grads, OffloadPolicy, OptimizerId,
    OptimizerKey, Params, Pass, Recording, Status, StepCount, StepCountKey, Stepper, StepperBuilder,
    Strategy, TensorId, Unused,
};

/// Runs the README's program as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Runs the program of `docs/rust.md` as a test.
#[cfg(doctest)]
#[doc = include_str!("../docs/rust.md")]
struct Rust;

/// Runs the program of `docs/sharding.md` as a test.
#[cfg(doctest)]
#[doc = include_str!("../docs/sharding.md")]
struct Sharding;
