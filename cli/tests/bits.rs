//! Checks that a replay's output has the library's bits, and does not depend on the options that control how steps run.
//!
//! Whole files are compared, including padding and order. The tests must run every instruction set of this machine.

use instep::bucket_step::{Lent, StepTensors};
use instep::optim::ALL;
use instep::{AdamW, BucketStep, Clip, Isa, Layout, Mode, Scaling, Stepper, Sums};

use crate::support::{Content, Folder, changed_options, input, replayed, stderr};

const PARAMS: [(&str, &[usize]); 5] =
    [("a", &[700]), ("layer.1.weight", &[64, 70]), ("b", &[]), ("none", &[0, 4]), ("c", &[257])];

const CONFIG: &str = r#"{"optimizer":"adamw","world_size":6,"loss_scale":4.0,"groups":[
    {"params":["a","layer.1.weight"],"lr":0.01,"weight_decay":0.1,"amsgrad":true},
    {"params":["b","none","c"],"betas":[0.8,0.95],"maximize":true}]"#;

#[test]
fn every_mode_instruction_set_cap_and_thread_count_writes_the_same_bytes() {
    for (more, modes) in [
        ("}", &["sequential", "eager", "normed"][..]),
        (r#","clip":{"global":0.75}}"#, &["sequential", "normed"]),
        (r#","skip_nonfinite":true}"#, &["sequential", "normed"]),
        (
            r#","copy":"f16","ema":0.9,"dtypes":{"param":"bf16","master":"remainder16","moments":"8bit",
                "rounding":"stochastic","seed":7}}"#,
            &["sequential", "eager", "normed"],
        ),
    ] {
        let folder = Folder::of(&format!("{CONFIG}{more}"), &input(&PARAMS, 4));
        let mut first = None;
        for mode in modes {
            for isa in Isa::available() {
                for (cap, threads) in [("1", "1"), ("3000", "2"), ("100000000", "3")] {
                    let how = [
                        "--mode",
                        mode,
                        "--isa",
                        isa.name(),
                        "--bucket-cap-bytes",
                        cap,
                        "--threads",
                        threads,
                    ];
                    let output = folder.replay(&how);
                    assert_eq!(output.status.code(), Some(0), "{how:?}: {}", stderr(&output));
                    let bytes = folder.read("OUT");
                    assert_eq!(*first.get_or_insert_with(|| bytes.clone()), bytes, "{how:?}");
                }
            }
        }
        let plain = folder.replay(&["--device", "host"]);
        assert!(plain.status.success() && Some(folder.read("OUT")) == first);
    }
}

/// The command divides by the world size in its own way, so its result is compared with the library's.
#[test]
fn the_output_is_what_the_library_makes_with_that_world_size() {
    for (world_size, loss_scale, max_norm) in
        [(1, 1.0, None), (6, 3.0, None), (7, 1e-3, Some(0.3)), (1001, 0.1, Some(1e-3))]
    {
        let content = input(&[("a", &[700]), ("b", &[3])], 4);
        let clip = max_norm.map_or("null".into(), |norm: f64| format!(r#"{{"global":{norm}}}"#));
        let config = format!(
            r#"{{"optimizer":"adamw","world_size":{world_size},"loss_scale":{loss_scale},"clip":{clip},
                "groups":[{{"params":["a","b"],"lr":0.01}}]}}"#
        );
        let output = replayed(&config, &content, &[]);
        let layout = Layout::builder().param("a", 700).param("b", 3).build().unwrap();
        let optimizer = AdamW { lr: 0.01, ..Default::default() };
        let mut builder = Stepper::builder(&layout, optimizer).mode(Mode::Sequential).loss_scale(loss_scale);
        if let Some(max_norm) = max_norm {
            builder = builder.clip(Clip::Global(max_norm));
        }
        let mut stepper = builder.host(Sums::by_caller(0, world_size)).unwrap();
        let fill = |name: &str, values: &mut [f32]| {
            values.copy_from_slice(&content.values(&format!("param.{name}")))
        };
        stepper.fill_params(fill).unwrap();
        for step in 0..4 {
            let mut pass = stepper.begin().unwrap();
            for (name, id) in ["a", "b"].into_iter().zip(layout.ids()) {
                pass.grads().write(id, &content.values(&format!("grad.{step}.{name}"))).unwrap();
                pass.grad_ready(id).unwrap();
            }
            pass.finish().unwrap();
        }
        let mut expected = Content::default();
        for (name, id) in ["a", "b"].into_iter().zip(layout.ids()) {
            let values = stepper.view::<f32>(id).unwrap();
            expected = expected.with(&format!("param.{name}"), &[values.len()], values).with_count(name, "4");
            for state in stepper.state_names(id).unwrap() {
                let values = stepper.view::<f32>(id.state(&state)).unwrap();
                expected = expected.with(&format!("state.{name}.{state}"), &[values.len()], values);
            }
        }
        assert_eq!(output, expected, "{config}");
    }
}

#[test]
fn a_group_is_clipped_together_with_others_or_alone_or_not_at_all() {
    let shapes: [(&str, &[usize]); 3] = [("a", &[700]), ("b", &[300]), ("c", &[5])];
    let config = |clip: &str, groups: &str| {
        format!(r#"{{"optimizer":"adamw","world_size":3,"clip":{clip},"groups":[{groups}]}}"#)
    };
    let all = config(
        r#"{"global":0.5}"#,
        r#"{"params":["a"]},{"params":["b"],"max_norm":0.25},{"max_norm":null,"params":["c"]}"#,
    );
    let only = |mut content: Content, name: &str| {
        content.tensors.retain(|tensor, _| tensor.split('.').any(|part| part == name));
        content.metadata.retain(|key, _| key.ends_with(&format!(".{name}")));
        content
    };
    let whole = replayed(&all, &input(&shapes, 4), &[]);
    assert_eq!(whole.metadata.len(), 3);
    for (name, clip) in [("a", r#"{"global":0.5}"#), ("b", r#"{"global":0.25}"#), ("c", "null")] {
        let alone = config(clip, &format!(r#"{{"params":["{name}"]}}"#));
        let content = only(input(&shapes, 4), name);
        assert_eq!(replayed(&alone, &content, &[]), only(whole.clone(), name), "{name}");
    }
}

#[test]
fn a_bucket_that_is_stepped_alone_makes_the_same_output() {
    let content = input(&[("w", &[700])], 4);
    let config =
        r#"{"optimizer":"adamw","world_size":6,"loss_scale":4.0,"groups":[{"params":["w"],"lr":0.01}]}"#;
    let output = replayed(config, &content, &[]);
    let layout = Layout::builder().param("w", 700).build().unwrap();
    let optimizer = AdamW { lr: 0.01, ..Default::default() };
    let mut step = BucketStep::builder(&layout, optimizer).host().unwrap();
    let mut params = content.values("param.w");
    let [mut first, mut second] = [(); 2].map(|()| vec![0.0f32; 700]);
    for k in 0..4 {
        let grads = content.values(&format!("grad.{k}.w"));
        let states = [Lent::slice_mut(&mut first), Lent::slice_mut(&mut second)];
        let tensors = StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&grads)).states(states);
        step.step(&tensors, Scaling::mean(6).loss_scale(4.0)).unwrap();
    }
    let expected = Content::default()
        .with("param.w", &[700], &params)
        .with("state.w.exp_avg", &[700], &first)
        .with("state.w.exp_avg_sq", &[700], &second)
        .with_count("w", "4");
    assert_eq!(output, expected);
}

/// One launch steps all groups, so a bug could make a group use another group's states.
#[test]
fn a_group_beside_others_gives_the_bits_that_it_gives_alone() {
    let content = input(&[("a", &[300]), ("b", &[40])], 4);
    let mut groups = vec![
        ("sgd".to_owned(), [r#","lr":0.1"#, r#","momentum":0.9,"weight_decay":0.1"#].map(str::to_owned)),
        ("sgd".to_owned(), [r#","momentum":0.9,"nesterov":true"#, r#","maximize":true"#].map(str::to_owned)),
        ("adam".to_owned(), [r#","amsgrad":true"#, r#","eps":1e-3"#].map(str::to_owned)),
        ("rmsprop".to_owned(), [r#","momentum":0.9"#, r#","centered":true"#].map(str::to_owned)),
    ];
    for descriptor in ALL {
        let options = changed_options(descriptor);
        let neighbours = options.windows(2).map(|two| (descriptor.key(), [two[0].clone(), two[1].clone()]));
        groups.extend(neighbours);
    }
    for (optimizer, [a, b]) in groups {
        let config =
            |groups: String| format!(r#"{{"optimizer":"{optimizer}","world_size":2,"groups":[{groups}]}}"#);
        let alone = |name: &str, options: &str| {
            let mut cut = content.clone();
            cut.tensors.retain(|tensor, _| tensor.ends_with(&format!(".{name}")));
            replayed(&config(format!(r#"{{"params":["{name}"]{options}}}"#)), &cut, &[])
        };
        let both = config(format!(r#"{{"params":["a"]{a}}},{{"params":["b"]{b}}}"#));
        let both = replayed(&both, &content, &[]);
        let mut joined = alone("a", &a);
        let other = alone("b", &b);
        joined.tensors.extend(other.tensors);
        joined.metadata.extend(other.metadata);
        assert_eq!(both, joined, "{optimizer} {a} | {b}");
    }
}

/// A parameter with its own learning rate gets the values that it would get in a group with that learning rate.
#[test]
fn a_parameter_with_a_multiplier_gives_the_bits_of_a_group_with_that_rate() {
    let content = input(&[("a", &[300]), ("b", &[40]), ("c", &[7])], 4);
    for optimizer in ["sgd", "adamw", "rprop", "lamb"] {
        let config = |rest: &str| format!(r#"{{"optimizer":"{optimizer}",{rest}}}"#);
        // Powers of two, so that the product is exact.
        let multiplied =
            config(r#""lr_multipliers":{"b":0.25,"c":0},"groups":[{"params":["a","b","c"],"lr":0.01}]"#);
        let grouped = config(
            r#""groups":[{"params":["a"],"lr":0.01},{"params":["b"],"lr":0.0025},{"params":["c"],"lr":0}]"#,
        );
        let (multiplied, grouped) = (replayed(&multiplied, &content, &[]), replayed(&grouped, &content, &[]));
        assert_eq!(multiplied, grouped, "{optimizer}");
        let unmultiplied = config(r#""groups":[{"params":["a","b","c"],"lr":0.01}]"#);
        assert_ne!(multiplied, replayed(&unmultiplied, &content, &[]), "{optimizer}");
    }
}
