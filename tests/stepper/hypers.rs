//! Hyperparameters change between passes: the bits are those of a stepper that is built with them, and a call changes
//! all or none.
//!
//! The reference is a new stepper in each pass, with that pass's hyperparameters and the state of the previous pass.
//! The state reaches it through a checkpoint, which holds no hyperparameters.

use std::io::Cursor;

use instep::checkpoint;
use instep::layout::DEFAULT_GROUP;
use instep::optim::{ALL, Descriptor, Value};
use instep::{
    Adam, AdamW, Device, Error, Layout, LrSchedule, Moments, Optimizer, OptimizerKey, ParamId, Precision,
    RmsProp, Sgd, Solo, Stepper, in_process,
};

use crate::support::device::cuda;
use crate::support::{Options, Outcome, layout, paint_params, painted, pass};

const LENGTHS: [usize; 3] = [300, 17, 700];

/// Returns every number of an optimizer, smaller in each pass; an option that is off stays off.
fn values(descriptor: &Descriptor, step: usize) -> Vec<(&'static str, Value)> {
    let factor = 0.875f64.powi(step as i32);
    let smaller = |value| match value {
        Value::Number(number) => Value::Number(number * factor),
        // The second of a pair may have a lower bound of 1.
        Value::Pair((first, second)) => Value::Pair((first * factor, second)),
        flag @ Value::Flag(_) => flag,
    };
    descriptor.fields.iter().map(|field| (field.name, smaller(field.default))).collect()
}

fn step<D: Device>(stepper: &mut Stepper<D>, step: usize) {
    let options = Options::default();
    let gradient = painted(&options);
    pass(stepper, &options, |param, values| gradient(step, param, values)).unwrap();
}

#[test]
fn every_hyperparameter_of_every_optimizer_changes_to_the_bits_of_a_stepper_built_with_it() {
    let layout = layout(&LENGTHS);
    for descriptor in ALL {
        let mut changed = Stepper::host(&layout, descriptor.build(), Solo::default()).unwrap();
        // SAFETY: the trainer's stream is the default one, or the stand-in's, which is a number.
        let mut gpu =
            unsafe { Stepper::builder(&layout, descriptor.build()).cuda(Solo::default(), &cuda()) }.unwrap();
        paint_params(&mut changed);
        paint_params(&mut gpu);
        let mut saved = Vec::new();
        checkpoint::write(&changed, &mut saved).unwrap();
        for at in 0..4 {
            let values = values(descriptor, at);
            changed.set_hyper(DEFAULT_GROUP, &values).unwrap();
            step(&mut changed, at);
            gpu.set_hyper(DEFAULT_GROUP, &values).unwrap();
            step(&mut gpu, at);
            let mut optimizer = descriptor.build();
            values.iter().for_each(|(name, value)| optimizer.set(name, *value).unwrap());
            let mut built = Stepper::host(&layout, optimizer, Solo::default()).unwrap();
            checkpoint::read(&mut built, Cursor::new(&saved)).unwrap();
            step(&mut built, at);
            saved.clear();
            checkpoint::write(&built, &mut saved).unwrap();
            let what = format!("{}, pass {at}", descriptor.name);
            Outcome::of(&changed).unwrap().assert_same(&Outcome::of(&built).unwrap(), &what);
            Outcome::of(&gpu)
                .unwrap()
                .assert_same(&Outcome::of(&built).unwrap(), &format!("{what}, on a GPU"));
        }
    }
}

#[test]
fn a_captured_pass_takes_the_hyperparameters_of_the_moment() {
    let layout = layout(&LENGTHS);
    let ids: Vec<ParamId> = layout.ids().collect();
    let mut host = Stepper::host(&layout, AdamW::default(), Solo::default()).unwrap();
    // SAFETY: as above.
    let mut gpu =
        unsafe { Stepper::builder(&layout, AdamW::default()).cuda(Solo::default(), &cuda()) }.unwrap();
    step(&mut host, 0);
    step(&mut gpu, 0);
    // The gradients of the first pass stay where they are.
    let captured = gpu.capture(|mut pass| {
        for id in &ids {
            pass.ptr(id.grad())?;
            pass.grad_ready(*id)?;
        }
        pass.finish()
    });
    let captured = captured.unwrap();
    for k in 1..4 {
        let betas = Value::from((0.9 / f64::from(k), 0.99));
        let changes = [("betas", betas), ("weight_decay", Value::from(0.25))];
        host.set_hyper(DEFAULT_GROUP, &changes).unwrap();
        step(&mut host, 0);
        gpu.set_hyper(DEFAULT_GROUP, &changes).unwrap();
        // SAFETY: the captured trainer touches nothing but the stepper's memory.
        unsafe { gpu.replay(&captured) }.unwrap();
    }
    Outcome::of(&gpu).unwrap().assert_same(&Outcome::of(&host).unwrap(), "replayed");
}

fn momentum(momentum: f64) -> Sgd {
    Sgd { lr: 0.5, momentum, ..Sgd::default() }
}

/// Returns the value that an optimizer reports for a hyperparameter.
fn told(stepper: &Stepper, key: OptimizerKey<'_>, name: &str) -> Option<Value> {
    let mut all = stepper.optimizers();
    let found = all.find(|attached| match key {
        OptimizerKey::Id(id) => attached.id == id,
        OptimizerKey::Group(group) => attached.group == Some(group),
    });
    found.unwrap().optimizer.get(name)
}

#[test]
fn a_change_that_is_refused_changes_nothing_of_it() {
    let layout = layout(&LENGTHS);
    let mut stepper = Stepper::host(&layout, momentum(0.9), Solo::default()).unwrap();
    let refusals: [&[(&str, Value)]; 6] = [
        &[("momentum", 0.5.into()), ("lr", f64::NAN.into())],
        &[("momentum", 0.5.into()), ("betas", (0.1, 0.2).into())],
        &[("momentum", true.into())],
        &[("nesterov", true.into()), ("dampening", 0.5.into())],
        &[("momentum", 0.0.into()), ("nesterov", true.into())],
        &[("lr", 1e300.into())],
    ];
    for changes in refusals {
        let refused = stepper.set_hyper(DEFAULT_GROUP, changes);
        assert!(
            matches!(refused, Err(Error::Config { .. } | Error::Unsupported(_))),
            "{changes:?}: {refused:?}"
        );
        for (name, value) in [("momentum", 0.9.into()), ("lr", 0.5.into()), ("nesterov", false.into())] {
            assert_eq!(told(&stepper, DEFAULT_GROUP.into(), name), Some(value), "{changes:?}");
        }
    }
    let refused = stepper.set_hyper("elsewhere", &[("lr", 0.1)]);
    assert!(matches!(refused, Err(Error::Config { field: "group", .. })), "{refused:?}");
    let refused = stepper.set_lr(DEFAULT_GROUP, f64::NAN);
    assert!(matches!(refused, Err(Error::Config { field: "lr", .. })), "{refused:?}");
    std::mem::forget(stepper.begin().unwrap());
    let refused = stepper.set_hyper(DEFAULT_GROUP, &[("momentum", 0.5)]);
    assert!(matches!(refused, Err(Error::Order(_))), "{refused:?}");
    stepper.abandon().unwrap();
    // A rate that is multiplied must do for every parameter.
    let id = layout.ids().next().unwrap();
    stepper.set_lr_multiplier(id, 1e30).unwrap();
    let refused = stepper.set_hyper(DEFAULT_GROUP, &[("lr", 1e20)]);
    assert!(matches!(refused, Err(Error::Config { field: "lr_multiplier", .. })), "{refused:?}");
    assert_eq!(told(&stepper, DEFAULT_GROUP.into(), "lr"), Some(0.5.into()));
}

#[test]
fn a_state_that_nobody_keeps_is_refused_by_name_and_one_that_is_kept_comes_into_use() {
    let layout = Layout::builder().param("a", 3).param("b", 2).in_group("other").build().unwrap();
    let switched = [("momentum", Value::Number(0.5))];
    let mut alone = Stepper::host(&layout, momentum(0.0), Solo::default()).unwrap();
    let refused = alone.set_hyper(DEFAULT_GROUP, &switched).unwrap_err().to_string();
    assert!(refused.contains("momentum_buffer"), "{refused}");
    let mut adam = Stepper::host(&layout, Adam::default(), Solo::default()).unwrap();
    let refused = adam.set_hyper(DEFAULT_GROUP, &[("amsgrad", true)]).unwrap_err().to_string();
    assert!(refused.contains("max_exp_avg_sq"), "{refused}");
    let refused = adam.set_hyper(DEFAULT_GROUP, &[("betas", 0.8)]).unwrap_err().to_string();
    assert!(
        refused.contains("`betas` = 0.8: Adam takes a pair of numbers here; use values as in"),
        "{refused}"
    );
    // Another group's buffers make room; from then on it is as if momentum had been on.
    let open = |first: f64| {
        let builder = Stepper::builder(&layout, momentum(first)).group("other", momentum(0.5));
        builder.host(Solo::default()).unwrap()
    };
    let (mut switches, mut always) = (open(0.0), open(0.5));
    switches.set_hyper(DEFAULT_GROUP, &switched).unwrap();
    for at in 0..3 {
        step(&mut switches, at);
        step(&mut always, at);
    }
    Outcome::of(&switches).unwrap().assert_same(&Outcome::of(&always).unwrap(), "switched on");
    // Switched off, a buffer rests, and is there when momentum is switched on again.
    let id = layout.id("a").unwrap();
    let before = switches.view::<f32>(id.state("momentum_buffer")).unwrap().to_vec();
    switches.set_hyper(DEFAULT_GROUP, &[("momentum", 0.0)]).unwrap();
    step(&mut switches, 3);
    assert_eq!(switches.view::<f32>(id.state("momentum_buffer")).unwrap(), before);
    switches.set_hyper(DEFAULT_GROUP, &switched).unwrap();
    // A state that would move to another's place is refused although there is room.
    let centered = RmsProp { centered: true, ..RmsProp::default() };
    let builder = Stepper::builder(&layout, centered).group("other", RmsProp { momentum: 0.9, ..centered });
    let mut moves = builder.host(Solo::default()).unwrap();
    assert!(moves.set_hyper(DEFAULT_GROUP, &[("momentum", 0.9)]).is_err());
}

/// A state that is switched off keeps its place in memory, so no other state begins with its values.
#[test]
fn a_state_never_takes_the_place_of_another_one_that_was_switched_off() {
    let layout = Layout::builder().param("w", 1).build().unwrap();
    let w = layout.id("w").unwrap();
    let with = |momentum, centered| RmsProp { momentum, centered, ..RmsProp::default() };
    let changes = [
        (with(0.9, false), [("momentum", Value::from(0.0)), ("centered", Value::from(true))], "grad_avg"),
        (
            with(0.0, true),
            [("centered", Value::from(false)), ("momentum", Value::from(0.9))],
            "momentum_buffer",
        ),
    ];
    for (built, [off, on], state) in changes {
        let mut stepper = Stepper::host(&layout, built, Solo::default()).unwrap();
        let mut pass = stepper.begin().unwrap();
        pass.write(w.grad(), &[4.0]).unwrap();
        pass.finish().unwrap();
        stepper.set_hyper(DEFAULT_GROUP, &[off]).unwrap();
        let outcome = stepper.set_hyper(DEFAULT_GROUP, &[on]);
        let Err(error) = outcome else {
            panic!("{state} begins with {:?}", stepper.view::<f32>(w.state(state)))
        };
        assert!(error.to_string().starts_with(&format!("states = {state}: ")), "{error}");
        // What is switched on again goes on.
        stepper.set_hyper(DEFAULT_GROUP, &[(off.0, built.get(off.0).unwrap())]).unwrap();
    }
}

#[test]
fn what_the_precision_excludes_is_excluded_later_too() {
    let layout = layout(&LENGTHS);
    let of = |moments| Precision { moments, ..Precision::F32 };
    let build =
        |moments| Stepper::builder(&layout, Adam::default()).precision(of(moments)).host(Solo::default());
    let mut codes = build(Moments::EightBit).unwrap();
    let tiny = [("eps", Value::Number(1e-30))];
    let refused = codes.set_hyper(DEFAULT_GROUP, &tiny);
    assert!(matches!(refused, Err(Error::Config { field: "moments", .. })), "{refused:?}");
    build(Moments::F32).unwrap().set_hyper(DEFAULT_GROUP, &tiny).unwrap();
}

#[test]
fn ranks_that_change_different_things_are_told_what() {
    let layout = layout(&LENGTHS);
    let outcome = in_process(2, |comm| {
        let rank = f64::from(comm.rank());
        let mut stepper = Stepper::host(&layout, Adam::default(), comm)?;
        stepper.begin()?.finish()?;
        stepper.set_hyper(DEFAULT_GROUP, &[("betas", (0.5 + rank / 4.0, 0.99))])?;
        stepper.begin()?.finish()?;
        stepper.status().map(drop)
    });
    let error = outcome.unwrap_err();
    let Error::Mismatch { differs, .. } = error.cause() else { panic!("{error}") };
    assert!(differs.contains("hyperparameters"), "{error}");
}

#[test]
fn any_optimizer_follows_a_schedule_one_of_single_parameters_and_a_late_one_too() {
    let layout = layout(&LENGTHS);
    let ids: Vec<ParamId> = layout.ids().collect();
    let schedule = || LrSchedule::step(0.5, 1, 0.5);
    let open = || {
        let builder = Stepper::builder(&layout, momentum(0.5)).optimizer_for(&ids[..1], momentum(0.25));
        let mut stepper = builder.host(Solo::default()).unwrap();
        let late = stepper.add_optimizer_for(&ids[1..2], Sgd::default()).unwrap();
        let own = stepper.optimizers_of(ids[0]).unwrap()[0];
        (stepper, [own, late])
    };
    let ((mut scheduled, followed), (mut by_hand, _)) = (open(), open());
    for id in followed {
        scheduled.set_lr_schedule(id, Some(schedule())).unwrap();
    }
    for at in 0..4 {
        for id in followed {
            by_hand.set_lr(id, schedule().lr_at(at as u64)).unwrap();
        }
        step(&mut scheduled, at);
        step(&mut by_hand, at);
    }
    Outcome::of(&scheduled).unwrap().assert_same(&Outcome::of(&by_hand).unwrap(), "scheduled");
    for refused in [scheduled.set_lr(followed[0], 0.1), scheduled.set_hyper(followed[0], &[("lr", 0.1)])] {
        assert!(matches!(refused, Err(Error::Config { field: "optimizer", .. })), "{refused:?}");
    }
    let refused = scheduled.set_lr_schedule(followed[0], Some(LrSchedule::step(0.5, 0, 0.5)));
    assert!(matches!(refused, Err(Error::Config { field: "step_size", .. })), "{refused:?}");
    scheduled.set_hyper(followed[0], &[("momentum", 0.125)]).unwrap();
    // Without its schedule the rate stays as it is until it is set.
    scheduled.set_lr_schedule(followed[0], None).unwrap();
    step(&mut scheduled, 4);
    assert_eq!(told(&scheduled, followed[0].into(), "lr"), Some(schedule().lr_at(3).into()));
    assert_eq!(told(&scheduled, followed[1].into(), "lr"), Some(schedule().lr_at(4).into()));
    scheduled.set_lr(followed[0], 0.1).unwrap();
}
