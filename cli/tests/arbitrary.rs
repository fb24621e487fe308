//! Random configurations: valid ones run, broken ones are refused, and none panics.
//!
//! The tests run in this process, because there are many cases. The fuzzer mutates tensor files (`tools/fuzz`).

use std::io::Cursor;

use instep_cli::replay::{Options, Order, replay};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::support::{Content, input};

/// Options of one group. Each option is present or missing at random.
fn group(optimizer: &'static str) -> impl Strategy<Value = Value> {
    let rate = || prop::option::of(prop_oneof![Just(0.0), 1e-6..2.0f64]);
    let share = || prop::option::of(0.0..1.0f64);
    let flag = || prop::option::of(any::<bool>());
    let numbers = (rate(), rate(), share(), share(), rate());
    (numbers, flag(), flag()).prop_map(move |((lr, weight_decay, one, two, eps), first, maximize)| {
        let rows = match optimizer {
            "sgd" => vec![
                ("momentum", one.map(Value::from)),
                (
                    "nesterov",
                    first.map(|first| Value::from(first && one.is_some_and(|momentum| momentum > 0.0))),
                ),
                ("dampening", two.filter(|_| first != Some(true)).map(Value::from)),
            ],
            "rmsprop" => vec![
                ("alpha", one.map(Value::from)),
                ("eps", eps.map(Value::from)),
                ("momentum", two.filter(|_| first.is_some()).map(Value::from)),
                ("centered", first.map(Value::from)),
            ],
            _ => vec![
                ("betas", one.zip(two).map(|(one, two)| json!([one, two]))),
                ("eps", eps.map(Value::from)),
                ("amsgrad", first.map(Value::from)),
            ],
        };
        let common = [("lr", lr.map(Value::from)), ("weight_decay", weight_decay.map(Value::from))];
        let all = rows.into_iter().chain(common).chain([("maximize", maximize.map(Value::from))]);
        Value::Object(all.filter_map(|(key, value)| Some((key.to_owned(), value?))).collect())
    })
}

/// A valid configuration and the number of its parameters.
fn config() -> impl Strategy<Value = (Value, usize)> {
    let optimizer = prop_oneof![Just("sgd"), Just("adam"), Just("adamw"), Just("rmsprop")];
    let groups = optimizer.prop_flat_map(|optimizer| {
        (Just(optimizer), prop::collection::vec((group(optimizer), 1..4usize), 1..4))
    });
    let scales = (1..100u32, prop::option::of(1e-3..1e3f64), 1e-3..1e3f64, any::<bool>());
    (groups, scales).prop_map(|((optimizer, groups), (world_size, max_norm, loss_scale, skip_nonfinite))| {
        let mut count = 0;
        let groups: Vec<Value> = groups
            .into_iter()
            .map(|(mut group, params)| {
                group["params"] = (count..count + params).map(name).collect();
                count += params;
                group
            })
            .collect();
        let clip = max_norm.map(|max_norm| json!({ "global": max_norm }));
        let config = json!({
            "optimizer": optimizer, "world_size": world_size, "clip": clip, "loss_scale": loss_scale,
            "skip_nonfinite": skip_nonfinite, "groups": groups,
        });
        (config, count)
    })
}

fn name(index: usize) -> String {
    format!("layer.{index}")
}

fn tensors(count: usize) -> Content {
    const SHAPES: [&[usize]; 4] = [&[3], &[], &[2, 300], &[0]];
    let names: Vec<String> = (0..count).map(name).collect();
    let params: Vec<_> = names.iter().enumerate().map(|(k, name)| (name.as_str(), SHAPES[k % 4])).collect();
    input(&params, 3)
}

fn run(config: &[u8], input: &Content, order: Order) -> Result<Vec<u8>, String> {
    let mut out = Vec::new();
    let options = Options { mode: order, threads: Some(1), ..Options::default() };
    match replay(config, Cursor::new(input.bytes()), &options, &mut out) {
        Ok(()) => Ok(out),
        Err(failure) => {
            assert!(out.is_empty(), "{failure}: something was written");
            Err(failure.to_string())
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn valid_configurations_run_and_write_what_they_should((config, count) in config()) {
        let text = config.to_string();
        let output = run(text.as_bytes(), &tensors(count), Order::Sequential).unwrap();
        prop_assert_eq!(&run(text.as_bytes(), &tensors(count), Order::Normed).unwrap(), &output);
        let output = Content::parse(&output);
        prop_assert_eq!(output.metadata.len(), count);
        prop_assert_eq!(output.tensors.keys().filter(|name| name.starts_with("param.")).count(), count);
    }

    #[test]
    fn broken_configurations_are_refused_and_never_panic(
        (config, count) in config(),
        cuts in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4usize), 1..6),
    ) {
        let mut text = config.to_string().into_bytes();
        for (at, byte, kind) in cuts {
            let at = at.index(text.len());
            match kind {
                0 => text[at] ^= 1 << (byte % 8),
                1 => text[at] = byte,
                2 => text.truncate(at.max(1)),
                _ => text.insert(at, b"0123456789.-eE{}[]\",:ntf"[usize::from(byte) % 23]),
            }
        }
        // The mutated text may still be valid, so the test only checks that `run` returns.
        let _ = run(&text, &tensors(count), Order::Sequential);
    }
}
