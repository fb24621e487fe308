//! The standard registry has every optimizer, by name and by type, with every hyperparameter, and all of PyTorch's
//! `functional_optim_map`.
//!
//! A keyword that reached another field, or none, would train silently with a default. Each field therefore gets a
//! different value here.

use std::any::Any;

use instep::optim::{ALL, Optimizer, Range, Value};
use instep::overlap::Registry;
use instep::{Adam, AdamW, Error, Rprop, Sgd};

/// Returns a number inside a range, different for each place.
fn inside(range: Range, place: usize) -> f64 {
    let share = (place + 1) as f64 / 16.0;
    match range {
        Range::NonNegative | Range::NonNegativeF64 | Range::BelowOne | Range::UpToOne | Range::InsideOne => {
            share
        }
        Range::AboveOne => 1.0 + share,
        // Nesterov's momentum takes no other.
        Range::Finite => 0.0,
        Range::Flag => 1.0,
    }
}

#[test]
fn every_name_stands_for_its_optimizer_and_every_keyword_for_its_field() {
    let registry = Registry::standard();
    assert_eq!(
        registry.names().collect::<Vec<&str>>(),
        ALL.iter().map(|one| one.name).collect::<Vec<&str>>()
    );
    for descriptor in ALL {
        let name = descriptor.name;
        let entry = registry.resolve(name).unwrap();
        let default = entry.build(&[]).unwrap();
        assert_eq!(format!("{default:?}"), format!("{:?}", descriptor.build()));
        let parts = descriptor.fields.iter().flat_map(|field| field.parts).enumerate();
        let keywords: Vec<(&str, f64)> =
            parts.map(|(place, part)| (part.keyword, inside(part.range, place))).collect();
        let built = entry.build(&keywords).unwrap();
        let numbers = descriptor.fields.iter().flat_map(|field| built.get(field.name).unwrap().numbers());
        assert!(numbers.eq(keywords.iter().map(|(_, number)| *number)), "{name}: {built:?}");
        let Err(Error::Unsupported(refusal)) = entry.build(&[("no such keyword", 0.0)]) else {
            panic!("{name} takes any keyword");
        };
        let given: Vec<&str> = keywords.iter().map(|(keyword, _)| *keyword).collect();
        assert_eq!(refusal.remedy, format!("use one of {}", given.join(", ")), "{name}");
        let bad = entry.build(&[("lr", f64::NAN)]);
        assert!(matches!(bad, Err(Error::Config { field: "lr", .. })), "{name}: {bad:?}");
        let bad = entry.build(&[("maximize", 0.5)]);
        assert!(matches!(bad, Err(Error::Config { field: "maximize", .. })), "{name}: {bad:?}");
    }
}

#[test]
fn a_type_resolves_to_its_entry_and_keywords_reach_the_fields_of_the_struct() {
    let registry = Registry::standard();
    let built =
        |name: &str, keywords| -> Box<dyn Any> { registry.resolve(name).unwrap().build(keywords).unwrap() };
    let keywords =
        [("lr", 0.1), ("beta1", 0.2), ("beta2", 0.3), ("eps", 0.4), ("weight_decay", 0.5), ("amsgrad", 1.0)];
    let expected =
        AdamW { lr: 0.1, betas: (0.2, 0.3), eps: 0.4, weight_decay: 0.5, amsgrad: true, maximize: false };
    assert_eq!(built("AdamW", &keywords).downcast_ref(), Some(&expected));
    assert_eq!(registry.resolve_type::<AdamW>().unwrap().name(), "AdamW");
    let keywords = [
        ("eta_minus", 0.2),
        ("eta_plus", 1.3),
        ("step_size_min", 0.4),
        ("step_size_max", 0.5),
        ("maximize", 1.0),
    ];
    let expected = Rprop { etas: (0.2, 1.3), step_sizes: (0.4, 0.5), maximize: true, ..Rprop::default() };
    assert_eq!(built("Rprop", &keywords).downcast_ref(), Some(&expected));
    assert_eq!(registry.resolve_type::<Rprop>().unwrap().name(), "Rprop");
}

#[test]
fn a_name_and_a_type_have_one_entry_and_a_wrong_name_is_told_the_closest() {
    let mut registry = Registry::standard();
    let again = registry.register("Adam", |_| Ok(Sgd::default())).unwrap_err().to_string();
    assert!(again.starts_with("name = Adam: registered already; "), "{again}");
    let another = registry.register("MyAdam", |_| Ok(Adam::default())).unwrap_err().to_string();
    assert!(another.contains("registered already under another name"), "{another}");
    for (wrong, first) in [("adamw", "AdamW"), ("NAadam", "NAdam"), ("RMSProp2", "RMSprop")] {
        let refused = registry.resolve(wrong).unwrap_err().to_string();
        assert!(refused.contains(&format!("not registered; use one of {first}, ")), "{refused}");
    }
    let by_type = Registry::new().resolve_type::<Adam>().unwrap_err().to_string();
    assert!(by_type.ends_with("register it first"), "{by_type}");
    for keyword in ["betas", "fused", "foreach"] {
        let refused = registry.resolve("Adam").unwrap().build(&[(keyword, 1.0)]).unwrap_err().to_string();
        assert!(refused.contains("no such hyperparameter; use one of lr, beta1, beta2, "), "{refused}");
    }
}

#[test]
fn a_field_takes_only_values_of_its_kind() {
    let mut adamw: Box<dyn Optimizer> = Box::new(AdamW::default());
    adamw.set("betas", Value::Pair((0.5, 0.6))).unwrap();
    assert_eq!(adamw.get("betas"), Some(Value::Pair((0.5, 0.6))));
    for (field, value) in [
        ("betas", Value::Number(0.5)),
        ("lr", Value::Flag(true)),
        ("amsgrad", Value::Number(1.0)),
        ("momentum", Value::Number(0.9)),
    ] {
        assert!(matches!(adamw.set(field, value), Err(Error::Unsupported { .. })), "{field}");
    }
    assert_eq!(adamw.get("momentum"), None);
}

#[test]
fn every_name_of_pytorchs_own_map_is_there() {
    let registry = Registry::standard();
    for name in ["Adagrad", "Adam", "AdamW", "SGD", "Adadelta", "RMSprop", "Rprop", "Adamax"] {
        registry.resolve(name).unwrap();
    }
}
