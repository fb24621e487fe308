//! The calls into NVIDIA's libraries go to libraries that these tests compile: old, new, incomplete, failing.
//!
//! `INSTEP_CUDA` and `INSTEP_NCCL` hold their paths. A process loads a library once, so each test starts itself again
//! in a separate process. The tests need no GPU. This is a separate binary, because only feature `cuda` loads
//! libraries.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, unsafe_code)]

mod driver;
mod nccl;

use std::path::{Path, PathBuf};
use std::process::Command;

/// The environment variable that names the test whose body a process runs.
const ALONE: &str = "INSTEP_TEST_ALONE";

/// Compiles a library from a file of this folder.
fn compile(source: &str, defines: &[&str], folder: &Path) -> PathBuf {
    let library = folder.join(format!("lib{source}")).with_extension("so");
    let name = library.file_name().unwrap().to_str().unwrap();
    compile_as(name, source, defines, &library);
    library
}

/// Compiles a library into a file, with a name inside it (its soname), by which cudarc finds a driver that was opened
/// from any path.
fn compile_as(name: &str, source: &str, defines: &[&str], library: &Path) {
    // As in `CC="ccache gcc"`.
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut words = compiler.split_whitespace();
    let mut command = Command::new(words.next().expect("CC names a compiler"));
    command.args(words).args(["-shared", "-fPIC", "-o"]).arg(library).arg(format!("-Wl,-soname,{name}"));
    command.args(defines.iter().map(|define| format!("-D{define}")));
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/libraries").join(source));
    let done = command.output().unwrap_or_else(|error| panic!("{compiler} does not start: {error}"));
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// Runs the body of a test in a separate process; `prepare` fills a folder and returns environment variables.
fn alone<Body: FnOnce()>(prepare: impl FnOnce(&Path) -> Vec<(&'static str, PathBuf)>, body: Body) {
    // The closure's path is crate, module, test and "{{closure}}".
    let path = std::any::type_name::<Body>();
    let (test, _) = path.split_once("::").and_then(|(_, rest)| rest.split_once("::{{")).expect(path);
    if std::env::var(ALONE).as_deref() == Ok(test) {
        return body();
    }
    let folder = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).env(ALONE, test).envs(prepare(folder.path()));
    let done = child.output().unwrap();
    let said = [&done.stdout, &done.stderr].map(|text| String::from_utf8_lossy(text).into_owned()).concat();
    assert!(done.status.success() && said.contains(" 1 passed"), "{said}");
}
