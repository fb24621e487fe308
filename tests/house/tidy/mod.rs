//! House rules as tests: the size of the interface, layers, unsafe files, file lengths, optimizers, documents.
//!
//! They read the source files as text and use only std, so this folder also compiles separately: `rustc --edition 2024
//! --test tests/house/tidy/mod.rs`, with CARGO_MANIFEST_DIR set to the root.

mod api_size;
mod documents;
mod files;
mod import_graph;
mod layers;
mod optimizers;
mod turns;
mod unsafe_code;

use std::fs;
use std::path::{Path, PathBuf};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// `cargo run -p bindings` writes these files, which are as long and as terse as their header. The header of the C
/// library is generated too.
pub(crate) const GENERATED: [&str; 5] = [
    "src/abi.rs",
    "src/cuda/nccl/bindings.rs",
    "capi/include/instep.h",
    "tools/software-gpu/src/header.rs",
    "tools/software-gpu/nccl/src/header.rs",
];

pub(crate) fn files(under: &str, extensions: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![Path::new(ROOT).join(under)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if extensions.iter().any(|x| path.extension().is_some_and(|e| e == *x)) {
                found.push(path);
            }
        }
    }
    assert!(!found.is_empty(), "{under} is empty");
    found.sort();
    found
}

pub(crate) fn name(path: &Path) -> String {
    path.strip_prefix(ROOT).unwrap().to_string_lossy().replace('\\', "/")
}

pub(crate) fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

pub(crate) fn code_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//"))
}
