//! Writes text or one JSON object to standard output.
//!
//! A closed pipe is not an error here, but `println!` would panic on it.

use std::io::{self, Write};

use serde::Serialize;

use crate::Failure;

/// Writes to standard output, and ignores a closed pipe.
///
/// # Errors
/// `File` if the output cannot be written for a reason other than a closed pipe.
pub fn print(text: &str) -> Result<(), Failure> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::File { what: "standard output".into(), error })
        }
        _ => Ok(()),
    }
}

/// Writes to standard output and adds a line break.
///
/// # Errors
/// Errors as for [`print()`].
pub fn print_line(text: &str) -> Result<(), Failure> {
    print(&format!("{text}\n"))
}

/// Writes one JSON object to standard output.
///
/// # Errors
/// Errors as for [`print()`].
pub fn print_json(report: &impl Serialize) -> Result<(), Failure> {
    let failed =
        |error: serde_json::Error| Failure::File { what: "standard output".into(), error: error.into() };
    print(&(serde_json::to_string_pretty(report).map_err(failed)? + "\n"))
}
