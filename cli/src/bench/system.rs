//! Reads facts about the system, and replaces files atomically.
//!
//! A fact that the system does not report is empty or unknown here. A missing fact is never an error, because no bench
//! depends on it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

/// Writes a file, and creates its folder if necessary. The file is written under another name and renamed, so a reader
/// never sees an incomplete file, even if this process is killed.
pub(super) fn write(path: &Path, text: &str) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let beside = path.with_file_name(name);
    fs::write(&beside, text)?;
    fs::rename(&beside, path)
}

/// Returns the path of this CPU's record in the source tree.
pub(super) fn path_of_this_machine() -> PathBuf {
    folder_of(&cpu_model()).join("host.csv")
}

/// Returns the folder of a processor's records in the source tree.
pub(super) fn folder_of(processor: &str) -> PathBuf {
    let words = processor.to_lowercase();
    let words =
        words.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty() && *word != "r");
    let folder = words.collect::<Vec<_>>().join("-");
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/record").join(folder)
}

/// Returns the commit of the source tree of this build.
pub(super) fn commit() -> String {
    first_line("git", &["-C", env!("CARGO_MANIFEST_DIR"), "describe", "--always", "--dirty"])
}

/// Returns the processor's name, with family and model. Family and model are added, because on a virtual machine the
/// name alone may not show the processor's generation.
pub(super) fn cpu_model() -> String {
    let text = read("/proc/cpuinfo");
    let field = |name: &str| {
        let of =
            |line: &str| Some(line.strip_prefix(name)?.trim_start().strip_prefix(':')?.trim().to_owned());
        text.lines().find_map(of)
    };
    let Some(name) = field("model name") else { return std::env::consts::ARCH.to_owned() };
    match (field("cpu family"), field("model")) {
        (Some(family), Some(model)) => format!("{name}, family {family} model {model}"),
        _ => name,
    }
}

/// Returns the size of the largest cache that the system reports, or 32 MiB if it reports none.
pub(super) fn last_level_cache_bytes() -> u64 {
    let size = |level: u32| {
        let text = read(&format!("/sys/devices/system/cpu/cpu0/cache/index{level}/size"));
        Some(text.trim().strip_suffix('K')?.parse::<u64>().ok()? << 10)
    };
    (0..5).filter_map(size).max().unwrap_or(32 << 20)
}

/// Returns the number of bytes that programs can still allocate, if the system reports it.
pub(crate) fn available_bytes() -> Option<u64> {
    let text = read("/proc/meminfo");
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

pub(super) fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

pub(super) fn first_line(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.lines().next().unwrap_or("unknown").to_owned()
}
