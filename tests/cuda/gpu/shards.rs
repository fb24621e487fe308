//! Ranks are processes with GPUs and shard states or parameters: NCCL's calls, the second communicator, complete
//! trainings.
//!
//! `cuda::shards` has the trainings and compares them with those of the host. This file has the scenes of `nccl.rs` for
//! two and three ranks. If one communicator fails, the calls of both must end.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use instep::collective::{Call, CallKey, CollectiveKind};
use instep::cuda::{Cuda, CudaDevice, Nccl};
use instep::dtype::DType;
use instep::layout::DEFAULT_GROUP;
use instep::{
    AdamW, Clip, Collective, Device, DevicePtr, Error, Layout, Mode, Result, Stepper, Strategy, in_process,
};

use super::doors::Door;
use super::memory::Gpu;
use super::nccl::{DEADLINE, alone, ranks_play};
use crate::cuda::shards::train_as_a_rank;
use crate::support::{Outcome, hardware, layout, paint, paint_params};

/// Enqueues a call whose longer buffer has this many bytes.
fn enqueue(
    comm: &dyn Collective,
    gpu: &Gpu,
    kind: CollectiveKind,
    (src, dst): (*mut f32, *mut f32),
    bytes: u64,
) -> Result<()> {
    let key = CallKey { kind, pass: 0, bucket: None, dtype: DType::F32, bytes, agreement: 7 };
    let (stream, ranks) = (Some(gpu.stream()), comm.world_size());
    // SAFETY: device memory of the call's length; nothing touches it before a wait for the stream.
    comm.enqueue(&mut unsafe { Call::new(key, ranks, src.cast(), dst.cast(), DEADLINE, stream) })
}

/// Returns small multiples of 1/8, whose sums are exact.
fn values(rank: u32, count: usize) -> Vec<f32> {
    (0..count).map(|k| ((k * 31 + rank as usize * 17) % 509) as f32 / 8.0).collect()
}

/// Returns whole numbers as the bits of floats, because the helpers carry floats.
fn words(words: &[u32]) -> Vec<f32> {
    words.iter().map(|word| f32::from_bits(*word)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Makes every call of a sharded pass, on both communicators, in place and not.
pub(super) fn calls(comm: Nccl, gpu: &Gpu) {
    let (rank, ranks) = (comm.rank(), comm.world_size() as usize);
    let own = rank as usize;
    let gathers = comm.duplicate().unwrap();
    for comm in [&comm as &dyn Collective, &*gathers] {
        assert!(CollectiveKind::ALL.into_iter().all(|kind| comm.supports(kind)));
        for part in [1usize, 256, 70_001] {
            let bytes = (ranks * part * 4) as u64;
            let whole: Vec<f32> = values(rank, ranks * part);
            let sum = |k: usize| (0..ranks as u32).map(|rank| values(rank, ranks * part)[k]).sum::<f32>();
            let sums: Vec<f32> =
                if part < 1000 { (own * part..(own + 1) * part).map(sum).collect() } else { vec![] };
            let src = gpu.upload(&whole);
            let apart = gpu.upload(&vec![-1.0; part]);
            enqueue(comm, gpu, CollectiveKind::ReduceScatter, (src, apart), bytes).unwrap();
            let scattered = gpu.read(apart, part);
            assert!(sums.is_empty() || scattered == sums, "{part} elements");
            let place = src.wrapping_add(own * part);
            enqueue(comm, gpu, CollectiveKind::ReduceScatter, (src, place), bytes).unwrap();
            assert_eq!(gpu.read(place, part), scattered, "{part} elements, in place");
            // What ranks have summed comes together again.
            let dst = gpu.upload(&vec![-1.0; ranks * part]);
            enqueue(comm, gpu, CollectiveKind::AllGather, (place, dst), bytes).unwrap();
            let gathered = gpu.read(dst, ranks * part);
            assert_eq!(gathered[own * part..(own + 1) * part], scattered[..], "{part} elements");
            enqueue(comm, gpu, CollectiveKind::AllGather, (place, src), bytes).unwrap();
            assert_eq!(gpu.read(src, ranks * part), gathered, "{part} elements, in place");
        }
        let number = gpu.upload(&words(&[u32::MAX, rank, 7, 0]));
        enqueue(comm, gpu, CollectiveKind::Sum64, (number, number), 16).unwrap();
        let carried = ranks as u64 * u64::from(u32::MAX) + ((0..ranks as u64).sum::<u64>() << 32);
        let expected = [carried as u32, (carried >> 32) as u32, 7 * ranks as u32, 0];
        assert_eq!(bits(&gpu.read(number, 4)), expected);
        let smallest = if ranks == 1 { 1 << 31 } else { 5 };
        for (kind, expected) in [(CollectiveKind::Max32, 1 << 31), (CollectiveKind::Min32, smallest)] {
            // The largest has the sign bit.
            let word = if own + 1 == ranks { 1 << 31 } else { 5 + rank };
            let number = gpu.upload(&words(&[word]));
            enqueue(comm, gpu, kind, (number, number), 4).unwrap();
            assert_eq!(bits(&gpu.read(number, 1)), [expected], "{kind}");
        }
        comm.check().unwrap();
    }
    // One that has gone leaves the others, and a new one can be made; the group closes what is left.
    drop(gathers);
    let memory = gpu.upload(&[1.0; 64]);
    let another = comm.duplicate().unwrap();
    enqueue(&*another, gpu, CollectiveKind::AllReduce, (memory, memory), 256).unwrap();
    assert_eq!(gpu.read(memory, 1), [ranks as f32]);
    comm.close().unwrap();
    assert!(matches!(another.check(), Err(Error::Order(_))));
    assert!(comm.duplicate().is_err());
}

/// Waits until a call on a communicator reports a failure, aborts as a stepper does, and waits for the stream.
fn ends_with_a_failure(comm: &dyn Collective, gpu: &Gpu) -> Error {
    let since = Instant::now();
    let error = loop {
        match comm.check() {
            Ok(()) => assert!(since.elapsed() < DEADLINE, "nobody told of the failure"),
            Err(error) => break error,
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    comm.abort(&error);
    assert!(gpu.ends(DEADLINE, || {}), "the abort did not end the call");
    error
}

/// Rank 1 aborts one communicator; rank 0 waits for a call of the other one.
pub(super) fn giving_up(comm: Nccl, gpu: &Gpu) {
    let gathers = comm.duplicate().unwrap();
    let memory = gpu.upload(&[1.0; 1024]);
    enqueue(&*gathers, gpu, CollectiveKind::AllReduce, (memory, memory), 4096).unwrap();
    assert_eq!(gpu.read(memory, 1), [2.0]);
    if comm.rank() == 1 {
        comm.abort(&Error::order("test", "the trainer gave up", ""));
        let refused = enqueue(&*gathers, gpu, CollectiveKind::AllReduce, (memory, memory), 4096);
        assert!(matches!(refused, Err(Error::Order(_))), "{refused:?}");
        return;
    }
    let outcome = enqueue(&*gathers, gpu, CollectiveKind::AllReduce, (memory, memory), 4096);
    let error = outcome.err().unwrap_or_else(|| ends_with_a_failure(&*gathers, gpu));
    assert!(matches!(&error, Error::PeerLost { rank: 1, why } if why.contains("gave up")), "{error}");
    assert_eq!(comm.check(), Err(error), "the failure is that of both");
}

/// Rank 1 dies; the ranks of another group have a call that never reaches all of them.
pub(super) fn groups_dying(comm: Nccl, gpu: &Gpu) {
    let neighbours = comm.subgroup(if comm.rank() < 2 { &[0, 1] } else { &[2, 3] }).unwrap();
    let replicas = comm.subgroup(if comm.rank().is_multiple_of(2) { &[0, 2] } else { &[1, 3] }).unwrap();
    assert_eq!((neighbours.rank(), neighbours.world_size()), (comm.rank() % 2, 2));
    assert_eq!((replicas.rank(), replicas.world_size()), (comm.rank() / 2, 2));
    let nested = replicas.duplicate().unwrap();
    let memory = gpu.upload(&[(1 << comm.rank()) as f32; 1024]);
    enqueue(&*neighbours, gpu, CollectiveKind::AllReduce, (memory, memory), 4096).unwrap();
    assert_eq!(gpu.read(memory, 1), [if comm.rank() < 2 { 3.0 } else { 12.0 }]);
    enqueue(&*nested, gpu, CollectiveKind::AllReduce, (memory, memory), 4096).unwrap();
    assert_eq!(gpu.read(memory, 1), [15.0]);
    assert!(comm.subgroup(&[comm.rank(), 9]).is_err(), "nobody is asked");
    // Rank 1 dies once all are here; the others may miss it in this call already.
    let met = comm.agree(3, DEADLINE);
    match comm.rank() {
        1 => std::process::exit(met.is_err().into()),
        // Ranks 0 and 3 wait for rank 1, and rank 2 for rank 0.
        0 => drop(enqueue(&*neighbours, gpu, CollectiveKind::AllReduce, (memory, memory), 4096)),
        _ => drop(enqueue(&*replicas, gpu, CollectiveKind::AllReduce, (memory, memory), 4096)),
    }
    let error = ends_with_a_failure(&*replicas, gpu);
    assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
    assert_eq!(neighbours.check(), Err(error));
}

/// Rank 1 dies; rank 0 has calls of both communicators on its stream that can never end.
pub(super) fn dying(comm: Nccl, gpu: &Gpu) {
    let gathers = comm.duplicate().unwrap();
    let memory = gpu.upload(&[1.0; 1024]);
    enqueue(&*gathers, gpu, CollectiveKind::AllReduce, (memory, memory), 4096).unwrap();
    assert_eq!(gpu.read(memory, 1), [2.0]);
    if comm.rank() == 1 {
        std::process::exit(0);
    }
    for comm in [&*gathers, &comm as &dyn Collective] {
        match enqueue(comm, gpu, CollectiveKind::AllReduce, (memory, memory), 4096) {
            Ok(()) | Err(Error::PeerLost { rank: 1, .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
    let error = ends_with_a_failure(&comm, gpu);
    assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
    assert_eq!(gathers.check(), Err(error));
}

/// Ranks with different strategies learn the difference before one of them makes a communicator by itself.
pub(super) fn differing(comm: Nccl, _: &Gpu) {
    let strategy = [Strategy::Zero, Strategy::Replicated][comm.rank() as usize];
    let layout = layout(&[700]);
    let builder = Stepper::builder(&layout, AdamW::default()).strategy(strategy);
    // SAFETY: the trainer's stream is the default one.
    match unsafe { builder.cuda(comm, &hardware::open()) } {
        Err(Error::Mismatch { differs, .. }) => assert!(differs.contains("options"), "{differs}"),
        other => panic!("{:?}", other.map(drop)),
    }
}

/// Ranks unshard different buckets; the scene needs the ledger, without which the ranks would hang.
pub(super) fn unsharding_others(comm: Nccl, _: &Gpu) {
    let layout = layout(&[700, 5000]);
    let builder = Stepper::builder(&layout, AdamW::default()).strategy(Strategy::Fsdp).bucket_cap_bytes(1000);
    // SAFETY: the trainer's stream is the default one.
    let mut stepper = unsafe { builder.cuda(comm.clone(), &hardware::open()) }.unwrap();
    stepper.unshard(comm.rank()).unwrap();
    let told = stepper.status().unwrap_err();
    assert!(matches!(told.cause(), Error::Mismatch { .. }), "{told}");
    assert!(matches!(comm.check(), Err(Error::Mismatch { .. })));
}

/// A trainer's stream reads full buckets, one ahead, and the host waits for nothing until all are resharded.
pub(super) fn read_by_a_stream(comm: Nccl, gpu: &Gpu) {
    let layout: &'static Layout = Box::leak(Box::new(layout(&LENS)));
    let cuda = hardware::open().compute_stream(gpu.stream());
    let builder = Stepper::builder(layout, AdamW::default()).strategy(Strategy::Fsdp).bucket_cap_bytes(1000);
    // SAFETY: the stream lives as long as the process.
    let mut stepper = unsafe { builder.max_unsharded(TWO).cuda(comm.clone(), &cuda) }.unwrap();
    paint_params(&mut stepper);
    let ids: Vec<_> = layout.ids().collect();
    let mut expected: Vec<Vec<f32>> = LENS.iter().map(|len| vec![0.0; *len]).collect();
    for (id, values) in ids.iter().zip(&mut expected) {
        stepper.gather(*id, values).unwrap();
    }
    let read: Vec<_> = LENS.iter().map(|len| gpu.upload(&vec![0.0; *len])).collect();
    let bucket_of = |stepper: &Stepper<CudaDevice>, param: usize| stepper.plan().segment_of(param).bucket;
    stepper.unshard(bucket_of(&stepper, 0)).unwrap();
    for (param, id) in ids.iter().enumerate() {
        let bucket = bucket_of(&stepper, param);
        if param + 1 < ids.len() {
            stepper.unshard(bucket_of(&stepper, param + 1)).unwrap();
        }
        let (from, to) = (stepper.ptr(*id).unwrap(), DevicePtr(read[param].addr() as u64));
        // SAFETY: memory of that length; the address holds until the bucket is resharded.
        hardware::entered(&**cuda.driver(), |driver| unsafe {
            driver.copy(to, from, 4 * LENS[param] as u64, gpu.stream())
        });
        if param + 1 == ids.len() || bucket_of(&stepper, param + 1) != bucket {
            stepper.reshard(bucket).unwrap();
        }
    }
    for (param, at) in read.into_iter().enumerate() {
        assert_eq!(gpu.read(at, LENS[param]), expected[param], "p{param}");
    }
    stepper.close().unwrap();
    comm.close().unwrap();
}

pub(super) fn train(comm: Nccl, n: usize) {
    train_as_a_rank(&comm, (n, 3));
    comm.close().unwrap();
}

const LENS: [usize; 4] = [700, 5, 2049, 300];
const REPLAYS: usize = 5;
const TWO: NonZeroU32 = NonZeroU32::new(2).unwrap();

/// Returns the builder of a rank; four ranks form groups of two.
fn builder(layout: &'static Layout, mode: Mode, ranks: u32) -> instep::StepperBuilder<'static> {
    let builder = Stepper::builder(layout, AdamW::default()).mode(mode).bucket_cap_bytes(4000);
    let builder = if mode == Mode::Eager { builder } else { builder.clip(Clip::Global(0.5)) };
    let builder = builder.strategy(Strategy::Zero);
    if ranks == 4 { builder.shard_size(TWO) } else { builder }
}

fn gradient(rank: u32, param: usize) -> Vec<f32> {
    (0..LENS[param]).map(|k| (paint(param, k) * 64.0).round() / 64.0 * (rank + 1) as f32).collect()
}

/// Makes a pass, always with the same gradients.
fn one_pass<D: Device>(stepper: &mut Stepper<D>) -> Result<()> {
    let (layout, rank) = (stepper.layout().clone(), stepper.rank());
    let mut pass = stepper.begin()?;
    for (param, id) in layout.ids().enumerate().rev() {
        pass.write(id.grad(), &gradient(rank, param))?;
        pass.grad_ready(id)?;
    }
    pass.finish()
}

fn host_passes(ranks: u32, rank: u32, layout: &'static Layout, mode: Mode) -> Outcome {
    let mut outcomes = in_process(ranks, |comm| {
        let mut stepper = builder(layout, mode, ranks).host(comm)?;
        paint_params(&mut stepper);
        one_pass(&mut stepper)?;
        for replay in 0..REPLAYS {
            stepper.set_lr(DEFAULT_GROUP, 0.01 / (replay + 1) as f64)?;
            one_pass(&mut stepper)?;
        }
        Outcome::of(&stepper)
    })
    .unwrap();
    outcomes.swap_remove(rank as usize)
}

/// Captured passes of sharded steppers, with calls of two communicators in one graph.
pub(super) fn replayed(comm: Nccl, gpu: &Gpu) {
    let layout: &'static Layout = Box::leak(Box::new(layout(&LENS)));
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let cuda = hardware::open().compute_stream(gpu.stream());
    for mode in [Mode::Eager, Mode::Normed] {
        // SAFETY: the stream lives as long as the process.
        let mut stepper = unsafe { builder(layout, mode, ranks).cuda(comm.clone(), &cuda) }.unwrap();
        paint_params(&mut stepper);
        one_pass(&mut stepper).unwrap();
        let sources: Vec<_> = (0..LENS.len()).map(|param| gpu.upload(&gradient(rank, param))).collect();
        let captured = stepper.capture(|mut pass| {
            for (param, id) in layout.ids().enumerate().rev() {
                copy(&cuda, gpu, pass.ptr(id.grad())?, sources[param], LENS[param]);
                pass.grad_ready(id)?;
            }
            pass.finish()
        });
        let captured = captured.unwrap();
        for replay in 0..REPLAYS {
            stepper.set_lr(DEFAULT_GROUP, 0.01 / (replay + 1) as f64).unwrap();
            // SAFETY: the sources are never freed.
            unsafe { stepper.replay(&captured).unwrap() };
        }
        let outcome = Outcome::of::<CudaDevice>(&stepper).unwrap();
        outcome.assert_same(&host_passes(ranks, rank, layout, mode), &format!("{mode:?}, rank {rank}"));
        assert!(matches!(comm.close(), Err(Error::Order(_))), "a graph has calls of both communicators");
        drop(captured);
        stepper.close().unwrap();
    }
    comm.close().unwrap();
}

/// Copies on the trainer's stream.
fn copy(cuda: &Cuda, gpu: &Gpu, to: DevicePtr, from: *mut f32, count: usize) {
    let from = DevicePtr(from.addr() as u64);
    // SAFETY: memory of that length; the trainer's stream has the gradient.
    hardware::entered(&**cuda.driver(), |driver| unsafe {
        driver.copy(to, from, 4 * count as u64, gpu.stream())
    });
}

#[test]
#[ignore = "benches/gpu/run.sh runs it: needs a GPU and NCCL"]
fn a_group_of_one_makes_every_call_of_shards_on_communicators_that_come_and_go() {
    let gpu = Gpu::open();
    calls(alone(), &gpu);
    replayed(alone(), &gpu);
    let alone = alone();
    let gathers: Arc<dyn Collective> = alone.duplicate().unwrap();
    alone.abort(&Error::order("test", "the trainer gave up", ""));
    assert!(matches!(gathers.check(), Err(Error::Order(_))));
}

macro_rules! ranks {
    ($($sentence:ident: $ranks:literal, $scene:literal, $door:ident;)*) => {
        $(
            #[test]
            #[ignore = "benches/gpu/run.sh runs it: needs a GPU and NCCL 2.30"]
            fn $sentence() {
                ranks_play($ranks, $scene, Door::$door);
            }
        )*
    };
}

ranks! {
    two_ranks_make_every_call_of_shards_on_communicators_that_come_and_go: 2, "calls_of_shards", Id;
    three_ranks_make_every_call_of_shards_on_communicators_that_come_and_go: 3, "calls_of_shards", File;
    a_rank_that_gives_one_communicator_up_ends_the_calls_of_both: 2, "shards_giving_up", Beside;
    a_rank_that_dies_ends_the_calls_of_both_communicators: 2, "shards_dying", Beside;
    two_ranks_of_different_strategies_both_get_a_mismatch: 2, "shards_differing", File;
    two_ranks_that_unshard_other_buckets_both_get_a_mismatch: 2, "unsharding_others", Beside;
    a_trainers_stream_reads_buckets_that_are_given_up_behind_it: 2, "read_by_a_stream", File;
    two_ranks_learn_digits_with_shards_of_states_and_the_bits_of_the_host: 2, "training_zero", Adopt;
    two_ranks_learn_digits_with_shards_of_parameters_and_the_bits_of_the_host: 2, "training_fsdp", Id;
    two_ranks_replay_captured_passes_with_calls_of_both_communicators: 2, "shards_replayed", File;
    two_ranks_step_shards_with_the_bits_of_the_host_first_part: 2, "shards_0", File;
    two_ranks_step_shards_with_the_bits_of_the_host_second_part: 2, "shards_with_ledger", Beside;
    two_ranks_step_shards_with_the_bits_of_the_host_third_part: 2, "shards_2", Adopt;
    three_ranks_step_shards_with_the_bits_of_the_host_first_part: 3, "shards_0", Id;
    three_ranks_step_shards_with_the_bits_of_the_host_second_part: 3, "shards_1", Adopt;
    three_ranks_step_shards_with_the_bits_of_the_host_third_part: 3, "shards_2", File;
    four_ranks_in_groups_replay_captured_passes_with_calls_of_both_kinds: 4, "shards_replayed", Adopt;
    four_ranks_in_groups_step_shards_with_the_bits_of_the_host_first_part: 4, "shards_0", Id;
    four_ranks_in_groups_step_shards_with_the_bits_of_the_host_second_part: 4, "shards_with_ledger", Beside;
    four_ranks_in_groups_step_shards_with_the_bits_of_the_host_third_part: 4, "shards_2", File;
    a_rank_that_dies_ends_the_calls_of_another_group: 4, "groups_dying", Beside;
}
