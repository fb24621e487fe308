//! Tests `instep replay` and `instep diff` with the checkpoints of a training as input.
//!
//! The library trains and saves checkpoints. After the same steps, the command must write a file with the same bytes.

use instep::checkpoint::{self, Extras, Scalar};
use instep::optim::{ALL, Optimizer};
use instep::{
    AdamW, Clip, DType, Layout, LossScaler, Master, Mode, Moments, NAdam, Precision, Rounding, Sgd, Stepper,
    StepperBuilder, Sums,
};

use crate::support::{Content, Folder, assert_refused, painted, stderr, stdout};

/// The parameters in the order of registration, which is not the order of names or groups.
const PARAMS: [(&str, &[usize], usize); 4] =
    [("w.0.weight", &[3, 100], 0), ("b", &[], 1), ("none", &[0], 0), ("a", &[17], 0)];

const BEFORE: u64 = 2;

fn layout() -> Layout {
    let builder = PARAMS.iter().fold(Layout::builder(), |builder, (name, shape, group)| {
        let builder = builder.param(*name, shape.iter().product()).in_group(format!("{group}"));
        builder.shape(shape.iter().copied())
    });
    builder.build().unwrap()
}

fn gradient(pass: u64, param: usize) -> Vec<f32> {
    // Values that every gradient type of these tests represents exactly.
    let values = painted(100 * pass + param as u64, PARAMS[param].1.iter().product());
    values.into_iter().map(|value| DType::BF16.round(value)).collect()
}

/// Returns the gradients of these passes, with the shapes of the checkpoint's parameters.
fn gradients(passes: std::ops::Range<u64>) -> Content {
    let first = passes.start;
    passes.fold(Content::default(), |content, pass| {
        (0..PARAMS.len()).fold(content, |content, k| {
            let (name, shape, _) = PARAMS[k];
            content.with(&format!("grad.{}.{name}", pass - first), shape, &gradient(pass, k))
        })
    })
}

/// Trains, and saves one checkpoint after two passes and another after `more` further passes. `IN` is the first
/// checkpoint, and `GRADS` has the gradients of the further passes.
fn trained(config: &str, more: u64, build: impl Fn(&Layout) -> Stepper) -> Folder {
    let folder = Folder::new();
    let layout = layout();
    let mut stepper = build(&layout);
    for (k, id) in layout.ids().enumerate() {
        let values = painted(1000 + k as u64, PARAMS[k].1.iter().product());
        let values: Vec<f32> = values.into_iter().map(|value| DType::BF16.round(value)).collect();
        stepper.write(id, &values).unwrap();
    }
    let mut extras = Extras::default();
    extras.scalars.insert("epoch".into(), Scalar::U64(12));
    extras.metadata.insert("made by".into(), "a trainer".into());
    for pass in 0..BEFORE + more {
        if pass == BEFORE {
            checkpoint::save_with(&stepper, &extras, folder.path("IN")).unwrap();
        }
        let mut open = stepper.begin().unwrap();
        for (k, id) in layout.ids().enumerate() {
            open.write(id.grad(), &gradient(pass, k)).unwrap();
            open.grad_ready(id).unwrap();
        }
        open.finish().unwrap();
    }
    checkpoint::save_with(&stepper, &extras, folder.path("SAVED")).unwrap();
    folder.write("GRADS", &gradients(BEFORE..BEFORE + more).bytes());
    folder.write("C.json", config.as_bytes());
    folder
}

/// Returns a configuration with the parameters of `PARAMS` in two groups, in an order that differs from registration.
fn config(optimizer: &str, options: [&str; 2], keys: &str) -> String {
    let [first, second] = options;
    format!(
        r#"{{"optimizer":"{optimizer}","world_size":3{keys},"groups":[
            {{"params":["none","a","w.0.weight"]{first}}},{{"params":["b"]{second}}}]}}"#
    )
}

fn two_groups<'a>(
    layout: &'a Layout,
    first: Box<dyn Optimizer>,
    second: Box<dyn Optimizer>,
) -> StepperBuilder<'a> {
    Stepper::builder(layout, first.clone()).group("0", first).group("1", second)
}

fn replay(folder: &Folder, more: &[&str]) -> std::process::Output {
    folder.replay(&[&["--grads", "GRADS"], more].concat())
}

/// Runs the replay in the folder, and compares the output with the library's checkpoint.
fn assert_replays(folder: &Folder, more: &[&str], what: &str) {
    let output = replay(folder, more);
    assert_eq!(output.status.code(), Some(0), "{what}: {}", stderr(&output));
    assert!(output.stderr.is_empty());
    let diff = folder.run(&["diff", "OUT", "SAVED"]);
    assert_eq!(diff.status.code(), Some(0), "{what}: {}{}", stdout(&diff), stderr(&diff));
    assert!(folder.read("OUT") == folder.read("SAVED"), "{what}: diff overlooks a difference");
    assert_eq!(folder.run(&["diff", "IN", "OUT"]).status.code(), Some(1), "{what}: nothing was stepped");
}

#[test]
fn every_optimizer_replays_from_a_checkpoint_to_the_checkpoint_that_the_library_saves() {
    for descriptor in ALL {
        let config = config(&descriptor.key(), ["", r#","lr":0.01"#], "");
        let folder = trained(&config, 1, |layout| {
            let mut second = descriptor.build();
            second.set("lr", instep::optim::Value::Number(0.01)).unwrap();
            two_groups(layout, descriptor.build(), second).host(Sums::by_caller(0, 3)).unwrap()
        });
        assert_replays(&folder, &["--mode", "eager"], &config);
    }
}

#[test]
fn momentum_and_the_product_of_momenta_go_on_over_several_passes() {
    let sgd = Sgd { lr: 0.1, momentum: 0.9, nesterov: true, ..Sgd::default() };
    let options = r#","lr":0.1,"momentum":0.9,"nesterov":true"#;
    let folder = trained(&config("sgd", [options, ""], ""), 3, |layout| {
        two_groups(layout, Box::new(sgd), Box::new(Sgd::default())).host(Sums::by_caller(0, 3)).unwrap()
    });
    assert_replays(&folder, &["--bucket-cap-bytes", "1"], "sgd");
    let nadam = NAdam { momentum_decay: 0.3, ..NAdam::default() };
    let folder = trained(&config("nadam", [r#","momentum_decay":0.3"#, ""], ""), 3, |layout| {
        let builder = two_groups(layout, Box::new(nadam), Box::new(NAdam::default()));
        builder.mode(Mode::Normed).host(Sums::by_caller(0, 3)).unwrap()
    });
    // A checkpoint does not depend on the mode.
    assert_replays(&folder, &["--mode", "normed"], "nadam");
    assert_replays(&folder, &[], "nadam");
}

#[test]
fn every_kind_of_precision_replays_from_a_checkpoint() {
    let bf16 = Precision { param: DType::BF16, grad: DType::BF16, ..Precision::F32 };
    let rounding = Rounding::Stochastic { seed: 7 };
    for (dtypes, precision) in [
        (r#""param":"bf16","grad":"bf16","master":"f32""#, Precision { master: Master::F32, ..bf16 }),
        (
            r#""param":"bf16","grad":"bf16","master":"remainder16""#,
            Precision { master: Master::Remainder16, ..bf16 },
        ),
        (
            r#""param":"bf16","grad":"bf16","master":"remainder8","moments":"8bit","rounding":"stochastic","seed":7"#,
            Precision { master: Master::Remainder8, moments: Moments::EightBit, rounding, ..bf16 },
        ),
        (
            r#""param":"bf16","grad":"bf16","moments":"bf16","rounding":"stochastic","seed":7"#,
            Precision { moments: Moments::BF16, rounding, ..bf16 },
        ),
        (r#""moments":"8bit""#, Precision { moments: Moments::EightBit, ..Precision::F32 }),
    ] {
        let config = config("adamw", ["", ""], &format!(r#","dtypes":{{{dtypes}}}"#));
        let folder = trained(&config, 2, |layout| {
            let adamw = || Box::new(AdamW::default());
            two_groups(layout, adamw(), adamw()).precision(precision).host(Sums::by_caller(0, 3)).unwrap()
        });
        assert_replays(&folder, &[], &config);
    }
}

#[test]
fn averages_clips_and_skipped_passes_go_on_too() {
    let keys = r#","ema":0.9,"clip":{"global":0.5},"skip_nonfinite":true,"lr_multipliers":{"a":0.5}"#;
    let folder = trained(&config("adamw", ["", ""], keys), 2, |layout| {
        let adamw = || Box::new(AdamW::default());
        let builder = two_groups(layout, adamw(), adamw()).ema(0.9).clip(Clip::Global(0.5));
        let builder = builder.skip_nonfinite(true).mode(Mode::Sequential);
        let mut stepper = builder.host(Sums::by_caller(0, 3)).unwrap();
        stepper.set_lr_multiplier(layout.id("a").unwrap(), 0.5).unwrap();
        stepper
    });
    assert_replays(&folder, &[], keys);
    let nan = gradients(2..3).with("grad.0.b", &[], &[f32::NAN]);
    folder.write("GRADS", &nan.bytes());
    assert_eq!(replay(&folder, &[]).status.code(), Some(0));
    let report = folder.run(&["diff", "IN", "OUT", "--json"]).stdout;
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    let changed = report["tensors"].as_array().unwrap().iter().filter(|tensor| tensor["different"] != 0);
    let changed: Vec<&serde_json::Value> = changed.map(|tensor| &tensor["name"]).collect();
    assert_eq!(changed, ["schedule.step"], "a skipped pass leaves a trace");
}

#[test]
fn a_dynamic_loss_scale_goes_on_growing_and_backs_off() {
    let scaler = LossScaler { initial_scale: 1024.0, growth_interval: 3, ..LossScaler::default() };
    let keys = r#","loss_scale":{"growth_interval":3}"#;
    let folder = trained(&config("adamw", ["", ""], keys), 2, |layout| {
        let builder = two_groups(layout, Box::new(AdamW::default()), Box::new(AdamW::default()));
        builder.mode(Mode::Normed).loss_scale(scaler).host(Sums::by_caller(0, 3)).unwrap()
    });
    // The scale grows after three passes without a skip. The third of them is the first pass of the replay.
    assert_replays(&folder, &[], keys);
    let scale = |of: &str| {
        let report = folder.run(&["diff", "IN", of, "--json"]).stdout;
        let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
        let scale =
            report["tensors"].as_array().unwrap().iter().find(|tensor| tensor["name"] == "scaler.scale");
        scale.unwrap()["worst"]["b"].clone()
    };
    assert_eq!(scale("SAVED"), "2048.0");
    folder.write("GRADS", &gradients(2..3).with("grad.0.b", &[], &[f32::NAN]).bytes());
    assert_eq!(replay(&folder, &[]).status.code(), Some(0));
    assert_eq!(scale("OUT"), "512.0");
    for (other, word) in [
        ("", "IN: tensor `scaler.scale`: the run scaled its loss dynamically"),
        (r#","loss_scale":{},"loss_scale":8"#, "duplicate field `loss_scale`"),
        (r#","loss_scale":{"growth":3}"#, "unknown field `growth`"),
        (r#","loss_scale":{"backoff_factor":2}"#, "backoff_factor = 2"),
    ] {
        folder.write("C.json", config("adamw", ["", ""], other).as_bytes());
        refuse(&folder, &GRADS, word);
    }
    let many = config("adamw", ["", ""], keys).replace(r#""world_size":3"#, r#""world_size":4097"#);
    folder.write("C.json", many.as_bytes());
    refuse(&folder, &GRADS, "world_size = 4097: out of range; use at most 4096");
    let plain = adamw();
    plain.write("C.json", config("adamw", ["", ""], keys).as_bytes());
    refuse(&plain, &GRADS, "dynamic loss_scale: the checkpoint has no `scaler.scale`");
    plain.write("IN", &gradients(2..3).bytes());
    refuse(
        &plain,
        &[],
        "dynamic loss_scale: an input that is no checkpoint does not hold its state; use a number",
    );
}

#[test]
fn a_clip_by_the_norm_of_the_pass_before_goes_on_with_that_norm() {
    let keys = r#","clip":{"previous":0.5}"#;
    let folder = trained(&config("sgd", ["", ""], keys), 2, |layout| {
        let builder = two_groups(layout, Box::new(Sgd::default()), Box::new(Sgd::default()));
        builder.clip(Clip::Previous(0.5)).host(Sums::by_caller(0, 3)).unwrap()
    });
    assert_replays(&folder, &["--mode", "eager"], keys);
    for other in [r#","clip":{"global":0.5}"#, ""] {
        folder.write("C.json", config("sgd", ["", ""], other).as_bytes());
        refuse(
            &folder,
            &GRADS,
            "IN: tensor `clip.previous_norm`: the run clipped by the norm of the pass before",
        );
    }
    folder.write("IN", &gradients(2..3).bytes());
    folder.write("C.json", config("sgd", ["", ""], keys).as_bytes());
    refuse(&folder, &[], "clip.previous: an input that is no checkpoint");
}

fn adamw() -> Folder {
    trained(&config("adamw", ["", ""], ""), 1, |layout| {
        let adamw = || Box::new(AdamW::default());
        two_groups(layout, adamw(), adamw()).host(Sums::by_caller(0, 3)).unwrap()
    })
}

/// Checks that a call is refused: once without an output file, and once with an old one that must stay unchanged.
fn refuse(folder: &Folder, arguments: &[&str], word: &str) {
    let before = folder.names();
    assert_refused(&folder.replay(arguments), word);
    assert_eq!(folder.names(), before, "{word}: a file is left over");
    folder.write("OUT", b"as it was");
    assert_refused(&folder.replay(arguments), word);
    assert_eq!(folder.read("OUT"), b"as it was", "{word}");
    std::fs::remove_file(folder.path("OUT")).unwrap();
}

const GRADS: [&str; 2] = ["--grads", "GRADS"];

#[test]
fn a_checkpoint_of_another_model_optimizer_or_precision_is_refused() {
    let folder = adamw();
    let fine = config("adamw", ["", ""], "");
    for (other, word) in [
        (fine.replace(r#""none","#, ""), "IN: `param.none`: belongs to `none`, which is in no group"),
        (fine.replace(r#""b""#, r#""b","c""#), "IN: `param.c`: missing; remove the parameter"),
        (config("sgd", ["", ""], ""), "IN: tensor `state."),
        (config("adamw", [r#","amsgrad":true"#, ""], ""), "max_exp_avg_sq`: missing; load a file"),
        (config("nadam", ["", ""], ""), "mu_product`: missing"),
        (config("adamw", ["", ""], r#","dtypes":{"moments":"bf16"}"#), "which `dtypes` would round to"),
        (
            config("adamw", ["", ""], r#","copy":"bf16""#),
            "config: C.json: copy: a checkpoint keeps no copies",
        ),
        (config("adamw", ["", ""], r#","frozen":["b"]"#), "GRADS: `grad.0.b`: `b` is frozen"),
        ("{}".into(), "config: C.json: "),
    ] {
        folder.write("C.json", other.as_bytes());
        refuse(&folder, &GRADS, word);
    }
}

#[test]
fn gradients_that_do_not_fit_the_checkpoint_are_refused() {
    let folder = adamw();
    let fine = gradients(2..3);
    let mut missing = fine.clone();
    missing.tensors.remove("grad.0.b");
    let mut empty = fine.clone();
    empty.tensors.clear();
    for (grads, word) in [
        (missing, "GRADS: `grad.0.b`: missing; give it one in every pass"),
        (empty, "GRADS: the file: holds no gradient; add grad.0.NAME"),
        (fine.clone().with("grad.0.a", &[16], &[0.0; 16]), "GRADS: `grad.0.a`: has 16 elements, and `a` 17"),
        (fine.clone().with("grad.0.z", &[1], &[0.0]), "GRADS: `grad.0.z`: belongs to `z`"),
        (fine.clone().with("param.a", &[17], &[0.0; 17]), "GRADS: tensor `param.a`: no gradient"),
        (fine.clone().with("grad.2.a", &[17], &[0.0; 17]), "GRADS: `grad.1.w.0.weight`: missing"),
    ] {
        folder.write("GRADS", &grads.bytes());
        refuse(&folder, &GRADS, word);
    }
    std::fs::remove_file(folder.path("GRADS")).unwrap();
    refuse(&folder, &GRADS, "GRADS");
}

#[test]
fn checkpoints_and_gradients_in_each_others_place_are_refused() {
    let folder = adamw();
    refuse(&folder, &[], "IN: a checkpoint: holds no gradients; name a file of gradients with --grads");
    refuse(&folder, &["--grads", "IN"], "IN: ");
    assert_refused(&folder.replay(&["--grads", "OUT"]), "OUT");
    folder.write("IN", &gradients(2..3).bytes());
    refuse(&folder, &GRADS, "IN: --grads: is for checkpoints, and the input is none");
}

#[test]
fn an_output_that_is_the_file_of_gradients_is_refused() {
    let folder = adamw();
    let arguments =
        ["replay", "--config", "C.json", "--input", "IN", "--grads", "GRADS", "--output", "GRADS"];
    let before = folder.read("GRADS");
    assert_refused(&folder.run(&arguments), "is also the input GRADS");
    assert_eq!(folder.read("GRADS"), before);
}

#[test]
fn a_checkpoint_with_any_byte_flipped_or_cut_off_is_refused_by_both_commands() {
    let folder = adamw();
    let fine = folder.read("IN");
    let header = 8 + u64::from_le_bytes(fine[..8].try_into().unwrap()) as usize;
    for at in [9, header / 2, header, header + 40, fine.len() / 2, fine.len() - 1] {
        let mut broken = fine.clone();
        broken[at] ^= 1;
        folder.write("IN", &broken);
        refuse(&folder, &GRADS, "IN: ");
        assert_refused(&folder.run(&["diff", "IN", "SAVED"]), "IN: ");
    }
    for length in [0, 7, header, fine.len() - 1] {
        folder.write("IN", &fine[..length]);
        refuse(&folder, &GRADS, "IN: ");
        assert_refused(&folder.run(&["diff", "SAVED", "IN"]), "IN: ");
    }
}

#[test]
fn diff_tells_which_scalars_and_tensors_of_two_checkpoints_differ() {
    let folder = adamw();
    let report = folder.run(&["diff", "IN", "SAVED", "--json"]);
    assert_eq!(report.status.code(), Some(1));
    let report: serde_json::Value = serde_json::from_slice(&report.stdout).unwrap();
    let tensors = report["tensors"].as_array().unwrap();
    let named = |name: &str| tensors.iter().find(|tensor| tensor["name"] == name);
    let step = named("state.a.step").unwrap();
    assert_eq!(
        (&step["dtype_a"], &step["worst"]["a"], &step["worst"]["b"]),
        (&"U64".into(), &"2".into(), &"3".into())
    );
    assert_eq!(named("epoch").unwrap()["different"], 0);
    assert_eq!(named("crc32"), None);
    assert_eq!(named("param.w.0.weight").unwrap()["different"], 300);
    // A step count has no tolerance.
    let wide = ["diff", "IN", "SAVED", "--max-ulp", "18446744073709551615"];
    let text = stdout(&folder.run(&wide));
    assert!(text.contains("outside the tolerance; worst: schedule.step at 0: 2 and 3"), "{text}");
}
