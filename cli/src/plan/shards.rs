//! `--offload=torch --strategy=fsdp`: predicts training under `fully_shard` with a `CPUOffloadPolicy`. The shards are
//! stepped on the host.
//!
//! Each repetition in the description is a unit. FSDP gathers the parameters of a unit together, and reduces its
//! gradients together. All other parameters belong to the root. The bytes and the order of the work are those of
//! `python/instep/torch/_offload_fsdp.py` with PyTorch 2.15. The bytes are those of rank 0, which has the longest
//! shards.

use instep::collective::CollectiveKind;
use instep::op::Group;
use instep::{Layout, Moments, Precision};

use super::model::Model;
use super::offload_run::{Bucket, Run, Task, states_of};
use super::report::Held;
use super::speeds::{Ranks, bus_bytes};
use super::{Arguments, PASSES};
use crate::Failure;

/// The number of elements in a block of 8-bit states. A block never crosses the end of a row.
const BLOCK: u64 = 256;
/// The smallest number of elements in a row with 8-bit states.
const LEAST_ROW: u64 = 128;

/// The root's number in `Model::repetitions`.
const ROOT: usize = 0;

/// A rank's shard of a parameter: the number of its rows, and the number of elements in each row.
#[derive(Clone, Copy)]
struct Shard {
    rows: u64,
    row: u64,
}

impl Shard {
    fn elements(self) -> u64 {
        self.rows * self.row
    }
}

/// Returns the shards of rank 0. FSDP pads the shards of all ranks to the same lengths.
fn shards_of(model: &Model, ranks: u32) -> Result<Vec<Shard>, Failure> {
    let cut = |parameter: &instep::layout::Parameter| match parameter.shape.split_first() {
        Some((rows, row)) => {
            Ok(Shard { rows: rows.div_ceil(ranks.into()), row: row.iter().product::<u64>() })
        }
        None => Err(Failure::config(
            format_args!("shape of {:?}", parameter.name),
            "fully_shard takes no scalars",
            "use [1]",
        )),
    };
    model.layout.ids().map(|id| cut(model.layout.parameter(id)?)).collect()
}

/// The shards of a model on one rank, and the number of ranks.
pub(super) struct Shards {
    shards: Vec<Shard>,
    ranks: Ranks,
}

impl Shards {
    pub(super) fn new(arguments: &Arguments, model: &Model) -> Result<Shards, Failure> {
        let Precision { param, grad, .. } = model.precision;
        if param != grad {
            let wrong = format_args!("FSDP gives shards of {param} gradients of that type");
            return Err(Failure::config(format_args!("dtypes.grad = {grad}"), wrong, "use the same"));
        }
        let ranks = Ranks::new(arguments.world_size, arguments.shard_size);
        Ok(Shards { shards: shards_of(model, ranks.shard_size)?, ranks })
    }

    /// Returns the number of elements of each parameter's shard.
    pub(super) fn lengths(&self) -> Vec<u64> {
        self.shards.iter().map(|shard| shard.elements()).collect()
    }

    /// Returns the number of bytes of each state and of the masters. Each row begins a new block of 8-bit states. Short
    /// rows have states in f32.
    pub(super) fn states(&self, model: &Model) -> Result<Vec<Held>, Failure> {
        let codes = |shard: &&Shard| {
            model.precision.moments == Moments::EightBit && shard.row >= LEAST_ROW && shard.rows > 0
        };
        let (coded, plain): (Vec<&Shard>, Vec<&Shard>) = self.shards.iter().partition(codes);
        let coded = coded.iter().map(|shard| shard.rows * shard.row.next_multiple_of(BLOCK)).collect();
        let plain = plain.iter().map(|shard| shard.elements()).collect();
        let moments = match model.precision.moments {
            Moments::EightBit => Moments::F32,
            other => other,
        };
        let mut all = Vec::<Held>::new();
        for (lengths, precision) in
            [(coded, model.precision), (plain, Precision { moments, ..model.precision })]
                as [(Vec<u64>, _); 2]
        {
            if lengths.is_empty() {
                continue;
            }
            let numbered = lengths.iter().enumerate();
            let builder = numbered.fold(Layout::builder(), |builder, (number, len)| {
                builder.param(number.to_string(), *len as usize)
            });
            for held in states_of(model, &builder.build()?, precision)? {
                match all.iter_mut().find(|other| other.what == held.what) {
                    Some(other) => other.bytes += held.bytes,
                    None => all.push(held),
                }
            }
        }
        Ok(all)
    }

    /// Returns the units as buckets, from the last unit to the first. The root is the last bucket.
    pub(super) fn cut(&self, arguments: &Arguments, model: &Model) -> Vec<Bucket> {
        let units = model.repetitions.iter().max().map_or(0, |last| last + 1);
        let mut buckets: Vec<Bucket> = (0..units).map(|_| Bucket::default()).collect();
        for (place, unit) in model.repetitions.iter().enumerate() {
            buckets[units - 1 - unit].params.push(place);
        }
        buckets.retain(|bucket| !bucket.params.is_empty());
        let speeds = &arguments.speeds;
        let [shards, replicas] = [Group::Shards, Group::Replicas].map(|group| self.ranks.of(group));
        let sent_ns = |kind, bytes: u64, ranks: u32| match ranks {
            1 => 0.0,
            _ => 1e3 * speeds.latency + bus_bytes(kind, bytes, ranks) / speeds.bus,
        };
        for bucket in &mut buckets {
            let elements: u64 = bucket.params.iter().map(|place| self.shards[*place].elements()).sum();
            bucket.param_bytes = elements * model.precision.param.bytes();
            bucket.gradient_bytes = elements * model.precision.grad.bytes();
            // FSDP copies each shard by itself.
            let launched_ns = 1e3 * speeds.launch * bucket.params.len() as f64;
            let copied_ns = |bytes: u64| launched_ns + bytes as f64 / speeds.host_link;
            let whole = |bytes: u64| bytes * u64::from(shards);
            let gathered_ns = sent_ns(CollectiveKind::AllGather, whole(bucket.param_bytes), shards);
            let summed_ns = sent_ns(CollectiveKind::ReduceScatter, whole(bucket.gradient_bytes), shards)
                + sent_ns(CollectiveKind::AllReduce, bucket.gradient_bytes, replicas);
            bucket.gather_ns = (copied_ns(bucket.param_bytes) + gathered_ns) as u64;
            bucket.sum_ns = summed_ns as u64;
            bucket.down_ns = copied_ns(bucket.gradient_bytes) as u64;
        }
        buckets
    }

    /// Predicts passes. Returns the duration of the last pass, the duration of its forward and backward, and the total
    /// time of its steps.
    ///
    /// A unit is gathered while the previous unit is computed. The unit's last step must end before the gather, because
    /// FSDP uploads the stepped shards. Backward waits until a unit's gradients are summed and copied, because only
    /// then does a hook hand the gradients over.
    pub(super) fn train(&self, mut run: Run<'_>, arguments: &Arguments, model: &Model) -> (u64, u64, u64) {
        let speeds = &arguments.speeds;
        let mut visits: Vec<(usize, u64)> = Vec::new();
        let of_root = run.buckets.iter().position(|bucket| model.repetitions[bucket.params[0]] == ROOT);
        let mut bucket_of = vec![0; self.shards.len()];
        for (index, bucket) in run.buckets.iter().enumerate() {
            bucket.params.iter().for_each(|place| bucket_of[*place] = index);
        }
        for (bucket, len) in bucket_of.into_iter().zip(model.lengths()) {
            match visits.last_mut().filter(|(last, _)| *last == bucket) {
                Some((_, elements)) => *elements += len,
                None => visits.push((bucket, len)),
            }
        }
        let (mut now, mut began, mut busy, mut gathers_free) = (0, 0, 0, 0);
        let mut gather = |run: &mut Run<'_>, bucket: usize, asked: u64| {
            gathers_free = asked.max(run.up(bucket)).max(gathers_free) + run.buckets[bucket].gather_ns;
            gathers_free
        };
        for _ in 0..PASSES {
            (began, busy) = (now, run.busy);
            for micro_batch in 1..=arguments.micro_batches.get() {
                // The root's parameters are gathered first, and stay until backward has ended.
                if let Some(root) = of_root {
                    now = now.max(gather(&mut run, root, now));
                }
                let mut before = now;
                for (bucket, elements) in &visits {
                    if Some(*bucket) != of_root {
                        now = now.max(gather(&mut run, *bucket, before));
                    }
                    before = now;
                    now += speeds.compute_ns(2, *elements);
                }
                let is_last = micro_batch == arguments.micro_batches.get();
                let mut before = now;
                for (bucket, elements) in visits.iter().rev() {
                    let is_of_unit = Some(*bucket) != of_root;
                    if is_of_unit {
                        now = now.max(gather(&mut run, *bucket, before));
                    }
                    before = now;
                    now += speeds.compute_ns(4, *elements);
                    if is_of_unit && is_last {
                        now = run.hand_over(*bucket, now);
                    }
                }
                if let Some(root) = of_root.filter(|_| is_last) {
                    now = run.hand_over(root, now);
                }
            }
            if run.decides {
                run.give(now, Task::Decide);
            }
            if arguments.grad_scaler {
                now = now.max(run.finish()); // A scaler writes gradients, which steps read.
            }
        }
        let micro_batches = u64::from(arguments.micro_batches.get());
        let once: u64 =
            model.lengths().map(|len| speeds.compute_ns(2, len) + speeds.compute_ns(4, len)).sum();
        (now - began, once * micro_batches, run.busy - busy)
    }
}
