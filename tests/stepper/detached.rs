//! Passes without a borrow: the stepper's own calls, flat buckets, and steppers that are exchanged during a pass.
//!
//! A detached pass must give the same bits as a borrowed one. All that the mutable reference of a pass makes possible
//! must end in the right result or a typed error.

use std::mem;

use instep::checkpoint;
use instep::{
    Adam, Error, Gradients, Layout, LrSchedule, Mode, Precision, Result, ScalerState, SegmentAction, Sgd,
    Solo, Stepper, TensorId, Unused, bf16, in_process,
};

use crate::support::{self, LENGTHS, MODES, Options, Outcome, few_optimizers, layout, painted};

fn is_order<T>(outcome: Result<T>) -> bool {
    matches!(outcome, Err(Error::Order(_)))
}

fn is_layout<T>(outcome: Result<T>) -> bool {
    matches!(outcome, Err(Error::Layout(_)))
}

fn is_unsupported<T>(outcome: Result<T>) -> bool {
    matches!(outcome, Err(Error::Unsupported(_)))
}

/// Trains through flat buckets, whose padding holds NaN, or through single gradients.
fn train(mut stepper: Stepper, options: &Options, flat: bool) -> Outcome {
    support::paint_params(&mut stepper);
    let (ids, plan) = (stepper.layout().ids().collect::<Vec<_>>(), stepper.plan().clone());
    let paint = painted(options);
    for step in 0..3 {
        stepper.begin().unwrap().detach();
        for (index, bucket) in plan.buckets().iter().enumerate() {
            for segment in plan.segments_of(bucket) {
                let id = ids[segment.param as usize];
                assert!(stepper.is_first(id).unwrap());
                if !flat {
                    paint(step, segment.param as usize, stepper.view_mut(id.grad()).unwrap());
                    stepper.grad_ready(id).unwrap();
                }
            }
            if flat {
                let slice = stepper.bucket_mut::<f32>(index as u32).unwrap();
                slice.fill(f32::NAN);
                for segment in plan.segments_of(bucket) {
                    let at = (segment.grad_start - bucket.start) as usize;
                    paint(step, segment.param as usize, &mut slice[at..][..segment.len as usize]);
                }
                stepper.bucket_ready(index as u32).unwrap();
            }
        }
        stepper.finish().unwrap();
    }
    let recording = stepper.take_recording().unwrap();
    assert_eq!(stepper.check(&recording), []);
    let outcome = Outcome::of(&stepper).unwrap();
    stepper.close().unwrap();
    outcome
}

#[test]
fn a_detached_pass_and_flat_buckets_leave_the_bits_of_a_borrowed_pass() {
    for mode in MODES {
        for unused in [Unused::Skip, Unused::StepZero] {
            let max_norm = (mode != Mode::Eager).then_some(0.5);
            let options =
                Options { mode, unused, max_norm, cap: Some(4096), record: true, ..Options::default() };
            let (layout, optim) = (layout(&LENGTHS), few_optimizers()[2]);
            let expected = support::run(&layout, optim, &options, 3, painted(&options));
            for flat in [false, true] {
                let stepper = options.stepper(&layout, optim, Solo::default()).unwrap();
                let found = train(stepper, &options, flat);
                found.assert_same(&expected, &format!("{mode:?}, {unused:?}, flat {flat}"));
                assert_eq!(found.status, expected.status, "padding is not measured");
            }
        }
    }
}

#[test]
fn ranks_train_alike_through_flat_buckets() {
    let layout = layout(&[3, 700, 256]);
    let trained = |flat| {
        in_process(2, |comm| {
            let options = Options { cap: Some(2048), record: true, ..Options::default() };
            let stepper = options.stepper(&layout, few_optimizers()[2], comm)?;
            Ok::<_, Error>(train(stepper, &options, flat))
        })
        .unwrap()
    };
    let (flat, single) = (trained(true), trained(false));
    flat[0].assert_same(&single[0], "flat buckets");
    flat[0].assert_same(&flat[1], "ranks");
}

#[test]
fn a_flat_bucket_is_refused_where_one_of_its_gradients_would_be() {
    let layout = Layout::builder().param("a", 300).param("b", 5).build().unwrap();
    let [a, b] = ["a", "b"].map(|name| layout.id(name).unwrap());
    let mut stepper = Stepper::host(&layout, Sgd::default(), Solo::default()).unwrap();
    assert!(is_order(stepper.bucket_mut::<f32>(0)), "no pass is open");
    stepper.begin().unwrap().detach();
    assert!(is_layout(stepper.bucket_mut::<f32>(1)));
    assert!(is_unsupported(stepper.bucket_mut::<bf16>(0)));
    let tail = stepper.plan().buckets()[0].tail.start as usize;
    assert_eq!(stepper.bucket_mut::<f32>(0).unwrap().len(), tail, "counts of ranks are left out");
    stepper.grad_ready(a).unwrap();
    assert!(is_order(stepper.bucket_mut::<f32>(0)), "one is handed over");
    stepper.abandon().unwrap();
    stepper.set_frozen(b, true).unwrap();
    stepper.begin().unwrap().detach();
    assert!(is_order(stepper.bucket_mut::<f32>(0)), "one is frozen");
    assert!(stepper.is_first(a).unwrap(), "a refusal marks nothing as written");
    stepper.abandon().unwrap();
}

#[test]
fn each_tensor_is_reached_when_it_may_be_and_refused_otherwise() {
    let layout =
        Layout::builder().param("w", 2).param("left", 1).action(SegmentAction::Leave).build().unwrap();
    let w = layout.id("w").unwrap();
    let builder = Stepper::builder(&layout, Adam::default()).ema(0.9).copy_params(instep::DType::BF16);
    let mut stepper = builder.host(Solo::default()).unwrap();
    let others = [w.state("exp_avg"), w.ema(), w.copy()];
    let mut two = [0.0; 2];
    assert_eq!(TensorId::from(w), TensorId::Param(w));
    for tensor in others.into_iter().chain([w.into(), w.grad()]) {
        stepper.read(tensor, &mut two).unwrap();
        assert!(is_layout(stepper.read(tensor, &mut [0.0])));
    }
    assert!(is_order(stepper.write(w.grad(), &[1.0; 2])), "gradients are written in a pass");
    assert!(is_order(stepper.view_mut::<f32>(w.grad())));
    assert!(is_unsupported(stepper.write(w.copy(), &[1.0; 2])), "steps alone write copies");
    assert!(is_unsupported(stepper.view_mut::<bf16>(w.copy())));
    assert!(is_unsupported(stepper.read(w.state("max_exp_avg_sq"), &mut two)));
    stepper.view_mut::<f32>(w.ema()).unwrap().copy_from_slice(&[3.0, 4.0]);
    assert_eq!(stepper.view::<f32>(w.ema()).unwrap(), [3.0, 4.0]);
    assert!(
        is_order(stepper.is_first(w)) && is_order(stepper.grad_ready(w)) && is_order(stepper.bucket_ready(0))
    );
    assert!(
        is_order(stepper.next_micro_batch()) && is_order(stepper.finish()) && is_order(stepper.abandon())
    );

    stepper.begin_accumulating(2.try_into().unwrap()).unwrap().detach();
    for tensor in others {
        assert!(is_order(stepper.read(tensor, &mut two)), "{tensor:?} in a pass");
    }
    assert!(is_order(stepper.write(w.state("exp_avg"), &two)) && is_order(stepper.write(w, &two)));
    assert!(is_order(stepper.view::<f32>(w.grad())), "nobody wrote it in this pass");
    stepper.write(w.grad(), &[1.0, 2.0]).unwrap();
    assert_eq!(stepper.view::<f32>(w.grad()).unwrap(), [1.0, 2.0]);
    assert_eq!(stepper.view::<f32>(w).unwrap(), [0.0; 2]);
    stepper.grad_ready(w).unwrap();
    assert!(is_order(stepper.view::<f32>(w.grad())) && is_order(stepper.read(w, &mut two)), "handed over");
    assert!(is_order(stepper.finish()), "a micro-batch is still to come");
    stepper.next_micro_batch().unwrap();
    assert_eq!(stepper.view::<f32>(w.grad()).unwrap(), [1.0, 2.0], "the refused end handed nothing over");
    stepper.view_mut::<f32>(w.grad()).unwrap()[0] = 3.0;
    stepper.finish().unwrap();
    assert_eq!(stepper.view::<f32>(w.grad()).unwrap(), [3.0, 2.0]);
}

#[test]
fn a_released_gradient_can_be_read_by_its_writer_only() {
    let layout = Layout::builder().param("w", 2).build().unwrap();
    let w = layout.id("w").unwrap();
    let builder = Stepper::builder(&layout, Sgd::default()).gradients(Gradients::Release);
    // A machine without memory release says so when the stepper is built.
    let Ok(mut stepper) = builder.host(Solo::default()) else { return };
    let mut pass = stepper.begin().unwrap();
    pass.write(w.grad(), &[1.0, 2.0]).unwrap();
    assert_eq!(pass.view::<f32>(w.grad()).unwrap(), [1.0, 2.0]);
    pass.finish().unwrap();
    assert!(is_order(stepper.view::<f32>(w.grad())));
}

#[test]
fn every_call_between_passes_is_refused_inside_one_and_the_pass_goes_on() {
    let layout = Layout::builder().param("w", 2).build().unwrap();
    let w = layout.id("w").unwrap();
    let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Sgd::default() }, Solo::default()).unwrap();
    let optimizer = stepper.optimizers_of(w).unwrap()[0];
    type Call = fn(&mut Stepper, instep::ParamId) -> Result<()>;
    let calls: [(&str, Call); 19] = [
        ("begin", |stepper, _| stepper.begin().map(|pass| pass.detach())),
        ("fill_params", |stepper, _| stepper.fill_params(|_, _| ())),
        ("status", |stepper, _| stepper.status().map(drop)),
        ("step_count", |stepper, w| stepper.step_count(w).map(drop)),
        ("set_step_count", |stepper, w| stepper.set_step_count(w, 7)),
        ("carried", |stepper, w| stepper.carried(w).map(drop)),
        ("set_frozen", |stepper, w| stepper.set_frozen(w, true)),
        ("set_lr", |stepper, _| stepper.set_lr("default", 0.5)),
        ("set_hyper", |stepper, _| stepper.set_hyper("default", &[("momentum", 0.5)])),
        ("set_lr_schedule", |stepper, _| stepper.set_lr_schedule("default", Some(LrSchedule::constant(0.1)))),
        ("set_lr_multiplier", |stepper, w| stepper.set_lr_multiplier(w, 0.5)),
        ("set_schedule_step", |stepper, _| stepper.set_schedule_step(5)),
        ("rebuild_buckets", |stepper, _| stepper.rebuild_buckets().map(drop)),
        ("add_optimizer_for", |stepper, w| stepper.add_optimizer_for(&[w], Sgd::default()).map(drop)),
        ("add_group", |stepper, _| stepper.add_group("default", Sgd::default()).map(drop)),
        ("rescue", |stepper, _| stepper.rescue()),
        ("previous_norm", |stepper, _| stepper.previous_norm().map(drop)),
        ("set_previous_norm", |stepper, _| stepper.set_previous_norm(Some(1.0))),
        ("checkpoint", |stepper, _| checkpoint::write(stepper, std::io::sink())),
    ];
    let mut pass = stepper.begin().unwrap();
    pass.write(w.grad(), &[1.0, 2.0]).unwrap();
    for (what, call) in calls {
        assert!(is_order(call(&mut pass, w)), "{what}");
    }
    assert!(pass.latest_status().is_none() && !pass.is_frozen(w).unwrap());
    assert!(pass.step_count((w, optimizer)).is_err());
    pass.finish().unwrap();
    assert_eq!(stepper.view::<f32>(w).unwrap(), [-1.0, -2.0]);
    assert_eq!((stepper.step_count(w).unwrap(), stepper.schedule_step()), (1, 1));
}

#[test]
fn steppers_exchanged_under_their_passes_keep_each_its_own() {
    let layout = Layout::builder().param("w", 1).build().unwrap();
    let w = layout.id("w").unwrap();
    let new = |lr| Stepper::host(&layout, Sgd { lr, ..Sgd::default() }, Solo::default()).unwrap();
    let (mut one, mut ten) = (new(1.0), new(10.0));
    let (mut first, mut second) = (one.begin().unwrap(), ten.begin().unwrap());
    first.write(w.grad(), &[1.0]).unwrap();
    mem::swap(&mut *first, &mut *second);
    assert!(first.is_first(w).unwrap() && !second.is_first(w).unwrap());
    first.write(w.grad(), &[1.0]).unwrap();
    first.finish().unwrap();
    second.finish().unwrap();
    assert_eq!((one.view::<f32>(w).unwrap()[0], ten.view::<f32>(w).unwrap()[0]), (-10.0, -1.0));

    // One without a pass comes in, and the open pass goes out with its stepper.
    let mut other = new(100.0);
    let mut pass = one.begin().unwrap();
    mem::swap(&mut *pass, &mut other);
    assert!(is_order(pass.grad_ready(w)) && is_order(pass.finish()));
    other.write(w.grad(), &[1.0]).unwrap();
    other.finish().unwrap();
    assert_eq!(other.view::<f32>(w).unwrap()[0], -20.0);
    assert_eq!(one.status().unwrap().abandoned, 0, "a pass abandons only one that is open");

    // The stepper of an open pass is dropped, or closed, by its own pass.
    let mut pass = one.begin().unwrap();
    *pass = new(1000.0);
    drop(pass);
    one.begin().unwrap().finish().unwrap();
    let mut pass = one.begin().unwrap();
    assert!(is_order(mem::replace(&mut *pass, new(1.0)).close()));
    assert!(is_order(pass.abandon()));
    one.close().unwrap();
}

#[test]
fn a_pass_that_was_ended_through_its_stepper_ends_once() {
    let layout = Layout::builder().param("w", 1).build().unwrap();
    let w = layout.id("w").unwrap();
    let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Sgd::default() }).unused(Unused::Refuse);
    let mut stepper = builder.host(Solo::default()).unwrap();
    let mut pass = stepper.begin().unwrap();
    assert!(is_order(Stepper::finish(&mut pass)), "nothing was written");
    pass.write(w.grad(), &[1.0]).unwrap();
    Stepper::finish(&mut pass).unwrap();
    assert_eq!(pass.view::<f32>(w).unwrap(), [-1.0], "the pass was mended, and no pass is open now");
    assert!(is_order(pass.finish()));
    let mut pass = stepper.begin().unwrap();
    Stepper::abandon(&mut pass).unwrap();
    drop(pass);
    assert_eq!(stepper.status().unwrap().abandoned, 1);
    assert_eq!(stepper.step_count(w).unwrap(), 1);
}

#[test]
fn scaling_and_precision_are_reached_through_a_pass() {
    let layout = Layout::builder().param("w", 2).build().unwrap();
    let w = layout.id("w").unwrap();
    let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Sgd::default() });
    let precision = Precision { grad: instep::DType::BF16, ..Precision::F32 };
    let scaler = instep::LossScaler::default();
    let builder = builder.precision(precision).mode(Mode::Normed).loss_scale(scaler);
    let mut stepper = builder.host(Solo::default()).unwrap();
    stepper.set_scaler_state(ScalerState { scale: 4.0, growth_tracker: 0 }).unwrap();
    assert_eq!(stepper.loss_scale().unwrap(), 4.0, "of the pass to come");
    let mut pass = stepper.begin().unwrap();
    let scale = pass.loss_scale().unwrap() as f32;
    pass.bucket_mut::<bf16>(0).unwrap().fill(bf16::from_f32(2.0 * scale));
    assert!(
        is_order(pass.scaler_state())
            && is_order(pass.set_scaler_state(ScalerState { scale: 8.0, growth_tracker: 0 }))
    );
    pass.finish().unwrap();
    assert_eq!(stepper.view::<f32>(w).unwrap(), [-2.0; 2]);
}
