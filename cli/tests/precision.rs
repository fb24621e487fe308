//! Checks in every precision that a replay has the bits of the library's run, and that a replay that resumes from an
//! output has the bits of the uninterrupted run.
//!
//! The tests run in this process, because there are many combinations. Inputs have only values that the configured
//! types represent exactly, because the command refuses any other value.

use std::io::Cursor;

use instep::{AdamW, DType, Element, Layout, Master, Moments, ParamId, Precision, Rounding, Stepper, Sums};
use instep::{bf16, f16};
use instep_cli::replay::{Options, replay};

use crate::support::{Content, input, painted};

const PARAMS: [(&str, &[usize]); 4] = [("a.b", &[3, 101]), ("c", &[]), ("none", &[0]), ("d", &[257])];

const PASSES: u64 = 4;

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Returns every precision.
fn precisions() -> Vec<Precision> {
    let masters = [Master::None, Master::F32, Master::Remainder16, Master::Remainder8];
    let roundings = [Rounding::Nearest, Rounding::Stochastic { seed: 0xffff_ffff_ffff_fffb }];
    let mut all = Vec::new();
    for (param, grad) in FLOATS.into_iter().flat_map(|param| FLOATS.map(|grad| (param, grad))) {
        for (master, rounding) in masters.into_iter().flat_map(|m| roundings.map(|r| (m, r))) {
            let of = |moments| Precision { param, grad, master, moments, rounding };
            all.extend([Moments::F32, Moments::BF16, Moments::EightBit].map(of));
        }
    }
    all.retain(|precision| precision.validate().is_ok());
    assert_eq!(all.len(), 105);
    all
}

fn spelled(precision: &Precision) -> String {
    let Precision { param, grad, master, moments, rounding } = precision;
    let master = match master {
        Master::None => "none",
        Master::F32 => "f32",
        Master::Remainder16 => "remainder16",
        Master::Remainder8 => "remainder8",
    };
    let moments = match moments {
        Moments::F32 => "f32",
        Moments::BF16 => "bf16",
        Moments::EightBit => "8bit",
    };
    let rounding = match rounding {
        Rounding::Nearest => r#""nearest""#.into(),
        Rounding::Stochastic { seed } => format!(r#""stochastic","seed":{seed}"#),
    };
    format!(
        r#"{{"param":"{param}","grad":"{grad}","master":"{master}","moments":"{moments}","rounding":{rounding}}}"#
    )
}

/// Returns an input with values that the types of `precision` represent exactly. The tensors are stored in these types
/// if `in_own_types` is true, and in f32 otherwise.
fn exact(precision: &Precision, frozen: Option<&str>, in_own_types: bool) -> Content {
    let mut content = input(&PARAMS, PASSES);
    if let Some(frozen) = frozen {
        content.tensors.retain(|name, _| !(name.starts_with("grad.") && name.ends_with(frozen)));
    }
    for name in content.tensors.keys().cloned().collect::<Vec<_>>() {
        let dtype = if name.starts_with("param.") { precision.param } else { precision.grad };
        content = content.retyped(&name, dtype);
        if !in_own_types {
            content = content.retyped(&name, DType::F32);
        }
    }
    content
}

fn replayed(config: &str, input: &Content) -> Content {
    run(config, input).unwrap_or_else(|failure| panic!("{config}: {failure}"))
}

fn run(config: &str, input: &Content) -> Result<Content, String> {
    let mut out = Vec::new();
    let options = Options { threads: Some(1), ..Options::default() };
    match replay(config.as_bytes(), Cursor::new(input.bytes()), &options, &mut out) {
        Ok(()) => Ok(Content::parse(&out)),
        Err(failure) => {
            assert!(out.is_empty());
            Err(failure.to_string())
        }
    }
}

/// Returns the tensors of `start` and the gradients of these passes, renumbered from 0.
fn followed_by(mut start: Content, all: &Content, passes: std::ops::Range<u64>) -> Content {
    start.tensors.retain(|name, _| !name.starts_with("grad."));
    for (name, tensor) in &all.tensors {
        let Some((pass, param)) = name.strip_prefix("grad.").and_then(|rest| rest.split_once('.')) else {
            continue;
        };
        let pass: u64 = pass.parse().unwrap();
        if passes.contains(&pass) {
            start.tensors.insert(format!("grad.{}.{param}", pass - passes.start), tensor.clone());
        }
    }
    start
}

#[test]
fn going_on_from_an_output_gives_the_bits_of_the_whole_run_in_every_precision() {
    let optimizers = [
        r#""sgd","groups":[{"params":["a.b","none"],"momentum":0.9},{"params":["c","d"],"lr":0.1}]"#,
        r#""adamw","groups":[{"params":["a.b","c","none","d"],"lr":0.01,"amsgrad":true}]"#,
        r#""rmsprop","groups":[{"params":["a.b","c"],"alpha":0.5},{"params":["none","d"],"momentum":0.5}]"#,
    ];
    for (k, precision) in precisions().iter().enumerate() {
        let (optimizer, dtypes) = (optimizers[k / 3 % 3], spelled(precision));
        let more =
            [r#","copy":"bf16","ema":0.75"#, r#","frozen":["c"],"copy":"f16""#, r#","ema":0.9"#, ""][k % 4];
        let config = format!(r#"{{"optimizer":{optimizer},"dtypes":{dtypes}{more}}}"#);
        let all = exact(precision, more.contains("frozen").then_some(".c"), true);
        let whole = replayed(&config, &all);
        for cut in 0..PASSES {
            let halfway = replayed(&config, &followed_by(all.clone(), &all, 0..cut));
            let resumed = replayed(&config, &followed_by(halfway.clone(), &all, cut..PASSES));
            assert_eq!(resumed, whole, "{config} cut at {cut}");
            assert_eq!(replayed(&config, &halfway), halfway, "{config} without gradients at {cut}");
        }
    }
}

/// Returns a parameter's stored values as f32.
fn stored(stepper: &Stepper, id: ParamId, dtype: DType) -> Vec<f32> {
    fn widened<T: Element>(stepper: &Stepper, id: ParamId) -> Vec<f32> {
        stepper.view::<T>(id).unwrap().iter().map(|value| value.to_f32()).collect()
    }
    match dtype {
        DType::BF16 => widened::<bf16>(stepper, id),
        DType::F16 => widened::<f16>(stepper, id),
        _ => widened::<f32>(stepper, id),
    }
}

#[test]
fn the_output_is_what_the_library_makes_in_every_precision() {
    for (k, precision) in precisions().into_iter().enumerate() {
        let (copy, content) = (FLOATS[k % 3], exact(&precision, None, k % 2 == 0));
        let config = format!(
            r#"{{"optimizer":"adamw","world_size":3,"loss_scale":4.0,"dtypes":{},"copy":"{copy}","ema":0.8,
                "groups":[{{"params":["a.b","c","none","d"],"lr":0.01}}]}}"#,
            spelled(&precision)
        );
        let mut layout = Layout::builder();
        for (name, shape) in PARAMS {
            layout = layout.param(name, shape.iter().product());
        }
        let layout = layout.build().unwrap();
        let builder = Stepper::builder(&layout, AdamW { lr: 0.01, ..AdamW::default() });
        let builder = builder.precision(precision).copy_params(copy).ema(0.8).loss_scale(4.0);
        let mut stepper = builder.host(Sums::by_caller(0, 3)).unwrap();
        for ((name, _), id) in PARAMS.into_iter().zip(layout.ids()) {
            stepper.write(id, &content.values(&format!("param.{name}"))).unwrap();
        }
        for step in 0..PASSES {
            let mut pass = stepper.begin().unwrap();
            for ((name, _), id) in PARAMS.into_iter().zip(layout.ids()) {
                pass.write(id.grad(), &content.values(&format!("grad.{step}.{name}"))).unwrap();
                pass.grad_ready(id).unwrap();
            }
            pass.finish().unwrap();
        }
        let mut expected = Content::default();
        for ((name, shape), id) in PARAMS.into_iter().zip(layout.ids()) {
            let read = |copied: &dyn Fn(&mut [f32]) -> instep::Result<()>| {
                let mut values = vec![0.0; shape.iter().product()];
                copied(&mut values).unwrap();
                values
            };
            let mut add = |kind: &str, values: &[f32], dtype| {
                let key = format!("{kind}.{name}");
                expected = std::mem::take(&mut expected).with(&key, shape, values).retyped(&key, dtype);
            };
            add("param", &stored(&stepper, id, precision.param), precision.param);
            if precision.master != Master::None {
                add("master", &read(&|into| stepper.read(id, into)), DType::F32);
            }
            add("copy", &read(&|into| stepper.read(id.copy(), into)), copy);
            add("ema", &read(&|into| stepper.read(id.ema(), into)), DType::F32);
            let moments = if precision.moments == Moments::BF16 { DType::BF16 } else { DType::F32 };
            for state in ["exp_avg", "exp_avg_sq"] {
                let key = format!("state.{name}.{state}");
                let values = read(&|into| stepper.read(id.state(state), into));
                expected = std::mem::take(&mut expected).with(&key, shape, &values).retyped(&key, moments);
            }
            expected = expected.with_count(name, &PASSES.to_string());
        }
        assert_eq!(replayed(&config, &content), expected, "{config}");
    }
}

const BF16: &str = r#"{"optimizer":"adam","dtypes":{"param":"bf16","grad":"bf16","moments":"8bit"},"copy":"bf16","ema":0.5,
    "groups":[{"params":["w"]}]}"#;

/// Returns a complete input that fits [`BF16`].
fn fine() -> Content {
    let start = Content::default().with("param.w", &[3], &[1.0, 2.0, -0.0]);
    let start = start.with("grad.0.w", &[3], &[1.0, 0.5, f32::NAN]).with("ema.w", &[3], &[0.1; 3]);
    let start = start.with("state.w.exp_avg", &[3], &[0.0; 3]).with("state.w.exp_avg_sq", &[3], &[0.0; 3]);
    start.with("copy.w", &[3], &[1.0, 2.0, 0.0]).with_count("w", "1")
}

#[test]
fn a_value_that_its_type_does_not_have_is_refused_by_name_and_place() {
    replayed(BF16, &fine());
    for (key, values, word) in [
        ("param.w", [1.0, 0.1, 1.0], "`param.w`: holds 0.1 at 1, which `dtypes` would round to 0.100097656"),
        ("grad.0.w", [1.0, 1.0, 1.001], "`grad.0.w`: holds 1.001 at 2"),
        ("grad.0.w", [3.4e38, 1.0, 1.0], "`grad.0.w`: holds 3.4e38 at 0"),
        ("state.w.exp_avg", [0.123, 1.0, 0.5], "`state.w.exp_avg`: holds 0.123 at 0"),
        ("state.w.exp_avg_sq", [0.0, -1.0, 0.0], "`state.w.exp_avg_sq`: holds -1.0 at 1"),
        ("copy.w", [1.0, 0.1, 1.0], "`copy.w`: holds 0.1 at 1"),
    ] {
        let refused = run(BF16, &fine().with(key, &[3], &values)).unwrap_err();
        assert!(refused.contains(word), "no {word:?} in {refused:?}");
    }
    // Whether a value is refused does not depend on its type in the input file.
    let half = fine().with("param.w", &[3], &[1.0, 2.0, 1.001]).retyped("param.w", DType::F16);
    assert!(run(BF16, &half).unwrap_err().contains("`param.w`: holds 1.0009766 at 2"));
    let wide = |dtype| replayed(BF16, &fine().retyped("param.w", dtype).retyped("grad.0.w", dtype));
    assert_eq!(wide(DType::F16), wide(DType::F32));
}

#[test]
fn a_parameter_and_its_master_agree_or_are_refused() {
    for (master, exact) in [("f32", 0.1), ("remainder16", 0.1), ("remainder8", 0.10000038)] {
        let config = BF16.replace(r#""moments":"8bit""#, &format!(r#""master":"{master}""#));
        let start = Content::default().with("grad.0.w", &[1], &[1.0]);
        let both = start.clone().with("master.w", &[1], &[exact]).with("param.w", &[1], &[0.100_097_656]);
        let alone = start.clone().with("param.w", &[1], &[exact]);
        assert_eq!(replayed(&config, &both), replayed(&config, &alone), "{master}");
        let refused = run(&config, &both.with("param.w", &[1], &[0.1])).unwrap_err();
        assert!(refused.contains("`param.w`: holds 0.1 at 0"), "{refused}");
        if master == "remainder8" {
            let refused = run(&config, &start.with("param.w", &[1], &[0.1])).unwrap_err();
            assert!(refused.contains("would round to 0.100000"), "{refused}");
        }
    }
}

#[test]
fn averages_go_on_or_begin_at_the_parameter_and_half_of_them_are_refused() {
    let config =
        r#"{"optimizer":"sgd","ema":0.75,"groups":[{"params":["v"],"momentum":0.5},{"params":["w"]}]}"#;
    let start = Content::default().with("param.v", &[1], &[8.0]).with("param.w", &[1], &[8.0]);
    let start = start.with("grad.0.v", &[1], &[0.0]).with("grad.0.w", &[1], &[0.0]);
    let average = |content: &Content| replayed(config, content).values("ema.w")[0];
    assert_eq!(average(&start), 8.0, "the first average is the parameter");
    let later = start.clone().with_count("w", "3");
    assert_eq!(average(&later), 8.0, "averages that are not given begin at the parameter");
    assert_eq!(average(&later.clone().with("ema.w", &[1], &[4.0])), 5.0);
    let frozen = config.replace(r#""groups""#, r#""frozen":["w"],"groups""#);
    let mut begun = later.clone();
    begun.tensors.remove("grad.0.w");
    let begun = replayed(&frozen, &begun);
    assert_eq!((begun.values("ema.v"), begun.values("ema.w")), (vec![8.0], vec![8.0]));
    assert_eq!(replayed(&frozen, &begun), begun, "what has begun goes on");
    let second = later.with("state.v.momentum_buffer", &[1], &[0.0]);
    let refused = run(config, &second.with("ema.w", &[1], &[4.0])).unwrap_err();
    assert!(refused.contains("`ema.v`: missing beside others"), "{refused}");
    for first in [start.clone(), start.with_count("v", "7")] {
        let refused = run(config, &first.with("ema.v", &[1], &[4.0])).unwrap_err();
        assert!(refused.contains("`ema.v`: given, though `v` was never stepped"), "{refused}");
    }
}

#[test]
fn a_frozen_parameter_keeps_everything_and_needs_no_gradient() {
    let config = r#"{"optimizer":"adam","frozen":["w"],"dtypes":{"param":"bf16","master":"f32"},"copy":"f32","ema":0.5,
        "groups":[{"params":["v","w"]}]}"#;
    let start =
        Content::default().with("param.v", &[2], &painted(1, 2)).with("grad.0.v", &[2], &painted(2, 2));
    let start = start.with("master.w", &[1], &[0.1]).with("param.w", &[1], &[0.100_097_656]);
    let mut start = start.retyped("param.w", DType::BF16).with("copy.w", &[1], &[7.0]).with_count("w", "5");
    for state in ["state.w.exp_avg", "state.w.exp_avg_sq", "ema.w"] {
        start = start.with(state, &[1], &[0.25]);
    }
    let output = replayed(config, &start);
    for (name, tensor) in start.tensors.iter().filter(|(name, _)| name.contains(".w")) {
        assert_eq!(&output.tensors[name], tensor, "{name}");
    }
    assert_eq!((output.metadata["step.w"].as_str(), output.metadata["step.v"].as_str()), ("5", "1"));
}
