//! Learning-rate schedules: closed forms, PyTorch's own values, and steppers that follow schedules as if rates were set
//! by hand.
//!
//! The golden numbers come from the documentation and formulas of `torch.optim.lr_scheduler`. The trainer of the
//! reference stepper calls `set_lr`. A schedule counts finished passes, as documented.

use instep::layout::DEFAULT_GROUP;
use instep::{Error, Layout, LrSchedule, Sgd, Solo, Stepper, in_process};

#[track_caller]
fn assert_rates(schedule: &LrSchedule, expected: &[(u64, f64)]) {
    for (step, lr) in expected {
        let got = schedule.lr_at(*step);
        assert!((got - lr).abs() <= 1e-15 * lr.abs().max(0.1), "step {step}: {got} is not {lr}");
    }
}

#[test]
fn each_schedule_has_torchs_values() {
    assert_rates(&LrSchedule::constant(0.05), &[(0, 0.05), (1_000_000, 0.05)]);
    // StepLR, lr = 0.05, step_size = 30, gamma = 0.1.
    let steps = LrSchedule::step(0.05, 30, 0.1);
    assert_rates(&steps, &[(0, 0.05), (29, 0.05), (30, 0.005), (59, 0.005), (60, 0.0005), (90, 0.00005)]);
    // CosineAnnealingLR, lr = 0.1, T_max = 10.
    let cosine = LrSchedule::cosine(0.1, 10, 0.0);
    let golden = [
        0.1,
        0.09755282581475769,
        0.09045084971874737,
        0.07938926261462366,
        0.06545084971874737,
        0.05,
        0.03454915028125263,
        0.020610737385376346,
        0.009549150281252633,
        0.0024471741852423234,
        0.0,
        0.0024471741852423234,
    ];
    let golden: Vec<(u64, f64)> = (0..).zip(golden).collect();
    assert_rates(&cosine, &golden);
    assert_rates(&LrSchedule::cosine(0.1, 10, 0.02), &[(0, 0.1), (5, 0.06), (10, 0.02), (20, 0.1)]);
    // LinearLR, lr = 0.05, start_factor = 0.5, total_iters = 4, in front of StepLR.
    let warm = LrSchedule::step(0.05, 2, 0.1).warm_up(4, 0.5);
    let rates = [0.025, 0.03125, 0.0375, 0.04375, 0.05, 0.05, 0.005, 0.005, 0.0005];
    assert_rates(&warm, &(0..).zip(rates).collect::<Vec<_>>());
    assert_rates(&LrSchedule::custom(|step| 1.0 / (step + 1) as f64).warm_up(1, 0.0), &[(0, 0.0), (2, 0.5)]);
}

fn layout() -> Layout {
    Layout::builder().param("a", 3).param("b", 2).in_group("slow").build().unwrap()
}

fn schedule() -> LrSchedule {
    LrSchedule::cosine(0.5, 7, 0.01).warm_up(3, 0.1)
}

fn builder(layout: &Layout) -> instep::StepperBuilder<'_> {
    Stepper::builder(layout, Sgd { lr: 0.25, momentum: 0.9, ..Default::default() })
}

fn pass(stepper: &mut Stepper, step: usize) {
    let mut pass = stepper.begin().unwrap();
    for (k, id) in layout().ids().enumerate() {
        pass.grads().get_mut(id).unwrap().fill(1.0 / (step + k + 1) as f32);
    }
    pass.finish().unwrap();
}

fn params(stepper: &Stepper) -> Vec<f32> {
    let params = stepper.params();
    layout().ids().flat_map(|id| params.get(id).unwrap().to_vec()).collect()
}

#[test]
fn a_scheduled_group_has_the_bits_of_rates_set_by_hand_and_the_others_keep_theirs() {
    let layout = layout();
    let mut scheduled = builder(&layout).lr_schedule("slow", schedule()).host(Solo::default()).unwrap();
    let mut by_hand = builder(&layout).host(Solo::default()).unwrap();
    for step in 0..12 {
        by_hand.set_lr("slow", schedule().lr_at(step as u64)).unwrap();
        pass(&mut by_hand, step);
        assert_eq!(scheduled.schedule_step(), step as u64);
        pass(&mut scheduled, step);
        if step % 5 == 2 {
            // It will be made again, at the same rate.
            scheduled.begin().unwrap().abandon().unwrap();
            by_hand.begin().unwrap().abandon().unwrap();
        }
    }
    assert_eq!(params(&scheduled), params(&by_hand));
    scheduled.set_lr(DEFAULT_GROUP, 0.125).unwrap();
    let refused = scheduled.set_lr("slow", 0.125).unwrap_err();
    assert!(matches!(&refused, Error::Config { field: "group", value, .. } if value == "slow"), "{refused}");
}

#[test]
fn a_loaded_step_goes_on_with_the_bits_of_the_uninterrupted_run() {
    let layout = layout();
    let open = || builder(&layout).lr_schedule("slow", schedule()).host(Solo::default()).unwrap();
    let mut whole = open();
    (0..5).for_each(|step| pass(&mut whole, step));
    let mut loaded = open();
    for id in layout.ids() {
        let mut values = vec![0.0; layout.parameter(id).unwrap().len as usize];
        whole.read(id, &mut values).unwrap();
        loaded.write(id, &values).unwrap();
        whole.read(id.state("momentum_buffer"), &mut values).unwrap();
        loaded.write(id.state("momentum_buffer"), &values).unwrap();
        loaded.set_step_count(id, whole.step_count(id).unwrap()).unwrap();
    }
    loaded.set_schedule_step(whole.schedule_step()).unwrap();
    for step in 5..9 {
        pass(&mut whole, step);
        pass(&mut loaded, step);
    }
    assert_eq!(params(&loaded), params(&whole));
    let open = whole.begin().unwrap();
    std::mem::forget(open);
    assert!(matches!(whole.set_schedule_step(0), Err(Error::Order(_))));
}

#[test]
fn ranks_at_different_steps_learn_of_it() {
    let layout = layout();
    let outcome = in_process(2, |comm| {
        let rank = u64::from(comm.rank());
        let mut stepper = builder(&layout).lr_schedule("slow", schedule()).host(comm)?;
        stepper.set_schedule_step(rank)?;
        stepper.begin()?.finish()?;
        stepper.status().map(drop)
    });
    let error = outcome.unwrap_err();
    assert!(matches!(error.cause(), Error::Mismatch { .. } | Error::PeerLost { .. }), "{error}");
}

#[test]
fn what_no_optimizer_would_take_is_refused_before_a_pass_begins() {
    let layout = layout();
    let refused = |group: &str, schedule: LrSchedule| {
        builder(&layout).lr_schedule(group, schedule).host(Solo::default()).unwrap_err().to_string()
    };
    assert!(refused("fast", schedule()).starts_with("lr_schedule"));
    assert!(refused("slow", LrSchedule::step(0.1, 0, 0.1)).starts_with("step_size"));
    assert!(refused("slow", LrSchedule::constant(f64::NAN)).starts_with("lr = NaN: "));
    assert!(refused("slow", LrSchedule::step(f64::NAN, 1, 0.1)).starts_with("lr = NaN: "));
    assert!(refused("slow", LrSchedule::cosine(f64::INFINITY, 1, 0.0)).starts_with("lr = inf: "));
    assert!(refused("slow", LrSchedule::step(0.1, 1, f64::NAN)).starts_with("gamma"));
    assert!(refused("slow", LrSchedule::cosine(0.1, 0, 0.0)).starts_with("period"));
    assert!(refused("slow", LrSchedule::cosine(0.1, 1, -1.0)).starts_with("lowest"));
    assert!(refused("slow", LrSchedule::constant(0.1).warm_up(1, f64::INFINITY)).starts_with("start_factor"));
    let twice = builder(&layout).lr_schedule("slow", schedule()).lr_schedule("slow", schedule());
    assert!(twice.host(Solo::default()).is_err());

    let bad = LrSchedule::custom(|step| if step == 1 { f64::NAN } else { 0.5 });
    let mut stepper = builder(&layout).lr_schedule("slow", bad).host(Solo::default()).unwrap();
    pass(&mut stepper, 0);
    let before = params(&stepper);
    assert!(matches!(stepper.begin(), Err(Error::Config { field: "lr", .. })));
    assert_eq!(params(&stepper), before);
    stepper.set_schedule_step(2).unwrap();
    pass(&mut stepper, 2);
    assert_ne!(params(&stepper), before);
}
