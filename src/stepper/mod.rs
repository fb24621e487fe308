//! A rank's training: the stepper, its passes, and views of its tensors.
//!
//! `state/` defines the data, `stepper.rs` owns it, and the other files are the interface for users. No file imports a
//! file of a higher layer (`tests/house/tidy` checks this). The safe interface cannot race. Slices borrow the stepper,
//! and every launch borrows the stepper mutably. Every access first waits for the ops that it conflicts with. Only the
//! schedule decides the order of ops. These files only inform the schedule of the trainer's calls.

mod access;
mod as_f32;
mod borrowing;
mod build;
mod builder;
mod claims;
mod control_access;
pub(crate) mod counts;
mod foresight;
mod gpu;
mod graphs;
mod learning_rates;
mod offload;
mod open_pass;
mod pass;
mod rebuild;
mod scaling;
mod shards;
mod state;
#[allow(clippy::module_inception)] // The file has the main type of the folder.
mod stepper;
mod taking_part;
mod tensor;
mod together;
mod unshard;
mod views;

pub use crate::launch::StepCount;
pub use builder::StepperBuilder;
pub use counts::StepCountKey;
pub use foresight::Foresight;
pub use pass::Pass;
pub use state::borrowed::Borrowed;
pub use state::optimizers::{Attached, OptimizerId, OptimizerKey};
pub use state::options::{Accumulation, Divisor, OffloadPolicy, Status, Strategy, Unused};
pub use state::run::Recording;
pub use stepper::{Abandoned, Stepper};
pub use tensor::TensorId;
pub(crate) use together::WORD_BYTES;
pub use views::{Grads, Params};
