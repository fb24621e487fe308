//! Compares the header, the C programs and the page about C (`docs/c.md`) with each other.
//!
//! `check.sh` compiles the programs and runs them; these tests need no C compiler.

#![allow(clippy::unwrap_used)] // A test that meets an error fails.

mod calls;
mod header;
mod page;

use std::fs;
use std::path::{Path, PathBuf};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn read(path: impl AsRef<Path>) -> String {
    let path = Path::new(ROOT).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The C and C++ programs.
fn programs() -> Vec<PathBuf> {
    let folders = ["examples", "tests"].map(|folder| Path::new(ROOT).join(folder));
    let entries = folders.iter().flat_map(|folder| fs::read_dir(folder).unwrap());
    let paths = entries.map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = paths
        .filter(|path| path.extension().is_some_and(|e| ["c", "cpp", "h"].iter().any(|x| e == *x)))
        .collect();
    found.sort();
    assert!(found.len() > 5, "the scan finds programs");
    found
}
