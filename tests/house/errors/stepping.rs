//! Refusals of a pass, of accesses between passes, of borrowed tensors and of checkpoints.
//!
//! Every call is made on a small stepper on the host, so no call depends on the machine.

use std::io::Cursor;

use instep::checkpoint::{self, Extras, Scalar};
use instep::layout::ForeignBucket;
use instep::{
    Adam, Borrowed, Clip, DType, Gradients, Layout, Master, Mode, NAdam, ParamId, Precision, SegmentAction,
    Sgd, Solo, Stepper, Unused,
};

use super::Page;
use super::building::one;

pub(super) fn add(page: &mut Page) {
    passes(page);
    between(page);
    numbers(page);
    later(page);
    borrowed(page);
    checkpoints(page);
}

fn stepper(layout: &Layout) -> (Stepper, ParamId) {
    let stepper = Stepper::host(layout, Sgd { momentum: 0.9, ..Sgd::default() }, Solo::default()).unwrap();
    (stepper, layout.ids().next().unwrap())
}

fn passes(page: &mut Page) {
    let (mut trainer, id) = stepper(&one());
    let mut pass = trainer.begin().unwrap();
    page.refused(pass.grad_ready(id));
    page.refused(pass.bucket_ready(7));
    page.refused(pass.next_micro_batch());
    page.refused(pass.write(id.grad(), &[0.0; 3]));
    page.refused(pass.grads().get_disjoint_mut::<f32, 2>([id, id]));
    pass.write(id.grad(), &[0.0; 4]).unwrap();
    pass.grad_ready(id).unwrap();
    page.refused(pass.params().get(id));
    pass.finish().unwrap();
    page.refused(trainer.finish());
    let pass = trainer.begin_accumulating(2.try_into().unwrap()).unwrap();
    page.refused(pass.finish());
    std::mem::forget(trainer.begin().unwrap());
    page.refused(trainer.begin());
    page.refused(trainer.status());
    page.refused(trainer.close());
    let (mut trainer, id) = stepper(&one());
    trainer.set_frozen(id, true).unwrap();
    let mut pass = trainer.begin().unwrap();
    page.refused(pass.grad_ready(id));
    drop(pass);
    let layout = one();
    let refusing = Stepper::builder(&layout, Sgd::default()).unused(Unused::Refuse);
    page.refused(refusing.host(Solo::default()).unwrap().begin().unwrap().finish());
    let releasing = Stepper::builder(&layout, Sgd::default()).gradients(Gradients::Release);
    if let Ok(trainer) = releasing.host(Solo::default()) {
        page.refused(trainer.view::<f32>(id.grad()));
    }
}

fn between(page: &mut Page) {
    let layout = Layout::builder().param("w", 4).param("b", 2).in_group("heads").build().unwrap();
    let [w, b] = ["w", "b"].map(|name| layout.id(name).unwrap());
    let mut trainer = Stepper::builder(&layout, Sgd::default())
        .group("heads", NAdam::default())
        .then("heads", Sgd::default())
        .host(Solo::default())
        .unwrap();
    page.refused(trainer.view::<f32>(w.state("exp_avg")));
    page.refused(trainer.view::<f32>(b.state("max_exp_avg_sq")));
    page.refused(trainer.set_lr("tails", 0.1));
    page.refused(trainer.set_lr("heads", 0.1));
    let nadam = trainer.optimizers_of(b).unwrap()[0];
    page.refused(trainer.step_count((w, nadam)));
    page.refused(trainer.set_hyper(nadam, &[("rho", 0.5)]));
    page.refused(trainer.set_hyper("default", &[("momentum", 0.5)]));
    page.refused(trainer.set_lr_multiplier(w, -1.0));
    page.refused(trainer.set_lr_multiplier(w, 1e300));
    page.refused(trainer.set_schedule_step(1 << 63));
    page.refused(trainer.join());
    let few = Precision { param: DType::BF16, master: Master::Remainder16, ..Precision::F32 };
    let mut trainer = Stepper::builder(&layout, Sgd::default()).precision(few).host(Solo::default()).unwrap();
    page.refused(trainer.view_mut::<instep::bf16>(w));
}

fn numbers(page: &mut Page) {
    let layout = one();
    let (mut trainer, id) = stepper(&layout);
    page.refused(trainer.set_step_count(id, 1 << 63));
    let only = trainer.optimizers_of(id).unwrap()[0];
    page.refused(trainer.set_step_count((id, only), (1, 0.5)));
    page.refused(trainer.scaler_state());
    let mut trainer = Stepper::host(&layout, NAdam::default(), Solo::default()).unwrap();
    let only = trainer.optimizers_of(id).unwrap()[0];
    page.refused(trainer.set_step_count(id, 1));
    page.refused(trainer.set_step_count((id, only), (1, 1.5)));
    let clipping = Stepper::builder(&layout, Sgd::default()).clip(Clip::Previous(1.0)).mode(Mode::Eager);
    page.refused(clipping.host(Solo::default()).unwrap().set_previous_norm(Some(-1.0)));
    let scheduled = Stepper::builder(&layout, Sgd::default());
    let scheduled = scheduled.lr_schedule("default", instep::LrSchedule::constant(0.1));
    page.refused(scheduled.host(Solo::default()).unwrap().set_lr("default", 0.1));
}

fn later(page: &mut Page) {
    let left = Layout::builder().param("w", 4).action(SegmentAction::Leave).build().unwrap();
    let (mut trainer, id) = stepper(&left);
    page.refused(trainer.add_optimizer_for(&[id], Sgd::default()));
    let layout = one();
    let mut trainer = Stepper::builder_without_optimizer(&layout).host(Solo::default()).unwrap();
    let id = layout.ids().next().unwrap();
    trainer.set_step_count(id, 3).unwrap();
    page.refused(trainer.add_optimizer_for(&[id], NAdam::default()));
}

fn borrowed(page: &mut Page) {
    let layout = Layout::builder().param("a", 1).param("b", 1).build().unwrap();
    let [a, b] = ["a", "b"].map(|name| layout.id(name).unwrap());
    let mut memory = [0.0f32; 64];
    let at = memory.as_mut_ptr();
    let build = |lent: Borrowed| {
        let builder = Stepper::builder(&layout, Sgd::default()).unused(Unused::StepZero);
        // SAFETY: the array outlives what is built, which never runs.
        unsafe { builder.host_borrowing(Solo::default(), lent) }
    };
    let params = || Borrowed::new().param(a, at).param(b, at.wrapping_add(1));
    let grads = at.wrapping_add(2);
    let bucket = |first, second| ForeignBucket::new(2).gradient(a, first).gradient(b, second);
    for lent in [
        Borrowed::new().param(a, at).bucket(bucket(0, 1), grads),
        params().param(a, at).bucket(bucket(0, 1), grads),
        params(),
        params().bucket(ForeignBucket::new(2), grads),
        params().bucket(bucket(0, 0), grads),
        params().bucket(bucket(0, 2), grads),
        params().bucket(bucket(0, 1), grads).bucket(bucket(0, 1), grads.wrapping_add(2)),
        params().bucket(bucket(0, 1), at),
        params().bucket(bucket(0, 1), grads.wrapping_byte_add(2)),
        params().bucket(bucket(0, 1), std::ptr::null_mut::<f32>()),
        params().bucket(bucket(0, 1), grads.cast::<instep::bf16>()),
        params().bucket(bucket(0, 1), std::ptr::without_provenance_mut::<f32>(usize::MAX - 3)),
    ] {
        page.refused(build(lent));
    }
    let whole = || params().bucket(bucket(0, 1), grads);
    let builder = || Stepper::builder(&layout, Sgd::default());
    for options in [
        builder().unused(Unused::Skip),
        builder().unused(Unused::StepZero).uneven_inputs(instep::Divisor::WorldSize),
        builder().unused(Unused::StepZero).bucket_cap_bytes(8),
        builder().unused(Unused::StepZero).gradients(Gradients::Release),
    ] {
        // SAFETY: as above.
        page.refused(unsafe { options.host_borrowing(Solo::default(), whole()) });
    }
    let mut trainer = build(whole()).unwrap();
    page.refused(trainer.rebuild_buckets());
    // SAFETY: refused before anything is touched.
    page.refused(unsafe { trainer.rebind(Borrowed::new().param(a, grads)) });
    let mut owned = Stepper::host(&layout, Sgd::default(), Solo::default()).unwrap();
    // SAFETY: as above.
    page.refused(unsafe { owned.rebind(Borrowed::new()) });
    page.refused(trainer.plan().reordered(&layout, &[1, 0]));
    page.refused(trainer.begin().unwrap().finish());
}

fn checkpoints(page: &mut Page) {
    let layout = one();
    let (trainer, _) = stepper(&layout);
    let mut bytes = Vec::new();
    checkpoint::write(&trainer, &mut bytes).unwrap();
    let mut adam = Stepper::host(&layout, Adam::default(), Solo::default()).unwrap();
    page.refused(checkpoint::read(&mut adam, Cursor::new(&bytes)));
    let (mut trainer, _) = stepper(&layout);
    *bytes.last_mut().unwrap() ^= 1;
    page.refused(checkpoint::read(&mut trainer, Cursor::new(&bytes)));
    page.refused(checkpoint::read(&mut trainer, Cursor::new(b"short")));
    page.refused(checkpoint::load(&mut trainer, "no such folder/w.safetensors"));
    let reserved = Extras { scalars: [("crc32".to_owned(), Scalar::U64(1))].into(), ..Extras::default() };
    page.refused(checkpoint::write_with(&trainer, &reserved, Vec::new()));
}
