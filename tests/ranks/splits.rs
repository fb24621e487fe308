//! Two steppers use one group of ranks: a critic and a generator, each on its own split.
//!
//! Their passes interleave differently on every rank, and each stepper ends with the bits that it has without the
//! other. The two layouts have different lengths, so a call that goes to the wrong split is a mismatch.

use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use instep::{Adam, Collective, Error, Layout, Mode, Sgd, Stepper, in_process};

use crate::support::{MODES, Optim, Options, Outcome, Presummed, layout, paint_params, pass};

const RANKS: u32 = 3;
const PASSES: usize = 12;
/// The deadline is longer than any of these tests takes: a test that ends sooner has not waited for it.
const DEADLINE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy)]
enum Net {
    Critic,
    Generator,
}

impl Net {
    fn layout(self) -> Layout {
        match self {
            Net::Critic => layout(&[300, 0, 257, 2049]),
            Net::Generator => layout(&[1000, 5]),
        }
    }

    fn optim(self) -> Optim {
        match self {
            Net::Critic => Optim::of(Adam { amsgrad: true, ..Adam::default() }),
            Net::Generator => Optim::of(Sgd { lr: 0.05, momentum: 0.9, ..Sgd::default() }),
        }
    }

    /// Returns a recording stepper with painted parameters.
    fn stepper(self, mode: Mode, comm: impl Collective + 'static) -> Stepper {
        let layout = self.layout();
        let builder = self.optim().builder(&layout).mode(mode).bucket_cap_bytes(2048);
        let mut stepper = builder.deadline(DEADLINE).record(true).host(comm).unwrap();
        paint_params(&mut stepper);
        stepper
    }
}

/// Makes one pass with multiples of 1/64, so that sums over ranks are exact in f32 and one rank can get them.
fn train(stepper: &mut Stepper, step: usize, ranks: std::ops::Range<u32>) -> Result<(), Error> {
    let gradient = |rank: u32, param: usize, element: usize| {
        let n = (step * 31 + rank as usize * 57 + param * 17 + element * 13) % 251;
        (n as f32 - 125.0) / 64.0
    };
    pass(stepper, &Options::default(), |param, values| {
        for (element, value) in values.iter_mut().enumerate() {
            *value = ranks.clone().map(|rank| gradient(rank, param, element)).sum();
        }
        true
    })
}

fn finish(stepper: Stepper) -> Result<Outcome, Error> {
    let mut stepper = stepper;
    let outcome = Outcome::of(&stepper)?;
    let recording = stepper.take_recording().unwrap();
    assert!(!recording.list.is_empty());
    assert_eq!(stepper.check(&recording), []);
    stepper.close()?;
    Ok(outcome)
}

/// Makes the same training with one rank that gets the sums.
fn alone(net: Net, mode: Mode) -> Outcome {
    let mut stepper = net.stepper(mode, Presummed(RANKS));
    for step in 0..PASSES {
        train(&mut stepper, step, 0..RANKS).unwrap();
    }
    finish(stepper).unwrap()
}

#[test]
fn steppers_interleaved_differently_on_every_rank_end_with_the_bits_of_each_alone() {
    for mode in MODES {
        let outcomes = in_process(RANKS, |comm| {
            let rank = comm.rank();
            let mut critic = Net::Critic.stepper(mode, comm.split());
            let mut generator = Net::Generator.stepper(mode, comm);
            for step in 0..PASSES {
                // The first pass of a stepper waits for all ranks, each later one for the one before it.
                let critic_first = step == 0 || [true, false, step % 2 == 0][rank as usize];
                let (first, second) =
                    if critic_first { (&mut critic, &mut generator) } else { (&mut generator, &mut critic) };
                train(first, step, rank..rank + 1)?;
                train(second, step, rank..rank + 1)?;
            }
            Ok::<_, Error>([finish(critic)?, finish(generator)?])
        });
        let (critic, generator) = (alone(Net::Critic, mode), alone(Net::Generator, mode));
        for [on_split, on_first] in outcomes.unwrap() {
            on_split.assert_same(&critic, &format!("critic, {mode:?}"));
            on_first.assert_same(&generator, &format!("generator, {mode:?}"));
        }
    }
}

#[test]
fn passes_of_two_steppers_may_be_open_at_once() {
    let outcomes = in_process(RANKS, |comm| {
        let rank = comm.rank();
        let mut critic = Net::Critic.stepper(Mode::Eager, comm.split());
        let mut generator = Net::Generator.stepper(Mode::Eager, comm);
        for step in 0..PASSES {
            let layout = critic.layout().clone();
            let mut open = critic.begin()?;
            for (k, id) in layout.ids().enumerate().rev() {
                open.grads().get_mut(id)?.fill(k as f32);
                open.grad_ready(id)?;
                if k == rank as usize {
                    train(&mut generator, step, rank..rank + 1)?;
                }
            }
            open.finish()?;
        }
        finish(critic)?;
        finish(generator)
    });
    let generator = alone(Net::Generator, Mode::Eager);
    for outcome in outcomes.unwrap() {
        outcome.assert_same(&generator, "generator");
    }
}

/// Makes two good passes of each of two steppers; then rank 1 acts and the others continue with both. Returns the
/// group's error, and the errors of critic and generator on each other rank.
fn misbehave(act: impl Fn(Stepper, Stepper) -> Result<(), Error> + Sync) -> (Error, Vec<[Error; 2]>) {
    let seen = Mutex::new(Vec::new());
    let began = Instant::now();
    let outcome = in_process(RANKS, |comm| {
        let rank = comm.rank();
        let mut critic = Net::Critic.stepper(Mode::Eager, comm.split());
        let mut generator = Net::Generator.stepper(Mode::Eager, comm);
        for step in 0..2 {
            train(&mut critic, step, rank..rank + 1)?;
            train(&mut generator, step, rank..rank + 1)?;
            // A rank that goes on must not be caught by the failure while it is still here.
            critic.status()?;
            generator.status()?;
        }
        if rank == 1 {
            return act(critic, generator);
        }
        let last = |stepper: &mut Stepper| loop {
            if let Err(error) = train(stepper, 2, rank..rank + 1) {
                return error;
            }
        };
        let errors = [last(&mut critic), last(&mut generator)];
        seen.lock().unwrap().push(errors.clone());
        Err(errors[0].clone())
    });
    assert!(began.elapsed() < DEADLINE, "nobody waited for the deadline");
    let seen = seen.into_inner().unwrap();
    assert_eq!(seen.len(), RANKS as usize - 1, "both other ranks end with errors");
    (outcome.unwrap_err(), seen)
}

fn lost(rank: u32) -> impl Fn(&Error) -> bool {
    move |error| matches!(error.cause(), Error::PeerLost { rank: lost, .. } if *lost == rank)
}

#[test]
fn a_failure_on_one_split_ends_the_other() {
    for first in [true, false] {
        let (_, seen) = misbehave(|critic, generator| {
            let (mut failing, mut staying) = if first { (generator, critic) } else { (critic, generator) };
            // Dropped inside a pass: the device is told to abort the group.
            std::mem::forget(failing.begin()?);
            drop(failing);
            // Nobody has left the group: what ends this stepper is the other one's failure.
            loop {
                train(&mut staying, 2, 1..2)?;
            }
        });
        assert!(seen.iter().flatten().all(lost(1)), "{seen:?}");
    }
}

#[test]
fn a_body_that_errs_or_panics_ends_every_split() {
    let (cause, seen) = misbehave(|_, _| Err(Error::order("test", "made up", "")));
    assert_eq!(cause, Error::order("test", "made up", ""));
    assert!(seen.iter().flatten().all(lost(1)), "{seen:?}");
    let (cause, seen) = misbehave(|_, _| panic!("out of data"));
    assert!(matches!(&cause, Error::Rank { rank: 1, message } if message == "out of data"), "{cause}");
    assert!(seen.iter().flatten().all(lost(1)), "{seen:?}");
}

#[test]
fn a_rank_that_leaves_one_split_or_all_ends_the_others() {
    let (_, seen) = misbehave(|critic, generator| critic.close().and_then(|()| generator.close()));
    assert!(seen.iter().flatten().all(lost(1)), "{seen:?}");
    let (_, seen) = misbehave(|critic, mut generator| {
        critic.close()?;
        // The group ends although this rank goes on with its other stepper.
        loop {
            train(&mut generator, 2, 1..2)?;
        }
    });
    assert!(seen.iter().flatten().all(lost(1)), "{seen:?}");
}

/// Rank 0 splits twice and rank 1 once; then rank 0 calls on its second split, and rank 1 keeps or drops its seats.
fn split_unevenly(deadline: Duration, rank_1_stays: bool) -> Error {
    let layout = layout(&[5]);
    let over = Barrier::new(2);
    let outcome = in_process(2, |comm| {
        let (rank, first) = (comm.rank(), comm.split());
        if rank == 1 {
            let held = rank_1_stays.then_some((comm, first));
            over.wait();
            drop(held);
            return Ok(());
        }
        let mut stepper = Stepper::builder(&layout, Sgd::default()).deadline(deadline).host(first.split())?;
        let outcome = train(&mut stepper, 0, 0..1).and_then(|()| stepper.status().map(|_| ()));
        over.wait();
        outcome
    });
    outcome.unwrap_err()
}

#[test]
fn a_split_that_only_one_rank_made_is_a_deadline() {
    let error = split_unevenly(Duration::from_millis(100), true);
    assert!(matches!(error.cause(), Error::Deadline { missing, .. } if missing == &[1]), "{error}");
}

#[test]
fn a_split_that_only_one_rank_made_is_a_lost_peer_once_the_other_has_dropped_its_communicators() {
    let error = split_unevenly(DEADLINE, false);
    assert!(lost(1)(&error), "{error}");
}

#[test]
fn a_group_that_has_ended_refuses_calls_on_later_splits() {
    let layout = layout(&[5]);
    let outcome = in_process(2, |comm| {
        if comm.rank() == 1 {
            return Err(Error::order("test", "made up", ""));
        }
        let open = |comm| Stepper::builder(&layout, Sgd::default()).deadline(DEADLINE).host(comm);
        let mut first = open(comm.split())?;
        assert!(train(&mut first, 0, 0..1).and_then(|()| first.status().map(|_| ())).is_err());
        let mut late = open(comm.split())?;
        let error = train(&mut late, 0, 0..1).and_then(|()| late.status().map(|_| ())).unwrap_err();
        assert!(lost(1)(&error), "{error}");
        Ok(())
    });
    assert_eq!(outcome.unwrap_err(), Error::order("test", "made up", ""));
}
