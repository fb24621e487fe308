//! Paths: what can be read, what may be written, and that an output is replaced as a whole.
//!
//! Every refusal is followed by a look into the folder: no file may be left over or changed.

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
    for arguments in [&["info"][..], &["--help"], &["diff", "IN", "IN"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = folder.command(arguments).stdout(writer).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", crate::support::stderr(&output));
    }
}
