//! Describes the machine and the build with which figures were measured. The benches print the description before the
//! tables, and also write it into the JSON report.
//!
//! The description contains no name of a user and no path. A fact that the system does not report is left out, or has a
//! placeholder such as null, 0 or `unknown`.

use std::fmt;
use std::fs;

use instep::{Isa, Pool};
use serde::Serialize;

use super::system;

/// This machine, and this build of the library.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Machine {
    /// Name, family and model of the processor.
    pub(super) cpu: String,
    /// The number of cores that this process may use.
    cores: usize,
    /// The number of a stepper's kernel threads, if no option sets this number.
    kernel_threads: usize,
    caches: Vec<CacheSize>,
    /// The frequency governor of the first core; null if the system does not report it.
    governor: Option<String>,
    /// Instruction sets that both this build and the processor have.
    isa_available: Vec<&'static str>,
    /// Version of the library.
    version: &'static str,
    /// `release` or `debug`.
    build: &'static str,
    /// The commit of the source tree; `unknown` if there is no source tree or no git.
    commit: String,
}

/// One cache of the first core.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct CacheSize {
    /// The name, such as `L1d` or `L2`.
    name: String,
    bytes: u64,
}

impl Machine {
    pub(super) fn this() -> instep::Result<Machine> {
        let governor = fs::read_to_string("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
        Ok(Machine {
            cpu: system::cpu_model(),
            cores: std::thread::available_parallelism().map_or(0, |n| n.get()),
            kernel_threads: Pool::from_environment()?.threads(),
            caches: caches(),
            governor: governor.ok().map(|text| text.trim().to_owned()),
            isa_available: Isa::available().into_iter().map(Isa::name).collect(),
            version: env!("CARGO_PKG_VERSION"),
            build: if cfg!(debug_assertions) { "debug" } else { "release" },
            commit: system::commit(),
        })
    }
}

fn caches() -> Vec<CacheSize> {
    let cache = |index: u32| {
        let read = |file: &str| {
            let text = fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{file}"));
            text.ok().map(|text| text.trim().to_owned())
        };
        let kind = match read("type")?.as_str() {
            "Data" => "d",
            "Instruction" => "i",
            _ => "",
        };
        let bytes = read("size")?.strip_suffix('K')?.parse::<u64>().ok()? << 10;
        Some(CacheSize { name: format!("L{}{kind}", read("level")?), bytes })
    };
    (0..8).map_while(cache).collect()
}

/// Writes two lines that begin with `#`.
impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { cpu, cores, kernel_threads, caches, governor, .. } = self;
        let Machine { isa_available, version, build, commit, .. } = self;
        let caches = caches.iter().map(|CacheSize { name, bytes }| match bytes {
            0..1_048_576 => format!(", {name} {} KiB", bytes >> 10),
            _ => format!(", {name} {} MiB", bytes >> 20),
        });
        let caches: String = caches.collect();
        let governor = governor.as_ref().map_or(String::new(), |governor| format!(", governor {governor}"));
        writeln!(f, "# {cpu}, {cores} cores, {kernel_threads} kernel threads{caches}{governor}")?;
        let isas = isa_available.join(", ");
        write!(f, "# instep {version}, commit {commit}, {build} build, kernels for {isas}")
    }
}
