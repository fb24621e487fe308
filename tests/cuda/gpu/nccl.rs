//! NCCL on one GPU: a group of one rank, and groups of processes that share the device. NCCL 2.30 permits two such
//! processes.
//!
//! Each rank starts this binary again, with the scene in environment variables; the parent kills a rank that hangs. A
//! scene for several ranks never passes with one rank, because NCCL then launches nothing. Only the software GPU runs
//! three ranks.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use instep::collective::{Call, CallKey, CollectiveKind, Purpose};
use instep::cuda::{Nccl, nccl};
use instep::dtype::DType;
use instep::{Collective, Error, Place, Solo, Strategy, bf16, f16};

use super::doors::{Door, Threshold, join};
use super::memory::Gpu;
use super::{calls, shards};
use crate::cuda::training::learn_as_a_rank_of_two;

pub(super) const DEADLINE: Duration = Duration::from_secs(20);
/// Sizes around NCCL's chunks, and a bucket of 25 MiB.
const COUNTS: [usize; 6] = [1, 3, 256, 4097, 1 << 20, 25 << 18];

/// Returns a group of one rank.
pub(super) fn alone() -> Nccl {
    Nccl::with_id(&nccl::Options::default(), nccl::unique_id().unwrap()).unwrap()
}

/// Enqueues a call of `count` elements on the GPU's stream, in a group of `comm`'s ranks.
fn enqueue(
    comm: &Nccl,
    gpu: &Gpu,
    kind: CollectiveKind,
    (src, dst): (*mut f32, *mut f32),
    count: usize,
    pass: u64,
) -> Result<(), Error> {
    enqueue_of(DType::F32, comm, gpu, kind, (src, dst), count as u64 * 4, pass)
}

/// Enqueues a call of this many bytes of any type.
fn enqueue_of(
    dtype: DType,
    comm: &Nccl,
    gpu: &Gpu,
    kind: CollectiveKind,
    (src, dst): (*mut f32, *mut f32),
    bytes: u64,
    pass: u64,
) -> Result<(), Error> {
    let key = CallKey { kind, pass, bucket: Some(0), dtype, bytes, agreement: 7 };
    // SAFETY: device memory of the call's length; nothing touches it before a wait for the stream.
    let mut call =
        unsafe { Call::new(key, comm.world_size(), src.cast(), dst.cast(), DEADLINE, Some(gpu.stream())) };
    comm.enqueue(&mut call)
}

/// Returns small dyadic numbers, whose sums are exact in any order.
fn values(rank: u32, count: usize) -> Vec<f32> {
    (0..count).map(|k| ((k * 31 + rank as usize * 17) % 509) as f32 / 8.0).collect()
}

#[test]
#[ignore = "benches/gpu/run.sh runs it: needs a GPU and NCCL"]
fn a_group_of_one_sums_copies_closes_and_gives_its_memory_back() {
    let gpu = Gpu::open();
    let comm = alone();
    assert!(comm.reaches(Place::Cuda(0)) && !comm.reaches(Place::Host) && !comm.reaches(Place::Cuda(1)));
    comm.agree(1, DEADLINE).unwrap();
    for count in COUNTS {
        let memory = comm
            .allocate(Purpose::Gradients, Place::Cuda(0), count as u64 * 4)
            .unwrap()
            .expect("NCCL 2.19 makes memory");
        assert!(memory.address().addr().is_multiple_of(256));
        let (own, other) = (memory.address().cast::<f32>(), gpu.upload(&vec![0.0; count]));
        gpu.write(own, &values(0, count));
        for kind in [CollectiveKind::AllReduce, CollectiveKind::Broadcast] {
            enqueue(&comm, &gpu, kind, (own, own), count, 0).unwrap();
            enqueue(&comm, &gpu, kind, (own, other), count, 0).unwrap();
            assert_eq!(gpu.read(own, count), values(0, count));
            assert_eq!(gpu.read(other, count), values(0, count));
        }
        comm.check().unwrap();
    }
    let memory = comm.allocate(Purpose::Gradients, Place::Cuda(0), 4096).unwrap();
    let handle = comm.clone();
    comm.close().unwrap();
    assert!(matches!(handle.check(), Err(Error::Order(_))));
    assert!(matches!(handle.clone().close(), Err(Error::Order(_))));
    drop(memory);
    // Dropped, not closed.
    drop(alone());
}

#[test]
#[ignore = "benches/gpu/run.sh runs it: needs a GPU and NCCL"]
fn an_aborted_group_answers_with_the_cause_ever_after() {
    let gpu = Gpu::open();
    let comm = alone();
    let memory = comm.allocate(Purpose::Gradients, Place::Cuda(0), 4096).unwrap().unwrap();
    let address = memory.address().cast::<f32>();
    let cause = Error::order("test", "the trainer gave up", "");
    comm.abort(&cause);
    comm.abort(&Error::order("test", "again", ""));
    let refused = enqueue(&comm, &gpu, CollectiveKind::AllReduce, (address, address), 1024, 0);
    assert_eq!(refused, Err(cause.clone()));
    assert_eq!(comm.check(), Err(cause.clone()));
    assert_eq!(comm.agree(1, DEADLINE), Err(cause.clone()));
    drop(memory);
    assert_eq!(comm.close(), Err(cause));
}

#[test]
#[ignore = "benches/gpu/run.sh runs it: needs a GPU and NCCL"]
fn only_a_group_beside_a_host_keeps_a_ledger() {
    let gpu = Gpu::open();
    let ledger = nccl::Options { ledger: true, ..Default::default() };
    let refused = Nccl::with_id(&ledger, nccl::unique_id().unwrap());
    assert!(matches!(refused, Err(Error::Config { field: "INSTEP_LEDGER", .. })));
    let comm = Nccl::beside(Solo::default(), &ledger).unwrap();
    let memory = gpu.upload(&[1.0; 64]);
    enqueue(&comm, &gpu, CollectiveKind::AllReduce, (memory, memory), 64, 0).unwrap();
    assert_eq!(gpu.read(memory, 1), [1.0]);
    comm.agree(1, DEADLINE).unwrap();
    comm.close().unwrap();
}

#[test]
#[ignore = "benches/gpu/run.sh runs it: needs a GPU and NCCL"]
fn a_gpu_that_is_not_there_is_named() {
    let options = nccl::Options { device: 4096, ..Default::default() };
    match Nccl::with_id(&options, [1; 128]) {
        Err(Error::Unsupported(refusal)) => {
            assert_eq!(refusal.thing, "cuda:4096");
            assert!(refusal.remedy.starts_with("use cuda:0"), "{refusal}");
        }
        other => panic!("{other:?}"),
    }
}

// The scenes for two ranks, with the outcome that each rank expects; those of shards are in `shards.rs`.

/// Returns pairs of small whole numbers of 16 bits, as the bits of floats.
fn pairs(dtype: DType, count: usize, value: impl Fn(usize) -> f32) -> Vec<f32> {
    let bits = |value: f32| match dtype {
        DType::BF16 => bf16::from_f32(value).to_bits(),
        _ => f16::from_f32(value).to_bits(),
    };
    let pair = |k: usize| u32::from(bits(value(2 * k))) | u32::from(bits(value(2 * k + 1))) << 16;
    (0..count).map(|k| f32::from_bits(pair(k))).collect()
}

fn sums_of_sixteen_bits(comm: Nccl, gpu: &Gpu) {
    let rank = comm.rank() as usize;
    let value = |rank: usize, k: usize| ((k * 5 + rank * 3) % 61) as f32 - 30.0;
    for (pass, dtype) in (0..).zip([DType::BF16, DType::F16]) {
        assert!(comm.sums(dtype));
        for count in COUNTS {
            let own = gpu.upload(&pairs(dtype, count, |k| value(rank, k)));
            let kind = CollectiveKind::AllReduce;
            enqueue_of(dtype, &comm, gpu, kind, (own, own), count as u64 * 4, pass).unwrap();
            let expected = pairs(dtype, count, |k| value(0, k) + value(1, k));
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert!(bits(&gpu.read(own, count)) == bits(&expected), "{dtype}, {count} pairs");
        }
    }
    comm.agree(3, DEADLINE).unwrap();
    comm.close().unwrap();
}

fn sums(comm: Nccl, gpu: &Gpu) {
    let rank = comm.rank();
    for (pass, count) in (0..).zip(COUNTS) {
        let memory = comm.allocate(Purpose::Gradients, Place::Cuda(0), count as u64 * 4).unwrap().unwrap();
        for own in [memory.address().cast::<f32>(), gpu.upload(&vec![0.0; count])] {
            gpu.write(own, &values(rank, count));
            enqueue(&comm, gpu, CollectiveKind::AllReduce, (own, own), count, pass).unwrap();
            let sum: Vec<f32> = values(0, count).iter().zip(values(1, count)).map(|(a, b)| a + b).collect();
            assert_eq!(gpu.read(own, count), sum, "{count} elements");
            let other = gpu.upload(&vec![-1.0; count]);
            gpu.write(own, &values(rank, count));
            enqueue(&comm, gpu, CollectiveKind::Broadcast, (own, other), count, pass).unwrap();
            assert_eq!(gpu.read(other, count), values(0, count), "{count} elements");
        }
        comm.check().unwrap();
    }
    comm.agree(3, DEADLINE).unwrap();
    comm.close().unwrap();
}

fn differing(comm: Nccl, _: &Gpu) {
    let rank = u64::from(comm.rank());
    comm.agree(3, DEADLINE).unwrap();
    assert!(matches!(comm.agree(rank, DEADLINE), Err(Error::Mismatch { rank: 0, other_rank: 1, .. })));
    assert!(matches!(comm.check(), Err(Error::Mismatch { .. })));
}

/// Collectives of all sizes as one launch, the largest last, and after a group that a call has failed in: the call names the
/// failure, and ends the communicator.
fn groups(comm: Nccl, gpu: &Gpu) {
    let rank = comm.rank();
    let kind = CollectiveKind::AllReduce;
    let key = |count: usize| CallKey {
        kind,
        pass: 0,
        bucket: None,
        dtype: DType::F32,
        bytes: count as u64 * 4,
        agreement: 7,
    };
    let made = |count: usize| gpu.upload(&values(rank, count));
    let memory: Vec<(usize, *mut f32)> = COUNTS.into_iter().map(|count| (count, made(count))).collect();
    let call = |(count, at): &(usize, *mut f32), stream| {
        // SAFETY: device memory of the call's length; nothing touches it before a wait for the stream.
        unsafe { Call::new(key(*count), 2, at.cast(), at.cast(), DEADLINE, stream) }
    };
    comm.enqueue_all(&mut memory.iter().map(|place| call(place, Some(gpu.stream())))).unwrap();
    for (count, at) in &memory {
        let sum: Vec<f32> = values(0, *count).iter().zip(values(1, *count)).map(|(a, b)| a + b).collect();
        assert_eq!(gpu.read(*at, *count), sum, "{count} elements");
    }
    comm.agree(3, DEADLINE).unwrap();
    // The second call has no stream. NCCL's group ends all the same, with the first call alone, on both ranks.
    let streams = [Some(gpu.stream()), None];
    let refused =
        comm.enqueue_all(&mut memory.iter().zip(streams).map(|(place, stream)| call(place, stream)));
    assert!(matches!(refused, Err(Error::Unsupported(_))), "{refused:?}");
    assert_eq!(comm.check(), refused);
    comm.abort(&refused.unwrap_err());
    assert!(gpu.ends(DEADLINE, || {}), "the abort did not end the calls");
}

/// Run with the ledger: without it the ranks would hang.
fn out_of_order(comm: Nccl, gpu: &Gpu) {
    let memory = gpu.upload(&[1.0; 1024]);
    enqueue(&comm, gpu, CollectiveKind::AllReduce, (memory, memory), 1024, 0).unwrap();
    let (kind, count) =
        [(CollectiveKind::AllReduce, 1024), (CollectiveKind::AllReduce, 512)][comm.rank() as usize];
    match enqueue(&comm, gpu, kind, (memory, memory), count, 1) {
        Err(Error::Mismatch { ours, theirs, .. }) => {
            assert!(ours.contains("4096 bytes") && theirs.contains("2048 bytes"), "{ours} {theirs}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(gpu.read(memory, 1), [2.0], "the good one came through and the bad one did not start");
}

/// Rank 1 dies; rank 0 has a sum on its stream that can never end.
fn dying(comm: Nccl, gpu: &Gpu) {
    let memory = gpu.upload(&[1.0; 1024]);
    enqueue(&comm, gpu, CollectiveKind::AllReduce, (memory, memory), 1024, 0).unwrap();
    assert_eq!(gpu.read(memory, 1), [2.0]);
    if comm.rank() == 1 {
        std::process::exit(0);
    }
    enqueue(&comm, gpu, CollectiveKind::AllReduce, (memory, memory), 1024, 1)
        .or_else(|error| if matches!(error, Error::PeerLost { rank: 1, .. }) { Ok(()) } else { Err(error) })
        .unwrap();
    let since = Instant::now();
    let lost = loop {
        match comm.check() {
            Ok(()) => assert!(since.elapsed() < DEADLINE, "rank 1 was not missed"),
            Err(error) => break error,
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    assert!(matches!(lost, Error::PeerLost { rank: 1, .. }), "{lost}");
    comm.abort(&lost);
    assert!(gpu.ends(DEADLINE, || {}), "the abort did not end the sum");
    assert_eq!(comm.check(), Err(lost));
}

/// Rank 1 dies, and no host reports it: rank 0 waits for its deadline.
fn dying_unheard(comm: Nccl, gpu: &Gpu) {
    comm.agree(3, DEADLINE).unwrap();
    if comm.rank() == 1 {
        std::process::exit(0);
    }
    let lost = comm.agree(3, Duration::from_millis(300)).unwrap_err();
    match &lost {
        Error::Deadline { rank: 0, call, missing, .. } => {
            assert!(call.contains("agreement") && missing.is_empty(), "{call}");
        }
        // NCCL itself has noticed.
        other => assert!(matches!(other, Error::Collective { .. }), "{other}"),
    }
    assert_eq!(comm.check(), Err(lost.clone()));
    comm.abort(&lost);
    assert!(gpu.ends(DEADLINE, || {}), "the abort did not end the exchange");
    assert_eq!(comm.close(), Err(lost));
}

/// Rank 1 aborts; rank 0 waits for a sum and receives the cause.
fn giving_up(comm: Nccl, gpu: &Gpu) {
    let memory = gpu.upload(&[1.0; 1024]);
    enqueue(&comm, gpu, CollectiveKind::AllReduce, (memory, memory), 1024, 0).unwrap();
    assert_eq!(gpu.read(memory, 1), [2.0]);
    if comm.rank() == 1 {
        comm.abort(&Error::order("test", "the trainer gave up", ""));
        assert!(matches!(comm.close(), Err(Error::Order(_))));
        return;
    }
    let mut seen = enqueue(&comm, gpu, CollectiveKind::AllReduce, (memory, memory), 1024, 1).err();
    if let Some(error) = &seen {
        comm.abort(error); // NCCL may have started the sum before the cause came
    }
    let ended = gpu.ends(DEADLINE, || {
        if let (None, Err(error)) = (&seen, comm.check()) {
            comm.abort(&error);
            seen = Some(error);
        }
    });
    assert!(ended, "the abort did not end the sum");
    match seen.or_else(|| comm.check().err()) {
        Some(Error::PeerLost { rank: 1, why }) => assert!(why.contains("gave up"), "{why}"),
        other => panic!("{other:?}"),
    }
}

/// Rank 1 drops its communicator; rank 0 closes its own.
fn dropping(comm: Nccl, gpu: &Gpu) {
    let memory = gpu.upload(&[1.0; 1024]);
    enqueue(&comm, gpu, CollectiveKind::AllReduce, (memory, memory), 1024, 0).unwrap();
    assert_eq!(gpu.read(memory, 1), [2.0]);
    if comm.rank() == 0 {
        return comm.close().unwrap();
    }
    drop(comm); // the exit of the process waits for the thread that ends it
}

/// Ranks join groups again and again through one file.
fn meeting_again(first: Nccl, gpu: &Gpu) {
    let memory = gpu.upload(&[1.0; 1024]);
    let groups = [first, join(), join()];
    for (expected, comm) in [2.0, 4.0, 8.0].into_iter().zip(&groups) {
        enqueue(comm, gpu, CollectiveKind::AllReduce, (memory, memory), 1024, 0).unwrap();
        assert_eq!(gpu.read(memory, 1), [expected]);
    }
    groups.iter().for_each(|comm| comm.close().unwrap());
}

type Scene = (&'static str, fn(Nccl, &Gpu));

const SCENES: [Scene; 29] = [
    ("sums", sums),
    ("meeting_again", meeting_again),
    ("differing", differing),
    ("out_of_order", out_of_order),
    ("dying", dying),
    ("dying_unheard", dying_unheard),
    ("giving_up", giving_up),
    ("dropping", dropping),
    ("training", |comm, _| learn_as_a_rank_of_two(comm, Strategy::Replicated)),
    ("calls", calls::of_nccl),
    ("calls_of_unsharding", calls::of_unsharding),
    ("calls_of_groups", calls::of_groups),
    ("calls_of_order", calls::of_order),
    ("groups", groups),
    ("sums_of_sixteen_bits", sums_of_sixteen_bits),
    ("calls_of_shards", shards::calls),
    ("shards_giving_up", shards::giving_up),
    ("shards_dying", shards::dying),
    ("groups_dying", shards::groups_dying),
    ("shards_differing", shards::differing),
    ("read_by_a_stream", shards::read_by_a_stream),
    ("unsharding_others", shards::unsharding_others),
    ("training_zero", |comm, _| learn_as_a_rank_of_two(comm, Strategy::Zero)),
    ("training_fsdp", |comm, _| learn_as_a_rank_of_two(comm, Strategy::Fsdp)),
    ("shards_replayed", shards::replayed),
    ("shards_0", |comm, _| shards::train(comm, 0)),
    ("shards_1", |comm, _| shards::train(comm, 1)),
    ("shards_2", |comm, _| shards::train(comm, 2)),
    ("shards_with_ledger", |comm, _| shards::train(comm, 1)),
];

/// This test is one rank. Another test below starts it.
#[test]
#[ignore = "tests/cuda/gpu/nccl.rs starts it: a process of its own per rank"]
fn rank_of_several() {
    let scene = std::env::var("INSTEP_TEST_SCENE");
    let found = SCENES.iter().find(|(name, _)| scene.as_deref() == Ok(name));
    let (_, play) = found.expect("a scene, which the tests below name");
    let gpu = Gpu::open();
    play(join(), &gpu);
}

/// A child process that is killed with the test.
struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(super) fn ranks_play(ranks: u32, scene: &str, door: Door) {
    ranks_play_with(ranks, scene, door, &[]);
}

pub(super) fn ranks_play_with(ranks: u32, scene: &str, door: Door, environment: &[(&str, &Path)]) {
    let threshold = Threshold::new(door);
    let start = |rank: u32| {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "cuda::gpu::nccl::rank_of_several", "--ignored", "--nocapture"]);
        threshold.describe(&mut child);
        child.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
        child.envs([("NCCL_MULTI_RANK_GPU_ENABLE", "1"), ("NCCL_MAX_CTAS", "2")]);
        child.envs([("INSTEP_TEST_SCENE", scene), ("INSTEP_DEADLINE_MS", "30000")]);
        let has_ledger = ["out_of_order", "shards_with_ledger", "unsharding_others"].contains(&scene);
        child.env("INSTEP_LEDGER", if has_ledger { "1" } else { "0" });
        if scene == "calls_of_order" {
            let seed = std::env::var("INSTEP_GPU_SEED").map_or(0, |seed| seed.parse::<u32>().unwrap());
            child.env("INSTEP_GPU_SEED", (ranks * seed + rank).to_string());
        }
        child.envs(environment.iter().copied());
        Rank(child.stdout(Stdio::null()).spawn().unwrap())
    };
    let mut ranks: Vec<Rank> = (0..ranks).map(start).collect();
    let since = Instant::now();
    for (rank, child) in ranks.iter_mut().enumerate() {
        let status = loop {
            match child.0.try_wait().unwrap() {
                Some(status) => break status,
                None => assert!(since.elapsed() < 4 * DEADLINE, "rank {rank} of {scene} hangs"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        assert!(status.success(), "rank {rank} of {scene}: {status}");
    }
}

macro_rules! two_ranks {
    ($($sentence:ident: $scene:literal, $door:ident;)*) => {
        $(
            #[test]
            #[ignore = "benches/gpu/run.sh runs it: needs a GPU and NCCL 2.30"]
            fn $sentence() {
                ranks_play(2, $scene, Door::$door);
            }
        )*
    };
}

two_ranks! {
    two_ranks_sum_and_broadcast_exactly: "sums", File;
    two_ranks_sum_sixteen_bits_exactly: "sums_of_sixteen_bits", Adopt;
    two_ranks_sum_many_buffers_in_one_launch: "groups", File;
    two_ranks_meet_again_and_again_by_one_file: "meeting_again", File;
    two_ranks_that_disagree_both_get_a_mismatch: "differing", Id;
    with_the_ledger_two_ranks_out_of_order_get_a_mismatch_and_do_not_hang: "out_of_order", Beside;
    a_rank_whose_peer_dies_gets_its_name_and_its_stream_back: "dying", Beside;
    a_rank_whose_peer_dies_unheard_gets_its_stream_back_at_its_deadline: "dying_unheard", File;
    a_rank_whose_peer_gives_up_learns_why: "giving_up", Beside;
    one_rank_may_drop_what_the_other_closes: "dropping", File;
    one_rank_may_drop_what_the_other_closes_beside_a_host: "dropping", Beside;
    two_ranks_learn_digits_with_the_bits_of_two_ranks_on_the_host: "training", Beside;
}
