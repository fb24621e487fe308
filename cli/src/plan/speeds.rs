//! The durations of ops: linear functions of bytes, with speeds that the user gives.
//!
//! In a ring of n ranks, an all-reduce moves 2 (n - 1) / n of a buffer over each link. A reduce-scatter or an
//! all-gather moves (n - 1) / n of the buffer. nccl-tests calls the moved bytes per second the bus bandwidth. Forward
//! takes 2 floating-point operations for each weight and token, and backward takes 4 (Kaplan et al., Scaling Laws for
//! Neural Language Models, 2020).

use std::num::NonZeroU32;

use instep::collective::CollectiveKind;
use instep::op::{Action, Group, Op};

use crate::Failure;

/// Speeds of one rank.
#[derive(clap::Args, Clone, Copy, Debug)]
pub(super) struct Speeds {
    /// Bus bandwidth of collectives, as nccl-tests prints it
    #[arg(long, value_name = "GB/S", default_value_t = 200.0)]
    pub(super) bus: f64,
    /// Time of the smallest collective
    #[arg(long, value_name = "US", default_value_t = 30.0)]
    pub(super) latency: f64,
    /// Speed at which kernels read and write memory
    #[arg(long, value_name = "GB/S", default_value_t = 3000.0)]
    pub(super) memory: f64,
    /// Time of an empty kernel
    #[arg(long, value_name = "US", default_value_t = 4.0)]
    pub(super) launch: f64,
    /// With offload, speed of each direction of the link between device and host
    #[arg(long, value_name = "GB/S", default_value_t = 50.0)]
    pub(super) host_link: f64,
    /// With offload, speed at which a rank's kernels read and write the host's memory
    #[arg(long, value_name = "GB/S", default_value_t = 50.0)]
    pub(super) host_memory: f64,
    /// Floating-point operations per second of the model in forward and backward
    #[arg(long, value_name = "TFLOPS", default_value_t = 400.0)]
    pub(super) compute: f64,
    /// Tokens, or rows, in one rank's batch
    #[arg(long, value_name = "COUNT", default_value_t = 8192)]
    pub(super) tokens: u64,
}

/// The number of ranks, and the number of ranks in a group that shards tensors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ranks {
    pub(super) world_size: u32,
    pub(super) shard_size: u32,
}

impl Ranks {
    pub(super) fn new(world_size: u32, shard_size: Option<NonZeroU32>) -> Ranks {
        Ranks { world_size, shard_size: shard_size.map_or(world_size, NonZeroU32::get) }
    }

    /// Returns the number of ranks of a group.
    pub(super) fn of(&self, group: Group) -> u32 {
        match group {
            Group::World => self.world_size,
            Group::Shards => self.shard_size,
            Group::Replicas => self.world_size / self.shard_size,
        }
    }
}

impl Speeds {
    pub(super) fn check(&self) -> Result<(), Failure> {
        let Speeds { bus, latency, memory, launch, host_link, host_memory, compute, .. } = *self;
        let speeds = [
            ("bus", bus),
            ("memory", memory),
            ("host-link", host_link),
            ("host-memory", host_memory),
            ("compute", compute),
        ];
        for (name, value) in speeds {
            if !(value.is_finite() && value > 0.0) {
                return Err(Failure::config(
                    format_args!("--{name} {value}"),
                    "out of range",
                    "use a number above 0",
                ));
            }
        }
        for (name, value) in [("latency", latency), ("launch", launch)] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(Failure::config(
                    format_args!("--{name} {value}"),
                    "out of range",
                    "use 0 or more",
                ));
            }
        }
        Ok(())
    }

    /// Returns a function that computes the duration of an op on one of these ranks. With offload, the host runs norms
    /// and steps.
    pub(super) fn cost(self, ranks: Ranks, offloads: bool) -> impl FnMut(&Op, u64) -> u64 + Send + 'static {
        move |op, bytes| {
            let ns = match op.action {
                Action::Collective { group, .. } if ranks.of(group) == 1 => 0.0,
                Action::Collective { kind, group, .. } => {
                    1e3 * self.latency + bus_bytes(kind, bytes, ranks.of(group)) / self.bus
                }
                Action::Norm { .. } | Action::Measure { .. } | Action::Step { .. } if offloads => {
                    bytes as f64 / self.host_memory
                }
                Action::Copy { .. } if offloads => 1e3 * self.launch + bytes as f64 / self.host_link,
                Action::Norm { .. }
                | Action::Measure { .. }
                | Action::Step { .. }
                | Action::Zero(_)
                | Action::Copy { .. }
                | Action::Add { .. } => 1e3 * self.launch + bytes as f64 / self.memory,
                Action::Control(_) if offloads => 0.0,
                Action::Count(_) | Action::Control(_) => 1e3 * self.launch,
                _ => 0.0,
            };
            ns as u64
        }
    }

    /// Returns the time of a computation that makes `operations` floating-point operations for each weight and token.
    pub(super) fn compute_ns(&self, operations: u64, weights: u64) -> u64 {
        ((operations * weights) as f64 * self.tokens as f64 / (1e3 * self.compute)) as u64
    }
}

/// Returns the number of bytes that a collective over a buffer sends over each link of a ring.
pub(super) fn bus_bytes(kind: CollectiveKind, bytes: u64, world_size: u32) -> f64 {
    let (ranks, bytes) = (f64::from(world_size), bytes as f64);
    match kind {
        CollectiveKind::AllReduce | CollectiveKind::Sum64 | CollectiveKind::Max32 | CollectiveKind::Min32 => {
            2.0 * bytes * (ranks - 1.0) / ranks
        }
        CollectiveKind::Broadcast => bytes,
        // A reduce-scatter or an all-gather sends half as much as an all-reduce.
        _ => bytes * (ranks - 1.0) / ranks,
    }
}
