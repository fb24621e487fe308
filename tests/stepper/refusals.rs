//! Options and hyperparameters that must be refused, each by an error that names the field.
//!
//! A table of the smallest wrong inputs, beside the nearest right ones. Must match the field, not the wording.

use instep::{
    Adadelta, Adagrad, Adam, AdamW, Adamax, Error, Lamb, Lion, Mode, NAdam, RAdam, Result, RmsProp, Rprop,
    Sgd, Solo, Stepper,
};

use crate::support::{Optim, Options, layout};

const NAN: f64 = f64::NAN;
const INFINITY: f64 = f64::INFINITY;

fn build(optim: Optim, options: &Options) -> Result<Stepper> {
    options.stepper(&layout(&[3]), optim, Solo::new(options.world_size))
}

#[track_caller]
fn assert_refused(built: Result<Stepper>, field: &str, what: &str) {
    match built {
        Err(Error::Config { field: named, .. }) => assert_eq!(named, field, "{what}"),
        Err(other) => panic!("{what}: `{field}` is refused as {other:?}"),
        Ok(_) => panic!("{what}: `{field}` is accepted"),
    }
}

#[test]
fn hyperparameters_out_of_range_are_refused_by_name() {
    let heavy = Sgd { momentum: 0.9, ..Sgd::default() };
    let sgds = [
        ("nesterov", Sgd { nesterov: true, ..Sgd::default() }),
        ("nesterov", Sgd { nesterov: true, dampening: 0.1, ..heavy }),
        ("dampening", Sgd { dampening: NAN, ..heavy }),
        ("dampening", Sgd { dampening: -INFINITY, ..heavy }),
    ];
    let mut cases: Vec<(&str, Optim)> = sgds.map(|(field, sgd)| (field, Optim::Sgd(sgd))).into();
    // 1e39 is finite, but not as the f32 that the kernels take.
    for bad in [NAN, -1e-3, INFINITY, 1e39] {
        let (adam, adamw) = (Adam::default(), AdamW::default());
        cases.extend([
            ("lr", Optim::Sgd(Sgd { lr: bad, ..heavy })),
            ("momentum", Optim::Sgd(Sgd { momentum: bad, ..heavy })),
            ("weight_decay", Optim::Sgd(Sgd { weight_decay: bad, ..heavy })),
            ("lr", Optim::Adam(Adam { lr: bad, ..adam })),
            ("eps", Optim::Adam(Adam { eps: bad, ..adam })),
            ("weight_decay", Optim::Adam(Adam { weight_decay: bad, ..adam })),
            ("lr", Optim::AdamW(AdamW { lr: bad, ..adamw })),
            ("eps", Optim::AdamW(AdamW { eps: bad, ..adamw })),
            ("weight_decay", Optim::AdamW(AdamW { weight_decay: bad, ..adamw })),
        ]);
        let adagrad = Adagrad::default();
        cases.extend([
            ("lr", Optim::Adagrad(Adagrad { lr: bad, ..adagrad })),
            ("lr_decay", Optim::Adagrad(Adagrad { lr_decay: bad, ..adagrad })),
            ("weight_decay", Optim::Adagrad(Adagrad { weight_decay: bad, ..adagrad })),
            (
                "initial_accumulator_value",
                Optim::Adagrad(Adagrad { initial_accumulator_value: bad, ..adagrad }),
            ),
            ("eps", Optim::Adagrad(Adagrad { eps: bad, ..adagrad })),
        ]);
        let rmsprop = RmsProp::default();
        cases.extend([
            ("lr", Optim::RmsProp(RmsProp { lr: bad, ..rmsprop })),
            ("eps", Optim::RmsProp(RmsProp { eps: bad, ..rmsprop })),
            ("weight_decay", Optim::RmsProp(RmsProp { weight_decay: bad, ..rmsprop })),
            ("momentum", Optim::RmsProp(RmsProp { momentum: bad, ..rmsprop })),
        ]);
        let (adadelta, adamax) = (Adadelta::default(), Adamax::default());
        cases.extend([
            ("lr", Optim::Adadelta(Adadelta { lr: bad, ..adadelta })),
            ("eps", Optim::Adadelta(Adadelta { eps: bad, ..adadelta })),
            ("weight_decay", Optim::Adadelta(Adadelta { weight_decay: bad, ..adadelta })),
            ("lr", Optim::Adamax(Adamax { lr: bad, ..adamax })),
            ("eps", Optim::Adamax(Adamax { eps: bad, ..adamax })),
            ("weight_decay", Optim::Adamax(Adamax { weight_decay: bad, ..adamax })),
        ]);
        let (rprop, lion, nadam, radam) =
            (Rprop::default(), Lion::default(), NAdam::default(), RAdam::default());
        cases.extend([
            ("lr", Optim::Rprop(Rprop { lr: bad, ..rprop })),
            ("step_sizes.0", Optim::Rprop(Rprop { step_sizes: (bad, 50.0), ..rprop })),
            ("step_sizes.1", Optim::Rprop(Rprop { step_sizes: (0.0, bad), ..rprop })),
            ("etas.1", Optim::Rprop(Rprop { etas: (0.5, bad), ..rprop })),
            ("lr", Optim::Lion(Lion { lr: bad, ..lion })),
            ("weight_decay", Optim::Lion(Lion { weight_decay: bad, ..lion })),
            ("lr", Optim::NAdam(NAdam { lr: bad, ..nadam })),
            ("eps", Optim::NAdam(NAdam { eps: bad, ..nadam })),
            ("weight_decay", Optim::NAdam(NAdam { weight_decay: bad, ..nadam })),
            ("lr", Optim::RAdam(RAdam { lr: bad, ..radam })),
            ("eps", Optim::RAdam(RAdam { eps: bad, ..radam })),
            ("weight_decay", Optim::RAdam(RAdam { weight_decay: bad, ..radam })),
            ("lr", Optim::Lamb(Lamb { lr: bad, ..Lamb::default() })),
            ("eps", Optim::Lamb(Lamb { eps: bad, ..Lamb::default() })),
            ("weight_decay", Optim::Lamb(Lamb { weight_decay: bad, ..Lamb::default() })),
        ]);
    }
    for bad in [NAN, -1e-3, INFINITY] {
        cases.push(("momentum_decay", Optim::NAdam(NAdam { momentum_decay: bad, ..NAdam::default() })));
    }
    for bad in [NAN, -0.5, 0.0, 1.0, 1.5, 1e-50] {
        cases.push(("etas.0", Optim::Rprop(Rprop { etas: (bad, 1.2), ..Rprop::default() })));
    }
    let (decoupled_weight_decay, large) = (true, 1e20);
    cases.extend([
        ("etas.1", Optim::Rprop(Rprop { etas: (0.5, 1.0), ..Rprop::default() })),
        ("step_sizes.0", Optim::Rprop(Rprop { step_sizes: (1.0, 0.5), ..Rprop::default() })),
        ("weight_decay", Optim::Lion(Lion { lr: large, weight_decay: large, ..Lion::default() })),
        (
            "weight_decay",
            Optim::NAdam(NAdam {
                lr: large,
                weight_decay: large,
                decoupled_weight_decay,
                ..NAdam::default()
            }),
        ),
        (
            "weight_decay",
            Optim::RAdam(RAdam {
                lr: large,
                weight_decay: large,
                decoupled_weight_decay,
                ..RAdam::default()
            }),
        ),
        ("lr", Optim::NAdam(NAdam { lr: 1e38, ..NAdam::default() })),
        ("lr", Optim::RAdam(RAdam { lr: 1e38, ..RAdam::default() })),
    ]);
    // What the kernels would derive from these overflows or vanishes in f32.
    cases.extend([
        ("lr", Optim::Adam(Adam { lr: 1e38, ..Adam::default() })),
        ("eps", Optim::Adam(Adam { eps: 1e-50, ..Adam::default() })),
        ("lr", Optim::Adamax(Adamax { lr: 1e38, ..Adamax::default() })),
        ("eps", Optim::Adagrad(Adagrad { eps: 1e-50, ..Adagrad::default() })),
        ("eps", Optim::Lamb(Lamb { eps: 1e-50, ..Lamb::default() })),
        ("weight_decay", Optim::AdamW(AdamW { lr: 1e20, weight_decay: 1e20, ..AdamW::default() })),
    ]);
    for bad in [NAN, -0.1, 1.0, 1.5] {
        cases.extend([
            ("betas.0", Optim::Adam(Adam { betas: (bad, 0.999), ..Adam::default() })),
            ("betas.1", Optim::Adam(Adam { betas: (0.9, bad), ..Adam::default() })),
            ("betas.0", Optim::AdamW(AdamW { betas: (bad, 0.999), ..AdamW::default() })),
            ("betas.1", Optim::AdamW(AdamW { betas: (0.9, bad), ..AdamW::default() })),
            ("betas.0", Optim::Adamax(Adamax { betas: (bad, 0.999), ..Adamax::default() })),
            ("betas.1", Optim::Adamax(Adamax { betas: (0.9, bad), ..Adamax::default() })),
            ("betas.0", Optim::Lion(Lion { betas: (bad, 0.99), ..Lion::default() })),
            ("betas.1", Optim::Lion(Lion { betas: (0.9, bad), ..Lion::default() })),
            ("betas.0", Optim::NAdam(NAdam { betas: (bad, 0.999), ..NAdam::default() })),
            ("betas.1", Optim::NAdam(NAdam { betas: (0.9, bad), ..NAdam::default() })),
            ("betas.0", Optim::RAdam(RAdam { betas: (bad, 0.999), ..RAdam::default() })),
            ("betas.1", Optim::RAdam(RAdam { betas: (0.9, bad), ..RAdam::default() })),
            ("betas.0", Optim::Lamb(Lamb { betas: (bad, 0.999), ..Lamb::default() })),
            ("betas.1", Optim::Lamb(Lamb { betas: (0.9, bad), ..Lamb::default() })),
        ]);
    }
    for bad in [NAN, -0.1, 1.0 + f64::EPSILON, INFINITY] {
        cases.extend([
            ("alpha", Optim::RmsProp(RmsProp { alpha: bad, ..RmsProp::default() })),
            ("rho", Optim::Adadelta(Adadelta { rho: bad, ..Adadelta::default() })),
        ]);
    }
    for (field, optim) in cases {
        assert_refused(build(optim, &Options::default()), field, &format!("{optim:?}"));
    }
}

#[test]
fn hyperparameters_at_the_edge_of_their_range_are_accepted() {
    let heavy = Sgd { momentum: 0.9, ..Sgd::default() };
    let edges = [
        Optim::Sgd(Sgd { lr: 0.0, ..heavy }),
        Optim::Sgd(Sgd { nesterov: true, ..heavy }),
        Optim::Sgd(Sgd { dampening: -0.5, momentum: 1.0, ..heavy }),
        Optim::Adam(Adam { lr: 0.0, betas: (0.0, 0.0), eps: 0.0, ..Adam::default() }),
        Optim::AdamW(AdamW { betas: (1.0 - f64::EPSILON, 1.0 - f64::EPSILON), ..AdamW::default() }),
        Optim::Adagrad(Adagrad { lr: 0.0, eps: 0.0, lr_decay: 1e30, ..Adagrad::default() }),
        Optim::RmsProp(RmsProp { lr: 0.0, alpha: 0.0, eps: 0.0, momentum: 1.5, ..RmsProp::default() }),
        Optim::RmsProp(RmsProp { alpha: 1.0, ..RmsProp::default() }),
        Optim::Adadelta(Adadelta { lr: 0.0, rho: 0.0, eps: 0.0, ..Adadelta::default() }),
        Optim::Adadelta(Adadelta { rho: 1.0, ..Adadelta::default() }),
        Optim::Adamax(Adamax { lr: 0.0, betas: (0.0, 0.0), eps: 0.0, ..Adamax::default() }),
        Optim::Rprop(Rprop { step_sizes: (0.0, 0.0), ..Rprop::default() }),
        Optim::Lion(Lion { lr: 0.0, betas: (0.0, 0.0), ..Lion::default() }),
        Optim::NAdam(NAdam { momentum_decay: 0.0, betas: (0.0, 0.0), eps: 0.0, ..NAdam::default() }),
        Optim::RAdam(RAdam { betas: (0.0, 0.0), eps: 0.0, ..RAdam::default() }),
        Optim::Lamb(Lamb { lr: 0.0, betas: (0.0, 0.0), eps: 0.0, weight_decay: 0.0, ..Lamb::default() }),
    ];
    for optim in edges {
        build(optim, &Options::default()).unwrap();
    }
}

#[test]
fn options_out_of_range_are_refused_by_name() {
    let sequential = Options { mode: Mode::Sequential, ..Options::default() };
    let mut cases = vec![
        ("threads", Options { threads: Some(0), ..sequential.clone() }),
        ("threads", Options { threads: Some(usize::MAX), ..sequential.clone() }),
        // The multiplier would vanish, be subnormal, or overflow in f32.
        ("loss_scale", Options { loss_scale: 1e46, ..sequential.clone() }),
        ("loss_scale", Options { loss_scale: 1e40, ..sequential.clone() }),
        ("loss_scale", Options { loss_scale: 1e-39, ..sequential.clone() }),
        ("bucket_cap_bytes", Options { cap: Some(0), ..sequential.clone() }),
    ];
    for bad in [NAN, 0.0, -1.0, INFINITY] {
        cases.push(("max_norm", Options { max_norm: Some(bad), ..sequential.clone() }));
        cases.push(("loss_scale", Options { loss_scale: bad, ..sequential.clone() }));
    }
    for (field, options) in cases {
        assert_refused(build(Optim::Adam(Adam::default()), &options), field, &format!("{options:?}"));
    }
}

#[test]
fn eager_refuses_what_needs_all_gradients_and_the_other_modes_accept_it() {
    for mode in [Mode::Sequential, Mode::Eager, Mode::Normed] {
        let clipped = Options { mode, max_norm: Some(1.0), ..Options::default() };
        let skipping = Options { mode, skip_nonfinite: true, ..Options::default() };
        for (field, options) in [("max_norm", clipped), ("skip_nonfinite", skipping)] {
            let built = build(Optim::Sgd(Sgd::default()), &options);
            if mode == Mode::Eager {
                assert_refused(built, field, "Eager");
            } else {
                built.unwrap();
            }
        }
    }
}

#[test]
fn a_state_that_the_optimizer_does_not_keep_is_refused_by_name() {
    let layout = layout(&[3]);
    let id = layout.id("p0").unwrap();
    let has = |optim, name: &str| {
        let stepper = build(optim, &Options::default()).unwrap();
        let state = stepper.state(id, name).map(<[f32]>::len);
        match state {
            Ok(len) => len == 3,
            Err(Error::Unsupported { what, .. }) if what.contains(name) => false,
            Err(other) => panic!("{other:?}"),
        }
    };
    let heavy = Sgd { momentum: 0.9, ..Sgd::default() };
    assert!(has(Optim::Sgd(heavy), "momentum_buffer") && !has(Optim::Sgd(Sgd::default()), "momentum_buffer"));
    let (plain, amsgrad) = (Adam::default(), Adam { amsgrad: true, ..Adam::default() });
    assert!(has(Optim::Adam(plain), "exp_avg") && has(Optim::Adam(plain), "exp_avg_sq"));
    assert!(has(Optim::Adam(amsgrad), "max_exp_avg_sq") && !has(Optim::Adam(plain), "max_exp_avg_sq"));
}
