//! Fused optimizer steps over whole gradient buckets, overlapped with backward.
//!
//! A [`Layout`] names the parameters. A [`Stepper`] stores parameters, gradients and optimizer states in flat buckets.
//! A stepper can also [borrow](StepperBuilder::host_borrowing) your parameters and gradients. Inside a [`Pass`], your
//! code (the trainer) reads parameters, writes gradients and hands each gradient over. Once all gradients of a bucket
//! are handed over, a [`Collective`] sums them over the ranks. One kernel launch then steps the bucket ([`Lamb`] takes
//! two launches). In the default mode, the rest of backward runs during the all-reduce and the step.
//!
//! docs/rust.md has a program that steps parameters in borrowed memory. In the following program, instep owns the
//! memory and runs the all-reduce. Two ranks run in one process, and each rank fits its own points of y = 3x - 1:
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
//! If nothing is clipped or skipped, training gives bit-identical parameters and states in all [modes](Mode).
//!
//! | [`Mode`] | steps a bucket | can clip by the global norm of this pass |
//! |---|---|---|
//! | `Eager` | as soon as it is reduced | no |
//! | `Normed` | once the last bucket is reduced and the norm is known. The steps run during the next forward | yes |
//! | `Sequential` | after the last reduce. The other modes are tested against this mode | yes |
//!
//! # What to call
//!
//! | To | call |
//! |---|---|
//! | step one bucket now, without a pass or a collective | [`BucketStep`], [`GradNorm`] |
//! | step without starting threads | [`StepperBuilder::inline`] with [`threads(1)`](StepperBuilder::threads) |
//! | step on parameters and gradients that your framework owns | [`StepperBuilder::host_borrowing`], [`StepperBuilder::cuda_borrowing`] |
//! | set different hyperparameters for some parameters | [`LayoutBuilder::in_group`], [`StepperBuilder::group`] |
//! | set the element types of a group or of single parameters | [`StepperBuilder::group_precision`], [`LayoutBuilder::dtype`] |
//! | choose the optimizer of a group or of single parameters | [`StepperBuilder::group`], [`StepperBuilder::optimizer_for`] |
//! | step a parameter by several optimizers, list optimizers, add an optimizer later | [`StepperBuilder::then`], [`StepperBuilder::then_for`], [`Stepper::optimizers`], [`Stepper::add_optimizer_for`] |
//! | leave some parameters to an optimizer outside instep | [`StepperBuilder::optimize_only`], or [`Stepper::builder_without_optimizer`] with optimizers for the other parameters |
//! | write your own optimizer, or choose an optimizer by name | [`optim::StepParam`], [`overlap::Registry`] |
//! | keep a parameter local to each rank | [`LayoutBuilder::local`] |
//! | change a learning rate, or let it follow a schedule | [`Stepper::set_lr`], [`StepperBuilder::lr_schedule`], [`Stepper::set_lr_schedule`] |
//! | change any other hyperparameter | [`Stepper::set_hyper`] |
//! | multiply one parameter's learning rate | [`Stepper::set_lr_multiplier`] |
//! | accumulate micro-batches | [`Stepper::begin_accumulating`], and with sharding [`StepperBuilder::accumulation`] |
//! | clip by the global norm, or skip non-finite passes (in the modes `Normed` and `Sequential`) | [`StepperBuilder::clip`], [`StepperBuilder::skip_nonfinite`] |
//! | scale the loss dynamically | [`StepperBuilder::loss_scale`], [`LossScaler`], [`Stepper::loss_scale`]; for PyTorch's `GradScaler`, [`StepperBuilder::grad_scaler`] |
//! | clip a group by its own norm, or exempt it from clipping | [`StepperBuilder::group_clip`], [`Stepper::group_norm`] |
//! | clip in `Eager` mode, by the previous pass's norm or by each bucket's norm | [`Clip::Previous`], [`Clip::PerBucket`] |
//! | read a pass's norm and outcome without waiting | [`Stepper::latest_status`] |
//! | share a parameter between layers, handle missing gradients, exclude a parameter from steps | [`LayoutBuilder::uses`], [`StepperBuilder::unused`], [`SegmentAction`] |
//! | declare parameters that no rank used | [`Stepper::set_unused`] |
//! | freeze a parameter | [`Stepper::set_frozen`] |
//! | store tensors in 16 bits or states in 8 bits, round stochastically | [`StepperBuilder::precision`], [`Precision`], [`Params::get_as`] |
//! | keep a moving average of parameters, or a copy in another type | [`StepperBuilder::ema`], [`StepperBuilder::copy_params`] |
//! | store states in the host's memory, and run the steps there (offload) | [`StepperBuilder::offload`] |
//! | zero gradients after their step, or release their memory | [`StepperBuilder::gradients`] |
//! | rebuild buckets in the order in which gradients arrive | [`Stepper::rebuild_buckets`] |
//! | move borrowed tensors, or rebuild borrowed buckets | [`Stepper::rebind`] |
//! | let ranks run out of data at different times | [`StepperBuilder::uneven_inputs`], [`Stepper::join`] |
//! | save, resume, import a state of `torch.optim` | [`checkpoint::save`], [`checkpoint::load`], [`checkpoint::import`] |
//! | exchange only parameters with PyTorch or candle | [`checkpoint::export`], [`checkpoint::import_params`] |
//! | save this rank's training after another rank has died | [`Stepper::rescue`] |
//! | set parameters, states and step counts by hand | [`Stepper::write`], [`Stepper::view_mut`], [`Stepper::set_step_count`] |
//! | compress gradients for the all-reduce, or replace the all-reduce | [`overlap::Compressed`], [`overlap::Hooked`] |
//! | read or change each bucket's sum before its step, also with sharding | [`overlap::SumHooked`] |
//! | train several models on the same ranks | [`InProcess::split`] |
//! | run on a GPU | [`StepperBuilder::cuda`], [`cuda`] |
//! | all-reduce over GPUs | [`cuda::Nccl`] |
//! | step buckets after your own all-reduce, in any order | [`Sums::by_caller`], [`bucket_ready_after`](Stepper::bucket_ready_after) |
//! | all-reduce over processes on the host | `Mpi` (feature `mpi`). Training gives the same bits as with ranks in one process |
//! | test your own transport | [`collective::conformance`] |
//! | capture a pass as a CUDA graph | `capture`, `replay` of a [`Stepper`] on a GPU |
//! | copy tensors to the host and back, on any device | [`Stepper::read`], [`Stepper::write`] |
//! | predict memory, schedule and times for any number of ranks | [`StepperBuilder::forecast`], [`forecast`] |
//! | record the ops that ran, and check the recording for races | [`StepperBuilder::record`], [`Stepper::take_recording`], [`timeline`] |
//!
//! Every trainer uses the items at the crate's root. A trainer on a GPU also uses [`cuda`]. The table shows which tasks
//! need the modules [`bucket_step`], [`overlap`], [`checkpoint`], [`collective`], [`forecast`] or [`optim`]. The other
//! modules are for tools that inspect a stepper: [`layout`] (offsets of parameters), [`op`] and [`schedule`]
//! (operations and their order), [`hazard`] (the race checker), [`timeline`] (times of operations).
//!
//! # Environment
//!
//! Options of the builder override these variables:
//!
//! | Variable | What it sets |
//! |---|---|
//! | `INSTEP_ISA` | the kernels' instruction set: `baseline`, `avx2` or `avx512` |
//! | `INSTEP_THREADS` | the number of kernel threads of a stepper, and of a [`BucketStep`] that is built with `.pool(Pool::from_environment()?)` |
//! | `INSTEP_SPIN_US` | how many microseconds kernel threads stay awake after a step, 200 by default |
//! | `INSTEP_PREFETCH` | whether steps prefetch: `on` or `off`. If unset, and if tensors take 32 MiB or more, each launch measures both settings and chooses one |
//! | `INSTEP_DEADLINE_MS` | how many milliseconds a rank waits for other ranks, 60,000 by default |
//! | `INSTEP_ID_FILE` | the file through which the ranks of [`cuda::Nccl::from_environment`] share NCCL's id |
//!
//! # GPUs
//!
//! Feature `cuda` builds the GPU kernels with an nvcc from `NVCC`, `CUDA_HOME` or `PATH`.
//! `NVCC=$(scripts/cuda-toolchain.sh)` installs an nvcc. The driver is needed only at run time. The driver must support
//! CUDA 12.0 or later, and at least the major version of the nvcc that built the kernels. The crate loads `libcuda.so`,
//! or the file that `INSTEP_CUDA` names. `INSTEP_NCCL` names NCCL's library.
//!
//! The crate calls the driver through cudarc. Streams and events of cudarc convert to [`StreamHandle`] and
//! [`EventHandle`]. If the nvcc on `PATH` is newer than cudarc supports, cudarc's build fails. In that case, set
//! `CUDARC_CUDA_VERSION=13000` (docs/cudarc.md).
//!
//! # MPI
//!
//! Feature `mpi` adds `Mpi`. Building `Mpi` needs an MPI library and libclang (on Debian: `libopenmpi-dev`,
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
