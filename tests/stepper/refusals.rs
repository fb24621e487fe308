//! Options and hyperparameters are refused, each by an error that names the field.
//!
//! The table has the smallest wrong inputs, beside the nearest right ones. The tests must match the field, not the
//! wording.

use instep::layout::DEFAULT_GROUP;
use instep::optim::{ALL, Range};
use instep::overlap::Registry;
use instep::{Adam, AdamW, Adamax, Lion, NAdam, RAdam, Rprop, Sgd};
use instep::{Error, Mode, Result, Solo, Stepper};

use crate::support::{Optim, Options, Presummed, layout};

const NAN: f64 = f64::NAN;
const INFINITY: f64 = f64::INFINITY;

fn build(optim: Optim, options: &Options) -> Result<Stepper> {
    options.stepper(&layout(&[3]), optim, Presummed(options.world_size))
}

#[track_caller]
fn assert_refused(built: Result<Stepper>, field: &str, what: &str) {
    match built {
        Err(Error::Config { field: named, .. }) => assert_eq!(named, field, "{what}"),
        Err(other) => panic!("{what}: `{field}` is refused as {other:?}"),
        Ok(_) => panic!("{what}: `{field}` is accepted"),
    }
}

/// Returns numbers outside a range, and numbers at its edges that are inside.
fn edges(range: Range) -> (Vec<f64>, Vec<f64>) {
    // 1e39 is finite, but not as the f32 that the kernels take; 1e-50 vanishes there.
    match range {
        Range::NonNegative => (vec![NAN, -1e-3, INFINITY, 1e39, 1e-50], vec![0.0, 1e-38]),
        Range::NonNegativeF64 => (vec![NAN, -1e-3, INFINITY], vec![0.0, 1e39, 1e-50]),
        Range::Finite => (vec![NAN, INFINITY, -INFINITY, 1e39], vec![-0.5, 0.0, 1e38]),
        Range::BelowOne => (vec![NAN, -0.1, 1.0, 1.5], vec![0.0, 1.0 - f64::EPSILON]),
        Range::UpToOne => (vec![NAN, -0.1, 1.0 + f64::EPSILON, INFINITY], vec![0.0, 1.0]),
        Range::InsideOne => (vec![NAN, -0.5, 0.0, 1.0, 1.5, 1e-50], vec![1e-38, 1.0 - f64::EPSILON]),
        Range::AboveOne => (vec![NAN, -1e-3, 0.0, 1.0, INFINITY, 1e39], vec![1.0 + f64::EPSILON]),
        Range::Flag => (vec![], vec![0.0, 1.0]),
    }
}

/// Returns the range of a hyperparameter of this name in the papers and in `torch.optim`.
fn known_range(keyword: &str) -> Option<Range> {
    match keyword {
        "lr" | "eps" | "weight_decay" | "momentum" | "lr_decay" | "initial_accumulator_value" => {
            Some(Range::NonNegative)
        }
        "step_size_min" | "step_size_max" => Some(Range::NonNegative),
        "momentum_decay" => Some(Range::NonNegativeF64),
        "dampening" => Some(Range::Finite),
        "beta1" | "beta2" => Some(Range::BelowOne),
        "alpha" | "rho" => Some(Range::UpToOne),
        "eta_minus" => Some(Range::InsideOne),
        "eta_plus" => Some(Range::AboveOne),
        "nesterov" | "amsgrad" | "centered" | "decoupled_weight_decay" | "maximize" => Some(Range::Flag),
        _ => None,
    }
}

#[test]
fn hyperparameters_out_of_range_are_refused_by_name_and_those_at_the_edge_are_accepted() {
    for descriptor in ALL {
        for field in descriptor.fields {
            for (place, part) in field.parts.iter().enumerate() {
                let (own, keyword) = (part.range, part.keyword);
                let known = known_range(keyword);
                // RMSprop's alpha is an average's share; another rule may mean another thing by it.
                if descriptor.name != "RMSprop" && keyword == "alpha" || known.is_none() {
                    assert!(!edges(own).1.is_empty());
                } else {
                    assert_eq!(Some(own), known, "{} {keyword}", descriptor.name);
                }
                let with = |number: f64| {
                    let mut numbers: Vec<f64> = field.default.numbers().collect();
                    numbers[place] = number;
                    Optim::of(descriptor.build()).with(field.name, field.value(&numbers).unwrap())
                };
                let (outside, inside) = edges(own);
                for optim in outside.into_iter().map(with) {
                    assert_refused(build(optim, &Options::default()), part.label, &format!("{optim:?}"));
                }
                // Other fields must fit these two; the next test has such cases.
                if ["nesterov", "step_size_max"].contains(&keyword) {
                    continue;
                }
                for optim in inside.into_iter().map(with) {
                    build(optim, &Options::default()).unwrap_or_else(|e| panic!("{optim:?}: {e}"));
                }
            }
        }
    }
}

#[test]
fn nan_is_reported_under_the_name_of_its_own_field_wherever_it_is_given() {
    let mut fields = 0;
    for descriptor in ALL {
        let registry = Registry::standard();
        for part in descriptor.fields.iter().flat_map(|field| field.parts) {
            let named = registry.resolve(descriptor.name).unwrap();
            let refused = named.build(&[(part.keyword, NAN)]).unwrap_err().to_string();
            assert!(refused.starts_with(&format!("{} = NaN: out of range; use ", part.label)), "{refused}");
            fields += 1;
        }
        let layout = layout(&[3]);
        let w = layout.ids().next().unwrap();
        let mut stepper = Stepper::host(&layout, descriptor.build(), Solo::default()).unwrap();
        for multiplier in [1.0, 0.5] {
            stepper.set_lr_multiplier(w, multiplier).unwrap();
            let refused = stepper.set_lr(DEFAULT_GROUP, NAN).unwrap_err().to_string();
            assert!(refused.starts_with("lr = NaN: out of range; use "), "{}: {refused}", descriptor.name);
        }
        let refused = stepper.set_lr_multiplier(w, NAN).unwrap_err().to_string();
        assert!(refused.starts_with("lr_multiplier = NaN: "), "{refused}");
    }
    assert!(fields > 2 * ALL.len());
}

#[test]
fn hyperparameters_that_do_not_fit_together_are_refused_by_name() {
    let heavy = Sgd { momentum: 0.9, ..Sgd::default() };
    let (decoupled_weight_decay, large) = (true, 1e20);
    let cases = [
        ("nesterov", Optim::of(Sgd { nesterov: true, ..Sgd::default() })),
        ("nesterov", Optim::of(Sgd { nesterov: true, dampening: 0.1, ..heavy })),
        ("step_sizes.0", Optim::of(Rprop { step_sizes: (1.0, 0.5), ..Rprop::default() })),
        // What the kernels would derive from these overflows in f32.
        ("weight_decay", Optim::of(Lion { lr: large, weight_decay: large, ..Lion::default() })),
        ("weight_decay", Optim::of(AdamW { lr: large, weight_decay: large, ..AdamW::default() })),
        (
            "weight_decay",
            Optim::of(NAdam { lr: large, weight_decay: large, decoupled_weight_decay, ..NAdam::default() }),
        ),
        (
            "weight_decay",
            Optim::of(RAdam { lr: large, weight_decay: large, decoupled_weight_decay, ..RAdam::default() }),
        ),
        ("lr", Optim::of(Adam { lr: 1e38, ..Adam::default() })),
        ("lr", Optim::of(AdamW { lr: 1e38, ..AdamW::default() })),
        ("lr", Optim::of(Adamax { lr: 1e38, ..Adamax::default() })),
        ("lr", Optim::of(NAdam { lr: 1e38, ..NAdam::default() })),
        ("lr", Optim::of(RAdam { lr: 1e38, ..RAdam::default() })),
    ];
    for (field, optim) in cases {
        assert_refused(build(optim, &Options::default()), field, &format!("{optim:?}"));
    }
    let edges = [
        Optim::of(Sgd { nesterov: true, ..heavy }),
        Optim::of(Sgd { dampening: -0.5, momentum: 1.0, ..heavy }),
        Optim::of(Adam { lr: 0.0, betas: (0.0, 0.0), eps: 0.0, ..Adam::default() }),
        Optim::of(AdamW { betas: (1.0 - f64::EPSILON, 1.0 - f64::EPSILON), ..AdamW::default() }),
        Optim::of(Rprop { step_sizes: (0.0, 0.0), ..Rprop::default() }),
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
        cases.push(("clip", Options { max_norm: Some(bad), ..sequential.clone() }));
        cases.push(("loss_scale", Options { loss_scale: bad, ..sequential.clone() }));
    }
    for (field, options) in cases {
        assert_refused(build(Optim::of(Adam::default()), &options), field, &format!("{options:?}"));
    }
}

#[test]
fn eager_refuses_what_needs_all_gradients_and_the_other_modes_accept_it() {
    for mode in [Mode::Sequential, Mode::Eager, Mode::Normed] {
        let clipped = Options { mode, max_norm: Some(1.0), ..Options::default() };
        let skipping = Options { mode, skip_nonfinite: true, ..Options::default() };
        for (field, options) in [("clip", clipped), ("skip_nonfinite", skipping)] {
            let built = build(Optim::of(Sgd::default()), &options);
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
        let state = stepper.view::<f32>(id.state(name)).map(<[f32]>::len);
        match state {
            Ok(len) => len == 3,
            Err(Error::Unsupported(refusal)) if refusal.thing.contains(name) => false,
            Err(other) => panic!("{other:?}"),
        }
    };
    let heavy = Sgd { momentum: 0.9, ..Sgd::default() };
    assert!(has(Optim::of(heavy), "momentum_buffer") && !has(Optim::of(Sgd::default()), "momentum_buffer"));
    let (plain, amsgrad) = (Adam::default(), Adam { amsgrad: true, ..Adam::default() });
    assert!(has(Optim::of(plain), "exp_avg") && has(Optim::of(plain), "exp_avg_sq"));
    assert!(has(Optim::of(amsgrad), "max_exp_avg_sq") && !has(Optim::of(plain), "max_exp_avg_sq"));
}
