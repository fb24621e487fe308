//! Ranks that step shards fail, die or come late in any of their calls: all ranks get an error, and none hangs.
//!
//! A communicator counts its rank's calls on both streams, and one of them fails.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use instep::collective::{Call, CallKey, CollectiveKind};
use instep::{
    Clip, Collective, DType, Error, InProcess, Lamb, Layout, Mode, Result, Sgd, Stepper, Strategy, in_process,
};

use crate::ranks::zero::{bucket_of, offloading};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Ending {
    Errs,
    Panics,
    ComesLate,
}

/// A communicator whose call number `at` fails on rank 1.
pub(crate) struct Failing {
    inner: Arc<dyn Collective>,
    pub(crate) calls: Arc<AtomicUsize>,
    /// Whether this is rank 1, whatever its number in a group.
    fails: bool,
    at: usize,
    ending: Ending,
}

impl Failing {
    pub(crate) fn new(inner: InProcess, at: usize, ending: Ending) -> Failing {
        Failing { fails: inner.rank() == 1, inner: Arc::new(inner), calls: Arc::default(), at, ending }
    }
}

impl Collective for Failing {
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn world_size(&self) -> u32 {
        self.inner.world_size()
    }

    fn supports(&self, kind: CollectiveKind) -> bool {
        self.inner.supports(kind)
    }

    fn duplicate(&self) -> Result<Arc<dyn Collective>> {
        let inner = self.inner.duplicate()?;
        Ok(Arc::new(Failing { inner, calls: Arc::clone(&self.calls), ..*self }))
    }

    fn subgroup(&self, ranks: &[u32]) -> Result<Arc<dyn Collective>> {
        let (inner, calls) = (self.inner.subgroup(ranks)?, Arc::clone(&self.calls));
        Ok(Arc::new(Failing { inner, calls, ..*self }))
    }

    fn enqueue(&self, call: &mut Call<'_>) -> Result<()> {
        if self.fails && self.calls.fetch_add(1, SeqCst) == self.at {
            match self.ending {
                Ending::Errs => return Err(Error::Hook("made up".to_owned())),
                Ending::Panics => panic!("made up"),
                Ending::ComesLate => std::thread::sleep(Duration::from_millis(30)),
            }
        }
        self.inner.enqueue(call)
    }

    fn abort(&self, cause: &Error) {
        self.inner.abort(cause);
    }
}

/// A strategy, whether it offloads, the number of ranks, and the number of ranks that shard tensors.
type Sharing = (Strategy, bool, u32, u32);

const SHARINGS: [Sharing; 8] = [
    (Strategy::Zero, false, 3, 3),
    (Strategy::Fsdp, false, 3, 3),
    (Strategy::Zero, false, 4, 2),
    (Strategy::Fsdp, false, 4, 2),
    (Strategy::Replicated, true, 3, 3),
    (Strategy::Zero, true, 3, 3),
    (Strategy::Fsdp, true, 3, 3),
    (Strategy::Fsdp, true, 4, 2),
];

/// Makes three passes, with an optimizer that stops in each step to share norms. Returns how each rank ended, and how
/// many calls rank 1 made.
fn train(
    (strategy, offloads, ranks, shard_size): Sharing,
    mode: Mode,
    at: usize,
    ending: Ending,
) -> (Vec<Result<()>>, usize) {
    let layout = Layout::builder().param("a", 700).param("b", 300).build().unwrap();
    let calls = AtomicUsize::new(0);
    let ends = in_process(ranks, |comm| {
        let all = comm.split();
        let comm = Failing::new(comm, at, ending);
        let made = Arc::clone(&comm.calls);
        let rank = comm.rank();
        let builder = Stepper::builder(&layout, Lamb::default()).mode(mode).bucket_cap_bytes(1);
        let builder = if mode == Mode::Eager { builder } else { builder.clip(Clip::Global(1.0)) };
        let builder = match strategy {
            Strategy::Replicated => builder,
            _ => builder.shard_size(NonZeroU32::new(shard_size).unwrap()),
        };
        let builder = offloading(builder, offloads).strategy(strategy);
        let mut stepper = builder.deadline(Duration::from_secs(60)).host(comm)?;
        let mut passes = || {
            for _ in 0..3 {
                for id in layout.ids() {
                    let bucket = bucket_of(&stepper, id)?;
                    stepper.unshard(bucket)?;
                    stepper.view::<f32>(id)?;
                    stepper.reshard(bucket)?;
                }
                let mut pass = stepper.begin()?;
                for id in layout.ids().rev() {
                    let bucket = bucket_of(&pass, id)?;
                    pass.unshard(bucket)?;
                    pass.grads().get_mut(id)?.fill(1.0);
                    pass.grad_ready(id)?;
                }
                pass.finish()?;
                stepper.status()?;
            }
            stepper.gather(layout.id("a")?, &mut [0.0; 700])
        };
        // Ranks of other groups meet a rank that fails in its last calls no more, but here.
        let end = passes().and_then(|()| meet(&all));
        if rank == 1 {
            calls.store(made.load(SeqCst), SeqCst);
        }
        Ok(end)
    });
    (ends.unwrap(), calls.into_inner())
}

fn meet(all: &InProcess) -> Result<()> {
    let (kind, mut one) = (CollectiveKind::AllReduce, [1.0f32]);
    let key = CallKey { kind, pass: 0, bucket: None, dtype: DType::F32, bytes: 4, agreement: 0 };
    let bytes = bytemuck::cast_slice_mut(&mut one);
    all.enqueue(&mut Call::on_host(all, key, None, bytes, Duration::from_secs(60))?)
}

#[test]
fn a_rank_that_fails_in_any_call_ends_all_ranks_with_an_error() {
    for (strategy, mode) in
        SHARINGS.into_iter().flat_map(|sharing| [Mode::Eager, Mode::Normed].map(|mode| (sharing, mode)))
    {
        let (ends, calls) = train(strategy, mode, usize::MAX, Ending::Errs);
        assert!(
            ends.iter().all(Result::is_ok) && calls > if strategy.0 == Strategy::Replicated { 6 } else { 15 },
            "{calls} calls, {ends:?}"
        );
        for at in 0..calls {
            let ending = [Ending::Errs, Ending::Panics][at % 2];
            let since = Instant::now();
            let (ends, _) = train(strategy, mode, at, ending);
            for (rank, end) in ends.iter().enumerate() {
                let error = end.as_ref().expect_err("every rank ends");
                let is_own = rank == 1 && error.to_string().contains("made up");
                let is_lost = matches!(error.cause(), Error::PeerLost { rank: 1, .. });
                assert!(is_own || is_lost, "call {at}, {ending:?}, rank {rank}: {error}");
            }
            assert!(since.elapsed() < Duration::from_secs(50), "a deadline ended it, not the failure");
        }
    }
}

#[test]
fn a_rank_that_is_late_in_a_call_is_waited_for() {
    for at in [0, 3, 7, 8] {
        for strategy in SHARINGS {
            let (ends, _) = train(strategy, Mode::Eager, at, Ending::ComesLate);
            assert!(ends.iter().all(Result::is_ok), "call {at}: {ends:?}");
        }
    }
}

/// All elements of a parameter have the same gradients, so a partly updated parameter would show.
#[test]
fn a_rescued_rank_reads_no_parameter_that_is_new_in_part() {
    let layout = Layout::builder().param("a", 700).param("b", 300).build().unwrap();
    let (whole, torn) = (AtomicUsize::new(0), AtomicUsize::new(0));
    for (mode, offloads) in [(Mode::Eager, false), (Mode::Normed, false), (Mode::Sequential, true)] {
        for at in 4..24 {
            let ends = in_process(2, |comm| {
                let builder = Stepper::builder(&layout, Sgd { lr: 0.5, ..Sgd::default() }).mode(mode);
                let builder = offloading(builder.bucket_cap_bytes(1), offloads).strategy(Strategy::Zero);
                let mut stepper = builder.host(Failing::new(comm, at, Ending::Errs))?;
                let mut passes = || {
                    for _ in 0..3 {
                        let mut pass = stepper.begin()?;
                        for id in layout.ids().rev() {
                            pass.grads().get_mut(id)?.fill(1.0);
                            pass.grad_ready(id)?;
                        }
                        pass.finish()?;
                        stepper.status()?;
                    }
                    Ok(())
                };
                let end: Result<()> = passes();
                stepper.rescue()?;
                for id in layout.ids().filter(|_| end.is_err()) {
                    let mut values = vec![0.0; layout.parameter(id)?.len as usize];
                    let views = stepper.view::<f32>(id).map(<[f32]>::to_vec);
                    match stepper.read(id, &mut values) {
                        Ok(()) => {
                            assert!(values.iter().all(|value| *value == values[0]), "call {at}, {mode:?}");
                            assert_eq!(views, Ok(values));
                            whole.fetch_add(1, SeqCst);
                        }
                        Err(error) => {
                            assert!(error.to_string().contains("parts of its last step"), "{error}");
                            assert_eq!(views, Err(error));
                            torn.fetch_add(1, SeqCst);
                        }
                    }
                }
                Ok(())
            });
            assert_eq!(ends.map(drop), Ok(()), "call {at}, {mode:?}");
        }
    }
    assert!(whole.into_inner() > 50 && torn.into_inner() > 10);
}
