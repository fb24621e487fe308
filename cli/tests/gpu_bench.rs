//! The GPU's benches run from end to end, on a driver that runs the kernels on the CPU. The tests check what the
//! benches do, not what they measure.
//!
//! No test may depend on a time, because the events of a simulated driver have no times.

use std::fs;
use std::sync::Arc;

use clap::Parser;
use instep::cuda::Cuda;
use instep::cuda::driver::Shape;
use instep::optim::{ALL, Optimizer};
use instep_cli::{Failure, bench};
use serde_json::Value;

use crate::support::stand_in::calls::Call;
use crate::support::stand_in::{FOREIGN, StandIn};
use crate::support::{Folder, assert_refused};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    bench: bench::Arguments,
}

fn run(driver: &Arc<StandIn>, words: &[&str]) -> Result<(), Failure> {
    let line = Line::try_parse_from([&["bench"], words].concat()).unwrap();
    bench::run_on_gpu(&line.bench, &Cuda::on(driver.clone()))
}

/// Runs a bench and reads its report.
fn report(driver: &Arc<StandIn>, words: &[&str]) -> Value {
    let folder = Folder::new();
    let path = folder.path("report.json");
    let json = ["--quick", "--json", path.to_str().unwrap()];
    run(driver, &[words, &json].concat()).unwrap();
    serde_json::from_slice(&folder.read("report.json")).unwrap()
}

fn rows<'a>(report: &'a Value, bench: &str) -> &'a Vec<Value> {
    report[bench].as_array().unwrap()
}

#[test]
fn a_sweep_has_a_line_for_every_case_and_counts_the_bytes_of_the_layout() {
    let sizes = ["--only", "step", "-b", "8K", "-e", "64K", "-f", "2"];
    let report = report(&StandIn::new(), &[&sizes[..], &["--max-blocks", "all,2x"]].concat());
    assert_eq!(report["device"]["name"], "stand-in");
    assert!(report["machine"]["cores"].as_u64().unwrap() > 0);
    // The gradient is read; the parameter and each state are read and written. If the rule scales its update by norms,
    // a second launch reads the parameter and the states again.
    let of = |states: usize, is_scaled: bool| {
        (12 + 8 * states + if is_scaled { 4 + 4 * states } else { 0 }) as f64
    };
    let mut bytes = vec![("momentum".to_owned(), of(1, false)), ("amsgrad".to_owned(), of(3, false))];
    bytes.extend(ALL.iter().map(|one| (one.key(), of(one.build().state_names().len(), one.is_scaled))));
    assert!(bytes.contains(&("lamb".into(), 40.0)) && bytes.contains(&("adamw".into(), 28.0)));
    for (optimizer, bytes) in bytes {
        let of = rows(&report, "step").iter().filter(|row| row["optimizer"] == optimizer);
        let of: Vec<&Value> = of.collect();
        assert!(
            of.iter().all(|row| row["bytes_per_element"] == bytes && row["segments"] == 1),
            "{optimizer}"
        );
        // Each of the four sizes runs beyond the cache, once with each of two limits on the number of blocks. A case in
        // the cache may have at most a quarter of the stand-in's 64 KiB, and only SGD's smallest bucket is so small.
        let beyond = of.iter().filter(|row| row["cache"] == "beyond");
        assert_eq!(beyond.clone().count(), 8, "{optimizer}");
        for row in beyond {
            // LAMB's second launch reads the parameter and the states again, and the footprint counts them once.
            let once = if optimizer == "lamb" { bytes - 12.0 } else { bytes };
            let footprint = (once as u64 - 4) / 2 + 4;
            let all = row["buckets"].as_u64().unwrap() * row["elements"].as_u64().unwrap() * footprint;
            assert!(all >= 4 * 65_536, "buckets take turns beyond the cache: {row}");
        }
        assert_eq!(of.len() - 8, if optimizer == "sgd" { 2 } else { 0 }, "{optimizer}");
        for blocks in [Value::Null, 4.into()] {
            assert_eq!(of.iter().filter(|row| row["max_blocks"] == blocks).count(), of.len() / 2);
        }
    }
}

#[test]
fn every_step_is_one_launch_and_is_held_against_a_copy_of_as_many_bytes() {
    let driver = StandIn::new();
    let options = ["--only", "step", "--optimizer", "adamw", "-b", "64K", "-e", "64K"];
    let report = report(&driver, &[&options[..], &["--rounds", "5", "--max-blocks", "3"]].concat());
    let [row] = rows(&report, "step").as_slice() else { panic!("{report}") };
    let (buckets, steps) = (row["buckets"].as_u64().unwrap(), row["steps_per_sample"].as_u64().unwrap());
    let calls = driver.take_calls();
    let count = |is: &dyn Fn(&Call) -> bool| calls.iter().filter(|call| is(call)).count() as u64;
    let shape = Shape { blocks: 3, threads: instep::abi::INSTEP_GPU_THREADS };
    let launches = count(
        &|call| matches!(call, Call::Launch { kernel: "instep_step_adam", shape: s, .. } if *s == shape),
    );
    // One round warms up. In each round, one launch before the sample does not count. Two steps of every bucket are
    // compared with the host's.
    let timed = (5 + 1) * (steps + 1);
    assert_eq!(launches, timed + 2 * buckets);
    let half = 16 * 1024 * 28 / 2;
    assert_eq!(count(&|call| matches!(call, Call::CopyOnDevice { bytes, .. } if *bytes == half)), timed);
    let begins = count(&|call| matches!(call, Call::Launch { kernel: "instep_begin", .. }));
    assert_eq!(begins, 6 + 2, "no Begin is timed with the steps");
}

#[test]
fn the_bucket_of_fifty_segments_is_one_launch_and_what_does_not_fit_is_said() {
    let driver = StandIn::new();
    // One block per tile, so that the number of blocks tells the launch of this bucket from others.
    let sizes =
        ["--min-bytes", "64K", "--max-bytes", "2G", "--step-factor", "32768", "--max-blocks", "65536"];
    let report = report(&driver, &[&["--only", "step", "--optimizer", "sgd"], &sizes[..]].concat());
    let skipped = rows(&report, "skipped");
    assert_eq!((skipped.len(), &skipped[0]["elements"]), (1, &(512 << 20).into()));
    assert_eq!(driver.allocated_bytes(), 0, "a case frees all its memory");
    // Here the parameters fit, and the copies do not.
    let large = ["-b", "48M", "-e", "48M"];
    let other =
        self::report(&StandIn::new(), &[&["--only", "step", "--optimizer", "sgd"], &large[..]].concat());
    assert_eq!((rows(&other, "skipped").len(), rows(&other, "step").len()), (1, 1));
    let bucket = &rows(&report, "step")[1];
    assert_eq!((&bucket["segments"], &bucket["elements"]), (&50.into(), &(25 << 18).into()));
    // 64 tiles in each of the 50 segments.
    let whole = |call: &&Call| matches!(call, Call::Launch { shape, .. } if shape.blocks == 50 * 64);
    let launches = driver.take_calls().iter().filter(whole).count() as u64;
    assert_eq!(launches, 4 * (bucket["steps_per_sample"].as_u64().unwrap() + 1) + 2);
}

#[test]
fn a_wrong_bit_is_a_marked_row_and_the_others_still_run() {
    let (driver, folder) = (StandIn::new(), Folder::new());
    driver.flip_bits();
    let (json, svg) = (folder.path("report.json"), folder.path("share.svg"));
    let options = ["--quick", "--only", "step", "--optimizer", "sgd,adamw", "--json", json.to_str().unwrap()];
    let sizes = ["-b", "16K", "-e", "32K", "-f", "2"];
    let picture = ["--svg", svg.to_str().unwrap()];
    let failure = run(&driver, &[&options[..], &sizes, &picture].concat()).unwrap_err().to_string();
    assert!(
        failure.contains("step: 4 of 4 rows differ from the host's bits; first adamw f32 Params"),
        "{failure}"
    );
    let report: Value = serde_json::from_slice(&folder.read("report.json")).unwrap();
    for row in rows(&report, "step") {
        let mismatch = row["compared"]["mismatch"].as_str().unwrap();
        assert!(mismatch.contains("on the host, and 1 of"), "{mismatch}");
        assert!(row["step_us"]["median"].is_number());
    }
    let text = String::from_utf8(folder.read("share.svg")).unwrap();
    assert!(!text.contains("<polyline"), "no figure of a wrong kernel is drawn");
}

#[test]
fn a_run_that_ends_in_its_second_case_leaves_the_row_of_the_first() {
    let (driver, folder) = (StandIn::new(), Folder::new());
    // Each case makes this call once.
    driver.break_call_after("load", 1);
    let (json, svg) = (folder.path("report.json"), folder.path("share.svg"));
    let files = ["--json", json.to_str().unwrap(), "--svg", svg.to_str().unwrap()];
    let options = ["--quick", "--only", "step", "-b", "16K", "-e", "256K"];
    let failure = run(&driver, &[&options[..], &files].concat()).unwrap_err().to_string();
    assert!(failure.contains("load"), "{failure}");
    let report: Value = serde_json::from_slice(&folder.read("report.json")).unwrap();
    let [row] = rows(&report, "step").as_slice() else { panic!("{report}") };
    assert_eq!((&row["optimizer"], &row["precision"]), (&"adamw".into(), &"f32".into()), "AdamW comes first");
    assert!(String::from_utf8(folder.read("share.svg")).unwrap().ends_with("</svg>\n"));
    assert_eq!(folder.names(), ["report.json", "share.svg"], "nothing is left beside them");
}

#[test]
fn every_precision_has_the_bytes_of_its_layout_and_the_bits_of_the_host() {
    let expected = [
        ("f32", 28.0),
        ("f32-moments-bf16", 20.0),
        ("f32-moments8bit", 16.0625),
        ("master", 28.0),
        ("remainder16", 26.0),
        ("remainder16-moments8bit", 14.0625),
        ("bf16", 14.0),
        ("bf16-stochastic", 14.0),
        ("bf16-stochastic8bit", 10.0625),
        ("f16-master", 28.0),
    ];
    let names = expected.map(|(name, _)| name).join(",");
    let sizes = ["--only", "step", "-b", "32K", "-e", "32K"];
    let options = [&sizes[..], &["--optimizer", "adamw,lamb", "--precision", &names]].concat();
    let report = report(&StandIn::new(), &options);
    let adamw = rows(&report, "step").iter().filter(|row| row["optimizer"] == "adamw");
    for (row, (name, bytes)) in adamw.zip(expected) {
        assert_eq!((&row["precision"], &row["bytes_per_element"]), (&name.into(), &bytes.into()));
    }
    assert_eq!(rows(&report, "step").len(), 2 * expected.len());
    for row in rows(&report, "step") {
        let elements = row["elements"].as_u64().unwrap();
        assert_eq!(row["bytes"], 32 << 10, "bytes of gradients, whatever their type");
        let (compared, all) = (&row["compared"], row["buckets"].as_u64().unwrap() * elements);
        let is_stochastic = row["precision"].as_str().unwrap().contains("stochastic");
        assert_eq!(compared["of"], all);
        // Random bits depend on the place in the layout, so only the first parameter is compared.
        assert_eq!(compared["elements"], if is_stochastic { elements } else { all });
    }
}

#[test]
fn beyond_sixteen_mi_elements_a_sample_is_compared_and_the_record_says_which() {
    let options = ["--only", "step", "--optimizer", "sgd", "--precision", "bf16", "--rounds", "1"];
    let report = report(&StandIn::new(), &[&options[..], &["-b", "34M", "-e", "34M"]].concat());
    let [row, bucket] = rows(&report, "step").as_slice() else { panic!("{report}") };
    assert_eq!(
        (&row["compared"]["elements"], &row["compared"]["of"]),
        (&(16 << 20).into(), &(17 << 20).into())
    );
    assert_eq!(row["compared"]["sample"], "first and last tile, 14 at random with seed 1");
    assert_eq!((&bucket["compared"]["sample"], &bucket["segments"]), (&"all".into(), &50.into()));
}

#[test]
fn a_norm_reads_its_gradients_and_both_copies_move_as_many_bytes() {
    let (driver, folder) = (StandIn::new(), Folder::new());
    folder.write("kernels", FOREIGN);
    let kernels = folder.path("kernels").to_str().unwrap().to_owned();
    let sizes = ["--only", "norm", "-b", "256K", "-e", "256K", "--rounds", "2"];
    let report = report(&driver, &[&sizes[..], &["--precision", "f32,bf16", "--kernels", &kernels]].concat());
    let rows = rows(&report, "norm");
    let bytes: Vec<&Value> = rows.iter().map(|row| &row["bytes_per_element"]).collect();
    assert_eq!(bytes, [4.0, 2.0]);
    assert!(rows.iter().all(|row| row["optimizer"].is_null() && row["compared"].is_null()));
    assert!(rows.iter().all(|row| row["sm_copy_us"].is_object() && row["ceiling"] == "copy"));
    let calls = driver.take_calls();
    let count = |is: &dyn Fn(&Call) -> bool| calls.iter().filter(|call| is(call)).count() as u64;
    // Two rounds, and one that warms up. Each round has the launches of a sample, and one launch before it that does
    // not count.
    let timed: u64 = rows.iter().map(|row| 3 * (row["steps_per_sample"].as_u64().unwrap() + 1)).sum();
    assert_eq!(count(&|call| matches!(call, Call::Launch { kernel: "instep_norm", .. })), timed);
    assert_eq!(count(&|call| matches!(call, Call::LaunchForeign { .. })), timed);
}

#[test]
fn a_pass_once_launches_are_timed_alone_and_a_replay_is_one_launch_of_a_graph() {
    let driver = StandIn::new();
    let report = report(&driver, &["--only", "control,graph"]);
    let control = rows(&report, "control").iter().map(|row| (row["launch"].clone(), row["params"].clone()));
    let pairs = [1, 50, 1000].map(|params| ["begin", "decide"].map(|launch| (launch.into(), params.into())));
    assert_eq!(control.collect::<Vec<_>>(), pairs.concat());
    let graph: Vec<_> = rows(&report, "graph").iter().map(|row| (&row["pass"], &row["buckets"])).collect();
    let (eager, replay) = ("call by call".into(), "replay".into());
    let (one, each) = (1.into(), 64.into());
    assert_eq!(graph, [(&eager, &one), (&replay, &one), (&eager, &each), (&replay, &each)]);
    let replays = driver.take_calls().iter().filter(|call| matches!(call, Call::LaunchGraph { .. })).count();
    assert_eq!(replays, 2 * (12 + 3));
}

#[test]
fn the_trainers_stream_goes_before_the_optimizers() {
    let driver = StandIn::new();
    report(&driver, &["--only", "handover"]);
    let priorities = driver.take_calls().into_iter().filter_map(|call| match call {
        Call::CreateStream { priority, .. } => Some(priority),
        _ => None,
    });
    let priorities: Vec<i32> = priorities.collect();
    // The trainer's stream comes first, then a stepper's two streams: that of the sums, with the highest priority, and
    // that of the optimizer.
    assert_eq!(priorities[..3], [-1, i32::MIN, 0]);
}

#[test]
fn modes_run_beside_the_stand_ins_and_one_pass_without_an_optimizer() {
    let (driver, folder) = (StandIn::new(), Folder::new());
    folder.write("kernels", FOREIGN);
    let path = |name: &str| folder.path(name).to_str().unwrap().to_owned();
    let (kernels, trace, picture) = (path("kernels"), path("trace.json"), path("pass.svg"));
    let files = ["--kernels", &kernels, "--trace", &trace, "--picture", &picture];
    let report = report(&driver, &[&["--only", "overlap", "--max-blocks", "all,1"], &files[..]].concat());
    let rows = rows(&report, "overlap");
    assert_eq!(rows.len(), 2 * 2 * 4);
    for mode in [Value::Null, "sequential".into(), "eager".into(), "normed".into()] {
        assert_eq!(rows.iter().filter(|row| row["mode"] == mode).count(), 4);
    }
    let alone = rows.iter().find(|row| row["mode"].is_null()).unwrap();
    assert_eq!(
        (&alone["exposed_us"]["max"], &alone["backward_slowdown_percent"]["max"]),
        (&0.0.into(), &0.0.into())
    );
    // Kernel 0, the first that is loaded, is the reduce: one launch per bucket and pass, with 24 blocks.
    let calls = driver.take_calls();
    let of = |kernel: usize| {
        calls.iter().filter(move |call| matches!(call, Call::LaunchForeign { kernel: k, .. } if *k == kernel))
    };
    let (rounds, passes, buckets, params) = (3 + 1, 2 * 2 * 4, 1, 4);
    assert_eq!(of(0).count(), rounds * passes * buckets + 4);
    assert!(of(0).all(|call| matches!(call, Call::LaunchForeign { shape, .. } if shape.blocks == 24)));
    assert_eq!(of(1).count() + of(2).count(), (rounds * passes + 4) * params);
    let trace: Value = serde_json::from_slice(&fs::read(&trace).unwrap()).unwrap();
    let steps = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["cat"] == "step");
    assert_eq!(steps.count(), 4, "one step in each of the recorded passes");
    assert!(fs::read_to_string(&picture).unwrap().starts_with("<svg "));
}

#[test]
fn handing_over_is_timed_in_every_mode() {
    let report = report(&StandIn::new(), &["--only", "handover"]);
    assert_eq!(rows(&report, "handover").len(), 6);
    assert!(rows(&report, "handover").iter().all(|row| row["grad_ready_us"]["min"].as_f64().unwrap() > 0.0));
}

#[test]
fn the_picture_has_a_line_per_optimizer_and_a_mark_per_size() {
    let folder = Folder::new();
    let path = folder.path("share.svg");
    let sizes = ["--only", "step", "-b", "16K", "-e", "64K", "--quick"];
    let options = ["--optimizer", "sgd,adamw", "--svg", path.to_str().unwrap()];
    run(&StandIn::new(), &[&sizes[..], &options].concat()).unwrap();
    let text = String::from_utf8(folder.read("share.svg")).unwrap();
    assert_eq!(text.matches("<polyline").count(), 2);
    assert_eq!(text.matches("<title>").count(), 4);
    assert!(text.contains(">4Ki<") && text.contains(">16Ki<") && text.ends_with("</svg>\n"));
}

#[test]
fn what_the_device_or_the_build_lacks_is_refused_in_one_line() {
    let folder = Folder::new();
    // No machine has so many GPUs. Without kernels or a driver, the error names these first.
    let output = folder.run(&["bench", "--device", "cuda:4096"]);
    let word = match instep::cuda::device_count() {
        Err(instep::Error::KernelsNotBuilt { .. }) => "rebuild with `--features cuda`",
        Err(_) => "CUDA driver: not usable",
        Ok(_) => "cuda:4096: no such GPU",
    };
    assert_refused(&output, word);
    assert_refused(&folder.run(&["bench", "--device", "gpu"]), "use host or cuda:N");
    assert_refused(&folder.run(&["bench", "--max-blocks", "2x"]), "--max-blocks: is for --device cuda:N");
    assert_refused(&folder.run(&["bench", "-b", "64k"]), "a number like 8, 256K");
    for bench in ["norm", "control", "graph"] {
        let word = format!("--only {bench}: is for --device cuda:N");
        assert_refused(&folder.run(&["bench", "--only", bench]), &word);
    }
    let refused = |words: &[&str]| run(&StandIn::new(), words).unwrap_err().to_string();
    assert!(refused(&["--threads", "2"]).contains("--threads: is for --device host"));
    assert!(refused(&["--parameters", "10"]).contains("--parameters: is for --device host"));
    assert!(refused(&["--only", "growth"]).contains("--only growth: is for --device host"));
    assert!(refused(&["--only", "overlap"]).contains("scripts/bench-kernels.sh"));
    assert!(refused(&["--only", "overlap", "--kernels", "/nowhere"]).contains("/nowhere"));
}
