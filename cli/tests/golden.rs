//! Replay against the numbers that `torch.optim` made in f64, in the library's `tests/vectors.txt`.
//!
//! Seven steps in a row, so errors pile up as they do in training: bound 1e-6 + 5e-6 * |value| for every parameter and
//! state. The library's own tests hold single steps to derived bounds.

use std::collections::HashMap;

use crate::support::{Content, replayed};

/// What else a step leaves behind, by any optimizer.
const STATES: [&str; 9] = [
    "momentum_buffer",
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "sum",
    "square_avg",
    "grad_avg",
    "acc_delta",
    "exp_inf",
];

/// What a case says of its optimizer, betas apart.
const OPTIONS: [&str; 13] = [
    "lr",
    "momentum",
    "dampening",
    "weight_decay",
    "eps",
    "nesterov",
    "amsgrad",
    "maximize",
    "lr_decay",
    "initial_accumulator_value",
    "alpha",
    "centered",
    "rho",
];

type Block<'a> = HashMap<&'a str, Vec<&'a str>>;

fn blocks() -> Vec<Block<'static>> {
    let parse = |block: &'static str| {
        let mut rows = Block::new();
        for line in block.lines().filter(|line| !line.starts_with('#')) {
            let (key, value) = line.split_once(" = ").unwrap();
            rows.entry(key).or_default().push(value);
        }
        rows
    };
    include_str!("../../tests/vectors.txt").split("\n\n").map(parse).collect()
}

fn numbers(text: &str) -> Vec<f64> {
    text.split(' ').map(|number| number.parse().unwrap()).collect()
}

fn config(case: &Block<'_>) -> String {
    let plain = OPTIONS.into_iter().filter_map(|key| Some(format!(r#""{key}":{}"#, case.get(key)?[0])));
    let betas = case.get("beta1").map(|beta1| format!(r#""betas":[{},{}]"#, beta1[0], case["beta2"][0]));
    let options: Vec<String> = plain.chain(betas).collect();
    let (optimizer, options) = (case["optimizer"][0], options.join(","));
    format!(r#"{{"optimizer":"{optimizer}","groups":[{{"params":["w"],{options}}}]}}"#)
}

#[test]
fn seven_steps_stay_with_torch_in_f64() {
    let blocks = blocks();
    let (common, cases) = blocks.split_first().unwrap();
    let f32s = |row: &str| -> Vec<f32> { numbers(row).iter().map(|x| *x as f32).collect() };
    let start = f32s(common["start"][0]);
    let mut input = Content::default().with("param.w", &[start.len()], &start);
    for (step, row) in common["gradient"].iter().enumerate() {
        input = input.with(&format!("grad.{step}.w"), &[start.len()], &f32s(row));
    }
    let mut worst = 0.0f64;
    for case in cases {
        let config = config(case);
        let output = replayed(&config, &input, &[]);
        let mut compared = 0;
        for key in ["param"].into_iter().chain(STATES) {
            let Some(rows) = case.get(key) else {
                assert!(
                    !output.tensors.contains_key(&format!("state.w.{key}")),
                    "{config}: torch has no {key}"
                );
                continue;
            };
            let name = if key == "param" { "param.w".to_owned() } else { format!("state.w.{key}") };
            for (ours, torch) in output.values(&name).into_iter().zip(numbers(rows[6])) {
                let ratio = (f64::from(ours) - torch).abs() / (1e-6 + 5e-6 * torch.abs());
                assert!(ratio <= 1.0, "{config}: {name} is {ours}, torch has {torch}: {ratio} of the bound");
                worst = worst.max(ratio);
                compared += 1;
            }
        }
        assert_eq!(compared, start.len() * (output.tensors.len()));
    }
    assert_eq!(cases.len(), 33);
    println!("largest ratio to the bound: {worst:.3}");
}
