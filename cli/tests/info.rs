//! `instep info`: documented keys, reasons, and the refusal of every bad variable.
//!
//! The tests must give the same result on every machine, with any CPU and any number of cores.

use serde_json::Value;

use crate::support::{Folder, assert_refused, stdout};

#[test]
fn the_documented_keys_are_there_and_say_what_is_in_use() {
    let output = Folder::new().run(&["info", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let keys: Vec<&String> = report.as_object().unwrap().keys().collect();
    let documented = [
        "devices",
        "environment",
        "features",
        "gpu_kernels",
        "isa",
        "isa_available",
        "missing",
        "threads",
        "version",
    ];
    assert_eq!(keys, documented);
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["isa"]["because"], "widest");
    assert_eq!(report["isa"]["value"], *report["isa_available"].as_array().unwrap().last().unwrap());
    assert_eq!(report["threads"]["because"], "cores");
    assert_eq!(report["devices"][0], "host");
    assert_eq!(report["environment"]["INSTEP_ISA"], Value::Null);
}

#[test]
fn a_variable_shows_as_the_reason() {
    let output = Folder::new()
        .command(&["info", "--json"])
        .envs([("INSTEP_ISA", "baseline"), ("INSTEP_THREADS", "3")])
        .output()
        .unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["isa"], serde_json::json!({"value": "baseline", "because": "environment"}));
    assert_eq!(report["threads"], serde_json::json!({"value": 3, "because": "environment"}));
    assert_eq!(report["environment"]["INSTEP_THREADS"], "3");
}

#[test]
fn the_text_names_the_available_instruction_sets_on_one_line() {
    let text = stdout(&Folder::new().run(&["info"]));
    let line = text.lines().find(|line| line.contains("available: ")).unwrap();
    assert!(line.contains("baseline"), "{text}");
    let gpu = text.contains("devices          host, cuda:0");
    assert_ne!(gpu, text.contains("missing          device cuda: "), "{text}");
}

#[test]
fn a_bad_variable_is_refused_by_name() {
    let cases = [
        ("INSTEP_ISA", "sse9", "INSTEP_ISA = sse9"),
        ("INSTEP_THREADS", "0", "INSTEP_THREADS"),
        ("INSTEP_THREADS", "two", "two"),
        ("INSTEP_SPIN_US", "-1", "INSTEP_SPIN_US"),
        ("INSTEP_PREFETCH", "yes", "INSTEP_PREFETCH = yes"),
    ];
    let cases = cases.into_iter().chain([("INSTEP_DEADLINE_MS", "-1", "INSTEP_DEADLINE_MS")]);
    for (name, value, word) in cases {
        for arguments in [&["info"][..], &["info", "--json"]] {
            let output = Folder::new().command(arguments).env(name, value).output().unwrap();
            assert_refused(&output, word);
        }
    }
}
