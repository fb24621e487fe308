//! Gives the driver's library the soname that cudarc looks for.
//!
//! A program may then open the file from any path before cudarc asks for that name.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
}
