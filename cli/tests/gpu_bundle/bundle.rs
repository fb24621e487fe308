//! A bundle as scripts/gpu-bundle.sh packs it, with stand-ins for every program that needs a GPU.
//!
//! `instep` is this test binary on the stand-in driver. A few lines of shell or Python stand in for each of the tests,
//! `cuda_ddp`, NVIDIA's tools, PyTorch's script and the Python package's programs. run.sh, results.sh and rows.py are
//! the real ones.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use clap::Parser;
use instep::cuda::Cuda;
use instep_cli::bench;

use crate::support::Folder;
use crate::support::stand_in::{FOREIGN, StandIn};

/// Runs in the middle of a stage. If `DRY_HOLD` names the stage, reports that the stage has reached this point, and
/// waits to be killed.
const HOLD: &str = r#"
if [ "$(basename "$RESULTS")" = "$DRY_HOLD" ]; then
    touch "$DRY_HELD"
    exec sleep 1000
fi
"#;

const TESTS: &str = r#"#!/bin/sh
case "$*" in *--list*) echo "one: test"; exit ;; esac
echo "running 1 test"
HOLD
echo "test one ... ok"
"#;

/// Stands in for a tool that takes a command after its options and runs the command.
const TOOL: &str = r#"#!/bin/sh
while [ "${1#./}" = "$1" ]; do shift; done
exec "$@"
"#;

const SMI: &str = r#"#!/bin/sh
case "$*" in
    *-lms*) echo timestamp; exec sleep 1000 ;;
    *) echo "stand-in, 1.0, 0.0" ;;
esac
"#;

/// Stands in for Nsight Compute, which runs a program and exports a report, or prints an exported report.
const NCU: &str = r#"#!/bin/sh
case "$*" in *--import*) echo "a kernel"; HOLD exit ;; esac
while [ "${1#./}" = "$1" ]; do
    [ "$1" != --export ] || echo report >"$2.ncu-rep"
    shift
done
exec "$@"
"#;

const TORCH: &str = r##"
import os, pathlib, sys, time
from rows import Rows
rows = Rows(pathlib.Path(sys.argv[sys.argv.index("--csv") + 1]), ["# stand-in", "candidate"])
for k in range(3):
    rows.put(k, [f"row {k}"])
    if k == 1 and os.path.basename(os.environ["RESULTS"]) == os.environ.get("DRY_HOLD"):
        pathlib.Path(os.environ["DRY_HELD"]).touch()
        time.sleep(1000)
"##;

/// Stands in for a program of the Python package, and checks that the package and its native half are there.
const PYTHON: &str = r##"
import os, pathlib, time
package = pathlib.Path(os.environ["PYTHONPATH"])
assert package == pathlib.Path(__file__).parents[1] and os.environ["WORLD_SIZE"] == "1"
assert (package / "instep/_native.abi3.so").read_bytes() == b""
if os.path.basename(os.environ["RESULTS"]) == os.environ.get("DRY_HOLD"):
    pathlib.Path(os.environ["DRY_HELD"]).touch()
    time.sleep(1000)
"##;

/// An empty file, compressed by xz.
const EMPTY_XZ: &[u8] = b"\xfd7zXZ\0\0\x04\xe6\xd6\xb4F\0\0\0\0\x1c\xdfD!\x1f\xb6\xf3}\x01\0\0\0\0\x04YZ";

/// A folder like that of a bundle, with `out` as $OUT and NVIDIA's tools in `bin`.
pub(super) struct Bundle {
    folder: Folder,
}

impl Bundle {
    pub(super) fn new() -> Bundle {
        let bundle = Bundle { folder: Folder::new() };
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches");
        for name in ["gpu/run.sh", "gpu/results.sh", "peers/rows.py"] {
            let path = root.join(name);
            fs::copy(&path, bundle.path(path.file_name().unwrap().to_str().unwrap())).unwrap();
        }
        let instep = format!(
            "#!/bin/sh\nif [ \"$1\" = info ]; then\n    echo 'GPU kernels: stand-in'\n{HOLD}    exit\nfi\n\
             shift\nDRY_WORDS=\"$*\" exec {:?} gpu_bundle::instep_of_the_dry_run --exact --ignored --nocapture\n",
            std::env::current_exe().unwrap()
        );
        fs::create_dir(bundle.path("bin")).unwrap();
        bundle.write("instep", &instep);
        bundle.write("tests", &TESTS.replace("HOLD", HOLD));
        bundle.write("cuda_ddp", &format!("#!/bin/sh\n{HOLD}"));
        bundle.write("bin/compute-sanitizer", TOOL);
        bundle.write("bin/ncu", &NCU.replace("HOLD", HOLD));
        bundle.write("bin/nvidia-smi", SMI);
        bundle.write("torch_gpu.py", TORCH);
        for name in ["instep", "benches", "tests"] {
            fs::create_dir_all(bundle.path("python").join(name)).unwrap();
        }
        for name in ["benches/buckets.py", "benches/offload.py", "benches/training.py", "tests/on_device.py"]
        {
            bundle.write(&format!("python/{name}"), PYTHON);
        }
        fs::write(bundle.path("python/instep/_native.abi3.so.xz"), EMPTY_XZ).unwrap();
        bundle.write("commit", "0123456789ab\n");
        fs::write(bundle.path("bench-kernels.fatbin"), FOREIGN).unwrap();
        bundle
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path(name)
    }

    pub(super) fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    /// Writes a program.
    pub(super) fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Makes a program's file not executable.
    pub(super) fn forget_mode(&self, name: &str) {
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(0o644)).unwrap();
    }

    pub(super) fn remove(&self, name: &str) {
        fs::remove_file(self.path(name)).unwrap();
    }

    /// Returns a command that runs `run.sh` with these arguments.
    pub(super) fn command(&self, words: &[&str]) -> Command {
        // The run gets its own session, by which its processes are found, because `timeout` gives each stage another
        // process group. `setsid` forks only if its process leads a group. A test's child leads none, so the session
        // has the child's id.
        let mut command = Command::new("setsid");
        let path = format!("{}:{}", self.path("bin").display(), std::env::var("PATH").unwrap());
        command.arg("bash").arg(self.path("run.sh")).args(words);
        command.env("OUT", self.path("out")).env("PATH", path).env("INSTEP_NCCL", "none");
        command.env_remove("DRY_HOLD").env_remove("INSTEP_BENCH_KERNELS");
        command
    }

    /// Starts run.sh, waits until this stage has reached its middle, and kills every process of the run.
    pub(super) fn kill_in(&self, stage: &str) {
        let held = self.path("held");
        let mut command = self.command(&[]);
        command.env("DRY_HOLD", stage).env("DRY_HELD", &held).stdout(Stdio::null()).stderr(Stdio::null());
        let mut run = command.spawn().unwrap();
        while !held.exists() {
            assert!(run.try_wait().unwrap().is_none(), "run.sh ended before {stage}");
            std::thread::sleep(Duration::from_millis(5));
        }
        let session = run.id().to_string();
        // Again and again, until none is left that could start another.
        loop {
            let left = processes_of(&session);
            if left.is_empty() {
                break;
            }
            let _ = Command::new("kill").arg("-KILL").args(&left).stderr(Stdio::null()).status();
            std::thread::sleep(Duration::from_millis(5));
        }
        run.wait().unwrap();
        fs::remove_file(held).unwrap();
    }

    /// The files of the archive.
    pub(super) fn archived(&self) -> BTreeMap<String, Vec<u8>> {
        let folder = Folder::new();
        let mut unpack = Command::new("tar");
        unpack.arg("-xzf").arg(self.path("out/results.tar.gz")).arg("-C").arg(folder.path(""));
        assert!(unpack.status().unwrap().success(), "the archive is readable");
        let mut found = BTreeMap::new();
        for stage in fs::read_dir(folder.path("")).unwrap().map(|entry| entry.unwrap()) {
            for file in fs::read_dir(stage.path()).unwrap().map(|entry| entry.unwrap()) {
                let mut bytes = Vec::new();
                fs::File::open(file.path()).unwrap().read_to_end(&mut bytes).unwrap();
                let name = |entry: &fs::DirEntry| entry.file_name().into_string().unwrap();
                found.insert(format!("{}/{}", name(&stage), name(&file)), bytes);
            }
        }
        found
    }

    /// All files below `out`.
    pub(super) fn files_left(&self) -> Vec<PathBuf> {
        let (mut folders, mut files) = (vec![self.path("out")], Vec::new());
        while let Some(folder) = folders.pop() {
            for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
                if path.is_dir() { folders.push(path) } else { files.push(path) }
            }
        }
        files
    }

    /// Returns whether this stage writes each row as soon as it is measured.
    pub(super) fn is_measured(&self, stage: &str) -> bool {
        let text = String::from_utf8(self.read("run.sh")).unwrap();
        let body = text.split_once(&format!("\nrun_{stage}() {{")).unwrap().1.split("\n}").next().unwrap();
        let body = body.lines().take_while(|line| !line.starts_with("run_")).collect::<String>();
        ["step ", "bench ", "torch"].iter().any(|word| body.trim_start().starts_with(word))
    }
}

/// Returns the fields that follow the process's name in /proc/PID/stat: state, parent, group, session, and so on.
fn status_of(process: &str) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    Some(text.rsplit_once(") ")?.1.split(' ').map(str::to_owned).collect())
}

fn processes() -> impl Iterator<Item = String> {
    let entries =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    entries.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
}

fn processes_of(session: &str) -> Vec<String> {
    let is_alive = |status: &[String]| status[3] == session && status[0] != "Z";
    processes().filter(|p| status_of(p).is_some_and(|status| is_alive(&status))).collect()
}

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    bench: bench::Arguments,
}

/// Runs the bench with the arguments in `DRY_WORDS`, but with smaller sizes. Does nothing if `DRY_WORDS` is not set.
pub(super) fn run_bench() {
    let Ok(words) = std::env::var("DRY_WORDS") else { return };
    let words = words.replace("64M", "32K").replace("32M", "16K").replace("256M", "64K").replace("4M", "16K");
    let mut words: Vec<&str> = ["bench"].into_iter().chain(words.split(' ')).collect();
    if !words.contains(&"--quick") {
        words.push("--quick");
    }
    let device = words.iter().position(|word| *word == "--device").unwrap();
    words.drain(device..device + 2);
    let is_sweep = words.iter().any(|word| word.starts_with("step") || word.starts_with("norm"));
    for (name, value) in [("-b", "16K"), ("-e", "128K")] {
        if is_sweep && !words.contains(&name) {
            words.extend([name, value]);
        }
    }
    let results = PathBuf::from(std::env::var_os("RESULTS").unwrap());
    let is_held = std::env::var_os("DRY_HOLD").as_deref() == results.file_name();
    let driver = StandIn::with_gate(move || {
        let has_rows = fs::read_dir(&results).unwrap().any(|entry| {
            let path = entry.unwrap().path();
            path.extension().is_some_and(|extension| extension == "json")
        });
        if is_held && has_rows {
            fs::write(std::env::var_os("DRY_HELD").unwrap(), "").unwrap();
            std::thread::sleep(Duration::from_secs(1000));
        }
    });
    let line = Line::try_parse_from(words).unwrap();
    bench::run_on_gpu(&line.bench, &Cuda::on(driver)).unwrap();
}
