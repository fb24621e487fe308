//! `--offload=torch`: predicts training with `instep.torch.offload`. The package has no schedule, so the plan simulates
//! the package's threads.
//!
//! The buckets, the bytes and the order of the work are those of `python/instep/torch/` (`offload.py`,
//! `_offload_engine.py`, `_offload_ring.py`). `cli/tests/offload_plans.json` contains bytes that both this plan and the
//! package must produce. `python/benches/offload.py --plan` compares predicted times with measured ones.

use std::fmt;

use instep::collective::CollectiveKind;
use serde::Serialize;

use super::model::Model;
use super::offload_run::{Bucket, Run, states_of};
use super::report::{Held, mebibytes, milliseconds};
use super::shards::Shards;
use super::speeds::bus_bytes;
use super::{Arguments, Sharing};
use crate::Failure;

/// Tensors in page-locked memory start at multiples of this number of bytes.
const ALIGNMENT: u64 = 64;

/// The plan of one rank.
#[derive(Serialize)]
pub(super) struct Plan {
    world_size: u32,
    parameters: usize,
    elements: u64,
    buckets: usize,
    optimizer: &'static str,
    /// Memory on the host, by kind.
    memory: Vec<Held>,
    /// The page-locked bytes of mirrors, ring and loss scale: the number that `page_locked_bytes()` returns.
    page_locked_bytes: u64,
    host_bytes: u64,
    pass_ns: u64,
    /// The exposed part of the pass: the time of the pass minus the time of forward and backward.
    blocked_ns: u64,
    /// The time in a pass during which the stepping thread works.
    optimizer_busy_ns: u64,
}

impl Plan {
    pub(super) fn new(arguments: &Arguments, model: &Model) -> Result<Plan, Failure> {
        let decides = arguments.max_norm.is_some() || arguments.grad_scaler;
        let lengths: Vec<u64> = model.lengths().collect();
        let shards = match arguments.strategy {
            Sharing::Fsdp => Some(Shards::new(arguments, model)?),
            _ => None,
        };
        let (states, mut buckets, stepped) = match &shards {
            Some(shards) => (shards.states(model)?, shards.cut(arguments, model), shards.lengths()),
            None => {
                let states = states_of(model, &model.layout, model.precision)?;
                (states, cut(arguments, model, &lengths), lengths.clone())
            }
        };
        let kept: u64 = states.iter().map(|held| held.bytes).sum();
        let kept = kept as f64 / stepped.iter().sum::<u64>().max(1) as f64;
        buckets.iter_mut().for_each(|bucket| bucket.time(arguments, model, &stepped, kept));
        let gradients = || buckets.iter().map(|bucket| bucket.gradient_bytes);
        let most = gradients().max().unwrap_or_default();
        let ring = match arguments.ring_mib {
            Some(mebibytes) if !decides => mebibytes << 20,
            _ => gradients().sum(),
        };
        if ring < most {
            let wrong = format_args!("the largest bucket has {most} bytes");
            return Err(Failure::config(
                format_args!("--ring-mib {}", ring >> 20),
                wrong,
                "give at least that",
            ));
        }
        // FSDP's copies of gradients are page-locked only if no hook takes them. Here a hook does.
        let (params, of_ring, of_fsdp) = match shards {
            None => ("mirrors of parameters", ring, 0),
            Some(_) => ("shards of parameters", 0, gradients().sum()),
        };
        let page_locked = [
            (params, buckets.iter().map(|bucket| bucket.param_bytes).sum()),
            ("ring of gradients", of_ring),
            ("loss scale", if arguments.grad_scaler { ALIGNMENT } else { 0 }),
        ];
        let page_locked_bytes = page_locked.iter().map(|(_, bytes)| bytes).sum();
        let held = page_locked.into_iter().chain([("gradients", of_fsdp)]).filter(|(_, bytes)| *bytes > 0);
        let memory: Vec<Held> = held.map(|(what, bytes)| Held::on_host(what, bytes)).chain(states).collect();
        let run = Run::new(&buckets, decides, ring);
        let (pass_ns, compute_ns, optimizer_busy_ns) = match &shards {
            Some(shards) => shards.train(run, arguments, model),
            None => run.train(arguments, &lengths),
        };
        Ok(Plan {
            world_size: arguments.world_size,
            parameters: lengths.len(),
            elements: lengths.iter().sum(),
            buckets: buckets.len(),
            optimizer: model.name,
            page_locked_bytes,
            host_bytes: memory.iter().map(|held| held.bytes).sum(),
            memory,
            pass_ns,
            blocked_ns: pass_ns - compute_ns,
            optimizer_busy_ns,
        })
    }
}

/// Divides parameters into buckets, from the last parameter to the first.
fn cut(arguments: &Arguments, model: &Model, lengths: &[u64]) -> Vec<Bucket> {
    let cap = arguments.bucket_cap_mib << 20;
    let (of_param, of_grad) = (model.precision.param.bytes(), model.precision.grad.bytes());
    let (mut buckets, mut size) = (Vec::<Bucket>::new(), cap);
    for (place, len) in lengths.iter().enumerate().rev() {
        if size >= cap {
            buckets.push(Bucket::default());
            size = 0;
        }
        let Some(bucket) = buckets.last_mut() else { break };
        bucket.params.push(place);
        bucket.param_bytes += (len * of_param).next_multiple_of(ALIGNMENT);
        bucket.gradient_bytes += (len * of_grad).next_multiple_of(ALIGNMENT);
        size += len * of_param;
    }
    let speeds = &arguments.speeds;
    for bucket in &mut buckets {
        let elements = bucket.params.iter().filter_map(|place| lengths.get(*place)).sum::<u64>() as f64;
        let (params, grads) = (elements * of_param as f64, elements * of_grad as f64);
        let copy_ns = |bytes: f64| (1e3 * speeds.launch + bytes / speeds.host_link) as u64;
        if arguments.world_size > 1 {
            let sent = bus_bytes(CollectiveKind::AllReduce, grads as u64, arguments.world_size);
            bucket.sum_ns = (1e3 * speeds.latency + sent / speeds.bus) as u64;
        }
        bucket.down_ns = copy_ns(grads);
        bucket.up_ns = copy_ns(params);
    }
    buckets
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { parameters, elements, buckets, optimizer, world_size, .. } = self;
        writeln!(
            f,
            "{parameters} parameters of {elements} elements in {buckets} buckets, {optimizer}, one rank of {world_size}\n"
        )?;
        writeln!(f, "{:<24}{:>12}", "on the host", "MiB")?;
        for Held { what, bytes, .. } in &self.memory {
            writeln!(f, "  {what:<22}{:>12.2}", mebibytes(*bytes))?;
        }
        writeln!(f, "  {:<22}{:>12.2}", "all", mebibytes(self.host_bytes))?;
        writeln!(f, "  {:<22}{:>12.2}\n", "page-locked", mebibytes(self.page_locked_bytes))?;
        writeln!(f, "one pass, as foreseen          {:>12.3} ms", milliseconds(self.pass_ns))?;
        writeln!(f, "  the model waits              {:>12.3} ms", milliseconds(self.blocked_ns))?;
        writeln!(f, "  steps and norms run          {:>12.3} ms", milliseconds(self.optimizer_busy_ns))
    }
}
