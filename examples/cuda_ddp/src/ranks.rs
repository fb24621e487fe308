//! Helpers of the program: they start the ranks, make the ranks' gradients, and compute the same steps on the CPU.
//!
//! The process that starts the ranks makes NCCL's id, because this process outlives the ranks.

use std::env;
use std::process::Command;

use cudarc::nccl::Id;
use cudarc::nccl::result::NcclError;
use instep::cuda::nccl::unique_id;
use instep::{AdamW, Layout, Stepper, Sums};

use crate::{LENGTH, STEPS};

pub(crate) type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// A rank's number, world size, device and NCCL id.
pub(crate) struct Own {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) device: usize,
    /// NCCL's id, by which the ranks find each other.
    pub(crate) id: [u8; 128],
}

fn number(name: &str) -> Option<usize> {
    env::var(name).ok()?.parse().ok()
}

fn world_size() -> usize {
    number("WORLD_SIZE").unwrap_or(1)
}

/// Returns the values that [`start`] gave to this process, if it is a rank.
pub(crate) fn own() -> Outcome<Option<Own>> {
    let (Some(rank), Ok(digits)) = (number("RANK"), env::var("ID")) else { return Ok(None) };
    let byte = |k: usize| u8::from_str_radix(digits.get(2 * k..2 * k + 2)?, 16).ok();
    let mut id = [0; 128];
    for (k, to) in id.iter_mut().enumerate() {
        *to = byte(k).ok_or("ID has to be 256 hexadecimal digits")?;
    }
    let device = number("DEVICE").unwrap_or(rank);
    Ok(Some(Own { rank, world_size: world_size(), device, id }))
}

/// Starts every rank as a process, and waits for the ranks. This process makes NCCL's id with the same NCCL library
/// that later sums the gradients.
pub(crate) fn start(sums_by_instep: bool) -> Outcome {
    let id = if sums_by_instep {
        unique_id()?
    } else {
        Id::new().map_err(told)?.internal().map(|byte| byte as u8)
    };
    let digits: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    let rank = |rank: usize| {
        let mut command = Command::new(env::current_exe()?);
        command.args(env::args_os().skip(1)).env("RANK", rank.to_string()).env("ID", &digits).spawn()
    };
    let mut ranks = (0..world_size()).map(rank).collect::<Result<Vec<_>, _>>()?;
    let outcomes = ranks.iter_mut().map(|rank| rank.wait()).collect::<Result<Vec<_>, _>>()?;
    if outcomes.iter().all(|outcome| outcome.success()) { Ok(()) } else { Err("a rank has failed".into()) }
}

/// Describes cudarc's NCCL error, which has no text of its own.
pub(crate) fn told(error: NcclError) -> String {
    format!("NCCL: {error:?}")
}

/// Returns the gradient of one bucket on one rank in one step. The values are multiples of 1/8, so that sums are exact
/// in any order.
pub(crate) fn gradient(rank: usize, step: usize, bucket: usize) -> Vec<f32> {
    (0..LENGTH).map(|k| ((k + 7 * bucket + 31 * step + 101 * rank) % 64) as f32 / 8.0 - 4.0).collect()
}

/// Returns the parameters after the same steps on the CPU.
pub(crate) fn on_the_cpu(layout: &Layout, world_size: usize) -> Outcome<Vec<Vec<f32>>> {
    let mut stepper = Stepper::host(layout, AdamW::default(), Sums::by_caller(0, world_size as u32))?;
    layout.ids().try_for_each(|id| stepper.write(id, &[1.0; LENGTH]))?;
    for step in 0..STEPS {
        let mut pass = stepper.begin()?;
        for (bucket, id) in layout.ids().enumerate() {
            let ranks: Vec<_> = (0..world_size).map(|rank| gradient(rank, step, bucket)).collect();
            let sum: Vec<f32> = (0..LENGTH).map(|k| ranks.iter().map(|rank| rank[k]).sum()).collect();
            pass.write(id.grad(), &sum)?;
            pass.grad_ready(id)?;
        }
        pass.finish()?;
    }
    Ok(layout.ids().map(|id| Ok(stepper.view::<f32>(id)?.to_vec())).collect::<instep::Result<_>>()?)
}
