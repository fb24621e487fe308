//! Tests that the header is what cbindgen generates from the current sources.
//!
//! `UPDATE=1` writes it.

use std::fs;
use std::path::Path;

use crate::{ROOT, read};

#[test]
fn the_header_is_that_of_the_sources() {
    let config = cbindgen::Config::from_file(Path::new(ROOT).join("cbindgen.toml")).unwrap();
    let bindings = cbindgen::Builder::new().with_config(config).with_crate(ROOT).generate().unwrap();
    let mut made = Vec::new();
    bindings.write(&mut made);
    let made = String::from_utf8(made).unwrap();
    let path = Path::new(ROOT).join("include/instep.h");
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&path, &made).unwrap();
    }
    assert!(read("include/instep.h") == made, "stale: run UPDATE=1 cargo test -p instep-capi header");
}
