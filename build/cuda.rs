//! Compiles the GPU kernels into one binary that the crate embeds, if feature `cuda` is on and there is an nvcc.
//!
//! A machine without nvcc is not an error. The crate then builds without GPU kernels, and an error at run time says
//! why. A tool, architecture or file named by NVCC, INSTEP_CUDA_ARCHS or INSTEP_FATBIN must exist, or the build stops.
//! The environment never adds flags: NVCC_APPEND_FLAGS=--use_fast_math would silently break the numerics contract.
#![allow(clippy::expect_used)] // a build script has nobody to return an error to

use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::{env, fs};

/// The compute capabilities to build for, and the compiler flags of the numerics contract. `scripts/compiler-lane.py`
/// reads both files.
const ARCHITECTURES: &str = include_str!("../kernels/architectures.txt");
const FLAGS: &str = "kernels/nvcc.flags";
const MAGIC: [u8; 4] = [0x50, 0xed, 0x55, 0xba];

/// Writes `kernels.fatbin` to `out`. If there are no kernels, the file is empty, and an environment variable gives the
/// crate the reason.
pub(crate) fn build(out: &Path) {
    let fatbin = out.join("kernels.fatbin");
    let outcome = if env::var_os("CARGO_FEATURE_CUDA").is_some() {
        watch();
        make(&fatbin)
    } else {
        Err("rebuild with `--features cuda`".to_owned())
    };
    let how = outcome.err().unwrap_or_default();
    if !how.is_empty() {
        fs::write(&fatbin, []).expect("OUT_DIR can be written");
    }
    println!("cargo::rustc-env=INSTEP_KERNELS_FATBIN={}", fatbin.display());
    println!("cargo::rustc-env=INSTEP_KERNELS_MISSING={how}");
}

/// Tells cargo which environment variables and files the kernels depend on. If NVCC is an absolute path, PATH affects
/// only nvcc's preprocessor. PATH is then not watched, because editors and pyenv change it, and each change would
/// recompile the crate.
fn watch() {
    for name in ["INSTEP_FATBIN", "INSTEP_CUDA_ARCHS", "NVCC", "NVCC_CCBIN"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    // Cargo takes a variable that is not UTF-8 for one that is not set.
    match env::var("NVCC") {
        Ok(named) if Path::new(&named).is_absolute() => println!("cargo::rerun-if-changed={named}"),
        _ => {
            println!("cargo::rerun-if-env-changed=CUDA_HOME");
            println!("cargo::rerun-if-env-changed=PATH");
        }
    }
}

/// Writes the kernel binary, or returns what the user must do to get one.
fn make(fatbin: &Path) -> Result<(), String> {
    if let Some(prebuilt) = env::var_os("INSTEP_FATBIN").map(PathBuf::from) {
        println!("cargo::rerun-if-changed={}", prebuilt.display());
        let shown = prebuilt.display();
        let bytes = fs::read(&prebuilt)
            .unwrap_or_else(|e| refuse(&format!("INSTEP_FATBIN={shown}: {e} (give an absolute path)")));
        if !bytes.starts_with(&MAGIC) {
            refuse(&format!(
                "INSTEP_FATBIN={shown} is no fatbin; name a kernels.fatbin that a build left in target/"
            ));
        }
        fs::write(fatbin, bytes).expect("OUT_DIR can be written");
        return Ok(());
    }
    let nvcc = match Nvcc::find() {
        Err(how) if env::var_os("INSTEP_CUDA_ARCHS").is_some() => {
            refuse(&format!("INSTEP_CUDA_ARCHS asks for kernels: {how}"))
        }
        found => found?,
    };
    let architectures = nvcc.architectures();
    let oldest = architectures.first().expect("at least one architecture");
    let mut call = nvcc.call(&["-fatbin", "-Xfatbin", "-compress-all", "--threads", "2", "-optf", FLAGS]);
    // One PTX for all, which is assembled for each: the front end takes most of the build. The driver compiles it for
    // other GPUs; it runs on none that is older than its own architecture.
    let machine_codes: String = architectures.iter().map(|code| format!(",sm_{code}")).collect();
    call.arg(format!("-gencode=arch=compute_{oldest},code=[compute_{oldest}{machine_codes}]"));
    let done = call
        .args(["-I", "kernels", "kernels/gpu/kernels.cu"])
        .arg("-o")
        .arg(fatbin)
        .output()
        .expect("nvcc started before");
    if !done.status.success() {
        refuse(&format!("nvcc failed:\n{}", String::from_utf8_lossy(&done.stderr)));
    }
    Ok(())
}

/// Stops the build with lines that cargo shows as errors. After a panic or a nonzero exit status, cargo would print
/// these lines after all other output.
fn refuse(why: &str) -> ! {
    for line in why.lines() {
        println!("cargo::error={line}");
    }
    exit(0)
}

struct Nvcc(PathBuf);

impl Nvcc {
    /// Returns the nvcc that NVCC names, or else the one in CUDA_HOME, or else the one on PATH.
    fn find() -> Result<Nvcc, String> {
        if let Some(named) = env::var_os("NVCC").map(PathBuf::from) {
            let nvcc = Nvcc(named);
            if nvcc.release().is_none() {
                refuse(&format!("NVCC={} is no nvcc that starts; name the program itself", nvcc.0.display()));
            }
            return Ok(nvcc.checked().unwrap_or_else(|how| refuse(&how)));
        }
        let home = env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc"));
        let found = home.into_iter().chain([PathBuf::from("nvcc")]).map(Nvcc).find(|n| n.release().is_some());
        // Asks for NVCC, because cargo notices that it changes. It does not notice a program added to a folder of PATH.
        let how = "name an nvcc of 12.x or 13.x by NVCC and rebuild; scripts/cuda-toolchain.sh installs one";
        found.ok_or(how)?.checked()
    }

    fn checked(self) -> Result<Nvcc, String> {
        let release = self.release().unwrap_or_default();
        match release.split('.').next() {
            Some("12" | "13") => Ok(self),
            _ => Err(format!("found nvcc {release}; name one of 12.x or 13.x by NVCC and rebuild")),
        }
    }

    /// Returns the compiler's release, such as "13.0", or `None` if the compiler does not start.
    fn release(&self) -> Option<String> {
        let text = self.says("--version")?;
        Some(text.split_once("release ")?.1.split(',').next()?.to_owned())
    }

    /// Returns the requested architectures, or those of `architectures.txt` that this compiler supports, oldest first.
    fn architectures(&self) -> Vec<u32> {
        let known = self.says("--list-gpu-code").unwrap_or_default();
        let knows = |code: &u32| known.lines().any(|line| line.trim() == format!("sm_{code}"));
        let asked = env::var("INSTEP_CUDA_ARCHS").ok();
        let numbers =
            asked.as_deref().unwrap_or(ARCHITECTURES).split([' ', ',', '\n']).filter(|n| !n.is_empty());
        let mut codes: Vec<u32> = numbers
            .map(|n| {
                n.parse().unwrap_or_else(|_| refuse(&format!("INSTEP_CUDA_ARCHS: {n} is no number like 90")))
            })
            .collect();
        codes.sort_unstable();
        codes.dedup();
        if asked.is_some() {
            let unknown: Vec<_> = codes.iter().filter(|code| !knows(code)).collect();
            if !unknown.is_empty() {
                refuse(&format!("INSTEP_CUDA_ARCHS: {} does not know {unknown:?}", self.0.display()));
            }
        }
        codes.retain(knows);
        if codes.is_empty() {
            refuse(&format!("INSTEP_CUDA_ARCHS is empty, or {} knows none of ours", self.0.display()));
        }
        codes
    }

    fn says(&self, question: &str) -> Option<String> {
        let done = self.call(&[question]).output().ok().filter(|done| done.status.success())?;
        String::from_utf8(done.stdout).ok()
    }

    fn call(&self, arguments: &[&str]) -> Command {
        let mut call = Command::new(&self.0);
        call.args(arguments).env_remove("NVCC_APPEND_FLAGS").env_remove("NVCC_PREPEND_FLAGS");
        call
    }
}
