//! A learning-rate factor per parameter has the bits of an optimizer with the product as its rate, on every device and
//! in every way.
//!
//! The reference is a stepper whose optimizers have the products as their rates. Factors are powers of two where the
//! product must be the exactly scaled rate.

use instep::{AdamW, Error, Layout, LrSchedule, Mode, ParamId, Sgd, Solo, Stepper, in_process};

use crate::support::device::cuda;
use crate::support::paint_gradient;

const LENS: [usize; 3] = [700, 3, 2050];
const FACTORS: [f64; 3] = [0.25, 1.0, 4.0];

fn layout() -> Layout {
    let lens = LENS.iter().enumerate();
    lens.fold(Layout::builder(), |layout, (k, len)| layout.param(format!("p{k}"), *len)).build().unwrap()
}

fn ids(layout: &Layout) -> Vec<ParamId> {
    layout.ids().collect()
}

/// Makes three passes, and returns the bits of all parameters after each.
fn run(stepper: &mut Stepper) -> Vec<Vec<u32>> {
    let ids = ids(stepper.layout());
    let passes = 0..3;
    let pass = |pass: usize| {
        let mut open = stepper.begin().unwrap();
        for (k, id) in ids.iter().enumerate() {
            let gradient: Vec<f32> = (0..LENS[k]).map(|at| paint_gradient(pass, k, at)).collect();
            open.write(id.grad(), &gradient).unwrap();
        }
        open.finish().unwrap();
        let params = stepper.params();
        ids.iter().flat_map(|id| params.get(*id).unwrap()).map(|x| x.to_bits()).collect()
    };
    passes.map(pass).collect()
}

fn adamw(lr: f64) -> AdamW {
    AdamW { lr, ..AdamW::default() }
}

/// Trains each parameter with a separate optimizer that has the product as its rate.
fn expected(mode: Mode, lr: f64) -> Vec<Vec<u32>> {
    let layout = layout();
    let builder = Stepper::builder(&layout, adamw(lr)).mode(mode);
    let builder = ids(&layout)
        .iter()
        .zip(FACTORS)
        .fold(builder, |builder, (id, factor)| builder.optimizer_for(&[*id], adamw(lr * factor)));
    run(&mut builder.host(Solo::default()).unwrap())
}

fn multiply(stepper: &mut Stepper) {
    for (id, factor) in ids(stepper.layout()).into_iter().zip(FACTORS) {
        stepper.set_lr_multiplier(id, factor).unwrap();
        assert_eq!(stepper.lr_multiplier(id), Ok(factor));
    }
}

#[test]
fn a_multiplied_rate_gives_the_bits_of_an_optimizer_with_the_product_in_every_mode_and_for_any_buckets() {
    let layout = layout();
    for mode in [Mode::Sequential, Mode::Eager, Mode::Normed] {
        for cap in [4, 5000, 1 << 20] {
            let builder = Stepper::builder(&layout, adamw(0.5)).mode(mode).bucket_cap_bytes(cap);
            let mut stepper = builder.host(Solo::default()).unwrap();
            multiply(&mut stepper);
            assert_eq!(run(&mut stepper), expected(mode, 0.5), "{mode:?}, cap {cap}");
        }
    }
}

#[test]
fn what_is_multiplied_follows_its_group_and_goes_along_into_rebuilt_buckets() {
    let layout = layout();
    let mut stepper =
        Stepper::builder(&layout, adamw(0.5)).bucket_cap_bytes(4).host(Solo::default()).unwrap();
    multiply(&mut stepper);
    stepper.rebuild_buckets().unwrap();
    stepper.set_lr("default", 0.125).unwrap();
    assert_eq!(run(&mut stepper), expected(Mode::Eager, 0.125));
    let halved = LrSchedule::step(0.25, 100, 0.5);
    let builder = Stepper::builder(&layout, adamw(0.5)).lr_schedule("default", halved);
    let mut stepper = builder.host(Solo::default()).unwrap();
    multiply(&mut stepper);
    assert_eq!(run(&mut stepper), expected(Mode::Eager, 0.25), "a schedule's rate is multiplied too");
}

#[test]
fn what_no_optimizer_takes_is_refused_and_leaves_the_old_factor() {
    let layout = layout();
    let id = layout.id("p0").unwrap();
    let mut stepper = Stepper::host(&layout, Sgd { lr: 1e30, ..Sgd::default() }, Solo::default()).unwrap();
    stepper.set_lr_multiplier(id, 2.0).unwrap();
    for refused in [-1.0, f64::NAN, f64::INFINITY] {
        let error = stepper.set_lr_multiplier(id, refused).unwrap_err();
        assert!(matches!(error, Error::Config { field: "lr_multiplier", .. }), "{error}");
    }
    let error = stepper.set_lr_multiplier(id, 1e30).unwrap_err();
    assert!(matches!(error, Error::Config { field: "lr_multiplier", .. }), "the product leaves f32: {error}");
    let error = stepper.set_lr("default", 3e38).unwrap_err();
    assert!(matches!(error, Error::Config { field: "lr_multiplier", .. }), "twice that leaves f32: {error}");
    assert_eq!(stepper.lr_multiplier(id), Ok(2.0));
    let open = stepper.begin().unwrap();
    std::mem::forget(open);
    assert!(matches!(stepper.set_lr_multiplier(id, 1.0), Err(Error::Order(_))));
}

#[test]
fn a_schedule_goes_on_where_the_product_is_less_than_f32_can_hold() {
    let layout = layout();
    let [first, second, _] = ids(&layout)[..] else { unreachable!() };
    let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Sgd::default() });
    let schedule = LrSchedule::step(1.0, 1, 0.5);
    let mut stepper = builder.lr_schedule("default", schedule).host(Solo::default()).unwrap();
    stepper.set_lr_multiplier(first, 1e-20).unwrap();
    for _ in 0..120 {
        let mut pass = stepper.begin().unwrap();
        for id in [first, second] {
            pass.grads().get_mut(id).unwrap().fill(1.0);
        }
        pass.finish().unwrap();
    }
    assert_eq!(stepper.schedule_step(), 120);
}

#[test]
fn ranks_that_multiply_by_different_factors_are_told_at_the_next_collective() {
    let layout = layout();
    let ends = in_process(2, |comm| {
        let rank = comm.rank();
        let mut stepper = Stepper::host(&layout, Sgd::default(), comm).unwrap();
        stepper.set_lr_multiplier(layout.id("p1").unwrap(), f64::from(rank + 1)).unwrap();
        stepper.begin().and_then(|pass| pass.finish()).and_then(|()| stepper.status().map(drop))
    });
    assert!(ends.is_err(), "{ends:?}");
}

#[test]
fn a_gpu_multiplies_with_the_hosts_bits() {
    let layout = layout();
    // SAFETY: no stream of the caller's is named.
    let mut stepper =
        unsafe { Stepper::builder(&layout, adamw(0.5)).cuda(Solo::default(), &cuda()).unwrap() };
    for (id, factor) in ids(&layout).into_iter().zip(FACTORS) {
        stepper.set_lr_multiplier(id, factor).unwrap();
    }
    let expected = expected(Mode::Eager, 0.5);
    for (pass, expected) in expected.iter().enumerate() {
        let mut open = stepper.begin().unwrap();
        for (k, id) in ids(&layout).iter().enumerate() {
            let gradient: Vec<f32> = (0..LENS[k]).map(|at| paint_gradient(pass, k, at)).collect();
            open.write(id.grad(), &gradient).unwrap();
        }
        open.finish().unwrap();
        let mut bits = Vec::new();
        for (k, id) in ids(&layout).iter().enumerate() {
            let mut values = vec![0.0; LENS[k]];
            stepper.read(*id, &mut values).unwrap();
            bits.extend(values.iter().map(|x| x.to_bits()));
        }
        assert_eq!(&bits, expected, "pass {pass}");
    }
}
