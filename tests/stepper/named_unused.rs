//! Parameters that the trainer names as unused stay unchanged, with the bits of buckets that count their ranks.
//!
//! The reference is `Unused::Skip` in the stepper's own memory, where no rank writes those gradients. The contents of a
//! bucket for an unused parameter must not matter, so they are garbage here.

use instep::{
    Clip, Device, Error, Layout, Mode, Pass, Precision, Result, Sgd, Solo, Stepper, StepperBuilder, Unused,
    in_process,
};

use crate::support::device::cuda;
use crate::support::lent::{Ground, Lent, Random};
use crate::support::stored::{Stored, cases, dyadic, with};
use crate::support::{MODES, Optim, Outcome, layout, optimizers, paint_params};

const LENGTHS: [usize; 8] = [300, 0, 1, 2049, 17, 256, 5, 700];
const STEPS: usize = 4;

fn is_unused(step: usize, param: usize) -> bool {
    // Each parameter at some time, none in the first pass, and at last all of them.
    step > 0 && (step == STEPS - 1 || (param + step).is_multiple_of(3))
}

/// When the trainer names a parameter as unused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    /// The trainer does not name it: buckets count.
    Never,
    First,
    /// The trainer names it after garbage has been written.
    Amid,
    /// The trainer names it after all gradients have been handed over.
    Last,
}

fn train_a_pass<D: Device>(stepper: &mut Stepper<D>, step: usize, rank: usize, said: Said) -> Result<()> {
    let ids: Vec<_> = stepper.layout().clone().ids().collect();
    let unused: Vec<usize> = (0..ids.len()).filter(|param| is_unused(step, *param)).collect();
    let named: Vec<_> = unused.iter().map(|param| ids[*param]).collect();
    let mut pass: Pass<'_, D> = stepper.begin()?;
    if said == Said::First {
        pass.set_unused(&named)?;
    }
    for param in (0..ids.len()).rev() {
        let len = LENGTHS[param];
        let is_used = !unused.contains(&param);
        let values: Vec<f32> = match (is_used, said) {
            (true, _) => (0..len).map(|k| dyadic(step, rank, param, k)).collect(),
            (false, Said::Amid) => vec![f32::NAN; len],
            (false, Said::Last) => vec![0.0; len],
            (false, _) => continue,
        };
        pass.write(ids[param].grad(), &values)?;
        if said == Said::Amid && !is_used {
            pass.set_unused(&[ids[param]])?;
            // It can still be read.
            pass.read(ids[param], &mut vec![0.0; len])?;
            assert!(matches!(pass.write(ids[param].grad(), &values), Err(Error::Order(_))));
        } else {
            pass.grad_ready(ids[param])?;
        }
    }
    if said == Said::Last {
        pass.set_unused(&named)?;
        pass.set_unused(&named)?;
    }
    pass.finish()
}

fn orders(mode: Mode) -> Vec<Said> {
    let all = [Said::First, Said::Amid, Said::Last];
    all.into_iter().filter(|said| mode != Mode::Eager || *said != Said::Last).collect()
}

fn train<D: Device>(mut stepper: Stepper<D>, said: Said) -> Outcome {
    paint_params(&mut stepper);
    (0..STEPS).for_each(|step| train_a_pass(&mut stepper, step, 0, said).unwrap());
    let recording = stepper.take_recording().unwrap();
    assert_eq!(stepper.check(&recording), [], "{said:?}");
    let outcome = Outcome::of(&stepper).unwrap();
    stepper.close().unwrap();
    outcome
}

fn builder<'a>(layout: &'a Layout, optim: Optim, mode: Mode) -> StepperBuilder<'a> {
    let builder = optim.builder(layout).mode(mode).record(true).unused(Unused::Refuse);
    if mode == Mode::Eager { builder } else { builder.clip(Clip::Global(0.5)) }
}

#[test]
fn named_parameters_are_skipped_with_the_bits_of_those_that_ranks_have_counted() {
    let layout = layout(&LENGTHS);
    for (case, optim) in optimizers().into_iter().enumerate() {
        let mode = MODES[case % 3];
        let owned = builder(&layout, optim, mode).unused(Unused::Skip).bucket_cap_bytes(2000);
        let owned = train(owned.host(Solo::default()).unwrap(), Said::Never);
        assert!(owned.step_counts[1] < STEPS as u64 - 1);
        for said in orders(mode) {
            let what = format!("{optim:?}, {mode:?}, {said:?}");
            let mut random = Random(case as u64);
            let lent = Lent::new(Ground::Host, &layout, Precision::F32, &mut random);
            // SAFETY: `lent` outlives the stepper, here and below.
            let stepper =
                unsafe { builder(&layout, optim, mode).host_borrowing(Solo::default(), lent.lend()) }
                    .unwrap();
            let outcome = train(stepper, said);
            outcome.assert_same(&owned, &what);
            assert_eq!(outcome.status, owned.status, "{what}");
            lent.assert_bands_stand();
            let cuda = cuda();
            let lent = Lent::new(Ground::of(&cuda), &layout, Precision::F32, &mut random);
            let builder = builder(&layout, optim, mode);
            // SAFETY: as above; the trainer's stream is the default one, or the stand-in's, which is a number.
            let stepper = unsafe { builder.cuda_borrowing(Solo::default(), lent.lend(), &cuda) }.unwrap();
            let outcome = train(stepper, said);
            outcome.assert_same(&owned, &format!("GPU, {what}"));
            assert_eq!(outcome.status, owned.status, "GPU, {what}");
        }
    }
}

#[test]
fn averages_copies_masters_and_narrow_states_stay_too() {
    let layout = layout(&LENGTHS);
    for (case, (storage, optim)) in cases().enumerate().step_by(5) {
        let mode = MODES[case % 3];
        let run = |mut stepper: Stepper, said| {
            paint_params(&mut stepper);
            (0..STEPS).for_each(|step| train_a_pass(&mut stepper, step, 0, said).unwrap());
            Stored::of(&stepper).unwrap()
        };
        let builder = || with(builder(&layout, optim, mode), &storage);
        let owned = run(builder().unused(Unused::Skip).host(Solo::default()).unwrap(), Said::Never);
        let lent = Lent::new(Ground::Host, &layout, storage.precision, &mut Random(case as u64));
        // SAFETY: as above.
        let stepper = unsafe { builder().host_borrowing(Solo::default(), lent.lend()) }.unwrap();
        run(stepper, Said::First).assert_same(&owned, &(storage, optim, mode));
    }
}

#[test]
fn ranks_that_name_the_same_agree_and_ranks_that_do_not_are_told() {
    let layout = layout(&LENGTHS);
    let optim = Optim::of(Sgd { lr: 0.05, momentum: 0.9, ..Sgd::default() });
    for mode in MODES {
        for said in orders(mode).into_iter().chain([Said::Never]) {
            let outcomes = in_process(3, |comm| {
                let rank = comm.rank() as usize;
                let lent = Lent::new(Ground::Host, &layout, Precision::F32, &mut Random(7));
                let builder = builder(&layout, optim, mode);
                let mut stepper = match said {
                    Said::Never => builder.unused(Unused::Skip).host(comm)?,
                    // SAFETY: as above.
                    _ => unsafe { builder.host_borrowing(comm, lent.lend())? },
                };
                paint_params(&mut stepper);
                (0..STEPS).try_for_each(|step| train_a_pass(&mut stepper, step, rank, said))?;
                let outcome = Outcome::of(&stepper)?;
                stepper.close()?;
                Ok::<_, Error>(outcome)
            });
            let outcomes = outcomes.unwrap();
            outcomes.iter().for_each(|one| one.assert_same(&outcomes[0], &format!("{mode:?}, {said:?}")));
            if said == Said::Never {
                continue;
            }
            // A rank that names one more is told, at once or in the next pass.
            let told = in_process(2, |comm| {
                let alone = comm.rank() == 1;
                let mut stepper = builder(&layout, optim, mode).unused(Unused::StepZero).host(comm)?;
                let ids: Vec<_> = layout.ids().collect();
                for _ in 0..2 {
                    let mut pass = stepper.begin()?;
                    if alone && said != Said::Last {
                        pass.set_unused(&ids[3..4])?;
                    }
                    for (param, id) in ids.iter().enumerate() {
                        if param != 3 || said == Said::Last {
                            pass.write(id.grad(), &vec![0.0; LENGTHS[param]])?;
                            pass.grad_ready(*id)?;
                        }
                    }
                    if alone && said == Said::Last {
                        pass.set_unused(&ids[3..4])?;
                    }
                    pass.finish()?;
                }
                stepper.close()
            });
            match told.unwrap_err().cause() {
                Error::Mismatch { differs, .. } => assert!(differs.contains("unused"), "{differs}"),
                other => panic!("{mode:?}, {said:?}: {other}"),
            }
        }
    }
}

#[test]
fn a_bucket_of_unused_parameters_holds_nobody_up() {
    let layout = layout(&[300, 5, 700]);
    let ids: Vec<_> = layout.ids().collect();
    // In order, the buckets after an unused one are launched as they are handed over.
    let launched = in_process(2, |comm| {
        let builder = Stepper::builder(&layout, Sgd::default()).unused(Unused::Refuse).bucket_cap_bytes(1);
        let mut stepper = builder.host(comm)?;
        let mut pass = stepper.begin()?;
        pass.set_unused(&ids[2..])?;
        for param in [1, 0] {
            pass.write(ids[param].grad(), &vec![1.0; [300, 5][param]])?;
            pass.grad_ready(ids[param])?;
        }
        Ok::<_, Error>(pass.abandon()?.stepped_buckets)
    });
    assert_eq!(launched.unwrap(), [[0, 1, 2], [0, 1, 2]]);
    // Without an order a hand-over says that the sum is there, also of a bucket without any gradient.
    let builder = Stepper::builder(&layout, Sgd::default()).unused(Unused::Refuse).bucket_cap_bytes(1);
    let mut stepper = builder.host(Solo::default()).unwrap();
    let mut pass = stepper.begin().unwrap();
    pass.set_unused(&ids[1..]).unwrap();
    pass.write(ids[0].grad(), &[1.0; 300]).unwrap();
    pass.grad_ready(ids[0]).unwrap();
    pass.bucket_ready(1).unwrap();
    assert_eq!(pass.abandon().unwrap().stepped_buckets, [2, 1]);
    let mut pass = stepper.begin().unwrap();
    pass.set_unused(&ids).unwrap();
    pass.finish().unwrap();
    assert_eq!(layout.ids().map(|id| stepper.step_count(id).unwrap()).collect::<Vec<_>>(), [1, 0, 0]);
}

#[test]
fn a_parameter_that_is_named_twice_is_left_alone_once() {
    let layout = layout(&[300, 5, 0]);
    let ids: Vec<_> = layout.ids().collect();
    let train = |named: &[usize]| {
        let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Default::default() });
        let mut stepper = builder.unused(Unused::StepZero).host(Solo::default()).unwrap();
        let mut pass = stepper.begin().unwrap();
        pass.write(ids[0].grad(), &[1.0; 300]).unwrap();
        for chunk in named.chunks(2) {
            pass.set_unused(&chunk.iter().map(|param| ids[*param]).collect::<Vec<_>>()).unwrap();
        }
        pass.set_unused(&[]).unwrap();
        pass.finish().unwrap();
        let counts = ids.iter().map(|id| stepper.step_count(*id).unwrap()).collect::<Vec<_>>();
        (stepper.view::<f32>(ids[0]).unwrap().to_vec(), counts)
    };
    assert_eq!(train(&[1, 1, 1, 2, 2, 1]), train(&[1, 2]));
    assert_eq!(train(&[1, 1]).1, [1, 0, train(&[1]).1[2]]);
}

#[test]
fn what_cannot_be_named_is_refused_and_changes_nothing() {
    let layout = layout(&[300, 5]);
    let ids: Vec<_> = layout.ids().collect();
    let builder = || Stepper::builder(&layout, Sgd::default()).unused(Unused::StepZero);
    let mut stepper = builder().host(Solo::default()).unwrap();
    assert!(matches!(stepper.set_unused(&ids), Err(Error::Order(_))), "no pass is open");
    let mut pass = stepper.begin_accumulating(2.try_into().unwrap()).unwrap();
    assert!(matches!(pass.set_unused(&ids), Err(Error::Order(_))), "another micro-batch follows");
    pass.next_micro_batch().unwrap();
    pass.write(ids[0].grad(), &[1.0; 300]).unwrap();
    pass.grad_ready(ids[0]).unwrap();
    // Both or none: the second is not named either.
    let refused = pass.set_unused(&[ids[1], ids[0]]).unwrap_err();
    assert!(matches!(&refused, Error::Order(why) if why.thing == "`p0`"), "{refused}");
    pass.write(ids[1].grad(), &[1.0; 5]).unwrap();
    pass.finish().unwrap();
    assert_eq!(ids.iter().map(|id| stepper.step_count(*id).unwrap()).collect::<Vec<_>>(), [1, 1]);
    let mut pass = stepper.begin().unwrap();
    pass.set_unused(&ids[1..]).unwrap();
    pass.write(ids[0].grad(), &[1.0; 300]).unwrap();
    for refused in [pass.grad_ready(ids[1]), pass.write(ids[1].grad(), &[1.0; 5])] {
        assert!(matches!(&refused, Err(Error::Order(why)) if why.thing == "`p1`"), "{refused:?}");
    }
    pass.finish().unwrap();
    // It is for one pass.
    stepper.begin().unwrap().finish().unwrap();
    assert_eq!(ids.iter().map(|id| stepper.step_count(*id).unwrap()).collect::<Vec<_>>(), [3, 2]);
    let uneven = builder().uneven_inputs(instep::Divisor::WorldSize);
    for (builder, option) in [(uneven, "uneven_inputs"), (builder().unused(Unused::Skip), "unused")] {
        let mut stepper = builder.host(Solo::default()).unwrap();
        let mut pass = stepper.begin().unwrap();
        let refused = pass.set_unused(&ids);
        assert!(matches!(refused, Err(Error::Config { field, .. }) if field == option), "{option}");
    }
}

#[test]
fn a_captured_pass_leaves_out_what_it_left_out_when_it_was_captured() {
    let (cuda, layout) = (cuda(), layout(&[300, 5]));
    let ids: Vec<_> = layout.ids().collect();
    let builder = || Stepper::builder(&layout, Sgd::default()).unused(Unused::StepZero);
    // SAFETY: the trainer's stream is the default one, or the stand-in's, which is a number.
    let mut stepper = unsafe { builder().cuda(Solo::default(), &cuda) }.unwrap();
    stepper.begin().unwrap().finish().unwrap();
    if stepper.capture(|pass| pass.finish()).is_err() {
        // The default stream of a real GPU cannot be captured.
        return;
    }
    let captured = stepper.capture(|mut pass| {
        pass.set_unused(&ids[1..])?;
        pass.ptr(ids[0].grad())?;
        pass.finish()
    });
    let captured = captured.unwrap();
    for _ in 0..2 {
        // SAFETY: the capture holds no work of the trainer.
        unsafe { stepper.replay(&captured).unwrap() };
    }
    stepper.begin().unwrap().finish().unwrap();
    assert_eq!(ids.iter().map(|id| stepper.step_count(*id).unwrap()).collect::<Vec<_>>(), [4, 2]);
}
