//! Link options of the shared library.
//!
//! The library is never unloaded, because its threads may still run. Its soname has the version that programs link to.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system == "linux") {
        let version = |part| env::var(format!("CARGO_PKG_VERSION_{part}")).unwrap_or_default();
        let (major, minor) = (version("MAJOR"), version("MINOR"));
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libinstep.so.{major}.{minor}");
    }
}
