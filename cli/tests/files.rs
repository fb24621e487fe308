//! Tests of paths: which files can be read or written, and whether an output is replaced completely.
//!
//! After refusals, the tests check that the folder has no new file. If the output is an input too, the tests also check
//! that the inputs are unchanged.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};

use crate::support::{Content, Folder, assert_refused, input};

const CONFIG: &str = r#"{"optimizer":"sgd","groups":[{"params":["w"]}]}"#;

fn folder() -> Folder {
    Folder::of(CONFIG, &input(&[("w", &[2])], 1))
}

fn replay(folder: &Folder, config: &str, input: &str, output: &str) -> std::process::Output {
    folder.run(&["replay", "--config", config, "--input", input, "--output", output])
}

#[test]
fn paths_that_cannot_be_read_are_refused_by_name() {
    let folder = folder();
    for (config, input, word) in [
        ("nowhere", "IN", "nowhere"),
        ("C.json", "nowhere", "nowhere"),
        (".", "IN", "regular file"),
        ("C.json", ".", "regular file"),
        ("/dev/zero", "IN", "/dev/zero"),
        ("C.json", "/dev/zero", "/dev/zero"),
        ("C.json", "C.json", "C.json: "),
        ("IN", "IN", "config: "),
    ] {
        assert_refused(&replay(&folder, config, input, "OUT"), word);
    }
    assert_eq!(folder.names(), ["C.json", "IN"]);
}

#[test]
fn outputs_that_cannot_be_written_are_refused_by_name() {
    let folder = folder();
    fs::create_dir(folder.path("folder")).unwrap();
    for (output, word) in [
        ("nowhere/OUT", "nowhere"),
        ("C.json/OUT", "C.json"),
        ("folder", "regular file"),
        ("folder/..", "not the name of a file"),
        ("/", "not the name of a file"),
        ("", "output"),
        ("/dev/null", "regular file"),
        ("/proc/OUT", "/proc"),
    ] {
        assert_refused(&replay(&folder, "C.json", "IN", output), word);
    }
    assert_eq!(folder.names(), ["C.json", "IN", "folder"]);
}

#[test]
fn an_output_that_is_an_input_under_any_name_is_refused() {
    let folder = folder();
    symlink(folder.path("IN"), folder.path("symbolic")).unwrap();
    fs::hard_link(folder.path("IN"), folder.path("hard")).unwrap();
    let before = folder.read("IN");
    for output in ["IN", "./IN", "symbolic", "hard", "C.json"] {
        assert_refused(&replay(&folder, "C.json", "IN", output), "is also the input");
    }
    assert_eq!(folder.read("IN"), before);
    assert_eq!(folder.read("C.json"), CONFIG.as_bytes());
}

#[test]
fn an_output_is_a_new_file_with_usual_permissions() {
    let folder = folder();
    folder.write("OUT", b"something longer than what comes");
    let old = fs::metadata(folder.path("OUT")).unwrap();
    assert!(folder.replay(&[]).status.success());
    let new = fs::metadata(folder.path("OUT")).unwrap();
    assert_ne!(old.ino(), new.ino(), "it was written in place");
    assert_eq!(old.mode(), new.mode());
    assert_eq!(folder.names(), ["C.json", "IN", "OUT"]);
    assert_eq!(Content::parse(&folder.read("OUT")).metadata["step.w"], "1");
}

#[test]
fn a_closed_pipe_is_no_panic() {
    let folder = folder();
    let replay = ["replay", "--config", "C.json", "--input", "IN", "--output", "OUT"];
    for arguments in [&["info"][..], &["--help"], &["diff", "IN", "IN"], &replay] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = folder.command(arguments).stdout(writer).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", crate::support::stderr(&output));
    }
}

#[test]
fn a_replay_says_its_parameters_steps_norm_and_time() {
    let config = |more: &str| {
        format!(
            r#"{{"optimizer":"sgd","groups":[{{"params":["a","b"]}}],"world_size":2,"frozen":["b"]{more}}}"#
        )
    };
    let gradients =
        |content: Content, pass: u32, values: &[f32]| content.with(&format!("grad.{pass}.a"), &[2], values);
    let content = Content::default().with("param.a", &[2], &[0.0; 2]).with("param.b", &[3], &[0.0; 3]);
    let content = gradients(gradients(content, 0, &[1.0, 1.0]), 1, &[6.0, 8.0]);
    let said = |config: &str, content: &Content| {
        let folder = Folder::of(config, content);
        let report = folder.replay(&["--json"]);
        let report = serde_json::from_slice::<serde_json::Value>(&report.stdout).unwrap();
        (report, crate::support::stdout(&folder.replay(&[])))
    };

    let (report, text) = said(&config(r#","clip":{"global":1}"#), &content);
    for (key, value) in [("parameters", 2), ("frozen", 1), ("elements", 5), ("passes", 2), ("skipped", 0)] {
        assert_eq!(report[key], value, "{key}");
    }
    // The mean over two ranks is (3, 4).
    assert_eq!((&report["optimizer"], &report["norm"]), (&"SGD".into(), &5.0.into()));
    assert!((report["clip_factor"].as_f64().unwrap() - 0.2).abs() < 1e-6, "{report}");
    assert!(report["seconds"].as_f64().unwrap() > 0.0);
    assert!(text.starts_with("SGD: 2 parameters of 5 elements, 1 frozen; 2 steps\n"), "{text}");
    assert!(text.contains("norm of the last pass: 5.000000, clipped by the factor 0.2"), "{text}");

    let (report, text) = said(&config(""), &content);
    assert!(report["norm"].is_null() && !text.contains("norm"), "nothing asked for it: {text}");

    let content = gradients(content, 2, &[f32::NAN, 1.0]);
    let (report, text) = said(&config(r#","skip_nonfinite":true"#), &content);
    assert_eq!((&report["passes"], &report["skipped"]), (&3.into(), &1.into()));
    assert!(text.contains("; 2 steps, 1 pass skipped\n"), "{text}");
}
