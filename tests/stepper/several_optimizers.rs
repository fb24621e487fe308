//! Several optimizers in one bucket, several for one parameter, the user's own code, and parameters without an
//! optimizer.
//!
//! Steps are elementwise, so each parameter in a bucket has the bits of a separate stepper. The same calls run on the
//! host and on a GPU, or its stand-in.

use std::any::Any;

use instep::abi::{INSTEP_ACTION_STEP, InstepCustomScalars};
use instep::layout::DEFAULT_GROUP;
use instep::optim::{Custom, EnqueuedStep, ParamStep, StepParam};
use instep::{
    Adam, AdamW, Device, Error, Layout, LrSchedule, Mode, ParamId, Place, Result, SegmentAction, Sgd, Solo,
    Stepper, StepperBuilder, Unused, in_process,
};

use crate::support::device::cuda;
use crate::support::stand_in::commands::pointer;
use crate::support::waits::{assert_each_is_missed, middle_passes};
use crate::support::{self, MODES, Presummed, paint, paint_gradient};

const LENGTHS: [usize; 6] = [300, 5, 2049, 0, 17, 4096];
const PASSES: usize = 5;

fn layout() -> Layout {
    let named = LENGTHS.iter().enumerate();
    named.fold(Layout::builder(), |layout, (k, len)| layout.param(format!("p{k}"), *len)).build().unwrap()
}

const HEAVY: Sgd =
    Sgd { lr: 0.05, momentum: 0.9, dampening: 0.0, weight_decay: 0.01, nesterov: true, maximize: false };

fn adamw() -> AdamW {
    AdamW { lr: 0.01, amsgrad: true, ..AdamW::default() }
}

/// Fills all tensors from formulas and makes the passes; `skips` leaves a parameter out of every third pass.
fn train<D: Device>(stepper: &mut Stepper<D>, layout: &Layout, names: &[usize], skips: bool) -> Result<()> {
    for param in names {
        let id = layout.id(&format!("p{param}"))?;
        let values: Vec<f32> = (0..LENGTHS[*param]).map(|k| paint(*param, k)).collect();
        stepper.write(id, &values)?;
    }
    for step in 0..PASSES {
        let mut pass = stepper.begin()?;
        for param in names.iter().rev() {
            if skips && (step + param) % 3 == 0 {
                continue;
            }
            let id = layout.id(&format!("p{param}"))?;
            let values: Vec<f32> =
                (0..LENGTHS[*param]).map(|k| 3.0 * paint_gradient(step, *param, k)).collect();
            pass.write(id.grad(), &values)?;
            pass.grad_ready(id)?;
        }
        pass.finish()?;
    }
    Ok(())
}

/// Returns the bits of a parameter, its states by name, and its step count.
pub(crate) fn bits<D: Device>(
    stepper: &Stepper<D>,
    id: ParamId,
) -> Result<(Vec<Vec<u32>>, Vec<String>, u64)> {
    let mut values = vec![0.0; stepper.layout().parameter(id)?.len as usize];
    let mut read = |fill: &dyn Fn(&mut [f32]) -> Result<()>| {
        fill(&mut values)?;
        Ok::<_, Error>(values.iter().map(|x| x.to_bits()).collect::<Vec<u32>>())
    };
    let mut all = vec![read(&|into| stepper.read(id, into))?];
    let names = stepper.state_names(id)?;
    for name in &names {
        all.push(read(&|into| stepper.read(id.state(name), into))?);
    }
    Ok((all, names.iter().map(|name| name.to_string()).collect(), stepper.step_count(id)?))
}

/// Returns a builder with SGD with momentum for even parameters and AdamW for odd ones.
fn alternating(layout: &Layout) -> StepperBuilder<'_> {
    let pick = |odd| (0..LENGTHS.len()).filter(move |k| k % 2 == odd).map(|k| format!("p{k}"));
    let ids = |odd| pick(odd).map(|name| layout.id(&name).unwrap()).collect::<Vec<_>>();
    Stepper::builder_without_optimizer(layout)
        .optimizer_for(&ids(0), HEAVY)
        .optimizer_for(&ids(1), adamw())
        .bucket_cap_bytes(4 << 10)
}

fn assert_alternating_is_each_alone<D: Device>(mixed: &mut Stepper<D>, mode: Mode) {
    let layout = mixed.layout().clone();
    let all: Vec<usize> = (0..LENGTHS.len()).collect();
    train(mixed, &layout, &all, true).unwrap();
    for odd in 0..2 {
        let build = |layout| {
            let builder =
                if odd == 0 { Stepper::builder(layout, HEAVY) } else { Stepper::builder(layout, adamw()) };
            builder.mode(mode).host(Presummed(3)).unwrap()
        };
        let own: Vec<usize> = all.iter().copied().filter(|k| k % 2 == odd).collect();
        let names = own.iter().map(|k| (format!("p{k}"), LENGTHS[*k]));
        let alone_layout =
            names.fold(Layout::builder(), |l, (name, len)| l.param(name, len)).build().unwrap();
        let mut alone = build(&alone_layout);
        train(&mut alone, &alone_layout, &own, true).unwrap();
        for param in own {
            let name = format!("p{param}");
            let (ours, theirs) = (layout.id(&name).unwrap(), alone_layout.id(&name).unwrap());
            assert_eq!(bits(mixed, ours).unwrap(), bits(&alone, theirs).unwrap(), "{mode:?} {name}");
        }
    }
}

#[test]
fn optimizers_that_share_buckets_give_the_bits_of_each_alone() {
    let layout = layout();
    for mode in MODES {
        assert_alternating_is_each_alone(
            &mut alternating(&layout).mode(mode).host(Presummed(3)).unwrap(),
            mode,
        );
        // SAFETY: the trainer's stream is the default one, or the stand-in's, which is a number.
        let gpu = unsafe { alternating(&layout).mode(mode).cuda(Presummed(3), &cuda()) };
        assert_alternating_is_each_alone(&mut gpu.unwrap(), mode);
    }
}

#[test]
fn shared_buckets_have_no_hazard_and_no_wait_too_many() {
    let layout = layout();
    for mode in MODES {
        let mut stepper = alternating(&layout).mode(mode).record(true).host(Solo::default()).unwrap();
        train(&mut stepper, &layout, &[0, 1, 2, 3, 4, 5], false).unwrap();
        let list = stepper.take_recording().unwrap().list;
        assert_each_is_missed(stepper.plan(), 3, &list, middle_passes(&list), 8, &format!("{mode:?}"));
    }
}

/// Two optimizers step all parameters; the reference is two steppers that hand the parameters to each other.
#[test]
fn a_second_optimizer_steps_after_the_first_with_states_of_its_own() {
    let layout = layout();
    let all: Vec<usize> = (0..LENGTHS.len()).collect();
    for mode in MODES {
        let mut both = Stepper::builder(&layout, adamw())
            .then(DEFAULT_GROUP, HEAVY)
            .mode(mode)
            .host(Presummed(3))
            .unwrap();
        train(&mut both, &layout, &all, false).unwrap();
        let mut first = Stepper::host(&layout, adamw(), Presummed(3)).unwrap();
        let mut second = Stepper::host(&layout, HEAVY, Presummed(3)).unwrap();
        for (param, id) in layout.ids().enumerate() {
            let values: Vec<f32> = (0..LENGTHS[param]).map(|k| paint(param, k)).collect();
            first.write(id, &values).unwrap();
        }
        for step in 0..PASSES {
            for from_first in [true, false] {
                let (stepper, other) =
                    if from_first { (&mut first, &mut second) } else { (&mut second, &mut first) };
                let mut pass = stepper.begin().unwrap();
                for (param, id) in layout.ids().enumerate() {
                    let gradient = (0..LENGTHS[param]).map(|k| 3.0 * paint_gradient(step, param, k));
                    pass.write(id.grad(), &gradient.collect::<Vec<f32>>()).unwrap();
                }
                crate::support::finish(pass).unwrap();
                for id in layout.ids() {
                    other.write(id, stepper.view::<f32>(id).unwrap()).unwrap();
                }
            }
        }
        for id in layout.ids() {
            let (ours, names, count) = bits(&both, id).unwrap();
            let ((mut one, _, _), (two, _, _)) = (bits(&first, id).unwrap(), bits(&second, id).unwrap());
            one.extend_from_slice(&two[1..]);
            one[0] = two[0].clone();
            assert_eq!(ours, one, "{mode:?}");
            assert_eq!(names, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer#1"]);
            assert_eq!(count, if layout.parameter(id).unwrap().len > 0 { PASSES as u64 } else { 0 });
        }
        let rates: Vec<_> = both.optimizers().map(|attached| attached.id).collect();
        assert!(matches!(both.set_lr(DEFAULT_GROUP, 1.0), Err(Error::Config { field: "group", .. })));
        both.set_lr(rates[1], 0.0).unwrap();
        let changed = both.optimizers().nth(1).unwrap().optimizer as &dyn Any;
        assert_eq!(changed.downcast_ref::<Sgd>().unwrap().lr, 0.0);
    }
}

/// Plain descent, as a user would write it, for both kinds of device: one state counts its updates.
pub(crate) struct Descent;

fn descend(param: &mut [f32], grad: &[f32], count: &mut [f32], lr: f32, multiplier: f32) {
    for ((p, g), c) in param.iter_mut().zip(grad).zip(count) {
        *p -= lr * (g * multiplier);
        *c += 1.0;
    }
}

impl StepParam for Descent {
    fn name(&self) -> &str {
        "descent"
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["seen"]
    }

    fn lr(&self) -> f64 {
        0.25
    }

    fn reaches(&self, _: Place) -> bool {
        true
    }

    fn step_param(&self, step: ParamStep<'_>) -> Result<()> {
        assert_eq!(step.states.len(), 1);
        assert_eq!(f64::from(step.states[0].first().copied().unwrap_or(0.0)) + 1.0, step.step as f64);
        let lr = step.lr as f32;
        descend(step.param, step.grad_sum, step.states[0], lr, step.multiplier);
        Ok(())
    }

    fn enqueue_param(&self, step: &EnqueuedStep<'_>) -> Result<()> {
        let len = step.len as usize;
        // SAFETY: the stand-in's memory is the CPU's and runs calls in their order, so this is where a kernel would
        // run.
        unsafe {
            let scalars = pointer(step.scalars).cast::<InstepCustomScalars>().read();
            if scalars.action == INSTEP_ACTION_STEP {
                let at = |address| std::slice::from_raw_parts_mut(pointer(address).cast::<f32>(), len);
                let (param, grad, count) = (at(step.param), at(step.grad_sum), at(step.states[0]));
                descend(param, grad, count, scalars.lr as f32, scalars.multiplier);
            }
        }
        Ok(())
    }
}

#[test]
fn code_of_the_users_own_steps_beside_built_in_optimizers_in_one_bucket() {
    let layout = layout();
    let all: Vec<usize> = (0..LENGTHS.len()).collect();
    let own = [layout.id("p0").unwrap(), layout.id("p4").unwrap()];
    for mode in MODES {
        let builder =
            || Stepper::builder(&layout, adamw()).optimizer_for(&own, Custom::new(Descent)).mode(mode);
        let mut host = builder().record(true).host(Presummed(3)).unwrap();
        train(&mut host, &layout, &all, true).unwrap();
        let plain = Sgd { lr: 0.25, ..Sgd::default() };
        let mut reference = Stepper::builder(&layout, adamw())
            .optimizer_for(&own, plain)
            .mode(mode)
            .host(Presummed(3))
            .unwrap();
        train(&mut reference, &layout, &all, true).unwrap();
        let recording = host.take_recording().unwrap();
        assert_eq!(host.check(&recording), []);
        for id in layout.ids() {
            let (ours, theirs) = (bits(&host, id).unwrap(), bits(&reference, id).unwrap());
            assert_eq!((&ours.0[0], ours.2), (&theirs.0[0], theirs.2), "{mode:?}");
            if own.contains(&id) {
                assert!(
                    host.view::<f32>(id.state("seen")).unwrap().iter().all(|seen| *seen == ours.2 as f32)
                );
            }
        }
        if !crate::support::hardware::is_required() {
            // SAFETY: the stand-in's stream is a number.
            let mut gpu = unsafe { builder().cuda(Presummed(3), &cuda()).unwrap() };
            train(&mut gpu, &layout, &all, true).unwrap();
            for id in layout.ids() {
                assert_eq!(bits(&gpu, id).unwrap(), bits(&host, id).unwrap(), "{mode:?} on a GPU");
            }
        }
    }
}

#[test]
fn a_skipped_pass_and_a_frozen_parameter_are_kept_from_the_users_code() {
    let layout = Layout::builder().param("a", 4).param("b", 3).build().unwrap();
    let (a, b) = (layout.id("a").unwrap(), layout.id("b").unwrap());
    for mode in [Mode::Sequential, Mode::Normed] {
        let builder = Stepper::builder(&layout, Custom::new(Descent)).mode(mode).skip_nonfinite(true);
        let mut stepper = builder.host(Solo::default()).unwrap();
        let step = |stepper: &mut Stepper, value: f32| {
            let mut pass = stepper.begin().unwrap();
            for id in [a, b] {
                if let Ok(gradient) = pass.grads().get_mut(id) {
                    gradient.fill(value);
                }
            }
            pass.finish().unwrap();
        };
        step(&mut stepper, f32::INFINITY);
        assert_eq!((stepper.step_count(a).unwrap(), stepper.view::<f32>(a).unwrap()), (0, &[0.0; 4][..]));
        stepper.set_frozen(b, true).unwrap();
        step(&mut stepper, 1.0);
        stepper.set_lr(DEFAULT_GROUP, 1.0).unwrap();
        stepper.set_frozen(b, false).unwrap();
        step(&mut stepper, 1.0);
        assert_eq!(stepper.view::<f32>(a).unwrap(), [-1.25; 4]);
        assert_eq!(stepper.view::<f32>(b).unwrap(), [-1.0; 3]);
        assert_eq!((stepper.step_count(a).unwrap(), stepper.step_count(b).unwrap()), (2, 1));
    }
}

struct Broken(fn() -> Result<()>);

impl StepParam for Broken {
    fn name(&self) -> &str {
        "broken"
    }

    fn step_param(&self, _: ParamStep<'_>) -> Result<()> {
        (self.0)()
    }
}

#[test]
fn what_fails_in_the_users_code_poisons_the_stepper_with_its_own_words() {
    let layout = Layout::builder().param("a", 4).build().unwrap();
    let failures: [fn() -> Result<()>; 2] =
        [|| panic!("out of ideas"), || Err(Error::layout("test", "out of ideas", ""))];
    for failure in failures {
        let mut stepper = Stepper::host(&layout, Custom::new(Broken(failure)), Solo::default()).unwrap();
        stepper.begin().unwrap().finish().unwrap();
        let mut pass = stepper.begin().unwrap();
        let _ = pass.write(layout.id("a").unwrap().grad(), &[1.0; 4]);
        let _ = pass.finish();
        let error = stepper.close().unwrap_err();
        assert!(
            matches!(&error, Error::Poisoned { .. }) && error.to_string().contains("out of ideas"),
            "{error}"
        );
    }
}

#[test]
fn what_custom_code_cannot_have_is_refused_when_the_stepper_is_built() {
    struct Named(&'static [&'static str], f64);
    impl StepParam for Named {
        fn name(&self) -> &str {
            "named"
        }
        fn state_names(&self) -> &'static [&'static str] {
            self.0
        }
        fn lr(&self) -> f64 {
            self.1
        }
        fn step_param(&self, _: ParamStep<'_>) -> Result<()> {
            Ok(())
        }
    }
    let layout = Layout::builder().param("a", 4).build().unwrap();
    let build = |rule| Stepper::host(&layout, Custom::new(rule), Solo::default());
    for names in [&["a", "b", "c", "d"][..], &["a", "a"], &["a.b"], &["a#1"], &["step"], &[""]] {
        assert!(
            matches!(build(Named(names, 0.0)), Err(Error::Config { field: "state_names", .. })),
            "{names:?}"
        );
    }
    assert!(matches!(build(Named(&[], f64::NAN)), Err(Error::Config { field: "lr", .. })));
    assert!(build(Named(&["a", "b", "c"], 0.0)).is_ok());
    // SAFETY: the stream is a number, or the default one; nothing is built.
    let on_gpu =
        unsafe { Stepper::builder(&layout, Custom::new(Named(&[], 0.0))).cuda(Solo::default(), &cuda()) };
    assert!(matches!(on_gpu, Err(Error::Unsupported { .. })));
}

#[test]
fn only_the_chosen_parameters_are_stepped_and_the_others_gradients_are_averaged() {
    let layout = layout();
    let all: Vec<usize> = (0..LENGTHS.len()).collect();
    let chosen = [layout.id("p2").unwrap()];
    for mode in MODES {
        for (subset, stepped) in
            [(None, vec![0, 1, 2, 4, 5]), (Some(&chosen[..]), vec![2]), (Some(&[][..]), vec![])]
        {
            let builder = Stepper::builder(&layout, HEAVY).mode(mode).optimize_only(subset);
            let mut stepper = builder.unused(Unused::StepZero).host(Presummed(3)).unwrap();
            train(&mut stepper, &layout, &all, false).unwrap();
            for (param, id) in layout.ids().enumerate() {
                let is_stepped = stepped.contains(&param);
                assert_eq!(stepper.step_count(id).unwrap(), if is_stepped { PASSES as u64 } else { 0 });
                if !is_stepped {
                    let third = (1.0f64 / 3.0) as f32;
                    let mean = |k| 3.0 * paint_gradient(PASSES - 1, param, k) * third;
                    let means: Vec<f32> = (0..LENGTHS[param]).map(mean).collect();
                    let values: Vec<f32> = (0..LENGTHS[param]).map(|k| paint(param, k)).collect();
                    assert_eq!(stepper.view::<f32>(id.grad()).unwrap(), means, "{mode:?} {param}");
                    assert_eq!(stepper.view::<f32>(id).unwrap(), values);
                }
            }
        }
    }
}

#[test]
fn an_optimizer_where_none_is_to_step_and_a_schedule_that_none_follows_are_refused() {
    let layout =
        Layout::builder().param("a", 4).param("b", 4).action(SegmentAction::Average).build().unwrap();
    let (a, b) = (layout.id("a").unwrap(), layout.id("b").unwrap());
    let builder = || Stepper::builder(&layout, HEAVY);
    let field = |builder: StepperBuilder<'_>| match builder.host(Solo::default()) {
        Err(Error::Config { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(field(builder().optimizer_for(&[b], HEAVY)), "action");
    assert_eq!(field(builder().optimize_only(Some(&[])).optimizer_for(&[a], HEAVY)), "optimize_only");
    assert_eq!(field(builder().optimizer_for(&[a, a], HEAVY)), "params");
    assert_eq!(field(builder().then_for(&[b], HEAVY)), "action");
    let mut stepper = builder().host(Solo::default()).unwrap();
    let late = stepper.add_optimizer_for(&[a, a], HEAVY);
    assert!(matches!(late, Err(Error::Config { field: "params", .. })), "{late:?}");
    assert_eq!(stepper.optimizers_of(a).unwrap().len(), 1, "as it was");
    let schedule = || LrSchedule::step(1.0, 1, 0.5);
    assert_eq!(
        field(builder().then(DEFAULT_GROUP, HEAVY).lr_schedule(DEFAULT_GROUP, schedule())),
        "lr_schedule"
    );
    let none = Stepper::builder_without_optimizer(&layout).optimizer_for(&[a], HEAVY);
    assert_eq!(field(none.lr_schedule(DEFAULT_GROUP, schedule())), "lr_schedule");
}

#[test]
fn a_rate_that_decays_below_every_f32_is_nothing_and_ends_no_training() {
    let layout = Layout::builder().param("a", 1).build().unwrap();
    let builder = Stepper::builder(&layout, HEAVY).lr_schedule(DEFAULT_GROUP, LrSchedule::step(0.1, 1, 0.5));
    let mut stepper = builder.host(Solo::default()).unwrap();
    for step in 0..200 {
        stepper.begin().unwrap().finish().unwrap();
        assert_eq!(stepper.schedule_step(), step + 1);
    }
    assert!(matches!(stepper.set_schedule_step(1 << 63), Err(Error::Config { .. })));
}

#[test]
fn ranks_with_other_optimizers_or_subsets_are_told_so() {
    let layout = layout();
    let differing = |pick: fn(usize, StepperBuilder<'_>) -> StepperBuilder<'_>| {
        in_process(2, |comm| {
            let rank = instep::Collective::rank(&comm) as usize;
            let mut stepper = pick(rank, Stepper::builder(&layout, HEAVY)).host(comm)?;
            stepper.begin()?.finish()?;
            stepper.close()
        })
    };
    let error = differing(
        |rank, builder| if rank == 0 { builder } else { builder.then(DEFAULT_GROUP, Adam::default()) },
    );
    assert!(matches!(error.unwrap_err().cause(), Error::Mismatch { .. }));
    let error = differing(|rank, builder| if rank == 0 { builder } else { builder.optimize_only(Some(&[])) });
    assert!(matches!(error.unwrap_err().cause(), Error::Mismatch { .. }));
}

#[test]
fn a_second_optimizer_is_added_by_name_alone_for_groups_and_for_single_parameters() {
    let layout = support::layout(&[1, 1]);
    let ids: Vec<ParamId> = layout.ids().collect();
    let sgd = |lr| Sgd { lr, ..Sgd::default() };
    let builder = || Stepper::builder_without_optimizer(&layout);
    let twice = [
        builder().group(DEFAULT_GROUP, sgd(1.0)).group(DEFAULT_GROUP, sgd(2.0)),
        builder().optimizer_for(&ids, sgd(1.0)).optimizer_for(&ids[1..], sgd(2.0)),
    ];
    for (builder, remedy) in twice.into_iter().zip(["StepperBuilder::then", "StepperBuilder::then_for"]) {
        let refused = builder.host(Solo::default()).unwrap_err().to_string();
        assert!(refused.contains("has an optimizer already") && refused.contains(remedy), "{refused}");
    }
    // After a parameter's own, after its group's, and whichever is registered first.
    let added = [
        builder().optimizer_for(&ids, sgd(1.0)).then_for(&ids[1..], sgd(2.0)),
        builder().then_for(&ids[1..], sgd(2.0)).optimizer_for(&ids, sgd(1.0)),
        builder().group(DEFAULT_GROUP, sgd(1.0)).then_for(&ids[1..], sgd(2.0)),
    ];
    for (k, builder) in added.into_iter().enumerate() {
        let mut stepper = builder.host(Solo::default()).unwrap();
        let of = ids.iter().map(|id| stepper.optimizers_of(*id).unwrap().len()).collect::<Vec<_>>();
        assert_eq!(of, [1, 2], "case {k}");
        let mut pass = stepper.begin().unwrap();
        for id in &ids {
            pass.write(id.grad(), &[1.0]).unwrap();
        }
        pass.finish().unwrap();
        let values = ids.iter().map(|id| stepper.view::<f32>(*id).unwrap()[0]).collect::<Vec<_>>();
        assert_eq!(values, [-1.0, -3.0], "case {k}");
    }
}
