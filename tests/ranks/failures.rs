//! Ranks panic, return errors, leave or come late, and trainers misuse a pass.
//!
//! Every other rank ends with an error, and the cause is reported before the errors that follow from it.

use std::sync::Mutex;
use std::time::Duration;

use instep::{AdamW, Collective, Error, InProcess, Layout, Mode, Sgd, Solo, Stepper, in_process};

/// The deadline never passes in these tests, even on a busy machine: each event here ends a group at once.
const DEADLINE: Duration = Duration::from_secs(60);

/// The deadline of the test in which it must pass.
const SHORT_DEADLINE: Duration = Duration::from_secs(2);

fn layout() -> Layout {
    Layout::builder().param("a", 300).param("b", 300).build().unwrap()
}

fn stepper(layout: &Layout, deadline: Duration, comm: InProcess) -> Stepper {
    Stepper::builder(layout, AdamW::default()).bucket_cap_bytes(1).deadline(deadline).host(comm).unwrap()
}

/// Makes one complete pass.
fn step(stepper: &mut Stepper) -> Result<(), Error> {
    let layout = stepper.layout().clone();
    let mut pass = stepper.begin()?;
    for id in layout.ids().rev() {
        pass.split().1.get_mut(id)?.fill(1.0);
        pass.grad_ready(id)?;
    }
    pass.finish()?;
    stepper.status()?;
    Ok(())
}

/// Runs three ranks, of which rank 1 misbehaves after two good passes; returns the group's error and the errors of
/// ranks 0 and 2.
fn misbehave(act: impl Fn(Stepper) -> Result<(), Error> + Sync) -> (Error, Vec<Error>) {
    misbehave_within(DEADLINE, |stepper, _| act(stepper))
}

/// Does the same with this deadline; rank 1 also gets the errors that the other two have seen so far.
fn misbehave_within(
    deadline: Duration,
    act: impl Fn(Stepper, &Mutex<Vec<Error>>) -> Result<(), Error> + Sync,
) -> (Error, Vec<Error>) {
    let layout = layout();
    let seen = Mutex::new(Vec::new());
    let outcome = in_process(3, |comm| {
        let rank = comm.rank();
        let mut stepper = stepper(&layout, deadline, comm);
        for _ in 0..2 {
            step(&mut stepper)?;
        }
        if rank == 1 {
            return act(stepper, &seen);
        }
        for _ in 0..1000 {
            if let Err(error) = step(&mut stepper) {
                seen.lock().unwrap().push(error.clone());
                return Err(error);
            }
        }
        Ok(())
    });
    let seen = seen.into_inner().unwrap();
    assert_eq!(seen.len(), 2, "both other ranks end with an error");
    (outcome.unwrap_err(), seen)
}

#[test]
fn a_panicking_rank_ends_the_others_and_is_the_reported_cause() {
    let (cause, seen) = misbehave(|mut stepper| {
        let _pass = stepper.begin()?;
        panic!("out of data");
    });
    assert!(matches!(&cause, Error::Rank { rank: 1, message } if message == "out of data"), "{cause}");
    assert!(seen.iter().all(|e| matches!(e.cause(), Error::PeerLost { rank: 1, .. })), "{seen:?}");
}

#[test]
fn a_rank_that_returns_an_error_ends_the_others() {
    let (cause, seen) = misbehave(|_| Err(Error::order("test", "made up", "")));
    assert_eq!(cause, Error::order("test", "made up", ""));
    assert!(seen.iter().all(|e| matches!(e.cause(), Error::PeerLost { rank: 1, .. })), "{seen:?}");
}

#[test]
fn a_rank_that_leaves_early_ends_the_others() {
    let (_, seen) = misbehave(|stepper| stepper.close());
    assert!(seen.iter().all(|e| matches!(e.cause(), Error::PeerLost { rank: 1, .. })), "{seen:?}");
}

#[test]
fn a_rank_that_drops_its_stepper_inside_a_pass_ends_the_others() {
    let (_, seen) = misbehave(|mut stepper| {
        std::mem::forget(stepper.begin()?);
        Ok(())
    });
    let told =
        |e: &Error| matches!(e.cause(), Error::PeerLost { rank: 1, why } if why.contains("inside a pass"));
    assert!(seen.iter().all(told), "{seen:?}");
}

#[test]
fn a_late_rank_ends_the_others_at_the_deadline_and_itself_when_it_comes() {
    let (cause, seen) = misbehave_within(SHORT_DEADLINE, |mut stepper, seen| {
        while seen.lock().unwrap().len() < 2 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let late = step(&mut stepper).unwrap_err();
        assert!(matches!(late.cause(), Error::PeerLost { .. }), "{late}");
        Err(late)
    });
    assert!(matches!(cause.cause(), Error::Deadline { missing, .. } if missing == &[1]), "{cause}");
    let deadline = |e: &Error| matches!(e.cause(), Error::Deadline { .. } | Error::PeerLost { .. });
    assert!(seen.iter().all(deadline), "{seen:?}");
}

#[test]
fn a_rank_that_abandons_alone_is_named_with_its_pass_on_all_ranks() {
    type Leave = fn(&mut Stepper) -> Result<(), Error>;
    let acts: [Leave; 2] =
        [|stepper| stepper.begin()?.abandon().map(drop), |stepper| stepper.begin().map(drop)];
    for leave in acts {
        let (cause, seen) = misbehave(|mut stepper| {
            leave(&mut stepper)?;
            step(&mut stepper)
        });
        for error in seen.iter().chain([&cause]) {
            assert!(matches!(error.cause(), Error::LeftPass { rank: 1, pass: 3, .. }), "{error}");
        }
    }
}

#[test]
fn ranks_are_told_which_part_of_their_agreement_differs_and_by_what() {
    let words = [
        ("layout", ["a of [301] in", "a of [300] in"]),
        ("learning rates", ["Sgd { lr: 0.1 }", "Sgd { lr: 0.2 }"]),
        ("options", ["`loss_scale: Constant(2.0)`", "`loss_scale: Constant(1.0)`"]),
        ("written parameters", ["`frozen: parameter 1`", "``"]),
        ("loaded values", ["rank 1", "rank 0"]),
    ];
    for (differ, (word, values)) in words.into_iter().enumerate() {
        let outcome = in_process(2, |comm| {
            let odd = comm.rank() == 1;
            let len = if odd && differ == 0 { 301 } else { 300 };
            let lr = if odd && differ == 1 { 0.1 } else { 0.2 };
            let layout = Layout::builder().param("a", len).param("b", 1).build()?;
            let optimizer = Sgd { lr, ..Default::default() };
            let scale = if odd && differ == 2 { 2.0 } else { 1.0 };
            let builder = Stepper::builder(&layout, optimizer).loss_scale(scale);
            let mut stepper = builder.deadline(DEADLINE).host(comm)?;
            let id = layout.id("a")?;
            match differ {
                3 if odd => stepper.set_frozen(layout.id("b")?, true)?,
                4 if odd => stepper.set_step_count(id, 5)?,
                _ => {}
            }
            stepper.begin()?.finish()?;
            stepper.status().map(drop)
        });
        let error = outcome.unwrap_err();
        let Error::Mismatch { differs, .. } = error.cause() else { panic!("{error}") };
        assert!(differs.contains(word) && !differs.contains("several"), "{word}: {error}");
        assert!(values.iter().all(|value| differs.contains(value)), "{word}: {error}");
    }
}

#[test]
fn all_ranks_may_abandon_together_and_go_on() {
    for mode in [Mode::Sequential, Mode::Eager, Mode::Normed] {
        let layout = layout();
        let counts = in_process(3, |comm| {
            let builder = Stepper::builder(&layout, AdamW::default()).mode(mode).bucket_cap_bytes(1);
            let mut stepper = builder.deadline(DEADLINE).host(comm)?;
            let (a, b) = (layout.id("a")?, layout.id("b")?);
            step(&mut stepper)?;
            let before = [stepper.view::<f32>(a)?.to_vec(), stepper.view::<f32>(b)?.to_vec()];
            let mut pass = stepper.begin()?;
            pass.split().1.get_mut(b)?.fill(2.0);
            pass.grad_ready(b)?;
            let abandoned = pass.abandon()?;
            let after = [stepper.view::<f32>(a)?.to_vec(), stepper.view::<f32>(b)?.to_vec()];
            assert_eq!(before[0], after[0]);
            if mode == Mode::Eager {
                assert_eq!(abandoned.stepped_buckets, [0]);
                assert_ne!(before[1], after[1]);
            } else {
                assert!(abandoned.stepped_buckets.is_empty());
                assert_eq!(before[1], after[1]);
            }
            step(&mut stepper)?;
            Ok::<_, Error>([stepper.step_count(a)?, stepper.step_count(b)?])
        })
        .unwrap();
        let eager = u64::from(mode == Mode::Eager);
        assert!(counts.iter().all(|c| *c == [2, 2 + eager]), "{mode:?} {counts:?}");
    }
}

#[test]
fn an_error_is_sticky_and_nothing_hangs_after_it() {
    let layout = layout();
    let outcome = in_process(2, |comm| {
        if comm.rank() == 1 {
            return Ok(());
        }
        let mut stepper = stepper(&layout, DEADLINE, comm);
        let first = step(&mut stepper).unwrap_err();
        assert!(matches!(first, Error::Poisoned { .. }));
        // Eight more passes queue up after the failure and are skipped.
        for _ in 0..8 {
            assert!(step(&mut stepper).is_err());
        }
        assert_eq!(stepper.status().unwrap_err(), first);
        assert_eq!(stepper.status().unwrap_err(), first);
        stepper.close()
    });
    assert!(matches!(outcome.unwrap_err().cause(), Error::PeerLost { rank: 1, .. }));
}

#[test]
fn a_collective_that_panics_poisons_its_rank_only() {
    struct Panicking;
    impl Collective for Panicking {
        fn rank(&self) -> u32 {
            0
        }
        fn world_size(&self) -> u32 {
            1
        }
        fn enqueue(&self, _: &mut instep::collective::Call<'_>) -> instep::Result<()> {
            panic!("no network")
        }
        fn abort(&self, _: &Error) {}
    }
    let mut stepper = Stepper::host(&layout(), Sgd::default(), Panicking).unwrap();
    let error = step(&mut stepper).unwrap_err();
    assert!(matches!(error.cause(), Error::Rank { message, .. } if message == "no network"), "{error}");
}

#[test]
fn misuse_of_a_pass_is_refused_and_changes_nothing() {
    let layout = Layout::builder().param("a", 3).param("tied", 2).uses(2).build().unwrap();
    let (a, tied) = (layout.id("a").unwrap(), layout.id("tied").unwrap());
    let other = Layout::builder().param("a", 4).build().unwrap();
    let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Default::default() }, Solo::default()).unwrap();
    let is_order = |outcome: Result<(), Error>| matches!(outcome, Err(Error::Order(_)));
    let is_layout = |outcome: Result<(), Error>| matches!(outcome, Err(Error::Layout(_)));

    let mut pass = stepper.begin().unwrap();
    assert!(is_order(pass.grad_ready(a)), "not written");
    assert!(is_order(pass.bucket_ready(0)), "not written");
    assert!(is_layout(pass.bucket_ready(1)), "no such bucket");
    assert!(is_layout(pass.grad_ready(other.id("a").unwrap())));
    assert!(is_layout(pass.split().1.write(a, &[1.0])), "wrong length");
    assert!(is_layout(pass.split().1.get_disjoint_mut::<f32, 2>([a, a]).map(|_| ())));
    assert!(pass.is_first(tied).unwrap());
    pass.split().1.add(tied, &[1.0, 2.0]).unwrap();
    pass.grad_ready(tied).unwrap();
    pass.split().1.add(tied, &[3.0, 4.0]).unwrap();
    pass.grad_ready(tied).unwrap();
    assert!(is_order(pass.grad_ready(tied)), "handed over more often than used");
    assert!(is_order(pass.split().1.add(tied, &[0.0, 0.0])), "out of reach");
    assert!(is_order(pass.split().0.get(tied).map(|_| ())), "out of reach");
    pass.split().1.write(a, &[1.0; 3]).unwrap();
    pass.grad_ready(a).unwrap();
    pass.finish().unwrap();
    assert_eq!(stepper.view::<f32>(tied).unwrap(), [-4.0, -6.0]);

    std::mem::forget(stepper.begin().unwrap());
    assert!(is_order(stepper.begin().map(|_| ())), "a leaked pass stays open");
    assert!(is_order(stepper.status().map(|_| ())));
    stepper.abandon().unwrap();
    assert!(is_order(stepper.abandon().map(|_| ())));
    stepper.begin().unwrap().finish().unwrap();
    stepper.close().unwrap();
}

#[test]
fn what_was_written_counts_even_if_it_was_not_handed_over_as_often_as_declared() {
    let layout = Layout::builder().param("tied", 2).uses(2).param("left", 1).param("out", 1).build().unwrap();
    let ids: Vec<_> = layout.ids().collect();
    let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Default::default() }, Solo::default()).unwrap();
    let mut pass = stepper.begin().unwrap();
    pass.grads().write(ids[0], &[1.0, 2.0]).unwrap();
    pass.grad_ready(ids[0]).unwrap();
    pass.grads().write(ids[1], &[3.0]).unwrap();
    pass.finish().unwrap();
    let params = stepper.params();
    assert_eq!(params.get(ids[0]).unwrap(), [-1.0, -2.0]);
    assert_eq!(params.get(ids[1]).unwrap(), [-3.0]);
    assert_eq!(stepper.step_count(ids[2]).unwrap(), 0, "nothing was written");
}

#[test]
fn a_status_before_any_decision_says_that_there_is_none() {
    for mode in [Mode::Sequential, Mode::Eager, Mode::Normed] {
        let layout = layout();
        let mut stepper = Stepper::builder(&layout, Sgd::default()).mode(mode).host(Solo::default()).unwrap();
        let told = |stepper: &Stepper| {
            let status = stepper.status().unwrap();
            (status.skipped, status.norm, status.clip, status.first_nonfinite_bucket)
        };
        assert_eq!(told(&stepper), (false, None, 1.0, None), "before the first pass");
        stepper.begin().unwrap().finish().unwrap();
        assert_eq!(told(&stepper).1, (mode == Mode::Normed).then_some(0.0));
        stepper.begin().unwrap().abandon().unwrap();
        assert_eq!(told(&stepper), (false, None, 1.0, None), "after a pass that was given up");
    }
}

#[test]
fn a_stepper_may_move_to_another_thread() {
    fn assert_send<T: Send>() {}
    assert_send::<Stepper>();
    assert_send::<InProcess>();
}
