//! Ranks run out of data: they still do all other work of a pass beside its sums.
//!
//! Ranks in one process compare rates, so a rank that falls behind ends the group; the test checks values too.

use instep::layout::DEFAULT_GROUP;
use instep::{Clip, Divisor, Layout, LrSchedule, Mode, Result, Sgd, Stepper, StepperBuilder, in_process};

const LEN: usize = 300;
const MODES: [Mode; 3] = [Mode::Sequential, Mode::Eager, Mode::Normed];
const BATCHES: [usize; 3] = [1, 4, 2];
const MOST: usize = 4;

fn sgd() -> Sgd {
    Sgd { lr: 1.0, ..Sgd::default() }
}

fn uneven(layout: &Layout) -> StepperBuilder<'_> {
    Stepper::builder(layout, sgd()).uneven_inputs(Divisor::ContributingRanks).record(true)
}

#[test]
fn a_schedule_goes_on_for_a_rank_without_data_and_is_the_same_after_it() {
    let layout = Layout::builder().param("w", LEN).build().unwrap();
    let schedule = || LrSchedule::step(1.0, 1, 0.5);
    for mode in MODES {
        let ends = in_process(BATCHES.len() as u32, |comm| {
            let batches = BATCHES[comm.rank() as usize];
            let mut stepper = uneven(&layout).mode(mode).lr_schedule(DEFAULT_GROUP, schedule()).host(comm)?;
            let w = layout.id("w")?;
            let mut steps = Vec::new();
            let pass = |stepper: &mut Stepper| {
                let mut pass = stepper.begin()?;
                pass.grads().write(w, &[1.0; LEN])?;
                pass.finish()
            };
            for at in 0.. {
                let goes_on =
                    if at < batches { pass(&mut stepper).map(|()| true)? } else { stepper.join()? };
                steps.push(stepper.schedule_step());
                if !goes_on {
                    break;
                }
            }
            let joined = stepper.view::<f32>(w)?[LEN - 1];
            // All have data again.
            pass(&mut stepper)?;
            Ok((steps, joined, stepper.view::<f32>(w)?[LEN - 1]))
        });
        // The mean of the ranks that had data is 1 in each pass; the round in which no rank had data counts too.
        let rate = |step: usize| 0.5f64.powi(step as i32);
        let steps: Vec<_> = (1..=MOST as u64 + 1).collect();
        let joined = -(0..MOST).map(rate).sum::<f64>() as f32;
        let expected = (steps, joined, joined - rate(MOST + 1) as f32);
        assert_eq!(ends.unwrap(), vec![expected; BATCHES.len()], "{mode:?}");
    }
}

/// If all shared parameters are frozen, the sum of the bucket that counts ranks is the only one, and no step follows
/// it.
#[test]
fn a_decision_for_the_next_pass_comes_after_the_count_of_ranks_where_only_local_parameters_are_stepped() {
    let layout = Layout::builder().param("common", LEN).param("own", 1).local().build().unwrap();
    let clips = [None, Some(Clip::Previous(0.5)), Some(Clip::Global(0.5)), Some(Clip::PerBucket(0.5))];
    for (mode, clip) in MODES.into_iter().flat_map(|mode| clips.map(|clip| (mode, clip))) {
        if mode == Mode::Eager && matches!(clip, Some(Clip::Global(_))) {
            continue; // Its steps cannot wait for the norm.
        }
        let ends = in_process(BATCHES.len() as u32, |comm| -> Result<(u64, f32)> {
            let batches = BATCHES[comm.rank() as usize];
            let mut builder = uneven(&layout).mode(mode);
            if let Some(clip) = clip {
                builder = builder.clip(clip);
            }
            let mut stepper = builder.host(comm)?;
            let [common, own] = [layout.id("common")?, layout.id("own")?];
            stepper.set_frozen(common, true)?;
            for _ in 0..batches {
                let mut pass = stepper.begin()?;
                pass.grads().write(own, &[1.0])?;
                pass.grad_ready(own)?;
                pass.finish()?;
            }
            while stepper.join()? {}
            let recording = stepper.take_recording().unwrap();
            assert_eq!(stepper.check(&recording), [], "{mode:?}, {clip:?}");
            let end = (stepper.step_count(own)?, stepper.view::<f32>(own)?[0]);
            stepper.close()?;
            Ok(end)
        });
        for (batches, (steps, value)) in BATCHES.into_iter().zip(ends.unwrap()) {
            assert_eq!(steps, batches as u64, "{mode:?}, {clip:?}");
            assert!(value < 0.0, "{mode:?}, {clip:?}: {value}");
        }
    }
}
