//! A local parameter belongs to its rank: nothing that only one rank does with it may end the group.
//!
//! The same action on a parameter of all ranks is a mismatch, which proves that ranks do compare.

use instep::{Error, Layout, Mode, Optimizer, ParamId, Result, Sgd, Stepper, Unused, in_process};

const LEN: usize = 300;

/// What only one rank does with a parameter in an open pass.
#[derive(Clone, Copy, Debug)]
enum Alone {
    /// Names the parameter as unused before its hand-over, or instead of it.
    UnusedBefore,
    /// Names the parameter as unused after its hand-over.
    UnusedAfter,
    /// Hands no gradient over.
    Missing,
}

const ALL: [Alone; 3] = [Alone::UnusedBefore, Alone::UnusedAfter, Alone::Missing];

/// Makes two passes; rank 1 acts in the first. Returns the step counts of the shared and of the local parameter.
fn train(mode: Mode, alone: Alone, on: &str) -> Result<Vec<[u64; 2]>> {
    let layout = Layout::builder().param("common", LEN).param("own", LEN).local().build()?;
    let [common, own] = [layout.id("common")?, layout.id("own")?];
    let named = layout.id(on)?;
    in_process(2, |comm| {
        let does_it = comm.rank() == 1;
        let builder = Stepper::builder(&layout, sgd()).mode(mode).unused(Unused::StepZero);
        let mut stepper = builder.host(comm)?;
        for step in 0..2 {
            let does_it = does_it && step == 0;
            let mut pass = stepper.begin()?;
            let has_gradient = |id: ParamId| !does_it || id != named || matches!(alone, Alone::UnusedAfter);
            if does_it && matches!(alone, Alone::UnusedBefore) {
                pass.set_unused(&[named])?;
            }
            for id in [own, common].into_iter().filter(|id| has_gradient(*id)) {
                pass.grads().write(id, &[1.0; LEN])?;
                pass.grad_ready(id)?;
            }
            if does_it && matches!(alone, Alone::UnusedAfter) {
                pass.set_unused(&[named])?;
            }
            pass.finish()?;
        }
        stepper.status()?;
        let counts = [stepper.step_count(common)?, stepper.step_count(own)?];
        stepper.close()?;
        Ok(counts)
    })
}

fn sgd() -> impl Optimizer + Copy + 'static {
    Sgd { lr: 1.0, ..Sgd::default() }
}

#[test]
fn a_rank_may_name_its_local_parameter_as_unused_at_any_time_and_a_common_one_not() {
    for mode in [Mode::Sequential, Mode::Eager, Mode::Normed] {
        // In Eager the step may be on its way.
        let all = ALL.into_iter().filter(|alone| mode != Mode::Eager || !matches!(alone, Alone::UnusedAfter));
        for alone in all {
            let what = format!("{mode:?}, {alone:?}");
            let counts = train(mode, alone, "own").unwrap_or_else(|error| panic!("{what}: {error}"));
            let left = if matches!(alone, Alone::Missing) { 2 } else { 1 };
            assert_eq!(counts, [[2, 2], [2, left]], "{what}");
            let common = train(mode, alone, "common");
            match alone {
                // A rank's zeros are its part of the sum.
                Alone::Missing => assert_eq!(common.unwrap(), [[2, 2]; 2], "{what}"),
                _ => {
                    let error = common.expect_err(&what);
                    assert!(matches!(error.cause(), Error::Mismatch { .. }), "{what}: {error}");
                }
            }
        }
    }
}
