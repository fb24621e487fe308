//! States and step counts are written by name: a stepper that is loaded from another one has its bits.
//!
//! The reference is an uninterrupted run. The tests use names and public accessors only, as a checkpoint does.

use instep::{Error, Layout, Result, Solo, Stepper};

use crate::support::{self, MODES, Optim, Options, Outcome, Presummed, layout, optimizers, painted};

const LENGTHS: [usize; 4] = [300, 0, 17, 2049];

/// Copies all that lasts from one stepper to another; the last parameter comes first, because order must not matter.
pub(crate) fn load(from: &Stepper, to: &mut Stepper) -> Result<()> {
    let layout = from.layout().clone();
    for id in layout.ids().rev() {
        to.view_mut::<f32>(id)?.copy_from_slice(from.view::<f32>(id)?);
        for name in from.state_names(id)? {
            to.view_mut::<f32>(id.state(&name))?.copy_from_slice(from.view::<f32>(id.state(&name))?);
        }
        let count = from.step_count(id)?;
        for optimizer in from.optimizers_of(id)? {
            match from.carried((id, optimizer))? {
                Some(carried) => to.set_step_count((id, optimizer), (count, carried))?,
                None => to.set_step_count((id, optimizer), count)?,
            }
        }
    }
    Ok(())
}

fn resumed(layout: &Layout, optim: Optim, options: &Options, before: usize, after: usize) -> Outcome {
    let gradient = painted(options);
    let mut first = support::open(layout, optim, options);
    for step in 0..before {
        support::pass(&mut first, options, |param, values| gradient(step, param, values)).unwrap();
    }
    let mut second = options.stepper(layout, optim, Presummed(options.world_size)).unwrap();
    load(&first, &mut second).unwrap();
    for step in before..before + after {
        support::pass(&mut second, options, |param, values| gradient(step, param, values)).unwrap();
    }
    Outcome::of(&second).unwrap()
}

#[test]
fn a_loaded_stepper_goes_on_with_the_bits_of_the_uninterrupted_run() {
    let layout = layout(&LENGTHS);
    for optim in optimizers() {
        for mode in MODES {
            let options = Options { mode, cap: Some(1500), ..Options::default() };
            let whole = support::run(&layout, optim, &options, 5, painted(&options));
            for before in [0, 1, 3] {
                let outcome = resumed(&layout, optim, &options, before, 5 - before);
                outcome.assert_same(&whole, &format!("{optim:?} {mode:?}, loaded after {before}"));
            }
        }
    }
}

#[test]
fn loading_between_passes_races_with_nothing_that_still_runs() {
    let layout = layout(&LENGTHS);
    let w = layout.id("p3").unwrap();
    for mode in MODES {
        let options = Options { mode, cap: Some(1500), ..Options::default() };
        let optim = optimizers()[3];
        let builder = optim.builder(&layout).mode(mode).bucket_cap_bytes(1500).record(true);
        let mut stepper = builder.host(Solo::default()).unwrap();
        for step in 0..4 {
            support::pass(&mut stepper, &options, |param, values| painted(&options)(step, param, values))
                .unwrap();
            stepper.set_step_count(w, 7).unwrap();
            stepper.view_mut::<f32>(w.state("momentum_buffer")).unwrap().fill(0.5);
            assert_eq!(stepper.step_count(w).unwrap(), 7);
        }
        let recording = stepper.take_recording().unwrap();
        assert_eq!(stepper.check(&recording), []);
    }
}

#[test]
fn what_cannot_be_loaded_is_refused_and_changes_nothing() {
    let (ours, theirs) = (layout(&[4]), layout(&[5]));
    let mut stepper = support::open(&ours, optimizers()[3], &Options::default());
    let (id, foreign) = (ours.id("p0").unwrap(), theirs.id("p0").unwrap());
    assert!(matches!(stepper.view_mut::<f32>(id.state("exp_avg")), Err(Error::Unsupported { .. })));
    assert!(matches!(stepper.view_mut::<f32>(foreign.state("momentum_buffer")), Err(Error::Layout(_))));
    assert!(matches!(stepper.set_step_count(foreign, 1), Err(Error::Layout(_))));
    let refused = stepper.set_step_count(id, 1 << 63);
    assert!(matches!(refused, Err(Error::Config { field: "step_count", .. })));
    std::mem::forget(stepper.begin().unwrap());
    assert!(matches!(stepper.view_mut::<f32>(id.state("momentum_buffer")), Err(Error::Order(_))));
    assert!(matches!(stepper.set_step_count(id, 1), Err(Error::Order(_))));
    stepper.abandon().unwrap();
    assert_eq!(stepper.step_count(id).unwrap(), 0);
}
