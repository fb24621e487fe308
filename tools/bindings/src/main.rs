//! Writes `src/abi.rs` from `kernels/abi.h`; with `--check`, compares instead and fails on a difference.
//!
//! The only place that needs libclang, which is why the output is checked in. Must not be edited by hand: the
//! header is the source, and `cargo run -p bindings` the way to change it.

use std::{env, fs, path::Path, process::ExitCode};

const HEADER: &str = "\
//! Structs and constants that cross the C boundary, generated from `kernels/abi.h`.
//!
//! Written by `cargo run -p bindings`; must not be edited by hand. Plain data only; the static assertions
//! below each struct are the compiler's word that its layout is the C side's.
#![allow(missing_docs, non_camel_case_types, non_upper_case_globals, unreachable_pub, clippy::all)]";

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let generated = bindgen::Builder::default()
        .header(root.join("kernels/abi.h").display().to_string())
        .allowlist_item("(Instep|INSTEP_).*")
        .blocklist_item("InstepLayoutRow|INSTEP_ABI_H")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .derive_default(false)
        .layout_tests(true)
        .use_core()
        .raw_line(HEADER)
        .disable_header_comment()
        .generate();
    let text = match generated {
        Ok(bindings) => bindings.to_string(),
        Err(error) => {
            eprintln!("bindgen: {error}");
            return ExitCode::FAILURE;
        }
    };
    let target = root.join("src/abi.rs");
    if env::args().any(|argument| argument == "--check") {
        if fs::read_to_string(&target).is_ok_and(|current| current == text) {
            println!("src/abi.rs is what kernels/abi.h says");
            return ExitCode::SUCCESS;
        }
        eprintln!("src/abi.rs is stale: run `cargo run -p bindings`");
        return ExitCode::FAILURE;
    }
    match fs::write(&target, text) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error}", target.display());
            ExitCode::FAILURE
        }
    }
}
