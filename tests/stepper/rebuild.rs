//! Buckets that are rebuilt in arrival order keep the bits of buckets that never were, in rank 0's order on every rank.
//!
//! Each rank hands its gradients over in a different order. The reference is the same training without a rebuild.
//! Recordings before and after a rebuild are judged by their own plans.

use instep::cuda::Cuda;
use instep::hazard::Traced;
use instep::layout::{DEFAULT_GROUP, ForeignBucket, Plan};
use instep::op::{Action, Phase};
use instep::{
    Adam, Borrowed, Device, Divisor, Error, Gradients, Layout, LossScaler, Mode, Moments, ParamId, Precision,
    Result, ScalerState, SegmentAction, Sgd, Solo, Stepper, Unused, in_process,
};

use crate::support::device::cuda;
use crate::support::stand_in::{COMPUTE, StandIn};
use crate::support::waits::{assert_each_is_missed, middle_passes};
use crate::support::{
    MODES, Options, Outcome, assert_same_bits, few_optimizers, layout, open, paint, paint_gradient,
    paint_params, painted, pass, set_step_count,
};

const COUNT: usize = 11;

fn many() -> Layout {
    let mut builder = Layout::builder();
    for (k, len) in [300, 0, 1, 2049, 17, 256, 5, 700, 1000, 31, 600].into_iter().enumerate() {
        builder = builder.param(format!("p{k}"), len);
        builder = match k {
            4 | 9 => builder.in_group("slow"),
            6 => builder.action(SegmentAction::Average),
            7 => builder.uses(2),
            _ => builder,
        };
    }
    builder.build().unwrap()
}

/// Returns a different order on each rank; no rank has the order of backward.
fn order(rank: u32) -> Vec<usize> {
    (0..COUNT).map(|k| (k * (2 + rank as usize) + 3 * rank as usize) % COUNT).collect()
}

/// Two parameters are missing in the first pass: no rank uses the first, and the second is frozen until the third pass.
const UNUSED: usize = 3;
const FROZEN: usize = 8;

/// Returns rank 0's order of buckets after the first pass.
fn expected_order() -> Vec<u32> {
    let arrived = order(0).into_iter().filter(|param| ![UNUSED, FROZEN].contains(param));
    arrived.chain([FROZEN, UNUSED]).map(|param| param as u32).collect()
}

fn plan_order(plan: &Plan) -> Vec<u32> {
    plan.segments().iter().map(|segment| segment.param).collect()
}

fn passes_in(list: &[Traced]) -> usize {
    let begins =
        |entry: &&Traced| matches!(entry, Traced::Op(op) if op.action == Action::Control(Phase::Begin));
    list.iter().filter(begins).count()
}

fn train_a_pass<D: Device>(stepper: &mut Stepper<D>, rank: u32, step: usize) -> Result<()> {
    let layout = stepper.layout().clone();
    let ids: Vec<ParamId> = layout.ids().collect();
    if step == 0 || step == 2 {
        stepper.set_frozen(ids[FROZEN], step == 0)?;
    }
    stepper.set_lr("slow", 1e-3 / (step + 1) as f64)?;
    let mut pass = stepper.begin_accumulating(2.try_into().unwrap())?;
    for micro_batch in 0..2 {
        // The first micro-batch comes the other way round, which must not matter.
        let arrivals = order(rank);
        let arrivals: Vec<usize> =
            if micro_batch == 0 { arrivals.into_iter().rev().collect() } else { arrivals };
        for param in arrivals {
            if param == FROZEN && step < 2 || param == UNUSED && step.is_multiple_of(3) {
                continue;
            }
            let parameter = layout.parameter(ids[param])?;
            let row = param + 20 * rank as usize;
            let values: Vec<f32> =
                (0..parameter.len as usize).map(|k| paint_gradient(3 * step, row, k)).collect();
            if micro_batch == 1 {
                pass.write(ids[param].grad(), &values)?;
            }
            for _ in 0..if micro_batch == 1 { parameter.uses } else { 0 } {
                pass.grad_ready(ids[param])?;
            }
        }
        if micro_batch == 0 {
            pass.next_micro_batch()?;
        }
    }
    pass.finish()
}

/// Makes six passes from states and counts that were loaded; asserts the plan and that nothing raced.
fn train<D: Device>(mut stepper: Stepper<D>, rebuilds: bool) -> Result<Outcome> {
    let (rank, what) = (stepper.rank(), format!("{:?}", stepper));
    paint_params(&mut stepper);
    let ids: Vec<ParamId> = stepper.layout().ids().collect();
    for (k, id) in ids.iter().enumerate() {
        let len = stepper.layout().parameter(*id)?.len as usize;
        for (n, name) in stepper.state_names(*id)?.iter().enumerate() {
            let state: Vec<f32> = (0..len).map(|e| paint(k + 50 * n, e).abs() / 64.0).collect();
            stepper.write(id.state(name), &state)?;
        }
        set_step_count(&mut stepper, *id, 3 * k as u64)?;
    }
    let before = plan_order(stepper.plan());
    for step in 0..6 {
        train_a_pass(&mut stepper, rank, step)?;
        if !rebuilds {
            continue;
        }
        let there = Outcome::of(&stepper)?;
        if step == 0 {
            let recording = stepper.take_recording().unwrap();
            assert_eq!(stepper.check(&recording), [], "{what}, before");
            assert_ne!(before, expected_order());
            assert!(stepper.rebuild_buckets()?, "{what}");
            assert_eq!(plan_order(stepper.plan()), expected_order(), "{what}");
        }
        let moved = Outcome::of(&stepper)?;
        moved.assert_same(&there, &what);
        assert_eq!(moved.status, there.status, "{what}");
        for (a, b) in moved.grads.iter().zip(&there.grads) {
            assert_same_bits(a, b, &what);
        }
        assert!(stepper.is_frozen(ids[FROZEN])? == (step < 2));
    }
    let outcome = Outcome::of(&stepper)?;
    let recording = stepper.take_recording().unwrap();
    assert_eq!(stepper.check(&recording), [], "{what}");
    assert_eq!(passes_in(&recording.list), if rebuilds { 5 } else { 6 }, "{what}: the list starts anew");
    let first = recording.list.iter().take_while(|entry| passes_in(std::slice::from_ref(*entry)) == 0);
    let frozen = |entry: &Traced| matches!(entry, Traced::Freeze { frozen: true, .. });
    assert!({ first }.any(frozen), "{what}: with what is frozen");
    Ok(outcome)
}

fn options(mode: Mode, unused: Unused) -> Options {
    let max_norm = (mode != Mode::Eager).then_some(0.5);
    Options { mode, unused, max_norm, cap: Some(3 << 10), record: true, ..Options::default() }
}

#[test]
fn rebuilt_buckets_train_on_with_the_bits_of_buckets_that_never_were() {
    for (ranks, mode) in (1..=4).flat_map(|ranks| MODES.map(|mode| (ranks, mode))) {
        for (k, optim) in few_optimizers().into_iter().enumerate().skip(1) {
            let options = options(mode, [Unused::Skip, Unused::StepZero][k % 2]);
            let run = |rebuilds| {
                in_process(ranks, |comm| {
                    let layout = many();
                    train(options.builder(&layout, optim).host(comm)?, rebuilds)
                })
            };
            let (rebuilt, never) = (run(true).unwrap(), run(false).unwrap());
            for (rebuilt, never) in rebuilt.iter().zip(&never) {
                let what = format!("{ranks} ranks, {mode:?}, {optim:?}");
                rebuilt.assert_same(never, &what);
                let (ours, theirs) = (rebuilt.status, never.status);
                assert_eq!(
                    (ours.pass, ours.norm, ours.clip),
                    (theirs.pass, theirs.norm, theirs.clip),
                    "{what}"
                );
            }
        }
    }
}

/// An 8-bit state consists of codes and of one scale per block, and both move.
#[test]
fn rebuilt_buckets_keep_8_bit_states_with_their_scales() {
    let options = options(Mode::Eager, Unused::Skip);
    let (layout, precision) = (many(), Precision { moments: Moments::EightBit, ..Precision::F32 });
    let run = |rebuilds| {
        let builder = options.builder(&layout, few_optimizers()[2]).precision(precision);
        train(builder.host(Solo::default()).unwrap(), rebuilds).unwrap()
    };
    let (rebuilt, never) = (run(true), run(false));
    assert!(never.states.iter().flatten().flatten().any(|x| *x != 0.0));
    rebuilt.assert_same(&never, "8-bit states");
}

#[test]
fn a_gpu_rebuilds_to_the_hosts_bits() {
    for mode in MODES {
        let (layout, optim, options) = (many(), few_optimizers()[3], options(mode, Unused::Skip));
        let gpu = options.stepper_on(&cuda(), &layout, optim, Solo::default()).unwrap();
        let host = options.stepper(&layout, optim, Solo::default()).unwrap();
        let (gpu, host) = (train(gpu, true).unwrap(), train(host, false).unwrap());
        gpu.assert_same(&host, &format!("{mode:?}"));
    }
}

#[test]
fn a_second_rebuild_in_the_same_order_changes_nothing_and_leaves_no_hazard() {
    for (mode, ranks) in MODES.into_iter().flat_map(|mode| [(mode, 1), (mode, 3)]) {
        in_process(ranks, |comm| {
            let (rank, layout) = (comm.rank(), many());
            let options = Options { uneven: Some(Divisor::WorldSize), ..options(mode, Unused::Skip) };
            let mut stepper = options.builder(&layout, few_optimizers()[2]).host(comm)?;
            train_a_pass(&mut stepper, rank, 4)?;
            assert!(stepper.rebuild_buckets()?);
            // Those of the passes in which all parameters are used.
            for step in [5, 7, 8, 10] {
                train_a_pass(&mut stepper, rank, step)?;
                let before = Outcome::of(&stepper)?;
                assert!(!stepper.rebuild_buckets()?);
                let after = Outcome::of(&stepper)?;
                after.assert_same(&before, "an exchange alone");
                let [after, before] = [after, before].map(|outcome| outcome.grads.concat());
                assert_same_bits(&after, &before, "the exchange puts gradients back");
            }
            // Nothing is touched in between: this pass's zeros must come after what the exchange wrote.
            assert!(!stepper.rebuild_buckets()?);
            stepper.begin()?.finish()?;
            let recording = stepper.take_recording().unwrap();
            assert_eq!(stepper.check(&recording), [], "{mode:?}");
            while stepper.join()? {}
            Ok::<_, Error>(())
        })
        .unwrap();
    }
}

#[test]
fn every_wait_of_rebuilt_buckets_is_needed() {
    for mode in MODES {
        let layout = layout(&[300, 0, 1, 700, 256, 5, 300]);
        let options = Options { mode, cap: Some(1), record: true, ..Options::default() };
        let mut stepper = open(&layout, few_optimizers()[2], &options);
        for step in 0..7 {
            let mut pass = stepper.begin().unwrap();
            layout.ids().for_each(|id| assert!(pass.params().get(id).is_ok()));
            for id in layout.ids() {
                let (params, mut grads) = pass.split();
                let _ = params.get(id).unwrap();
                grads.get_mut(id).unwrap().fill(0.25);
                pass.grad_ready(id).unwrap();
            }
            pass.finish().unwrap();
            if step == 0 {
                assert!(stepper.rebuild_buckets().unwrap());
                assert_eq!(plan_order(stepper.plan()), [0, 1, 2, 3, 4, 5, 6]);
            }
        }
        stepper.status().unwrap();
        let list = stepper.take_recording().unwrap().list;
        assert_eq!(passes_in(&list), 6, "{mode:?}: the list starts anew");
        assert_each_is_missed(stepper.plan(), 2, &list, middle_passes(&list), 12, &format!("{mode:?}"));
    }
}

#[test]
fn an_order_longer_than_the_gradients_travels_in_turns() {
    let mut lens = vec![0; 1001];
    lens[500] = 1;
    let layout = layout(&lens);
    let orders = in_process(2, |comm| {
        let rank = comm.rank();
        let options = Options { unused: Unused::StepZero, ..Options::default() };
        let mut stepper = options.builder(&layout, few_optimizers()[0]).host(comm)?;
        assert_eq!(stepper.plan().grads_len() % 256, 0);
        assert!(stepper.plan().grads_len() < 1001);
        let mut ids: Vec<ParamId> = layout.ids().collect();
        ids.rotate_left(17 + 400 * rank as usize);
        let mut pass = stepper.begin()?;
        for id in ids {
            let len = layout.parameter(id)?.len as usize;
            pass.write(id.grad(), &[1.0][..len])?;
            pass.grad_ready(id)?;
        }
        pass.finish()?;
        assert!(stepper.rebuild_buckets()?);
        Ok::<_, Error>(plan_order(stepper.plan()))
    });
    let mut expected: Vec<u32> = (0..1001).collect();
    expected.rotate_left(17);
    assert_eq!(orders.unwrap(), [expected.clone(), expected]);
}

#[test]
fn released_gradients_stay_released_in_rebuilt_buckets() {
    let run = |gradients| {
        let options = Options { gradients, ..options(Mode::Eager, Unused::Skip) };
        let mut stepper = open(&many(), few_optimizers()[2], &options);
        (0..4)
            .try_for_each(|step| {
                train_a_pass(&mut stepper, 0, step)?;
                stepper.rebuild_buckets().map(drop)
            })
            .unwrap();
        let recording = stepper.take_recording().unwrap();
        assert_eq!(stepper.check(&recording), []);
        stepper
    };
    let (kept, released) = (run(Gradients::Keep), run(Gradients::Release));
    for id in many().ids() {
        let params = [&kept, &released].map(|stepper| stepper.view::<f32>(id).unwrap());
        assert_same_bits(params[0], params[1], "released");
        let is_stepped = many().parameter(id).unwrap().action == SegmentAction::Step;
        assert_eq!(released.view::<f32>(id.grad()).is_err(), is_stepped);
    }
    assert_eq!(plan_order(kept.plan()), plan_order(released.plan()));
}

#[test]
fn what_cannot_be_rebuilt_is_refused_and_nothing_is_changed() {
    let layout = layout(&[0, 0]);
    let mut empty = Stepper::host(&layout, Sgd::default(), Solo::default()).unwrap();
    assert_eq!(empty.rebuild_buckets(), Ok(false));
    let layout = Layout::builder().param("w", 4).build().unwrap();
    let w = layout.id("w").unwrap();
    let (mut weights, mut bucket) = ([1.0f32; 4], [0.0f32; 4]);
    let memory = Borrowed::new()
        .param(w, weights.as_mut_ptr())
        .bucket(ForeignBucket::new(4).gradient(w, 0), bucket.as_mut_ptr());
    let builder = Stepper::builder(&layout, Sgd::default()).unused(Unused::StepZero);
    // SAFETY: the arrays outlive the stepper, which alone touches them until it is dropped.
    let mut stepper = unsafe { builder.host_borrowing(Solo::default(), memory) }.unwrap();
    assert!(matches!(stepper.rebuild_buckets(), Err(Error::Unsupported { .. })));
    let mut stepper = Stepper::host(&layout, Sgd::default(), Solo::default()).unwrap();
    assert_eq!(stepper.rebuild_buckets(), Ok(false), "before the first pass");
    std::mem::forget(stepper.begin().unwrap());
    assert!(matches!(stepper.rebuild_buckets(), Err(Error::Order(_))));
    stepper.abandon().unwrap();
    assert_eq!(stepper.rebuild_buckets(), Ok(false));
}

#[test]
fn a_rank_that_rebuilds_alone_is_told_at_once() {
    let layout = layout(&[300, 400]);
    let outcome = in_process(2, |comm| {
        let alone = comm.rank() == 1;
        let mut stepper = Stepper::host(&layout, Adam::default(), comm)?;
        stepper.begin()?.finish()?;
        if alone { stepper.rebuild_buckets().map(drop) } else { stepper.begin()?.finish() }?;
        stepper.status().map(drop)
    });
    let error = outcome.unwrap_err();
    assert!(matches!(error.cause(), Error::Mismatch { .. }), "{error}");
}

#[test]
fn graphs_of_the_old_buckets_are_refused_and_the_latest_status_counts_on() {
    for mode in MODES {
        let gpu = Cuda::on(StandIn::new()).compute_stream(COMPUTE);
        let (layout, optim) = (layout(&[300, 5, 2049]), few_optimizers()[3]);
        let orders = Options { order: Some(vec![1, 0, 2]), cap: Some(1 << 10), mode, ..Options::default() };
        let mut stepper = orders.stepper_on(&gpu, &layout, optim, Solo::default()).unwrap();
        let mut host = open(&layout, optim, &orders);
        paint_params(&mut stepper);
        let gradient = painted(&orders);
        let mut both = |stepper: &mut Stepper<_>, step| {
            pass(stepper, &orders, |param, values| gradient(step, param, values)).unwrap();
            pass(&mut host, &orders, |param, values| gradient(step, param, values)).unwrap();
            Outcome::of(stepper).unwrap().assert_same(&Outcome::of(&host).unwrap(), &format!("{mode:?}"));
        };
        // More passes than the rings have slots, on both sides.
        (0..11).for_each(|step| both(&mut stepper, step));
        let trainer = |mut pass: instep::Pass<'_, instep::cuda::CudaDevice>| {
            for id in layout.ids().rev() {
                pass.ptr(id.grad())?;
                pass.grad_ready(id)?;
            }
            pass.finish()
        };
        let captured = stepper.capture(trainer).unwrap();
        both(&mut stepper, 11);
        assert!(stepper.rebuild_buckets().unwrap());
        // SAFETY: refused.
        let refused = unsafe { stepper.replay(&captured) };
        assert!(matches!(refused, Err(Error::Order(_))), "{refused:?}");
        for step in 12..24 {
            stepper.set_lr(DEFAULT_GROUP, 0.01).unwrap();
            both(&mut stepper, step);
            assert_eq!(stepper.latest_status().unwrap().pass, step as u64 + 1, "{mode:?}");
        }
        let captured = stepper.capture(trainer).unwrap();
        // SAFETY: the capture holds no work of the trainer's.
        unsafe { stepper.replay(&captured).unwrap() };
        stepper.status().unwrap();
        assert_eq!(stepper.latest_status().unwrap().pass, 25);
    }
}

#[test]
fn a_rebuild_that_fails_leaves_the_old_buckets_and_all_that_was_in_them() {
    for call in ["allocate", "create_stream", "create_event", "load", "allocate_mapped"] {
        let stand_in = StandIn::new();
        let gpu = Cuda::on(stand_in.clone()).compute_stream(COMPUTE);
        let (layout, optim) = (layout(&[300, 5, 2049]), few_optimizers()[3]);
        let options = Options { order: Some(vec![1, 0, 2]), cap: Some(1 << 10), ..Options::default() };
        let mut stepper = options.stepper_on(&gpu, &layout, optim, Solo::default()).unwrap();
        paint_params(&mut stepper);
        let gradient = painted(&options);
        let train = |stepper: &mut Stepper<_>, step| {
            pass(stepper, &options, |param, values| gradient(step, param, values)).unwrap();
        };
        train(&mut stepper, 0);
        let (before, bytes) = (Outcome::of(&stepper).unwrap(), stand_in.allocated_bytes());
        stand_in.break_call(call);
        let failed = stepper.rebuild_buckets();
        assert!(matches!(failed, Err(Error::Device { .. })), "{call}: {failed:?}");
        stand_in.break_call("nothing");
        assert_eq!(plan_order(stepper.plan()), [2, 1, 0]);
        assert_eq!(stand_in.allocated_bytes(), bytes, "{call}");
        Outcome::of(&stepper).unwrap().assert_same(&before, call);
        assert!(stepper.rebuild_buckets().unwrap(), "{call}");
        train(&mut stepper, 1);
        let mut host = open(&layout, optim, &options);
        (0..2).for_each(|step| pass(&mut host, &options, |p, values| gradient(step, p, values)).unwrap());
        Outcome::of(&stepper).unwrap().assert_same(&Outcome::of(&host).unwrap(), call);
        drop(stepper);
        assert_eq!(stand_in.allocated_bytes(), 0, "{call}");
    }
}

#[test]
fn states_stay_where_they_were_when_another_parameters_optimizer_makes_a_round_wider() {
    let layout = layout(&[3, 5]);
    let [kept, other] = [layout.id("p0").unwrap(), layout.id("p1").unwrap()];
    let heavy = Sgd { momentum: 0.9, ..Sgd::default() };
    let train = |widens: bool| {
        let builder = Stepper::builder_without_optimizer(&layout).optimizer_for(&[kept], Sgd::default());
        let mut stepper = builder.then_for(&[kept], heavy).host(Solo::default()).unwrap();
        for step in 0..4 {
            if widens && step == 2 {
                stepper.add_optimizer_for(&[other], heavy).unwrap();
            }
            let mut pass = stepper.begin().unwrap();
            pass.grads().write(kept, &[step as f32, 1.0, -2.0]).unwrap();
            pass.finish().unwrap();
        }
        let params = stepper.view::<f32>(kept).unwrap().to_vec();
        [params, stepper.view::<f32>(kept.state("momentum_buffer#1")).unwrap().to_vec()]
    };
    for (ours, theirs) in train(true).iter().zip(&train(false)) {
        assert_same_bits(ours, theirs, "what another parameter's optimizer has left");
    }
}

#[test]
fn a_rebuild_hides_no_difference_between_ranks_and_invents_none() {
    let layout = layout(&[3]);
    let train = |scales: [f64; 2]| {
        in_process(2, |comm| {
            let rank = comm.rank();
            let builder = Stepper::builder(&layout, Sgd::default()).mode(Mode::Normed);
            let mut stepper = builder.loss_scale(LossScaler::default()).host(comm)?;
            stepper.begin()?.finish()?;
            stepper.set_scaler_state(ScalerState { scale: scales[rank as usize], growth_tracker: 0 })?;
            stepper.rebuild_buckets()?; // the first numbers of this setting that ranks compare
            if rank == 0 {
                stepper.set_lr(DEFAULT_GROUP, Sgd::default().lr)?; // to what it is already
            }
            stepper.begin()?.finish()?;
            stepper.status()
        })
    };
    assert!(train([4.0, 4.0]).is_ok());
    let error = train([1.0, 4.0]).unwrap_err();
    assert!(matches!(error.cause(), Error::Mismatch { .. }), "{error}");
}
