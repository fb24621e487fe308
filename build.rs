//! Compiles the CPU kernels once per instruction set, which needs only a C++17 compiler. `build/cuda.rs` compiles the
//! GPU kernels if feature `cuda` is on.
//!
//! The compiler flags implement the numerics contract (ARCHITECTURE.md, "Bits"): no FMA contraction and no fast-math.
//! Debug builds optimise the kernels too, because unoptimised helpers would be slow and not inlined. This script never
//! probes the build machine's CPU: the library chooses between the builds at run time.

use std::path::Path;
use std::{env, fs};

#[path = "build/cuda.rs"]
mod cuda;

/// The name of each build and of its exported table, and the flags that select its instruction set.
const X86_64_BUILDS: [(&str, &[&str]); 3] = [
    ("baseline", &[]),
    ("avx2", &["-mavx2"]),
    // -mavx512f alone lacks the byte, word and 256-bit forms, and -march alone prefers 256-bit vectors.
    ("avx512", &["-march=x86-64-v4", "-mprefer-vector-width=512"]),
];
const PORTABLE_BUILDS: [(&str, &[&str]); 1] = [("baseline", &[])];

fn main() {
    println!("cargo::rerun-if-changed=kernels");
    let target = |key: &str| env::var(format!("CARGO_CFG_TARGET_{key}")).unwrap_or_default();
    if target("ENV") == "msvc" {
        panic!("instep: MSVC is not supported; use the x86_64-pc-windows-gnu target");
    }
    let builds: &[(&str, &[&str])] = match target("ARCH").as_str() {
        "x86_64" => &X86_64_BUILDS,
        "aarch64" => &PORTABLE_BUILDS,
        other => panic!("instep: no kernels for {other}; x86_64 and aarch64 are supported"),
    };
    if let Some(missing) = missing_compiler() {
        println!("cargo::error={missing}");
        return;
    }
    let out = env::var("OUT_DIR").unwrap_or_default();
    cuda::build(Path::new(&out)); // first: it may refuse what the environment asks for
    // In parallel: each takes as long as the rest of the crate.
    std::thread::scope(|scope| {
        for (name, flags) in builds {
            let folder = Path::new(&out).join(name);
            scope.spawn(move || compile(name, flags, &folder));
        }
    });
    // The object tests inspect the compiled kernels.
    println!("cargo::rustc-env=INSTEP_KERNEL_OBJECTS={out}");
}

/// If no C++ compiler starts, returns a message that says what to install. The crate `cc` would name the missing
/// program, but would not say how to install one.
fn missing_compiler() -> Option<String> {
    let tool = cc::Build::new().cpp(true).cargo_warnings(false).try_get_compiler();
    let name = tool.as_ref().map_or("c++".into(), |tool| tool.path().to_string_lossy().into_owned());
    let starts =
        |tool: cc::Tool| tool.to_command().arg("--version").output().is_ok_and(|o| o.status.success());
    (!tool.is_ok_and(starts)).then(|| {
        format!("instep needs a C++17 compiler, but {name} does not start; install g++ or clang++, or set CXX to one")
    })
}

/// Compiles one build into its own folder, because the object files of all builds have the same names.
fn compile(name: &str, flags: &[&str], out: &Path) {
    fs::create_dir_all(out).unwrap_or_else(|e| panic!("instep: {}: {e}", out.display()));
    let mut build = cc::Build::new();
    build.out_dir(out);
    build.cpp(true).std("c++17").file("kernels/cpu/kernels.cpp").include("kernels").warnings(true);
    build.define("INSTEP_KERNELS", format!("instep_kernels_{name}").as_str());
    // No C++ runtime: nothing throws, nothing allocates.
    build.cpp_link_stdlib(None).flag("-fno-exceptions").flag("-fno-rtti");
    build.opt_level(3).flags(flags);
    // A switch must list every dtype, or a new one would be converted as another.
    build.flag("-Werror=switch");
    build.flag("-ffp-contract=off").flag("-fno-math-errno").flag("-fno-trapping-math");
    build.compile(&format!("instep_{name}"));
}
