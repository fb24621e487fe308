//! Survivors of a lost rank can still read all results of the ops that ran, and no further op runs.
//!
//! The reference is the same group, which ends in order before the pass in which the rank is lost.

use std::io::Cursor;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use instep::checkpoint;
use instep::{AdamW, Error, InProcess, Layout, Mode, Result, Solo, Stepper, in_process};

use crate::ranks::zero::offloading;
use crate::support::{MODES, Options, Outcome, layout, paint_gradient, paint_params, pass};

const RANKS: u32 = 3;
const PASSES: usize = 3;

/// A mode, and whether steps run on the host.
type Way = (Mode, bool);

fn open(layout: &Layout, (mode, offloads): Way, comm: InProcess) -> Result<Stepper> {
    let builder = Stepper::builder(layout, AdamW::default()).mode(mode).bucket_cap_bytes(1);
    let mut stepper = offloading(builder, offloads).deadline(Duration::from_secs(60)).host(comm)?;
    paint_params(&mut stepper);
    Ok(stepper)
}

fn step(stepper: &mut Stepper, step: usize) -> Result<()> {
    let rank = stepper.rank() as usize;
    pass(stepper, &Options::default(), |param, values| {
        values.iter_mut().enumerate().for_each(|(k, g)| *g = paint_gradient(step + 7 * rank, param, k));
        true
    })
}

/// Trains until rank 1 is lost, and returns the rescued others.
fn survivors(layout: &Layout, mode: Way, act: impl Fn(Stepper) -> Result<()> + Sync) {
    // The group's error is the lost rank's, also if an assertion of another one fails.
    let survived = AtomicUsize::new(0);
    let outcome = in_process(RANKS, |comm| {
        let is_lost = comm.rank() == 1;
        let mut stepper = open(layout, mode, comm)?;
        (0..PASSES).try_for_each(|at| step(&mut stepper, at))?;
        // A failure skips the steps that have not run yet.
        stepper.status()?;
        if is_lost {
            return Err(Error::Hook("the power is out".into()));
        }
        let failure = step(&mut stepper, PASSES).and_then(|()| stepper.status().map(drop)).unwrap_err();
        assert!(matches!(failure, Error::Poisoned { .. }), "{failure}");
        stepper.rescue()?;
        act(stepper)?;
        survived.fetch_add(1, SeqCst);
        Ok(())
    });
    assert_eq!(survived.into_inner(), RANKS as usize - 1);
    assert_eq!(outcome, Err(Error::Hook("the power is out".into())));
}

#[test]
fn survivors_read_what_the_last_complete_pass_has_left() {
    let layout = layout(&[300, 17, 0, 700]);
    for mode in MODES.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
        let whole = in_process(RANKS, |comm| {
            let mut stepper = open(&layout, mode, comm)?;
            (0..PASSES).try_for_each(|at| step(&mut stepper, at))?;
            Outcome::of(&stepper)
        });
        let whole = whole.unwrap();
        survivors(&layout, mode, |stepper| {
            let rescued = Outcome::of(&stepper)?;
            // The lost rank took no part in any sum of its last pass, so Eager has stepped nothing of it either.
            rescued.assert_same(&whole[stepper.rank() as usize], &format!("{mode:?}"));
            let mut saved = Vec::new();
            checkpoint::write(&stepper, &mut saved)?;
            let mut resumed = Stepper::host(&layout, AdamW::default(), Solo::default())?;
            checkpoint::read(&mut resumed, Cursor::new(saved))?;
            Outcome::of(&resumed)?.assert_same(&rescued, "saved");
            Ok(())
        });
    }
}

#[test]
fn a_rescued_stepper_refuses_to_train_and_reports_its_failure_when_it_is_closed() {
    let layout = layout(&[300]);
    survivors(&layout, (Mode::Eager, false), |mut stepper| {
        let id = layout.ids().next().unwrap();
        let poisoned = |outcome: Result<()>| {
            assert!(matches!(outcome, Err(Error::Poisoned { .. })), "{outcome:?}");
        };
        poisoned(stepper.begin().map(drop));
        poisoned(stepper.rebuild_buckets().map(drop));
        poisoned(stepper.add_optimizer_for(&[id], AdamW::default()).map(drop));
        stepper.rescue()?;
        stepper.status()?;
        poisoned(stepper.close());
        Ok(())
    });
}

#[test]
fn a_stepper_that_has_not_failed_goes_on_after_a_rescue() {
    let layout = layout(&[300]);
    let run = |rescues: bool| {
        let outcomes = in_process(2, |comm| {
            let mut stepper = open(&layout, (Mode::Normed, true), comm)?;
            for at in 0..PASSES {
                step(&mut stepper, at)?;
                if rescues {
                    stepper.rescue()?;
                }
            }
            Outcome::of(&stepper)
        });
        outcomes.unwrap()
    };
    for (rescued, plain) in run(true).iter().zip(run(false)) {
        rescued.assert_same(&plain, "nothing to rescue");
    }
    let mut stepper = Stepper::host(&layout, AdamW::default(), Solo::default()).unwrap();
    std::mem::forget(stepper.begin().unwrap());
    assert!(matches!(stepper.rescue(), Err(Error::Order(_))));
}
