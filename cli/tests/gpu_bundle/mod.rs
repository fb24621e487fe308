//! A dry run of benches/gpu/run.sh: a run that is killed in the middle of any stage still has the results of all
//! finished stages.
//!
//! The bundle consists of stand-ins (`bundle.rs`). The benches are the real ones on the stand-in driver. A stage waits
//! at a fixed point until every process of the run is killed, so no test depends on timing.

mod bundle;

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::Value;

use bundle::Bundle;

/// Returns the part, the name and the time limit in seconds of each stage, as `run.sh list` prints them.
fn stages(bundle: &Bundle) -> Vec<(String, String, u32)> {
    let output = bundle.command(&["list"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let stage = |line: &str| {
        let [part, name, limit] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        (part.to_owned(), name.to_owned(), limit.parse().unwrap())
    };
    text.lines().map(stage).collect()
}

/// Checks all files of a run that was stopped at any point after these stages had ended.
fn check(bundle: &Bundle, finished: &[String]) {
    let record: Value = serde_json::from_slice(&bundle.read("out/record.json")).unwrap();
    let named: Vec<&str> =
        record["stages"].as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap()).collect();
    assert_eq!(named, finished);
    assert_eq!(record["commit"], "0123456789ab");
    let files = bundle.files_left();
    assert!(files.len() <= 8, "some machines return few files: {files:?}");
    if finished.is_empty() {
        return;
    }
    let table = String::from_utf8(bundle.read("out/table.txt")).unwrap();
    assert!(finished.iter().all(|name| table.contains(&format!("\n{name} "))), "{table}");
    let archived = bundle.archived();
    for name in finished {
        assert!(archived.contains_key(&format!("{name}/log")), "{name}: {:?}", archived.keys());
    }
    for (path, bytes) in
        archived.iter().filter(|(path, _)| path.ends_with(".json") && !path.contains(".cut-"))
    {
        let report: Value = serde_json::from_slice(bytes).unwrap_or_else(|error| panic!("{path}: {error}"));
        assert!(report.is_object(), "{path}");
    }
}

/// Returns the number of rows in the file that the stopped bench was writing.
fn rows_so_far(bundle: &Bundle, stage: &str) -> usize {
    let folder = bundle.path(&format!("out/now/{stage}"));
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("json") => {
                let report: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
                let rows = report.as_object().unwrap().values().filter_map(Value::as_array).map(Vec::len);
                count += rows.sum::<usize>();
            }
            Some("csv") if path.file_stem().unwrap() == "torch" => {
                count += std::fs::read_to_string(&path).unwrap().lines().count() - 2;
            }
            _ => {}
        }
    }
    count
}

#[test]
fn limits_of_stages_fit_their_part_and_every_stage_is_known() {
    let bundle = Bundle::new();
    let mut sums: BTreeMap<String, u32> = BTreeMap::new();
    let stages = stages(&bundle);
    for (part, _, limit) in &stages {
        *sums.entry(part.clone()).or_default() += limit;
    }
    // A few seconds remain for writing the record between stages.
    let budgets =
        [("part1", 4 * 60), ("part2", 9 * 60), ("part3", 9 * 60), ("part4", 8 * 60), ("part5", 8 * 60)];
    assert!(sums.len() == 5 && budgets.iter().all(|(part, budget)| sums[*part] + 10 <= *budget), "{sums:?}");
    // The first figures come early, in case the GPU is there for a short time only.
    for (last, deadline) in [("bucket", 30), ("overlap", 120)] {
        let end = stages.iter().position(|(_, name, _)| name == last).unwrap();
        let until: u32 = stages[..=end].iter().map(|(_, _, limit)| limit).sum();
        assert!(until <= deadline, "{last} may end after {until} s, {deadline} are promised");
    }
    let early: Vec<&str> = stages.iter().map(|(_, name, _)| name.as_str()).take(5).collect();
    assert_eq!(early, ["info", "bucket", "adamw", "torch", "overlap"]);
    let count = |bundle: &Bundle| bundle.command(&["count"]).output().unwrap();
    let counted = String::from_utf8(count(&bundle).stdout).unwrap();
    assert!(counted.contains("\nmemcheck: 1 tests: host_run::many_segments "), "{counted}");
    bundle.write("tests", "#!/bin/sh\n");
    assert_eq!(
        count(&bundle).status.code(),
        Some(3),
        "a stage without a test is noticed before it has a GPU"
    );
    let output = bundle.command(&["adamw", "nonsense"]).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && message.contains("nonsense: no such stage"), "{message}");
}

#[test]
fn a_run_that_is_killed_in_any_stage_leaves_all_before_it_and_the_next_call_goes_on() {
    let bundle = Bundle::new();
    let all: Vec<String> = stages(&bundle).into_iter().map(|(_, name, _)| name).collect();
    for (k, stage) in all.iter().enumerate() {
        bundle.kill_in(stage);
        check(&bundle, &all[..k]);
        if bundle.is_measured(stage) {
            assert!(rows_so_far(&bundle, stage) >= 1, "{stage} had rows when it was killed");
        }
    }
    let output = bundle.command(&[]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stdout));
    check(&bundle, &all);
    let (log, archived) = (String::from_utf8(bundle.read("out/run.log")).unwrap(), bundle.archived());
    for stage in &all {
        let begun = log.matches(&format!("\n== {stage} (at")).count();
        assert_eq!(begun, 2, "{stage} runs until it was killed, and once more");
        let cut = &archived[&format!("{stage}.cut-1/log")];
        let (whole, begin) = (&archived[&format!("{stage}/log")], format!("== {stage} (at"));
        assert!(
            [cut, whole].iter().all(|log| log.starts_with(begin.as_bytes())),
            "{stage}'s own part of the log"
        );
    }
    let few: Vec<_> = std::fs::read_dir(bundle.path("out")).unwrap().collect();
    assert_eq!(few.len(), 4, "{few:?}");
    // Nothing is left to do.
    let before = bundle.read("out/run.log").len();
    assert_eq!(bundle.command(&["part1"]).output().unwrap().status.code(), Some(0));
    let more = bundle.read("out/run.log").split_off(before);
    assert!(!String::from_utf8(more).unwrap().contains("(at"));
}

#[test]
fn a_stage_that_fails_is_late_or_is_absent_is_not_passed_and_stops_no_other() {
    let bundle = Bundle::new();
    bundle.remove("torch_gpu.py");
    bundle.remove("python/instep/_native.abi3.so.xz");
    bundle.write("tests", "#!/bin/sh\ncase $* in *--list*) ;; *) exit 1 ;; esac\n");
    let output = bundle.command(&["bits", "torch", "handover", "python_cases"]).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stdout));
    let record: Value = serde_json::from_slice(&bundle.read("out/record.json")).unwrap();
    let exits: Vec<_> =
        record["stages"].as_array().unwrap().iter().map(|s| (&s["name"], &s["exit"])).collect();
    let [bits, torch, handover, python] = ["bits", "torch", "handover", "python_cases"].map(Value::from);
    let wanted = [(&bits, &3.into()), (&torch, &3.into()), (&handover, &0.into()), (&python, &3.into())];
    assert_eq!(exits, wanted);
    // If nvidia-smi fails, the record has no facts about a GPU. A copied program may have lost its permission to run.
    bundle.write("bin/nvidia-smi", "#!/bin/sh\nexit 9\n");
    bundle.forget_mode("instep");
    bundle.command(&["info"]).output().unwrap();
    let record: Value = serde_json::from_slice(&bundle.read("out/record.json")).unwrap();
    assert_eq!((&record["stages"][4]["exit"], &record["gpu_now"]), (&0.into(), &serde_json::json!({})));
    // Another commit's results are not mixed with these.
    bundle.write("commit", "ba9876543210");
    let output = bundle.command(&["info"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_script_finds_its_bundle_wherever_it_lies() {
    let bundle = Bundle::new();
    // If the bundle lies directly below the root, a script has fewer than two folders above it.
    let code = "import sys; sys.argv = ['x']; exec(open(sys.stdin.fileno()).read())";
    let text = String::from_utf8(std::fs::read(bundle.path("rows.py")).unwrap()).unwrap();
    for place in ["/torch_bundle/rows.py", "/rows.py"] {
        let script = format!("__file__ = {place:?}\n{text}\nprint(ROOT)");
        bundle.write("script.py", &script);
        let file = std::fs::File::open(bundle.path("script.py")).unwrap();
        let output = Command::new("python3").args(["-c", code]).stdin(file).output().unwrap();
        let found = String::from_utf8(output.stdout).unwrap();
        let folder = std::path::Path::new(place).parent().unwrap().to_str().unwrap();
        assert_eq!(found.trim(), folder, "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn a_pass_beside_pytorch_has_eight_buckets_beyond_the_cache_and_the_bucket_case_comes_first() {
    let code = "import gpu_shapes as g\n\
                print(*g.SHAPES)\n\
                for l2 in (6 << 20, 50 << 20, 60 << 20, 126 << 20):\n    \
                    for shape, (segments, length) in g.SHAPES.items():\n        \
                        for states in range(3):\n            \
                            count = g.bucket_count(shape, l2, states, 16)\n            \
                            print(count, count * segments * length * 4 * (2 + states) >= 4 * l2)";
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/peers");
    let mut python = Command::new("python3");
    let output = python.args(["-B", "-c", code]).current_dir(folder).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("bucket 256Mi 16Mi"), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(lines.clone().count(), 4 * 3 * 3);
    for line in lines {
        let (count, is_beyond) = line.split_once(' ').unwrap();
        assert!((8..=16).contains(&count.parse::<u32>().unwrap()) && is_beyond == "True", "{line}");
    }
}

/// The dry run's `instep`: a bench of small sizes on the stand-in driver. If `DRY_HOLD` names its stage, the bench
/// stops after its first row.
#[test]
#[ignore = "cli/tests/gpu_bundle/bundle.rs: its `instep` runs this as a process of its own"]
fn instep_of_the_dry_run() {
    bundle::run_bench();
}
