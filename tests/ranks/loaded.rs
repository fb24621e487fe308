//! Ranks load the same values of shared parameters, and different values of local ones.
//!
//! Each rank saves a checkpoint and continues with it in a new stepper. The reference is the uninterrupted run,
//! compared bit for bit.

use std::io::Cursor;

use instep::checkpoint;
use instep::{AdamW, Divisor, Error, InProcess, Layout, Mode, Result, Stepper, in_process};

use crate::stepper::several_optimizers::bits;
use crate::support::{MODES, paint_gradient};

const COMMON: &str = "common";

/// The parameter that is local to each rank, as an expert is.
const OWN: &str = "own";

fn layout() -> Layout {
    Layout::builder().param(COMMON, 300).param(OWN, 70).local().build().unwrap()
}

fn stepper(layout: &Layout, mode: Mode, comm: InProcess) -> Result<Stepper> {
    let builder = Stepper::builder(layout, AdamW::default()).mode(mode);
    builder.uneven_inputs(Divisor::ContributingRanks).host(comm)
}

/// Makes one pass, in which the local parameter may have no gradient.
fn pass(stepper: &mut Stepper, step: usize, has_own: bool) -> Result<()> {
    let (layout, rank) = (stepper.layout().clone(), stepper.rank() as usize);
    let mut pass = stepper.begin()?;
    for id in layout.ids().rev().filter(|id| has_own || Ok(*id) != layout.id(OWN)) {
        let len = layout.parameter(id)?.len as usize;
        let gradient: Vec<f32> = (0..len).map(|k| paint_gradient(step, rank, k)).collect();
        pass.write(id.grad(), &gradient)?;
        pass.grad_ready(id)?;
    }
    pass.finish()
}

/// Compares the uninterrupted run with one that every rank resumed from its own checkpoint.
fn assert_resumes_per_rank(begin: impl Fn(&mut Stepper) -> Result<()> + Sync) {
    let layout = layout();
    for mode in MODES {
        let go_on = |stepper: &mut Stepper| {
            (10..13).try_for_each(|step| pass(stepper, step, true))?;
            Ok::<_, Error>([COMMON, OWN].map(|name| bits(stepper, layout.id(name).unwrap()).unwrap()))
        };
        let whole = in_process(2, |comm| {
            let mut stepper = stepper(&layout, mode, comm)?;
            begin(&mut stepper)?;
            let mut bytes = Vec::new();
            checkpoint::write(&stepper, &mut bytes)?;
            Ok::<_, Error>((stepper.step_count(layout.id(OWN)?)?, bytes, go_on(&mut stepper)?))
        })
        .unwrap();
        assert_ne!(whole[0].0, whole[1].0, "{mode:?}: the ranks' own counts differ");
        let resumed = in_process(2, |comm| {
            let bytes = &whole[comm.rank() as usize].1;
            let mut stepper = stepper(&layout, mode, comm)?;
            checkpoint::read(&mut stepper, Cursor::new(bytes))?;
            go_on(&mut stepper)
        })
        .unwrap();
        for rank in 0..2 {
            assert_eq!(resumed[rank], whole[rank].2, "{mode:?}, rank {rank}");
        }
    }
}

#[test]
fn ranks_resume_their_own_local_parameters_after_one_of_them_joined() {
    assert_resumes_per_rank(|stepper| {
        let passes = 4 - stepper.rank() as usize;
        (0..passes).try_for_each(|step| pass(stepper, step, true))?;
        while stepper.join()? {}
        Ok(())
    });
}

#[test]
fn ranks_resume_their_own_local_parameters_when_one_of_them_had_no_gradient() {
    assert_resumes_per_rank(|stepper| {
        let is_idle = stepper.rank() == 1;
        (0..3).try_for_each(|step| pass(stepper, step, step != 1 || !is_idle))
    });
}

/// Returns the outcome if only one rank changes a parameter of this name.
fn outcome_of(name: &str, change: impl Fn(&mut Stepper, instep::ParamId) -> Result<()> + Sync) -> Result<()> {
    let layout = layout();
    let id = layout.id(name)?;
    in_process(2, |comm| {
        let mut stepper = stepper(&layout, Mode::Eager, comm)?;
        pass(&mut stepper, 0, true)?;
        if stepper.rank() == 1 {
            change(&mut stepper, id)?;
        }
        pass(&mut stepper, 1, true)?;
        stepper.status().map(drop)
    })
    .map(drop)
}

#[test]
fn loading_on_one_rank_only_is_a_mismatch_unless_the_parameter_is_local() {
    type Change = fn(&mut Stepper, instep::ParamId) -> Result<()>;
    let changes: [(&str, Change); 3] = [
        ("state_mut", |stepper, id| stepper.view_mut::<f32>(id.state("exp_avg")).map(|state| state[0] = 1.0)),
        ("write_state", |stepper, id| {
            let values = vec![1.0; stepper.layout().parameter(id)?.len as usize];
            stepper.write(id.state("exp_avg"), &values)
        }),
        ("set_step_count", |stepper, id| stepper.set_step_count(id, 9)),
    ];
    for (what, change) in changes {
        let error = outcome_of(COMMON, change).expect_err(what);
        assert!(matches!(error.cause(), Error::Mismatch { .. }), "{what}: {error}");
        outcome_of(OWN, change).unwrap_or_else(|error| panic!("{what} of a local parameter: {error}"));
    }
}
