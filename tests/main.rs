//! All integration tests in one binary, so that they share helpers and link once.
//!
//! Everything goes through the public interface. Must contain nothing but this header and the list of modules; the long
//! lanes of `.ci/run` repeat the list per instruction set and with another compiler.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, unsafe_code)]

mod abi;
mod accumulation;
mod arbitrary;
mod bands;
mod bfloat16;
mod bitexact;
mod bitpatterns;
mod borrowed;
mod bucket_clips;
mod captures;
mod checkpoint;
mod checkpoint_import;
mod checkpoint_kill;
mod checkpoint_precision;
mod checkpoint_refusals;
mod checkpoint_scalars;
mod clipping;
mod compression;
mod cuda_failures;
mod cuda_training;
mod digests;
mod drift;
mod driver_calls;
mod endings;
mod entries;
mod failures;
mod freezing;
mod golden;
#[cfg(feature = "cuda")]
mod gpu;
mod gradients;
mod groups;
mod guarded;
mod hardware;
mod hooks;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod host_run;
mod inexact_clips;
mod local;
mod loss_scaling;
mod lr_multipliers;
mod lr_schedules;
mod mixed;
mod multirank;
mod nccl;
mod norms;
mod objects;
mod on_cuda;
mod ordering;
mod parity;
mod passes;
mod property;
mod rebuild;
mod recorded;
mod reference;
mod refusals;
mod registry;
mod resume;
mod sixteen_bit;
mod splits;
mod stand_in;
mod state_counts;
mod step_options;
mod steps;
mod support;
mod tidy;
mod tolerance;
mod training;
mod turns;
mod uneven;
mod waits;
