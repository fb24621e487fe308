//! Gives the driver's library the name inside that cudarc looks for, so that programs may open the file from any path.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
}
