//! Tests that a C program calls every function of the header, and that the header says which threads may call it.
//!
//! The programs are read as text; `check.sh` runs all of them.

use crate::{programs, read};

/// The functions that the header declares.
fn functions() -> Vec<String> {
    let header = read("include/instep.h");
    let mut found = Vec::new();
    for line in header.lines().filter(|line| !line.starts_with([' ', '*', '/', '#'])) {
        if let Some((before, _)) = line.split_once('(')
            && let Some(name) =
                before.split([' ', '*']).next_back().filter(|name| name.starts_with("instep_"))
        {
            found.push(name.to_owned());
        }
    }
    assert!(found.len() > 30, "the scan finds functions: {found:?}");
    found
}

#[test]
fn every_function_of_the_header_is_called_by_a_program() {
    let programs: String = programs().iter().map(read).collect();
    let words: std::collections::HashSet<&str> =
        programs.split(|c: char| !(c.is_alphanumeric() || c == '_')).collect();
    for function in functions() {
        assert!(words.contains(&*function), "no program calls {function}");
    }
}

#[test]
fn every_function_says_which_threads_may_call_it() {
    let header = read("include/instep.h");
    for function in functions() {
        let at = header.find(&format!("{function}(")).unwrap();
        let comment = &header[header[..at].rfind("/*").unwrap()..at];
        assert!(
            comment.to_lowercase().contains("any thread"),
            "{function} does not say on which threads it may run"
        );
    }
}
