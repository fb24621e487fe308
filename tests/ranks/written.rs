//! Parameters are written between passes: the next pass broadcasts rank 0's values of their buckets, and of no other.
//!
//! Ranks write different values, so ranks would differ without a broadcast. The reference writes rank 0's values on all
//! ranks.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use instep::collective::Call;
use instep::cuda::Cuda;
use instep::hazard::Traced;
use instep::op::{Action, CollectiveKind, Memory, Op, Span};
use instep::{
    AdamW, Collective, Error, InProcess, Layout, Mode, Place, Precision, Result, Stepper, in_process,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};

use crate::schedule::property::for_all;
use crate::support::lent::{Ground, Lent, Random};
use crate::support::stand_in::{COMPUTE, StandIn};
use crate::support::{MODES, Options, Outcome, layout, paint, paint_gradient, pass};

const F32: Precision = Precision::F32;
const BF16: Precision = Precision {
    param: instep::DType::BF16,
    grad: instep::DType::BF16,
    master: instep::Master::F32,
    ..Precision::F32
};

fn step(stepper: &mut Stepper, at: usize) -> Result<()> {
    let rank = stepper.rank() as usize;
    pass(stepper, &Options::default(), |param, values| {
        values.iter_mut().enumerate().for_each(|(k, g)| *g = paint_gradient(at + 7 * rank, param, k));
        true
    })
}

/// Writes a parameter with the values of rank `source`.
fn write(stepper: &mut Stepper, param: usize, at: usize, source: usize) -> Result<()> {
    let id = stepper.layout().ids().nth(param).unwrap();
    let len = stepper.layout().parameter(id)?.len as usize;
    let values: Vec<f32> = (0..len).map(|k| paint(31 * at + 7 * source + param, k)).collect();
    stepper.write(id, &values)
}

/// Returns the spans of each broadcast in a recording, with its bucket.
fn broadcasts(list: &[Traced]) -> Vec<(Option<u32>, Span)> {
    let broadcast = |entry: &Traced| match entry {
        Traced::Op(Op {
            action: Action::Collective { kind: CollectiveKind::Broadcast, bucket, src, .. },
            ..
        }) => Some((*bucket, *src)),
        _ => None,
    };
    list.iter().filter_map(broadcast).collect()
}

/// Returns the bytes of a broadcast of these parameters' buckets, masters included.
fn bytes_of(stepper: &Stepper, written: &[usize]) -> u64 {
    let plan = stepper.plan();
    let is_written = |params: &[u32]| params.iter().any(|param| written.contains(&(*param as usize)));
    let buckets = plan.buckets().iter().filter(|bucket| {
        is_written(&plan.segments_of(bucket).iter().map(|segment| segment.param).collect::<Vec<_>>())
    });
    let bytes = |precision: &Precision| precision.param.bytes() + precision.master.bytes();
    buckets
        .map(|bucket| {
            let padded = bucket.params.end - bucket.params.start;
            if plan.is_foreign() {
                // Only the caller's tensors, without padding; masters are the stepper's own.
                let elements: u64 = plan.segments_of(bucket).iter().map(|segment| segment.len).sum();
                elements * bucket.storage.precision.param.bytes()
                    + padded * bucket.storage.precision.master.bytes()
            } else {
                padded * bytes(&bucket.storage.precision)
            }
        })
        .sum()
}

#[test]
fn a_written_parameter_broadcasts_its_own_bucket_once() {
    let layout = layout(&[300, 17, 600, 5]);
    for (mode, precision) in MODES.into_iter().flat_map(|mode| [(mode, F32), (mode, BF16)]) {
        let told = in_process(2, |comm| {
            let builder = Stepper::builder(&layout, AdamW::default()).mode(mode).precision(precision);
            let mut stepper = builder.bucket_cap_bytes(1).record(true).host(comm)?;
            step(&mut stepper, 0)?;
            let first = broadcasts(&stepper.take_recording().unwrap().list);
            let rank = stepper.rank() as usize;
            write(&mut stepper, 2, 1, rank)?;
            step(&mut stepper, 1)?;
            let list = stepper.take_recording().unwrap().list;
            step(&mut stepper, 2)?;
            let last = broadcasts(&stepper.take_recording().unwrap().list);
            let bucket = stepper.plan().segment_of(2).bucket;
            Ok::<_, Error>((first, broadcasts(&list), last, bucket, Outcome::of(&stepper)?))
        })
        .unwrap();
        for (first, second, last, bucket, outcome) in &told {
            let memories = |told: &[(Option<u32>, Span)]| told.iter().map(|(_, span)| span.memory).collect();
            let expected: Vec<Memory> =
                if precision == BF16 { vec![Memory::Master, Memory::Params] } else { vec![Memory::Params] };
            let seen: [Vec<Memory>; 2] = [memories(first), memories(second)];
            assert_eq!(seen, [expected.clone(), expected], "{mode:?}");
            assert!(second.iter().all(|(named, _)| named == &Some(*bucket)), "{second:?}");
            // 600 elements, padded to 2 ranks of 256 elements each.
            let bytes = second.iter().map(|(_, span)| span.bytes()).sum::<u64>();
            assert_eq!(bytes, 1024 * if precision == BF16 { 6 } else { 4 }, "{mode:?}");
            assert_eq!(last, &[], "{mode:?}");
            outcome.assert_same(&told[0].4, "ranks have rank 0's values");
        }
    }
}

#[derive(Clone, Debug)]
struct Case {
    lengths: Vec<usize>,
    cap: u64,
    mode: Mode,
    precision: Precision,
    borrowed: bool,
    seed: u64,
    /// The parameters that are written before each pass except the first, whether buckets are then rebuilt, and whether
    /// the pass is abandoned.
    passes: Vec<(Vec<usize>, bool, bool)>,
}

fn case() -> impl Strategy<Value = Case> {
    let lengths = vec(select(vec![0usize, 1, 100, 300, 2049]), 1..7);
    let options =
        (select(vec![1u64, 3000, 1 << 20]), select(MODES.to_vec()), select(vec![F32, BF16]), any::<bool>());
    (lengths, options, any::<u64>()).prop_flat_map(|(lengths, (cap, mode, precision, borrowed), seed)| {
        let written = subsequence((0..lengths.len()).collect::<Vec<_>>(), 0..=lengths.len());
        let passes = vec((written, prop::bool::weighted(0.2), prop::bool::weighted(0.2)), 1..4);
        let lengths = Just(lengths);
        (lengths, passes).prop_map(move |(lengths, passes)| Case {
            lengths,
            cap,
            mode,
            precision,
            borrowed,
            seed,
            passes,
        })
    })
}

impl Case {
    /// Trains, and checks after each pass what was broadcast. With `same`, all ranks write rank 0's values.
    fn run(&self, comm: InProcess, same: bool) -> Result<Outcome> {
        let (layout, rank) = (layout(&self.lengths), comm.rank() as usize);
        let builder = Stepper::builder(&layout, AdamW::default()).mode(self.mode).precision(self.precision);
        let builder = builder.record(true).unused(instep::Unused::StepZero);
        let lent =
            self.borrowed.then(|| Lent::new(Ground::Host, &layout, self.precision, &mut Random(self.seed)));
        let mut stepper = match &lent {
            // SAFETY: the tensors outlive the stepper, and this thread alone touches them.
            Some(lent) => unsafe { builder.host_borrowing(comm, lent.lend())? },
            None => builder.bucket_cap_bytes(self.cap).host(comm)?,
        };
        for param in 0..self.lengths.len() {
            // Before the first pass each rank writes what it likes.
            if rank == 0 || param % 2 == 0 {
                write(&mut stepper, param, 0, rank)?;
            }
        }
        step(&mut stepper, 0)?;
        let recording = stepper.take_recording().unwrap();
        assert_eq!(stepper.check(&recording), []);
        for (at, (written, rebuilds, abandons)) in (1..).zip(&self.passes) {
            for param in written {
                write(&mut stepper, *param, at, if same { 0 } else { rank })?;
            }
            if *rebuilds && !self.borrowed {
                // The recording of the old buckets goes with them.
                stepper.rebuild_buckets()?;
            }
            if *abandons {
                stepper.begin()?.abandon()?;
            } else {
                step(&mut stepper, at)?;
            }
            let recording = stepper.take_recording().unwrap();
            // A rebuild that changes nothing has told the order of buckets through a gradient.
            let sent = broadcasts(&recording.list);
            let params = sent.iter().filter(|(_, span)| span.memory != Memory::Grads);
            let bytes: u64 = params.map(|(_, span)| span.bytes()).sum();
            assert_eq!(bytes, bytes_of(&stepper, written), "pass {at}, {written:?}");
        }
        Outcome::of(&stepper)
    }
}

#[test]
fn random_writes_reach_every_rank_and_broadcast_their_buckets_alone() {
    for_all(150, case(), |case| {
        let ranks = in_process(2, |comm| case.run(comm, false)).unwrap();
        let reference = in_process(2, |comm| case.run(comm, true)).unwrap();
        for (rank, outcome) in ranks.iter().enumerate() {
            outcome.assert_same(&reference[0], &format!("rank {rank}"));
        }
    });
}

/// Makes each rank write its own parameters, before the first pass and after it.
fn outcome(written: [&'static [usize]; 2], cap: u64) -> Result<()> {
    let layout = layout(&[30, 20, 10]);
    let act = |comm: InProcess| {
        let builder = Stepper::builder(&layout, AdamW::default()).bucket_cap_bytes(cap);
        let mut stepper = builder.host(comm)?;
        let rank = stepper.rank() as usize;
        for at in 0..2 {
            written[rank].iter().try_for_each(|param| write(&mut stepper, *param, at, rank))?;
            step(&mut stepper, at)?;
            stepper.status()?;
        }
        Ok::<_, Error>(())
    };
    in_process(2, act).map(drop)
}

#[test]
fn ranks_that_wrote_different_parameters_are_told_which() {
    let all: &[usize] = &[0, 1, 2];
    let cases: [([&'static [usize]; 2], &[&str]); 6] = [
        ([&[0], &[1]], &["written: `p0`", "written: `p1`"]),
        ([&[2], &[]], &["written: `p2`"]),
        ([&[], &[2]], &["written: `p2`"]),
        ([&[0, 1], &[0]], &["written: `p1`"]),
        ([all, &[]], &["written: all parameters"]),
        ([&[1], all], &["written: `p1`", "written: all parameters"]),
    ];
    // One bucket for each parameter, and one for all.
    for ((written, words), cap) in cases.into_iter().flat_map(|case| [(case, 1), (case, 1 << 20)]) {
        let error = outcome(written, cap).expect_err(&format!("{written:?}"));
        assert!(matches!(error.cause(), Error::Mismatch { .. }), "{error}");
        let text = error.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{written:?}: {text}");
        outcome([written[0]; 2], cap).unwrap();
    }
}

#[test]
fn a_local_parameter_is_written_on_one_rank_and_broadcast_to_none() {
    let layout = Layout::builder().param("common", 300).param("own", 70).local().build().unwrap();
    let own = layout.id("own").unwrap();
    let told = in_process(2, |comm| {
        let mut stepper = Stepper::builder(&layout, AdamW::default()).record(true).host(comm)?;
        step(&mut stepper, 0)?;
        stepper.take_recording();
        if stepper.rank() == 1 {
            stepper.write(own, &[5.0; 70])?;
        }
        step(&mut stepper, 1)?;
        let sent = broadcasts(&stepper.take_recording().unwrap().list).len();
        Ok::<_, Error>((sent, stepper.view::<f32>(own)?[0]))
    });
    let [(0, first), (0, second)] = told.unwrap()[..] else { panic!("something was broadcast") };
    assert!(first.abs() < 0.1 && second > 4.9, "{first} {second}");
}

/// A group in which the other rank agrees with every comparison.
struct Compared {
    agreed: Arc<Mutex<Vec<u64>>>,
    calls: Arc<Mutex<Vec<Option<u32>>>>,
}

impl Collective for Compared {
    fn rank(&self) -> u32 {
        0
    }

    fn world_size(&self) -> u32 {
        2
    }

    fn reaches(&self, place: Place) -> bool {
        place == Place::Cuda(0)
    }

    fn agree(&self, number: u64, _: Duration) -> Result<()> {
        self.agreed.lock().unwrap().push(number);
        Ok(())
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        if call.kind == CollectiveKind::Broadcast {
            self.calls.lock().unwrap().push(call.bucket);
        }
        Ok(())
    }

    fn abort(&self, _: &Error) {}
}

/// A GPU's collectives need not compare their calls, so ranks with different broadcasts would hang there.
#[test]
fn on_a_gpu_ranks_compare_what_they_wrote_before_they_broadcast_it() {
    let (agreed, calls) = (Arc::default(), Arc::default());
    let comm = Compared { agreed: Arc::clone(&agreed), calls: Arc::clone(&calls) };
    let cuda = Cuda::on(StandIn::new()).compute_stream(COMPUTE);
    let (layout, options) = (layout(&[300, 17]), Options { cap: Some(1), ..Options::default() });
    let optim = crate::support::few_optimizers()[0];
    let mut stepper = options.stepper_on(&cuda, &layout, optim, comm).unwrap();
    let mut step = || {
        pass(&mut stepper, &options, |_, gradient| {
            gradient.fill(1.0);
            true
        })
        .unwrap()
    };
    step();
    step();
    let take = |numbers: &Mutex<Vec<u64>>| std::mem::take(&mut *numbers.lock().unwrap());
    let take_calls = || std::mem::take(&mut *calls.lock().unwrap());
    assert_eq!((take(&agreed).len(), take_calls()), (1, vec![None]), "when it was built");
    let mut numbers = Vec::new();
    for (param, bucket) in [(0, 1), (1, 0), (1, 0)] {
        let id = layout.ids().nth(param).unwrap();
        stepper.write(id, &vec![1.0; layout.parameter(id).unwrap().len as usize]).unwrap();
        pass(&mut stepper, &options, |_, gradient| {
            gradient.fill(1.0);
            true
        })
        .unwrap();
        numbers.extend(take(&agreed));
        assert_eq!(take_calls(), [Some(bucket)]);
    }
    assert_eq!(numbers.len(), 3);
    assert_ne!(numbers[0], numbers[1], "other parameters");
    assert_eq!(numbers[1], numbers[2], "the same parameters");
}
