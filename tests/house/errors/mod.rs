//! The page of errors lists every kind of refusal and failure once, as a user reads it.
//!
//! `cargo test --test main errors -- --nocapture` prints the page. Calls of the public interface cause most of the
//! errors. Each text has the form `<thing>: <what is wrong>; <what to do>`, and every variant of `Error` is on the
//! page.

mod building;
mod devices;
mod stepping;

use std::collections::BTreeSet;
use std::fs;
use std::panic::Location;
use std::path::Path;

use instep::{Error, Result};

/// Largest number of characters of a text, without the operations in brackets.
const LONGEST: usize = 200;

/// Phrases of earlier texts that no reader understood at once.
const RIDDLES: [&str; 4] = ["is not available here", "there is ", " is no ", "is none"];

/// Errors in the order in which users meet them.
#[derive(Default)]
struct Page {
    errors: Vec<Error>,
    /// The places of calls that were accepted by mistake.
    accepted: Vec<&'static Location<'static>>,
}

impl Page {
    /// Adds the error that a call must return.
    #[track_caller]
    fn refused<T>(&mut self, outcome: Result<T>) {
        match outcome {
            Ok(_) => self.accepted.push(Location::caller()),
            Err(error) => self.errors.push(error),
        }
    }

    fn whole() -> Page {
        let mut page = Page::default();
        building::add(&mut page);
        stepping::add(&mut page);
        devices::add(&mut page);
        page
    }
}

/// Removes text in brackets: operations and calls, which say where the error happened.
fn without_operations(text: &str) -> String {
    let mut depth = 0;
    let outside = text.chars().filter(|c| {
        depth += i32::from(*c == '[') - i32::from(*c == ']');
        depth == 0
    });
    outside.collect()
}

/// Returns the fault of a text, if it has one.
fn fault(text: &str, needs_remedy: bool) -> Option<&'static str> {
    let Some((thing, rest)) = text.split_once(": ") else { return Some("names no thing") };
    let mut first = thing.chars();
    let is_identifier = thing.starts_with(|c: char| c.is_ascii_uppercase())
        && (first.nth(1).is_some_and(|c| c.is_ascii_uppercase()) || thing.contains("::"));
    let remedy = rest.split_once("; ").map(|(_, remedy)| remedy);
    match () {
        () if text.chars().any(char::is_control) => Some("has a control character"),
        () if without_operations(text).chars().count() > LONGEST => Some("is too long"),
        () if RIDDLES.iter().any(|riddle| text.contains(riddle)) => Some("is a riddle"),
        () if text.ends_with('.') => Some("ends in a full stop"),
        () if thing.starts_with(char::is_uppercase) && !is_identifier => Some("starts with a capital"),
        () if needs_remedy && remedy.is_none() => Some("says nothing about what to do"),
        () if remedy.is_some_and(|remedy| !remedy.starts_with(char::is_lowercase)) => {
            Some("does not begin its advice with a verb")
        }
        () => None,
    }
}

/// Returns whether the library knows something that the caller can do about it.
fn needs_remedy(error: &Error) -> bool {
    matches!(
        error,
        Error::Config { .. }
            | Error::Layout(_)
            | Error::Sharded { .. }
            | Error::Order(_)
            | Error::Unsupported(_)
            | Error::KernelsNotBuilt { .. }
            | Error::DriverUnavailable { .. }
            | Error::NcclUnavailable { .. }
            | Error::Arithmetic { .. }
            | Error::Mismatch { .. }
            | Error::LeftPass { .. }
            | Error::PeerLost { .. }
            | Error::Deadline { .. }
            | Error::PartlyLoaded { .. }
            | Error::Checkpoint(_)
    )
}

#[test]
fn every_error_names_a_thing_what_is_wrong_and_what_to_do() {
    let page = Page::whole();
    assert!(page.accepted.is_empty(), "nothing was refused at {:?}", page.accepted);
    let mut faults = Vec::new();
    for error in &page.errors {
        let text = error.cause().to_string();
        println!("{error}");
        faults.extend(fault(&text, needs_remedy(error.cause())).map(|fault| format!("{fault}: {text}")));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_page_repeats_no_text() {
    let page = Page::whole();
    let mut seen = BTreeSet::new();
    let repeated: Vec<String> =
        page.errors.iter().map(Error::to_string).filter(|text| !seen.insert(text.clone())).collect();
    assert!(repeated.is_empty(), "{}", repeated.join("\n"));
}

#[test]
fn every_variant_is_on_the_page() {
    let source = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/error.rs")).unwrap();
    let (_, body) = source.split_once("pub enum Error {").unwrap();
    let (body, _) = body.split_once("\n}\n").unwrap();
    let is_variant = |line: &&str| line.starts_with(|c: char| c.is_ascii_uppercase());
    let variants: BTreeSet<&str> = body
        .lines()
        .filter_map(|line| line.strip_prefix("    "))
        .filter(is_variant)
        .map(|line| line.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap())
        .collect();
    assert!(variants.len() > 10, "{variants:?}");
    let page = Page::whole();
    let errors = page.errors.iter().flat_map(|error| [error, error.cause()]);
    let debugged: Vec<String> = errors.map(|error| format!("{error:?}")).collect();
    let shown: BTreeSet<&str> = debugged
        .iter()
        .map(|text| text.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap())
        .collect();
    assert_eq!(variants, shown);
}

#[test]
fn a_text_without_the_form_is_noticed() {
    for (text, expected) in [
        ("no thing here", "names no thing"),
        ("Parameter: is frozen; thaw it", "starts with a capital"),
        ("parameter: is frozen", "says nothing about what to do"),
        ("parameter: is frozen; Thaw it", "does not begin its advice with a verb"),
        ("parameter: is frozen; thaw it.", "ends in a full stop"),
        ("parameter: \u{1b}[31m; thaw it", "has a control character"),
        ("f16: it is not available here; use f32", "is a riddle"),
    ] {
        assert_eq!(fault(text, true), Some(expected), "{text}");
    }
    assert_eq!(fault(&format!("parameter: {}; thaw it", "x".repeat(LONGEST)), true), Some("is too long"));
    for fine in ["RANK = 2: out of range; use 0", "Gradients::Release: x; use y", "`w`: frozen; thaw it"] {
        assert_eq!(fault(fine, true), None);
    }
}
