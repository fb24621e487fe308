//! Compares replays with the f64 numbers of the library's `tests/numerics/vectors.txt`. `torch.optim` computed these
//! numbers. For Lion, LAMB and AdEMAMix, which torch lacks, `tests/numerics/papers.py` computed them.
//!
//! The tests make seven steps in a row, so errors add up as in training. The bound is 1e-6 + 5e-6 * |value| for every
//! parameter and state. The library's own tests compare single steps within derived bounds.

use std::collections::{BTreeMap, BTreeSet};

use crate::support::{Content, replayed};

/// Each row has a configuration key for a pair of numbers, and the two keys of these numbers in the vectors. All other
/// keys are the same in the configuration and in the vectors.
const PAIRS: [[&str; 3]; 3] = [
    ["betas", "beta1", "beta2"],
    ["etas", "eta_minus", "eta_plus"],
    ["step_sizes", "step_size_min", "step_size_max"],
];

type Block<'a> = BTreeMap<&'a str, Vec<&'a str>>;

fn blocks() -> Vec<Block<'static>> {
    let parse = |block: &'static str| {
        let mut rows = Block::new();
        for line in block.lines().filter(|line| !line.starts_with('#')) {
            let (key, value) = line.split_once(" = ").unwrap();
            rows.entry(key).or_default().push(value);
        }
        rows
    };
    include_str!("../../tests/numerics/vectors.txt").split("\n\n").map(parse).collect()
}

fn numbers(text: &str) -> Vec<f64> {
    text.split(' ').map(|number| number.parse().unwrap()).collect()
}

fn config(case: &Block<'_>) -> String {
    let is_plain = |key: &str| key != "optimizer" && !PAIRS.iter().any(|pair| pair.contains(&key));
    let plain = case.iter().filter(|(key, rows)| rows.len() == 1 && is_plain(key));
    let plain = plain.map(|(key, rows)| format!(r#""{key}":{}"#, rows[0]));
    let pair = |[key, first, second]: [&str; 3]| {
        Some(format!(r#""{key}":[{},{}]"#, case.get(first)?[0], case[second][0]))
    };
    let options: Vec<String> = plain.chain(PAIRS.into_iter().filter_map(pair)).collect();
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
    let f64s = |values: Vec<f32>| values.into_iter().map(f64::from).collect();
    let mut worst = 0.0f64;
    for case in cases {
        let config = config(case);
        let output = replayed(&config, &input, &[]);
        let mut compared = BTreeSet::new();
        for (key, rows) in case.iter().filter(|(_, rows)| rows.len() == common["gradient"].len()) {
            let (name, ours): (_, Vec<f64>) = match *key {
                "mu_product" => {
                    ("mu_product.w".to_owned(), vec![output.metadata["mu_product.w"].parse().unwrap()])
                }
                "param" => ("param.w".to_owned(), f64s(output.values("param.w"))),
                state => (format!("state.w.{state}"), f64s(output.values(&format!("state.w.{state}")))),
            };
            for (ours, torch) in ours.into_iter().zip(numbers(rows.last().unwrap())) {
                let ratio = (ours - torch).abs() / (1e-6 + 5e-6 * torch.abs());
                assert!(ratio <= 1.0, "{config}: {name} is {ours}, torch has {torch}: {ratio} of the bound");
                worst = worst.max(ratio);
            }
            compared.insert(name);
        }
        let kept =
            output.tensors.keys().chain(output.metadata.keys().filter(|key| !key.starts_with("step.")));
        assert_eq!(compared, kept.cloned().collect(), "{config}");
    }
    let made = include_str!("../../tests/numerics/vectors.py")
        .lines()
        .filter(|line| line.starts_with("    (\""))
        .count();
    assert_eq!(cases.len(), made, "the file is whole");
    println!("largest ratio to the bound: {worst:.3}");
}
