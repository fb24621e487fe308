//! Tests of `instep plan`: the bytes, the times that follow from the speeds, and the comparison with a real run on this
//! machine.
//!
//! The tests compute the expected plan from the description, and never depend on how fast this machine is.

use serde_json::Value;

use crate::support::{Folder, assert_refused, stdout};

const MODEL: &str = r#"{
    "params": [
        {"name": "embed", "shape": [100, 64]},
        {"repeat": 3, "params": [{"name": "layer.{}.up", "shape": [64, 256]}, {"name": "layer.{}.down", "shape": [256, 64]}]}
    ],
    "dtypes": {"param": "bf16", "grad": "bf16", "master": "f32"}
}"#;
const ELEMENTS: u64 = 100 * 64 + 3 * 2 * 64 * 256;

fn folder() -> Folder {
    let folder = Folder::new();
    folder.write("model.json", MODEL.as_bytes());
    folder
}

fn plan(folder: &Folder, more: &[&str]) -> Value {
    let output = folder.run(&[&["plan", "--config", "model.json", "--json"], more].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn held(report: &Value, what: &str) -> u64 {
    let memory = report["memory"].as_array().unwrap();
    memory.iter().find(|held| held["what"] == what).unwrap()["bytes"].as_u64().unwrap()
}

#[test]
fn a_plan_counts_bytes_and_ops_from_the_description() {
    let report = plan(&folder(), &["--world-size", "4", "--bucket-cap-mib", "1"]);
    assert_eq!((&report["parameters"], &report["elements"]), (&7.into(), &ELEMENTS.into()));
    // Every parameter has a multiple of 256 elements, and the bucket has a multiple of 4 x 256.
    let elements = ELEMENTS.next_multiple_of(1024);
    for (what, bytes) in
        [("parameters", 2), ("gradients", 2), ("masters", 4), ("exp_avg", 4), ("exp_avg_sq", 4)]
    {
        assert_eq!(held(&report, what), bytes * elements, "{what}");
    }
    let buckets = report["buckets"].as_u64().unwrap();
    let work = report["work"].as_array().unwrap();
    let count = |what| work.iter().find(|work| work["what"] == what).unwrap()["count"].as_u64().unwrap();
    assert_eq!((count("all-reduce"), count("step")), (buckets, buckets));
    assert_eq!(report["bus_bytes"].as_u64().unwrap(), 2 * elements * 2 * 3 / 4);
}

#[test]
fn shared_states_are_a_share_and_the_same_bytes_are_sent() {
    let folder = folder();
    let whole = plan(&folder, &["--world-size", "4"]);
    let shared = plan(&folder, &["--world-size", "4", "--strategy", "zero"]);
    for what in ["masters", "exp_avg", "exp_avg_sq"] {
        assert_eq!(4 * held(&shared, what), held(&whole, what), "{what}");
    }
    for what in ["parameters", "gradients"] {
        assert_eq!(held(&shared, what), held(&whole, what), "{what}");
    }
    // A reduce-scatter and an all-gather of 16-bit elements together send as much as an all-reduce of them. The further
    // bytes are those of values on which the ranks must agree.
    let [whole, shared] = [whole, shared].map(|report| report["bus_bytes"].as_u64().unwrap());
    assert!(shared >= whole && shared - whole < 1024, "{shared} {whole}");
}

#[test]
fn shared_parameters_are_a_share_and_two_whole_buckets() {
    let folder = Folder::new();
    // Eight buckets of one size.
    let model = r#"{"params": [{"repeat": 8, "params": [{"name": "layer.{}", "shape": [1024, 256]}]}]}"#;
    folder.write("model.json", model.as_bytes());
    let arguments = ["--world-size", "4", "--bucket-cap-mib", "1", "--strategy"];
    let of = |strategy| plan(&folder, &[&arguments[..], &[strategy]].concat());
    let (zero, fsdp) = (of("zero"), of("fsdp"));
    for what in ["exp_avg", "gradients"] {
        assert_eq!(held(&fsdp, what), held(&zero, what), "{what}");
    }
    let (whole, peak) = (held(&zero, "parameters"), held(&fsdp, "parameters"));
    let buckets = fsdp["buckets"].as_u64().unwrap();
    assert_eq!(buckets, 8);
    // This rank always has a quarter of each bucket.
    assert_eq!(peak, 6 * (whole / 8) / 4 + 2 * (whole / 8));
    let gathers = |report: &serde_json::Value| {
        let work = report["work"].as_array().unwrap();
        let gather = work.iter().find(|work| work["what"] == "all-gather").unwrap();
        gather["count"].as_u64().unwrap()
    };
    // Forward and backward each gather every bucket. The last bucket of forward may stay for backward, which begins
    // with it.
    let count = (gathers(&zero), gathers(&fsdp));
    assert!(count.0 == buckets && (2 * buckets - 2..=2 * buckets).contains(&count.1), "{count:?}");
}

#[test]
fn groups_of_ranks_send_a_shard_to_their_replicas_and_the_rest_to_their_neighbours() {
    let folder = folder();
    let of_groups = ["--world-size", "8", "--strategy", "zero", "--shard-size", "4"];
    let (alone, groups) =
        (plan(&folder, &["--world-size", "4", "--strategy", "zero"]), plan(&folder, &of_groups));
    for what in ["parameters", "gradients", "masters", "exp_avg", "exp_avg_sq"] {
        assert_eq!(held(&groups, what), held(&alone, what), "{what}");
    }
    let work = groups["work"].as_array().unwrap();
    let sums = work.iter().find(|work| work["what"] == "replicas' sum").unwrap();
    assert_eq!(sums["count"], groups["buckets"]);
    let bytes = |report: &Value, name: &str| report[name].as_u64().unwrap();
    // Two ranks all-reduce a quarter of the 16-bit gradients.
    let between = bytes(&groups, "bus_bytes_between_groups");
    assert_eq!((between, &groups["shard_size"]), (ELEMENTS.next_multiple_of(1024) / 2, &Value::from(4)));
    assert_eq!(bytes(&groups, "bus_bytes") - between, bytes(&alone, "bus_bytes"));
    let text = stdout(&folder.run(&[&["plan", "--config", "model.json"][..], &of_groups].concat()));
    assert!(text.contains("between groups of 4"), "{text}");
    let measured = [&["plan", "--config", "model.json", "--measure"][..], &of_groups].concat();
    assert!(stdout(&folder.run(&measured)).contains("in the same order: yes"));
}

#[test]
fn offload_moves_what_is_stepped_to_the_host() {
    let folder = folder();
    let of = |strategy, more: &[&str]| {
        plan(
            &folder,
            &[&["--world-size", "1024", "--bucket-cap-mib", "1", "--strategy", strategy], more].concat(),
        )
    };
    let place = |report: &Value, what: &str| {
        let memory = report["memory"].as_array().unwrap();
        memory.iter().find(|held| held["what"] == what).unwrap()["place"].clone()
    };
    for strategy in ["replicated", "zero", "fsdp"] {
        let (plain, offloaded) = (of(strategy, &[]), of(strategy, &["--offload"]));
        assert_eq!(plain["host_bytes"], 0, "{strategy}");
        for what in ["masters", "exp_avg", "exp_avg_sq"] {
            assert_eq!(held(&offloaded, what), held(&plain, what), "{strategy}, {what}");
            assert_eq!((place(&plain, what), place(&offloaded, what)), ("device".into(), "host".into()));
        }
        // A state has 4 bytes per element that the rank keeps; parameters and gradients have 2.
        let kept = held(&plain, "exp_avg") / 4;
        assert_eq!(held(&offloaded, "stepped parameters"), 2 * kept, "{strategy}");
        // With shards, the sums include the padding.
        let summed = if strategy == "replicated" { ELEMENTS } else { kept };
        assert_eq!(held(&offloaded, "summed gradients"), 2 * summed, "{strategy}");
        for what in ["stepped parameters", "summed gradients"] {
            assert_eq!(place(&offloaded, what), "host");
        }
        assert_eq!(held(&offloaded, "gradients"), held(&plain, "gradients"), "{strategy}");
        let memory = offloaded["memory"].as_array().unwrap().iter();
        let on_host =
            memory.filter(|held| held["place"] == "host").map(|held| held["bytes"].as_u64().unwrap());
        assert_eq!(on_host.sum::<u64>(), offloaded["host_bytes"].as_u64().unwrap(), "{strategy}");
        let copies = |stream: &str| {
            let work = offloaded["work"].as_array().unwrap();
            let copy = work.iter().find(|work| work["stream"] == stream && work["what"] == "copy").unwrap();
            copy["count"].as_u64().unwrap()
        };
        let buckets = offloaded["buckets"].as_u64().unwrap();
        assert_eq!(copies("download"), buckets, "{strategy}");
        assert!(copies("upload") >= buckets, "{strategy}");
        let slower = of(strategy, &["--offload", "--host-link", "1"]);
        assert!(slower["pass_ns"].as_u64() > offloaded["pass_ns"].as_u64(), "{strategy}");
    }
    let text = stdout(&folder.run(&["plan", "--config", "model.json", "--offload"]));
    assert!(text.contains("on the host"), "{text}");
}

/// Each case has options, and the numbers of bytes that `python/tests/test_offload_plan.py` measures.
#[test]
fn pytorchs_offload_is_planned_to_the_byte() {
    let folder = Folder::new();
    let plans: Value = serde_json::from_str(include_str!("offload_plans.json")).unwrap();
    for case in plans.as_array().unwrap() {
        folder.write("model.json", case["config"].to_string().as_bytes());
        let options = case["options"].as_array().unwrap().iter().map(|option| option.as_str().unwrap());
        let report = plan(&folder, &[&["--offload=torch"][..], &options.collect::<Vec<_>>()].concat());
        let bytes = |key: &str| report[key].as_u64().unwrap();
        // FSDP's gradients are neither page-locked nor kept.
        let gradients = case["gradient_bytes"].as_u64().unwrap_or_default();
        assert!(gradients == 0 || held(&report, "gradients") == gradients, "{case}");
        let kept = bytes("host_bytes") - bytes("page_locked_bytes") - gradients;
        let planned = (&report["page_locked_bytes"], &Value::from(kept));
        assert_eq!(planned, (&case["page_locked_bytes"], &case["kept_bytes"]), "{case}");
        let memory = report["memory"].as_array().unwrap().iter().map(|held| held["bytes"].as_u64().unwrap());
        assert_eq!(memory.sum::<u64>(), report["host_bytes"].as_u64().unwrap(), "{case}");
    }
}

#[test]
fn pytorchs_offload_takes_the_times_that_follow_from_the_speeds() {
    let folder = Folder::new();
    // Eight buckets of 1 MiB of gradients. Forward takes 1 ms for each, backward 2 ms, a copy 1 ms and a step 4 ms.
    let model = r#"{"params": [{"repeat": 8, "params": [{"name": "layer.{}", "shape": [1024, 256]}]}]}"#;
    folder.write("model.json", model.as_bytes());
    let elements = 262_144.0;
    let speed = |name: &str, value: f64| format!("--{name}={value}");
    let speeds = [
        speed("compute", 2.0 * elements * 1000.0 / 1e9),
        speed("host-link", 4.0 * elements / 1e6),
        speed("host-memory", 28.0 * elements / 4e6),
        "--launch=0".into(),
        "--bucket-cap-mib=1".into(),
        "--offload=torch".into(),
    ];
    let with_tokens = |tokens: &str, more: &[&str]| {
        let speeds = speeds.iter().map(String::as_str).chain(["--tokens", tokens]);
        plan(&folder, &[&speeds.collect::<Vec<_>>()[..], more].concat())
    };
    let of = |more: &[&str]| with_tokens("1000", more);
    let near = |report: &Value, key: &str, milliseconds: f64| {
        let found = report[key].as_u64().unwrap() as f64 / 1e6;
        assert!((found - milliseconds).abs() < 0.01, "{key}: {found} ms instead of {milliseconds} ms");
    };
    // Steps begin 3, 7, 11, 15, 19, 23, 27 and 31 ms after backward begins, for buckets 0, 2, 4, 6, 7, 5, 3 and 1: each
    // time for the arrived bucket with the largest index. Forward begins with bucket 7 at 24 ms. It waits for bucket 5
    // until 28 ms, for bucket 3 until 32 ms and for bucket 1 until 36 ms.
    let all = of(&[]);
    near(&all, "optimizer_busy_ns", 32.0);
    near(&all, "pass_ns", 38.0);
    let many = of(&["--micro-batches", "100"]);
    near(&many, "pass_ns", 99.0 * 24.0 + 38.0);
    // If backward is slow enough, only the last bucket is late: its copy down, its step, and its copy up.
    let slow = with_tokens("5000", &[]);
    near(&slow, "blocked_ns", 1.0 + 4.0 + 1.0);
    // After the last gradient come its copy, its norm and all steps, the first module's step first. Each of the eight
    // forward parts waits for the step of its own bucket; the last upload is that of the last module.
    let clipped = of(&["--max-norm", "1"]);
    let norm = 4.0 / 7.0;
    near(&clipped, "blocked_ns", 1.0 + norm + 32.0 + 1.0 - 7.0);
    near(&clipped, "optimizer_busy_ns", 32.0 + 8.0 * norm);
    // The ring has room for one bucket, so a gradient may go down once the previous step has ended.
    let narrow = of(&["--ring-mib", "1"]);
    near(&narrow, "pass_ns", 8.0 + 2.0 + 8.0 * (1.0 + 4.0) + 1.0);
    // With two ranks, a bucket is summed before it goes down: half a MiB each way, over a link that is as fast as the
    // copies.
    let bus = speed("bus", 4.0 * elements / 1e6);
    let two = of(&["--world-size", "2", "--micro-batches", "100", "--latency", "0", &bus]);
    near(&two, "pass_ns", 99.0 * 24.0 + 38.0 + 1.0);
    assert!(all["blocked_ns"].as_u64() < narrow["blocked_ns"].as_u64());
    let text = stdout(&folder.run(&["plan", "--config", "model.json", "--offload=torch"]));
    assert!(text.contains("page-locked") && text.contains("the model waits"), "{text}");
}

#[test]
fn pytorchs_offload_of_shards_waits_for_steps_unit_by_unit() {
    let folder = Folder::new();
    let elements = 262_144.0;
    let speed = |name: &str, value: f64| format!("--{name}={value}");
    // Eight units of 1 MiB. Forward takes 5 ms for each, backward 10 ms, a copy 1 ms and a step 4 ms.
    let speeds = [
        speed("compute", 2.0 * elements * 1000.0 / 1e9),
        speed("host-link", 4.0 * elements / 1e6),
        speed("host-memory", 28.0 * elements / 4e6),
        speed("bus", 4.0 * elements / 1e6),
        "--tokens=5000".into(),
        "--latency=0".into(),
        "--launch=0".into(),
        "--offload=torch".into(),
        "--strategy=fsdp".into(),
    ];
    let repeated = |count: usize| {
        format!(r#"{{"repeat": {count}, "params": [{{"name": "layer.{{}}", "shape": [1024, 256]}}]}}"#)
    };
    let alone = format!(r#"{{"params": [{}]}}"#, repeated(8));
    let root = format!(r#"{{"params": [{{"name": "embed", "shape": [1024, 256]}}, {}]}}"#, repeated(7));
    for model in [&alone, &root] {
        folder.write("model.json", model.as_bytes());
        let blocked = |more: &[&str], milliseconds: f64| {
            let speeds = speeds.iter().map(String::as_str).chain(more.iter().copied());
            let found =
                plan(&folder, &speeds.collect::<Vec<_>>())["blocked_ns"].as_u64().unwrap() as f64 / 1e6;
            assert!(
                (found - milliseconds).abs() < 0.01,
                "{model} {more:?}: {found} ms, not {milliseconds} ms"
            );
        };
        // Backward waits for each copy down. Nothing hides the copy up of backward's first unit. Nothing hides the step
        // and the copy up of forward's first unit either.
        let (down, first) = (8.0, 1.0);
        blocked(&[], down + first + 4.0 + 1.0);
        blocked(&["--micro-batches=2"], down + 2.0 * (first + 1.0) + 4.0);
        // A decision waits for the norm of the last unit; all steps come after it, beside forward.
        let norm = 4.0 / 7.0;
        blocked(&["--max-norm=1"], down + first + norm + 4.0 + 1.0);
        // A scaler writes gradients after backward, so it waits for all steps.
        blocked(&["--grad-scaler"], down + first + norm + 8.0 * 4.0 + 1.0);
        // Shards of half the size take half as long, and a gather or a sum sends half of a unit.
        blocked(&["--world-size=2"], 8.0 * (0.5 + 0.5) + (0.5 + 0.5) + 2.0 + (0.5 + 0.5));
        // The same holds for two groups of two ranks. Their replicas also sum their shards.
        blocked(&["--world-size=4", "--shard-size=2"], 8.0 * (0.5 + 0.5 + 0.5) + 1.0 + 2.0 + 1.0);
    }
}

#[test]
fn steps_after_a_decision_share_launches_in_a_plan() {
    let folder = Folder::new();
    // Twelve buckets of 32 MiB of gradients.
    let model = r#"{"params": [{"repeat": 12, "params": [{"name": "layer.{}", "shape": [8192, 1024]}]}]}"#;
    folder.write("model.json", model.as_bytes());
    let steps = |mode: &str, more: &[&str]| {
        let arguments = ["--world-size", "4", "--bucket-cap-mib", "1", "--mode", mode];
        let report = plan(&folder, &[&arguments[..], more].concat());
        let work = report["work"].as_array().unwrap();
        work.iter().find(|work| work["what"] == "step").unwrap()["count"].as_u64().unwrap()
    };
    // The bucket that is needed first has its own launch. Each other launch has at most 128 MiB.
    assert_eq!(steps("normed", &[]), 1 + 3);
    assert_eq!(steps("sequential", &[]), 1);
    assert_eq!(steps("sequential", &["--strategy", "zero"]), 1 + 3);
    assert_eq!(steps("eager", &[]), 12);
    // The host steps each bucket by itself.
    assert_eq!(steps("normed", &["--offload"]), 12);
}

#[test]
fn released_gradients_are_held_from_their_write_to_their_step() {
    let folder = Folder::new();
    // Eight buckets of one size, without padding.
    let model = r#"{"params": [{"repeat": 8, "params": [{"name": "layer.{}", "shape": [1024, 256]}]}]}"#;
    folder.write("model.json", model.as_bytes());
    let arguments = ["--bucket-cap-mib", "1", "--world-size", "4", "--tokens", "100000000"];
    let gradients = |more: &[&str]| held(&plan(&folder, &[&arguments[..], more].concat()), "gradients");
    let bucket = 1024 * 256 * 4;
    assert_eq!(gradients(&[]), 8 * bucket);
    for strategy in ["replicated", "zero", "fsdp"] {
        let released =
            |more: &[&str]| gradients(&[&["--release-gradients", "--strategy", strategy], more].concat());
        // If backward is slower than the steps, it writes one bucket while the previous bucket is summed and stepped.
        let few = released(&[]);
        assert!((bucket..=2 * bucket).contains(&few), "{strategy}: {few}");
        // If the sums are slower than backward, all gradients exist for a while. With fsdp, backward waits for
        // all-gathers too.
        if strategy != "fsdp" {
            assert_eq!(released(&["--latency", "1e12"]), 8 * bucket, "{strategy}");
        }
    }
    // Nothing is stepped before all is summed; a rank keeps a shard of each bucket until then.
    assert_eq!(gradients(&["--release-gradients", "--mode", "sequential"]), 8 * bucket);
    let shards = gradients(&["--release-gradients", "--mode", "sequential", "--strategy", "zero"]);
    assert!((2 * bucket..=4 * bucket).contains(&shards), "{shards}");
    let measured =
        ["plan", "--config", "model.json", "--measure", "--release-gradients", "--world-size", "2"];
    assert!(stdout(&folder.run(&measured)).contains("in the same order: yes"));
}

#[test]
fn micro_batches_are_summed_once_a_pass_or_each_with_sums_of_a_shard() {
    let folder = Folder::new();
    let model = r#"{"params": [{"repeat": 8, "params": [{"name": "layer.{}", "shape": [1024, 256]}]}]}"#;
    folder.write("model.json", model.as_bytes());
    let arguments =
        ["--world-size", "4", "--bucket-cap-mib", "1", "--strategy", "fsdp", "--release-gradients"];
    let of = |more: &[&str]| plan(&folder, &[&arguments[..], more].concat());
    let (one, local) = (of(&[]), of(&["--micro-batches", "3"]));
    let summed = of(&["--micro-batches", "3", "--sum-micro-batches"]);
    let count = |report: &Value, what: &str| {
        let work = report["work"].as_array().unwrap().clone();
        work.iter()
            .filter(|work| work["what"] == what)
            .map(|work| work["count"].as_u64().unwrap())
            .sum::<u64>()
    };
    let buckets = one["buckets"].as_u64().unwrap();
    assert_eq!(buckets, 8);
    assert_eq!([&one, &local, &summed].map(|report| count(report, "reduce-scatter")), [8, 8, 24]);
    // In each bucket, the sums of the first micro-batch are copied and those of the second are added to the copy. The
    // copy is then added to the sums of the last micro-batch.
    assert_eq!([&one, &local, &summed].map(|report| count(report, "add")), [0, 0, 16]);
    assert_eq!(count(&summed, "copy"), 8);
    // Each forward and each backward gathers every bucket, except for the bucket that stays full between them.
    assert!(count(&local, "all-gather") > 2 * count(&one, "all-gather"));
    let bytes = 8 * 1024 * 256 * 4;
    assert_eq!(held(&summed, "sums of micro-batches"), bytes / 4);
    assert_eq!(held(&local, "gradients"), bytes, "whole from the first micro-batch to the last");
    assert!(held(&summed, "gradients") < bytes / 2, "{}", held(&summed, "gradients"));
    let pass = |report: &Value| report["pass_ns"].as_u64().unwrap();
    assert!(pass(&local) > 2 * pass(&one));
    let refused = ["plan", "--config", "model.json", "--micro-batches", "2", "--sum-micro-batches"];
    assert_refused(&folder.run(&refused), "--sum-micro-batches: with --strategy replicated");
}

#[test]
fn slower_links_hide_less() {
    let folder = folder();
    let blocked = |bus| plan(&folder, &["--world-size", "8", "--bus", bus])["blocked_ns"].as_u64().unwrap();
    assert!(blocked("0.1") > blocked("1") && blocked("1") > blocked("100"));
}

#[test]
fn a_thousand_ranks_are_planned_in_every_mode_and_drawn() {
    let folder = folder();
    for mode in ["sequential", "eager", "normed"] {
        let report = plan(
            &folder,
            &["--world-size", "1024", "--mode", mode, "--trace", "t.json", "--picture", "p.svg"],
        );
        assert!(report["pass_ns"].as_u64().unwrap() > 0);
        let trace: Value = serde_json::from_slice(&folder.read("t.json")).unwrap();
        assert!(trace["traceEvents"].as_array().unwrap().len() > 10);
        assert!(folder.read("p.svg").starts_with(b"<svg"));
    }
    let text = stdout(&folder.run(&["plan", "--config", "model.json"]));
    assert!(text.contains("held by this rank") && text.contains("one pass, as foreseen"), "{text}");
}

#[test]
fn a_real_run_has_the_order_that_was_foreseen() {
    let folder = folder();
    let measure = ["plan", "--config", "model.json", "--world-size", "2", "--measure"];
    for strategy in ["replicated", "zero", "fsdp"] {
        for mode in ["sequential", "eager", "normed"] {
            let output = folder.run(&[&measure[..], &["--strategy", strategy, "--mode", mode]].concat());
            let text = stdout(&output);
            assert!(
                output.status.success(),
                "{strategy} {mode}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
            assert!(text.contains("in the same order: yes") && text.contains("ratio"), "{text}");
        }
    }
}

#[test]
fn what_cannot_be_planned_is_refused_by_name() {
    let folder = folder();
    let refused = |arguments: &[&str], word: &str| {
        assert_refused(&folder.run(&[&["plan", "--config", "model.json"], arguments].concat()), word);
    };
    refused(&["--bus", "0"], "--bus");
    refused(&["--latency=-1"], "--latency");
    refused(&["--host-link", "0"], "--host-link");
    refused(
        &["--mode", "eager", "--max-norm", "1"],
        "--max-norm 1: --mode eager steps the first bucket before",
    );
    refused(&["--mode", "normed", "--max-norm", "0"], "--max-norm 0: out of range");
    refused(&["--shard-size", "2"], "--shard-size 2: with --strategy replicated there are no shards");
    let three_of_8 = ["--world-size", "8", "--strategy", "zero", "--shard-size", "3"];
    refused(&three_of_8, "--shard-size 3: does not divide --world-size 8");
    refused(&["--ring-mib", "1"], "--ring-mib: is of instep.torch.offload; give --offload=torch too");
    refused(&["--offload", "--grad-scaler"], "--grad-scaler: is of instep.torch.offload");
    refused(
        &["--offload=torch", "--strategy", "zero"],
        "--strategy zero: instep.torch.offload has no such choice",
    );
    for (option, value) in [("--mode", "normed"), ("--trace", "t.json"), ("--picture", "p.svg")] {
        refused(
            &["--offload=torch", option, value],
            &format!("{option}: instep.torch.offload has no such choice"),
        );
    }
    for (option, value) in [("--ring-mib", "1"), ("--bucket-cap-mib", "2")] {
        let given = ["--offload=torch", "--strategy", "fsdp", option, value];
        refused(&given, &format!("{option}: FSDP copies gradients itself"));
    }
    refused(&["--offload=torch", "--measure"], "--measure: instep.torch.offload has no such choice");
    refused(&["--offload=gpu"], "--offload");
    refused(&["--bucket-cap-mib", "0"], "--bucket-cap-mib");
    refused(&["--bucket-cap-mib", "17592186044416"], "--bucket-cap-mib");
    refused(&["--world-size", "0"], "world-size");
    for (text, word) in [
        (r#"{"params": []}"#, "params: empty; describe a parameter"),
        (r#"{"params": [{"name": "a", "shape": [-2]}]}"#, "expected a whole number"),
        (
            r#"{"params": [{"name": "a", "shape": [2]}], "dtypes": {"moments": "8bit"}, "optimizer": "adadelta"}"#,
            "dtypes.moments = 8bit",
        ),
        (r#"{"params": [{"name": "a", "shpae": [2]}]}"#, "unknown field `shpae`"),
        (r#"{"params": [{"repeat": 2, "parms": []}]}"#, "unknown field `parms`"),
        (r#"{"params": [{"repeat": 2, "params": [{"name": "a{}", "kind": 3}]}]}"#, "unknown field `kind`"),
        (
            r#"{"params": [{"name": "a", "shape": [2]}, {"name": "b"}]}"#,
            "entry 1 of params, \"b\": has no shape",
        ),
        (r#"{"params": [{"shape": [2]}]}"#, "entry 0 of params: has no name"),
        (r#"{"params": [{"repeat": 2}]}"#, "repeats no params"),
        (r#"{"params": [{"params": []}]}"#, "params without repeat"),
        (r#"{"params": [{}]}"#, "is empty"),
        (r#"{"params": [{"name": "a", "shape": [2], "repeat": 2}]}"#, "a repetition at once"),
        (r#"{"params": [{"name": "a", "shape": [2]}], "optimizer": "adma"}"#, "adamw"),
        (r#"{"params": [{"repeat": 9999999, "params": [{"name": "a{}", "shape": [1]}]}]}"#, "parameters"),
        (r#"{"params": [{"name": "a", "shape": [4294967296, 4294967296]}]}"#, "elements"),
        (r#"{"params": [{"name": "a", "shape": [1]}, {"name": "a", "shape": [1]}]}"#, "a"),
    ] {
        folder.write("model.json", text.as_bytes());
        refused(&[], word);
    }
    folder.write("model.json", br#"{"params": [{"name": "a", "shape": [1024, 1025]}]}"#);
    refused(&["--offload=torch", "--ring-mib", "4"], "--ring-mib 4: the largest bucket has 4198400 bytes");
    for (text, word) in [
        (r#"{"params": [{"name": "a", "shape": []}]}"#, "shape of \"a\": fully_shard takes no scalars"),
        (
            r#"{"params": [{"name": "a", "shape": [2]}], "dtypes": {"param": "bf16"}}"#,
            "dtypes.grad = f32: FSDP",
        ),
    ] {
        folder.write("model.json", text.as_bytes());
        refused(&["--offload=torch", "--strategy", "fsdp"], word);
    }
    #[cfg(target_os = "linux")]
    {
        // Each rank would need 4 TiB for its parameters.
        folder.write("model.json", br#"{"params": [{"name": "a", "shape": [1099511627776]}]}"#);
        refused(&["--world-size", "2", "--measure"], "--measure of 2 ranks");
    }
}
