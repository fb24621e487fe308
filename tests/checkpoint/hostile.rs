//! Malicious headers cause one short error line, and no text of theirs reaches a terminal unescaped.
//!
//! The files have a few megabytes, so an error that repeated their text would be seen.

use std::io::Cursor;

use instep::checkpoint::safetensors::{Dtype, open};
use instep::checkpoint::{self, Extras};
use instep::{Error, Sgd, Solo, Stepper};

use crate::support::layout;

/// Number of bytes that a header repeats.
const MANY: usize = 4 << 20;

/// Largest length of an error about a file.
const LONGEST: usize = 640;

/// Returns a file with this header, and some bytes of data.
fn file(header: &str, data_bytes: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data_bytes, 0);
    bytes
}

fn refusal(bytes: Vec<u8>) -> String {
    match open(Cursor::new(bytes)) {
        Err(error @ Error::Checkpoint { .. }) => error.to_string(),
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("the header is taken"),
    }
}

fn entry(name: &str, dtype: &str, shape: &str) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[0,4]}}"#)
}

#[test]
fn errors_about_giant_headers_are_one_short_line() {
    let long = "x".repeat(MANY);
    let (ones, fine) = (vec!["1"; MANY / 2].join(","), entry("a", "F32", "1"));
    let rows = [
        (format!("{{{}}}", entry("a", "F32", &ones)), "more than 64 dimensions"),
        (format!("{{{}}}", entry("a", "F32", &vec!["9"; 64].join(","))), "do not agree"),
        (format!("{{{}}}", entry("a", &long, "1")), "none of F16"),
        (format!("{{{0},{0}}}", entry(&long, "F32", "1")), "occurs twice"),
        (format!("{{{}}}", entry(&long, "F32", "2")), "do not agree"),
        (format!(r#"{{"a":{{"{long}":1}}}}"#), "unknown field"),
        (format!(r#"{{"a":{{"dtype":"F32","shape":"{long}","data_offsets":[0,4]}}}}"#), "invalid type"),
        (format!(r#"{{"__metadata__":{{"{long}":1}},{fine}}}"#), "invalid type"),
        (format!(r#"{{"__metadata__":{{"{long}":"","{long}":""}},{fine}}}"#), "occurs twice"),
        (format!(r#"{{"__metadata__":"{long}",{fine}}}"#), "invalid type"),
    ];
    for (header, word) in rows {
        let error = refusal(file(&header, 4));
        assert!(error.len() < LONGEST, "{} bytes: {}...", error.len(), &error[..LONGEST]);
        assert!(error.contains(word), "{error}, not {word}");
    }
}

#[test]
fn metadata_that_would_take_many_times_their_bytes_are_refused_when_read_and_when_written() {
    let keys = |count: usize| (0..count).map(|k| (format!("{k:x}"), String::new()));
    let header = |count: usize| {
        let all: Vec<String> = keys(count).map(|(key, _)| format!(r#""{key}":"""#)).collect();
        format!(r#"{{"__metadata__":{{{}}},{}}}"#, all.join(","), entry("a", "F32", "1"))
    };
    let (header_of_most, _) = open(Cursor::new(file(&header(1 << 16), 4))).unwrap();
    assert_eq!(header_of_most.metadata.len(), 1 << 16);
    assert_eq!(header_of_most.tensors["a"].dtype, Dtype::F32);
    let error = refusal(file(&header((1 << 16) + 1), 4));
    assert!(error.contains("more than 65536 keys"), "{error}");

    let stepper = Stepper::host(&layout(&[1]), Sgd::default(), Solo::default()).unwrap();
    let extras = Extras { metadata: keys(1 << 16).collect(), ..Extras::default() };
    // One more is the version's.
    let refused = checkpoint::write_with(&stepper, &extras, std::io::sink()).unwrap_err().to_string();
    assert!(refused.contains("65537 metadata of at most 65536"), "{refused}");
}

#[test]
fn no_name_in_a_file_steers_a_terminal() {
    // JSON spells control characters by escapes of its own.
    let red = r"\u001b[31m\u009b2J\n\u202e";
    let mut stepper = Stepper::host(&layout(&[1]), Sgd::default(), Solo::default()).unwrap();
    let rows = [
        format!("{{{}}}", entry(red, "F32", "2")),
        format!("{{{}}}", entry("a", red, "1")),
        format!("{{{0},{0}}}", entry(red, "F32", "1")),
        format!(r#"{{"__metadata__":{{"{red}":"","{red}":""}},{}}}"#, entry("a", "F32", "1")),
        format!(r#"{{"a":{{"{red}":1}}}}"#),
        format!(r#"{{"a":{{"dtype":"F32","shape":"{red}","data_offsets":[0,4]}}}}"#),
        format!(r#"{{"__metadata__":{{"instep.checkpoint":"{red}"}},{}}}"#, entry("a", "F32", "1")),
        format!("{{{}}}", entry(&format!("param.{red}"), "F32", "1")),
    ];
    for header in rows {
        let bytes = file(&header, 4);
        for own in [true, false] {
            let source = Cursor::new(&bytes);
            let outcome = if own {
                checkpoint::read(&mut stepper, source)
            } else {
                checkpoint::import(&mut stepper, source, None)
            };
            let error = outcome.expect_err(&header).to_string();
            let steers = |char: char| char.is_control() || char == '\u{202e}';
            assert!(!error.contains(steers) && error.len() < LONGEST, "{error:?}");
        }
    }
}
