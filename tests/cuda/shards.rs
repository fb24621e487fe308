//! Ranks with GPUs that shard optimizer states or parameters have the bits of the same ranks on the host.
//!
//! Without a GPU, ranks are threads with one stand-in each, whose collectives are those of the host. With
//! `INSTEP_REQUIRE_GPU=1` the test is a group of one rank over NCCL; `cuda::gpu::nccl` starts several processes. Sums
//! of these gradients are exact in any order.

use std::fs;
use std::num::NonZeroU32;
use std::sync::{Arc, LazyLock};

use instep::checkpoint;
use instep::collective::{Call, CollectiveKind};
use instep::cuda::{Cuda, CudaDevice, Nccl, nccl};
use instep::{
    Collective, DType, Device, Error, HostDevice, Layout, Master, Moments, ParamId, Place, Precision, Result,
    Solo, Stepper, Strategy, StreamHandle, Sums, bf16, in_process,
};

use super::shard_cases::{CASES, Case, PLAIN, builder};
use crate::support::device::cuda;
use crate::support::stand_in::COMPUTE;
use crate::support::{Outcome, assert_same_bits, grouped, hardware, paint};

/// Shards begin inside parameters; some parameters and shards are empty.
pub(crate) const LENS: [usize; 6] = [5 * 257, 17, 64 * 60, 1, 0, 700];
const STEPS: usize = 4;

pub(crate) fn shapes() -> &'static Layout {
    static LAYOUT: LazyLock<Layout> = LazyLock::new(|| grouped(&LENS));
    &LAYOUT
}

/// Multiples of 1/64 below 2.
fn gradient(step: usize, rank: usize, param: usize, element: usize) -> f32 {
    let n = (step * 31 + rank * 57 + param * 17 + element * 13) % 251;
    (n as f32 - 125.0) / 64.0
}

/// The result of a training, and the values read during it.
struct Trained {
    outcome: Outcome,
    decisions: Vec<String>,
    /// Parameters as they lie in memory, each time a forward would read them.
    seen: Vec<Vec<u8>>,
}

impl Trained {
    fn assert_same(&self, other: &Trained, what: &str) {
        assert_eq!(self.decisions, other.decisions, "{what}");
        assert_eq!(self.seen.len(), other.seen.len(), "{what}");
        for (at, (ours, theirs)) in self.seen.iter().zip(&other.seen).enumerate() {
            assert!(ours == theirs, "{what}: reading {at} of a parameter differs");
        }
        self.outcome.assert_same(&other.outcome, what);
        for (param, (ours, theirs)) in self.outcome.grads.iter().zip(&other.outcome.grads).enumerate() {
            assert_same_bits(ours, theirs, &format!("{what}, gradient of p{param}"));
        }
    }
}

/// Reads a parameter where it lies.
type Stored<'a, D> = &'a dyn Fn(&mut Stepper<D>, ParamId) -> Result<Vec<u8>>;

fn bucket_of<D: Device>(stepper: &Stepper<D>, id: ParamId) -> Result<u32> {
    Ok(stepper.plan().segment_of(stepper.layout().index(id)?).bucket)
}

/// Reads all parameters as a forward does, one bucket ahead, and reshards some buckets.
fn walk<D: Device>(
    stepper: &mut Stepper<D>,
    step: usize,
    stored: Stored<'_, D>,
    seen: &mut Vec<Vec<u8>>,
) -> Result<()> {
    for id in shapes().ids() {
        let bucket = bucket_of(stepper, id)?;
        stepper.unshard(bucket)?;
        stepper.unshard(bucket.saturating_sub(1))?;
        seen.push(stored(stepper, id)?);
        if (bucket as usize + step).is_multiple_of(2) {
            stepper.reshard(bucket)?;
        }
    }
    Ok(())
}

fn train<D: Device>(mut stepper: Stepper<D>, case: &Case, stored: Stored<'_, D>) -> Result<Trained> {
    let (rank, ranks) = (stepper.rank() as usize, stepper.world_size() as usize);
    for (param, id) in shapes().ids().enumerate() {
        let values: Vec<f32> = (0..LENS[param]).map(|k| paint(param, k)).collect();
        stepper.write(id, &values)?;
    }
    let (mut decisions, mut seen) = (Vec::new(), Vec::new());
    let frozen = shapes().id("p5")?;
    for step in 0..STEPS {
        if case.freezes && (step == 1 || step == 3) {
            stepper.set_frozen(frozen, step == 1)?;
        }
        if case.joins && step >= 2 && rank % 2 == 1 {
            assert!(stepper.join()?);
            decisions.push(format!("{:?}", stepper.status()?));
            continue;
        }
        walk(&mut stepper, step, stored, &mut seen)?;
        let micro_batches = NonZeroU32::new(case.micro_batches).unwrap();
        let mut pass = stepper.begin_accumulating(micro_batches)?;
        for micro_batch in 0..micro_batches.get() as usize {
            walk(&mut pass, step + micro_batch, stored, &mut seen)?;
            for (param, id) in shapes().ids().enumerate().rev() {
                let is_left_out =
                    (step + micro_batch) % 2 == 1 && (param == 1 || param == 3 && rank % 2 == 1);
                if case.leaves_out && is_left_out || pass.is_frozen(id)? {
                    continue;
                }
                let mut values = vec![0.0; LENS[param]];
                if !pass.is_first(id)? {
                    pass.read(id.grad(), &mut values)?;
                }
                for (k, value) in values.iter_mut().enumerate() {
                    *value += gradient(step + 7 * micro_batch, rank, param, k);
                }
                if case.overflows && step == 2 && rank + 1 == ranks && param == 2 {
                    values[3000] = f32::INFINITY;
                }
                pass.write(id.grad(), &values)?;
                pass.grad_ready(id)?;
                if case.abandons && step == 2 && param == 2 {
                    break;
                }
            }
            if micro_batch + 1 < micro_batches.get() as usize {
                pass.next_micro_batch()?;
            }
        }
        if case.abandons && step == 2 {
            drop(pass.abandon()?)
        } else {
            pass.finish()?
        }
        decisions.push(format!("{:?}", stepper.status()?));
    }
    if case.joins {
        assert!(!stepper.join()?);
    }
    let outcome = Outcome::of(&stepper)?;
    let recording = stepper.take_recording().unwrap();
    assert_eq!(stepper.check(&recording), [], "{}", case.name);
    stepper.close()?;
    Ok(Trained { outcome, decisions, seen })
}

fn on_host(comm: impl Collective + 'static, case: &Case, strategy: Strategy) -> Result<Trained> {
    let stored = |stepper: &mut Stepper<HostDevice>, id| {
        Ok(match stepper.precision_of(id)?.param {
            DType::F32 => stepper.view::<f32>(id)?.iter().flat_map(|value| value.to_ne_bytes()).collect(),
            _ => stepper.view::<bf16>(id)?.iter().flat_map(|value| value.to_ne_bytes()).collect(),
        })
    };
    train(builder(case, strategy).host(comm)?, case, &stored)
}

fn on_gpu(
    sums: impl Into<Sums>,
    (cuda, stream): (&Cuda, StreamHandle),
    case: &Case,
    strategy: Strategy,
) -> Result<Trained> {
    let stored = |stepper: &mut Stepper<CudaDevice>, id: ParamId| {
        let elements = shapes().parameter(id)?.len;
        let mut bytes = vec![0; (elements * stepper.precision_of(id)?.param.bytes()) as usize];
        let at = stepper.ptr(id)?;
        if !bytes.is_empty() {
            // SAFETY: the parameter is there for the trainer's stream, from which it is copied.
            hardware::entered(&**cuda.driver(), |driver| unsafe { driver.download(&mut bytes, at, stream) });
        }
        Ok(bytes)
    };
    // SAFETY: the trainer's stream is the default one, or the stand-in's, which is a number.
    train(unsafe { builder(case, strategy).cuda(sums, cuda)? }, case, &stored)
}

/// The ranks of the host, with memory that only the stand-in treats as a GPU's memory.
pub(crate) struct OnStandIn(pub(crate) Arc<dyn Collective>);

impl Collective for OnStandIn {
    fn rank(&self) -> u32 {
        self.0.rank()
    }

    fn world_size(&self) -> u32 {
        self.0.world_size()
    }

    fn reaches(&self, place: Place) -> bool {
        place == Place::Cuda(0)
    }

    fn sums(&self, dtype: DType) -> bool {
        self.0.sums(dtype)
    }

    fn supports(&self, kind: CollectiveKind) -> bool {
        self.0.supports(kind)
    }

    fn duplicate(&self) -> Result<Arc<dyn Collective>> {
        Ok(Arc::new(OnStandIn(self.0.duplicate()?)))
    }

    fn subgroup(&self, ranks: &[u32]) -> Result<Arc<dyn Collective>> {
        Ok(Arc::new(OnStandIn(self.0.subgroup(ranks)?)))
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        call.require_stream()?;
        let (src, dst, deadline) = (call.src(), call.dst(), call.deadline());
        // SAFETY: the stand-in's memory is the host's, and its calls run in the order in which they are made.
        self.0.enqueue(&mut unsafe { Call::new(call.key(), self.world_size(), src, dst, deadline, None) })
    }

    fn abort(&self, cause: &Error) {
        self.0.abort(cause);
    }
}

/// Returns the results of all ranks of a group on the host.
fn expected(ranks: u32, case: &Case, strategy: Strategy) -> Vec<Trained> {
    in_process(ranks, |comm| on_host(comm, case, strategy))
        .unwrap_or_else(|error| panic!("{}, {strategy:?}, {ranks} ranks on the host: {error}", case.name))
}

fn strategies(case: &Case) -> impl Iterator<Item = Strategy> {
    // A rank without data would not know what to unshard.
    let is_sharded = |strategy: &Strategy| *strategy == Strategy::Fsdp;
    let joins = case.joins;
    [Strategy::Zero, Strategy::Fsdp].into_iter().filter(move |strategy| !joins || !is_sharded(strategy))
}

/// Runs all ranks of a group with GPUs: as threads with one stand-in each, or a group of one rank over NCCL.
fn ranks_with_gpus<T: Send>(
    ranks: u32,
    rank: impl Fn(Box<dyn Collective>, (&Cuda, StreamHandle)) -> Result<T> + Sync,
) -> Vec<T> {
    if hardware::is_required() {
        let group = Nccl::with_id(&nccl::Options::default(), nccl::unique_id().unwrap()).unwrap();
        let outcome = rank(Box::new(group.clone()), (&cuda(), StreamHandle::default())).unwrap();
        group.close().unwrap();
        return vec![outcome];
    }
    in_process(ranks, |comm| rank(Box::new(OnStandIn(Arc::new(comm))), (&cuda(), COMPUTE))).unwrap()
}

#[test]
fn ranks_with_gpus_that_step_shards_have_the_bits_of_ranks_on_the_host() {
    for (k, case) in CASES.iter().enumerate() {
        for strategy in strategies(case) {
            let on_gpus = ranks_with_gpus([2, 3, 5][k % 3], |comm, cuda| on_gpu(comm, cuda, case, strategy));
            let ranks = on_gpus.len();
            for (rank, (gpu, host)) in on_gpus.iter().zip(expected(ranks as u32, case, strategy)).enumerate()
            {
                gpu.assert_same(&host, &format!("{}, {strategy:?}, rank {rank} of {ranks}", case.name));
            }
        }
    }
}

#[test]
fn groups_of_ranks_with_gpus_that_share_shards_out_have_the_bits_of_groups_on_the_host() {
    for (k, case) in CASES.iter().enumerate() {
        // NCCL without several processes has groups of one.
        let (ranks, size) = if hardware::is_required() { (1, 1) } else { [(4, 2), (6, 2), (6, 3)][k % 3] };
        let case = Case { shard_size: NonZeroU32::new(size), ..*case };
        for strategy in strategies(&case) {
            let on_gpus = ranks_with_gpus(ranks, |comm, cuda| on_gpu(comm, cuda, &case, strategy));
            for (rank, (gpu, host)) in on_gpus.iter().zip(expected(ranks, &case, strategy)).enumerate() {
                gpu.assert_same(&host, &format!("{}, {strategy:?}, rank {rank} of {ranks}", case.name));
            }
        }
    }
}

#[test]
fn a_checkpoint_of_shards_on_gpus_goes_on_on_the_host_and_back_on_gpus() {
    fn passes<D: Device>(stepper: &mut Stepper<D>, from: usize) -> Result<()> {
        for step in from..from + 2 {
            let mut pass = stepper.begin()?;
            for (param, id) in shapes().ids().enumerate().rev() {
                let values: Vec<f32> = (0..LENS[param]).map(|k| gradient(step, 0, param, k)).collect();
                pass.write(id.grad(), &values)?;
            }
            pass.finish()?;
        }
        Ok(())
    }
    let folder = tempfile::tempdir().unwrap();
    let case = Case {
        build: |builder| {
            let low = Precision {
                param: DType::BF16,
                master: Master::Remainder16,
                moments: Moments::EightBit,
                ..Precision::F32
            };
            builder.precision(low).ema(0.9)
        },
        ..PLAIN
    };
    for strategy in strategies(&case) {
        let path = folder.path().join(format!("{strategy:?}.safetensors"));
        ranks_with_gpus(3, |comm, (cuda, _)| {
            // SAFETY: as in `on_gpu`.
            let mut stepper = unsafe { builder(&case, strategy).cuda(comm, cuda)? };
            passes(&mut stepper, 0)?;
            checkpoint::save(&stepper, &path)?;
            checkpoint::save_together(&stepper, path.with_extension("together"))
        });
        let [alone, together] =
            ["safetensors", "together"].map(|kind| fs::read(path.with_extension(kind)).unwrap());
        assert!(alone == together, "{strategy:?}");
        let mut whole = builder(&case, Strategy::Replicated).host(Solo::default()).unwrap();
        passes(&mut whole, 0).unwrap();
        passes(&mut whole, 2).unwrap();
        let whole = Outcome::of(&whole).unwrap();
        let mut host = builder(&case, Strategy::Replicated).host(Solo::default()).unwrap();
        checkpoint::load(&mut host, &path).unwrap();
        passes(&mut host, 2).unwrap();
        Outcome::of(&host).unwrap().assert_same(&whole, &format!("{strategy:?} to the host"));
        let on_gpus = ranks_with_gpus(2, |comm, (cuda, _)| {
            // SAFETY: as above.
            let mut stepper = unsafe { builder(&case, strategy).cuda(comm, cuda)? };
            checkpoint::load(&mut stepper, &path)?;
            passes(&mut stepper, 2)?;
            Outcome::of(&stepper)
        });
        on_gpus.iter().for_each(|gpu| gpu.assert_same(&whole, &format!("{strategy:?} to GPUs")));
    }
}

#[test]
fn a_part_of_a_tensor_has_no_address_and_is_told_as_that() {
    ranks_with_gpus(2, |comm, (cuda, _)| {
        // SAFETY: as in `on_gpu`.
        let mut stepper = unsafe { builder(&PLAIN, Strategy::Zero).cuda(comm, cuda)? };
        let id = shapes().id("p2")?;
        for outcome in [stepper.ptr(id.state("exp_avg")), stepper.ptr(id.grad())] {
            let is_whole = stepper.world_size() == 1;
            assert!(is_whole || matches!(outcome, Err(Error::Sharded { len: 3840, .. })), "{outcome:?}");
        }
        stepper.ptr(id).map(drop)
    });
}

/// Trains every `of`-th case, from the n-th on, as one rank of several processes, and asserts the bits of ranks on the
/// host. Four ranks form groups of two.
// `cuda::gpu` needs the feature.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) fn train_as_a_rank(group: &Nccl, (n, of): (usize, usize)) {
    let (rank, ranks) = (group.rank() as usize, group.world_size());
    for case in CASES.iter().skip(n).step_by(of) {
        let case = &Case { shard_size: NonZeroU32::new(2).filter(|_| ranks == 4), ..*case };
        for strategy in strategies(case) {
            let what = format!("{}, {strategy:?}, rank {rank} of {ranks}", case.name);
            let gpu = (&hardware::open(), StreamHandle::default());
            let trained = on_gpu(group.clone(), gpu, case, strategy);
            let trained = trained.unwrap_or_else(|error| panic!("{what}: {error}"));
            trained.assert_same(&expected(ranks, case, strategy)[rank], &what);
        }
    }
}
