//! A replay's output contains enough to resume with the bits of the uninterrupted run.
//!
//! Every resumed replay is compared with the uninterrupted run. As in `torch.optim`, there are no counts and no states
//! before the first update. (Only torch's Adagrad has them earlier.)

use instep::optim::ALL;

use crate::support::{Content, changed_options, input, painted, replayed};

const PARAMS: [(&str, &[usize]); 4] =
    [("layer.0.weight", &[3, 100]), ("b", &[]), ("none", &[0]), ("c", &[17])];

fn config(optimizer: &str, first: &str, second: &str) -> String {
    format!(
        r#"{{"optimizer":"{optimizer}","world_size":3,"groups":[
            {{"params":["layer.0.weight","none"]{first}}},{{"params":["c","b"]{second}}}]}}"#
    )
}

fn configs() -> Vec<String> {
    let mut configs = vec![
        config("sgd", r#","momentum":0.9,"dampening":0.1"#, r#","weight_decay":0.1"#),
        config("sgd", "", r#","momentum":0.5,"nesterov":true"#),
        config("adam", r#","betas":[0.5,0.6]"#, r#","amsgrad":true"#),
        config("adamw", r#","amsgrad":true"#, r#","maximize":true"#),
        config("rmsprop", r#","momentum":0.5"#, r#","centered":true"#),
        config("radam", r#","betas":[0.9,0.9]"#, ""),
    ];
    for descriptor in ALL {
        let options = changed_options(descriptor);
        let (first, last) = (&options[options.len() / 2], &options[options.len() - 2]);
        configs.push(config(&descriptor.key(), first, last));
    }
    configs
}

/// Returns the same file with only the gradients of these passes, renumbered from 0.
fn passes(content: &Content, range: std::ops::Range<u64>) -> Content {
    let mut cut = Content { metadata: content.metadata.clone(), ..Content::default() };
    for (name, tensor) in &content.tensors {
        let Some(rest) = name.strip_prefix("grad.") else {
            cut.tensors.insert(name.clone(), tensor.clone());
            continue;
        };
        let (pass, param) = rest.split_once('.').unwrap();
        let pass: u64 = pass.parse().unwrap();
        if range.contains(&pass) {
            cut.tensors.insert(format!("grad.{}.{param}", pass - range.start), tensor.clone());
        }
    }
    cut
}

/// Returns a checkpoint together with the gradients of the next passes.
fn followed_by(mut checkpoint: Content, gradients: &Content) -> Content {
    let gradients = gradients.tensors.iter().filter(|(name, _)| name.starts_with("grad."));
    checkpoint.tensors.extend(gradients.map(|(name, tensor)| (name.clone(), tensor.clone())));
    checkpoint
}

#[test]
fn going_on_from_any_step_gives_the_bits_of_the_whole_run() {
    let all = input(&PARAMS, 5);
    for config in configs() {
        let whole = replayed(&config, &all, &[]);
        let counts: Vec<&String> = whole
            .metadata
            .iter()
            .filter_map(|(key, count)| key.starts_with("step.").then_some(count))
            .collect();
        assert!(counts.iter().all(|count| *count == "5") && counts.len() == 4);
        for cut in 0..=5 {
            let checkpoint = replayed(&config, &passes(&all, 0..cut), &[]);
            let rest = passes(&all, cut..5);
            let resumed = replayed(&config, &followed_by(checkpoint, &rest), &[]);
            if cut < 5 {
                assert_eq!(resumed, whole, "{config} cut at {cut}");
            }
        }
    }
}

#[test]
fn without_gradients_the_output_is_the_input() {
    for config in configs() {
        let fresh = input(&PARAMS, 0);
        assert_eq!(replayed(&config, &fresh, &[]), fresh);
        let mut checkpoint = replayed(&config, &input(&PARAMS, 2), &[]);
        checkpoint.metadata.insert("made by".into(), "a trainer".into());
        // Bits that arithmetic would not keep.
        checkpoint.tensors.get_mut("param.c").unwrap().1[0] = 0xffc0_1234;
        assert_eq!(replayed(&config, &checkpoint, &[]), checkpoint);
    }
}

#[test]
fn every_group_writes_the_states_that_torch_would_keep_for_it() {
    let names = |config: &str| -> Vec<String> {
        let output = replayed(config, &input(&[("a", &[2]), ("b", &[2])], 2), &[]);
        output.tensors.into_keys().filter(|name| name.starts_with("state.")).collect()
    };
    let two = |optimizer: &str, more: &str| {
        format!(r#"{{"optimizer":"{optimizer}","groups":[{{"params":["a"]{more}}},{{"params":["b"]}}]}}"#)
    };
    assert_eq!(names(&two("sgd", r#","momentum":0.9"#)), ["state.a.momentum_buffer"]);
    let moments = ["exp_avg", "exp_avg_sq"];
    let plain = ["a", "b"].map(|param| moments.map(|state| format!("state.{param}.{state}"))).concat();
    assert_eq!(names(&two("adam", "")), plain);
    let rmsprop = names(&two("rmsprop", r#","centered":true"#));
    assert_eq!(rmsprop, ["state.a.grad_avg", "state.a.square_avg", "state.b.square_avg"]);
    let with_maximum = names(&two("adamw", r#","amsgrad":true"#));
    assert_eq!(with_maximum.len(), 5);
    assert!(with_maximum.contains(&"state.a.max_exp_avg_sq".into()));
}

#[test]
fn a_momentum_buffer_means_not_the_first_step_whatever_the_count() {
    let config = r#"{"optimizer":"sgd","groups":[{"params":["w"],"lr":1,"momentum":0.5,"dampening":0.5}]}"#;
    let start = Content::default().with("param.w", &[1], &[0.0]).with("grad.0.w", &[1], &[8.0]);
    let moved = |content: Content| {
        let output = replayed(config, &content, &[]);
        (output.values("state.w.momentum_buffer")[0], output.metadata["step.w"].clone())
    };
    let buffer = start.clone().with("state.w.momentum_buffer", &[1], &[4.0]);
    assert_eq!(moved(buffer.clone()), (6.0, "1".into()));
    assert_eq!(moved(buffer.clone().with_count("w", "0")), (6.0, "1".into()));
    assert_eq!(moved(buffer.with_count("w", "7")), (6.0, "8".into()));
    assert_eq!(moved(start.clone()), (8.0, "1".into()));
    assert_eq!(moved(start.with_count("w", "7")), (8.0, "8".into()));
}

#[test]
fn a_skipped_pass_leaves_no_trace_and_nan_steps_as_ieee_says_otherwise() {
    let config = |skip: bool| {
        format!(
            r#"{{"optimizer":"sgd","skip_nonfinite":{skip},
                "groups":[{{"params":["w"],"momentum":0.5}},{{"params":["v"]}}]}}"#
        )
    };
    let bad = input(&[("w", &[2]), ("v", &[3])], 1).with("grad.0.v", &[3], &[0.0, f32::NAN, 1.0]);
    let skipped = replayed(&config(true), &bad, &[]);
    assert_eq!(skipped.tensors, input(&[("w", &[2]), ("v", &[3])], 0).tensors);
    assert_eq!(skipped.metadata["step.w"], "0");
    let stepped = replayed(&config(false), &bad, &[]);
    assert!(stepped.values("param.v")[1].is_nan() && stepped.values("param.v")[2].is_finite());
    // The first step after a skipped one is still a first step.
    let good = input(&[("w", &[2]), ("v", &[3])], 1);
    let again = replayed(&config(true), &followed_by(skipped, &good), &[]);
    assert_eq!(again, replayed(&config(true), &good, &[]));
}

#[test]
fn counts_near_the_end_go_on() {
    let config = r#"{"optimizer":"adam","groups":[{"params":["w"]}]}"#;
    let count = (1u64 << 63) - 2;
    let content = input(&[("w", &[2])], 1).with("state.w.exp_avg", &[2], &painted(1, 2));
    let content = content.with("state.w.exp_avg_sq", &[2], &[1.0, 2.0]).with_count("w", &count.to_string());
    assert_eq!(replayed(config, &content, &[]).metadata["step.w"], (count + 1).to_string());
}
