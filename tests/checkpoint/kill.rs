//! Runs are killed in the middle of a save: at any moment, the last complete checkpoint loads.
//!
//! A child process saves generation after generation until a signal kills it. The signal comes at an exact byte of the
//! file, through the system's limit on file sizes, or at a random moment. The random moments adapt to the last kills,
//! so that some come before the renaming and some after it, on any machine.

use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use instep::checkpoint::{self, Extras, Scalar};
use instep::{Adam, Layout, Solo, Stepper};
use tempfile::TempDir;

use crate::checkpoint::round_trip::names;

/// Number of places in the file at which a child is killed.
const KILLS_AT_A_BYTE: u64 = 20;

/// Number of kills at random moments on each side of the renaming; a limit holds for all together.
const KILLS_ON_EACH_SIDE: usize = 20;
const MOST_KILLS: usize = 1000;

const ELEMENTS: usize = 1 << 18;

const FOLDER: &str = "INSTEP_TEST_FOLDER";

const SIGKILL: i32 = 9;
const SIGXFSZ: i32 = 25;

const FILE: &str = "last.safetensors";

fn stepper() -> Stepper {
    let layout = Layout::builder().param("a", ELEMENTS - 5).param("b", 5).build().unwrap();
    Stepper::host(&layout, Adam::default(), Solo::default()).unwrap()
}

/// Fills every tensor with the generation's number and saves.
fn save(stepper: &mut Stepper, generation: u64, path: &Path) {
    let layout = stepper.layout().clone();
    for id in layout.ids() {
        stepper.view_mut::<f32>(id).unwrap().fill(generation as f32);
        for name in ["exp_avg", "exp_avg_sq"] {
            stepper.view_mut::<f32>(id.state(name)).unwrap().fill(generation as f32);
        }
        stepper.set_step_count(id, generation).unwrap();
    }
    println!("saving {generation}");
    let scalars = [("generation".to_owned(), Scalar::U64(generation))].into();
    checkpoint::save_with(stepper, &Extras { scalars, ..Extras::default() }, path).unwrap();
}

/// Loads a checkpoint, asserts that all values belong to one generation, and returns it.
fn generation(stepper: &mut Stepper, path: &Path) -> u64 {
    let extras = checkpoint::load(stepper, path).unwrap();
    let Scalar::U64(generation) = extras.scalars["generation"] else { panic!("{extras:?}") };
    let layout = stepper.layout().clone();
    for id in layout.ids() {
        let value = stepper.view::<f32>(id).unwrap();
        let states = ["exp_avg", "exp_avg_sq"].map(|name| stepper.view::<f32>(id.state(name)).unwrap());
        let all = [value, states[0], states[1]].concat();
        assert!(all.iter().all(|x| *x == generation as f32), "a mixture of generations");
        assert_eq!(stepper.step_count(id).unwrap(), generation);
    }
    generation
}

/// This test is the child process that is killed.
#[test]
#[ignore = "tests/checkpoint/kill.rs starts it: a process of its own that is killed while it saves"]
fn saves_until_it_is_killed() {
    let folder = std::env::var_os(FOLDER).expect("a folder, which the test below names");
    let path = Path::new(&folder).join(FILE);
    let mut stepper = stepper();
    let mut last = generation(&mut stepper, &path);
    loop {
        last += 1;
        save(&mut stepper, last, &path);
    }
}

/// A child process, which is killed when the test ends.
struct Saving(Child);

impl Drop for Saving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The way in which a child ends.
#[derive(Clone, Copy, Debug)]
enum End {
    /// A file that grows beyond this number of KiB causes SIGXFSZ. Its default action ends the process like SIGKILL.
    AtKib(u64),
    /// SIGKILL comes this long after the child's first save began.
    After(Duration),
}

/// Starts a child, ends it, and returns the last generation that it began to save.
fn kill_one(folder: &Path, end: End) -> u64 {
    let tests = std::env::current_exe().unwrap();
    let mut command = match end {
        End::AtKib(kib) => {
            let mut shell = Command::new("bash");
            let limited = format!("ulimit -c 0; ulimit -f {kib}; exec \"$@\"");
            shell.args(["-c", &limited, "bash"]).arg(tests);
            shell
        }
        End::After(_) => Command::new(tests),
    };
    command.args(["--exact", "checkpoint::kill::saves_until_it_is_killed", "--ignored", "--nocapture"]);
    let mut child = Saving(command.env(FOLDER, folder).stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    let begun = |line: String| line.rsplit_once("saving ").and_then(|(_, number)| number.parse().ok());
    let first: u64 = lines.by_ref().find_map(|line| begun(line.unwrap())).expect("the child saves");
    if let End::After(delay) = end {
        std::thread::sleep(delay);
        child.0.kill().unwrap();
    }
    let status = child.0.wait().unwrap();
    let signal = std::os::unix::process::ExitStatusExt::signal(&status);
    assert_eq!(signal, Some(if let End::AtKib(_) = end { SIGXFSZ } else { SIGKILL }), "{status}");
    lines.filter_map(|line| begun(line.ok()?)).last().unwrap_or(first)
}

/// The file that the children write, with a stepper that loads it.
struct Target {
    folder: TempDir,
    stepper: Stepper,
    last: u64,
}

impl Target {
    fn new() -> Self {
        let (folder, mut stepper) = (tempfile::tempdir().unwrap(), stepper());
        save(&mut stepper, 1, &folder.path().join(FILE));
        Target { folder, stepper, last: 1 }
    }

    fn whole_bytes(&self) -> u64 {
        fs::metadata(self.folder.path().join(FILE)).unwrap().len()
    }

    /// Ends a child, asserts that one complete generation is in the file, and returns the length of the unfinished
    /// file.
    fn kill(&mut self, end: End) -> Option<u64> {
        let begun = kill_one(self.folder.path(), end);
        let now = generation(&mut self.stepper, &self.folder.path().join(FILE));
        assert!((begun - 1..=begun).contains(&now), "{end:?}: {now} is there, and {begun} was being saved");
        assert!(now >= self.last, "{end:?}: generation {now} is there, after {}", self.last);
        self.last = now;
        // At most the last run's leftover is there, whatever the others left.
        let mut leftovers = names(self.folder.path());
        leftovers.retain(|name| name != FILE);
        assert!(leftovers.len() <= 1, "{leftovers:?}");
        leftovers.first().map(|name| fs::metadata(self.folder.path().join(name)).unwrap().len())
    }
}

#[test]
fn a_run_killed_at_any_byte_of_the_file_leaves_the_last_whole_checkpoint() {
    let mut target = Target::new();
    let whole_kib = (target.whole_bytes() - 1) / 1024;
    for kill in 0..KILLS_AT_A_BYTE {
        // The first and the last whole KiB, and places between.
        let kib = 1 + kill * (whole_kib - 1) / (KILLS_AT_A_BYTE - 1);
        assert_eq!(target.kill(End::AtKib(kib)), Some(kib * 1024), "what is left is written up to the limit");
        assert_eq!(target.last, 1, "no save was finished");
    }
}

#[test]
fn a_run_killed_at_any_moment_leaves_the_last_whole_checkpoint() {
    let mut target = Target::new();
    let random = RandomState::new();
    let (mut span, mut before, mut after, mut kills) = (Duration::from_millis(20), 0, 0, 0);
    while before < KILLS_ON_EACH_SIDE || after < KILLS_ON_EACH_SIDE {
        assert!(kills < MOST_KILLS, "{before} kills came before the renaming, {after} after it");
        kills += 1;
        let share = random.hash_one(kills) as f64 / u64::MAX as f64;
        let was = target.last;
        target.kill(End::After(span.mul_f64(share)));
        if target.last == was {
            before += 1;
            span = span.mul_f64(1.2).min(Duration::from_secs(1));
        } else {
            after += 1;
            span = span.mul_f64(0.8);
        }
    }
    println!(
        "{before} kills came before the first renaming, {after} after it; generation {} is there",
        target.last
    );
}
