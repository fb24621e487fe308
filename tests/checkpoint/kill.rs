//! Runs that are killed in the middle of a save: whenever it happens, the last whole checkpoint loads.
//!
//! A child process saves one generation after the other until it is killed with SIGKILL, 100 times at random moments.
//! Must see that enough of the kills came between the first byte and the renaming, or it has shown nothing.

use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use instep::checkpoint::{self, Extras, Scalar};
use instep::{Adam, Layout, Solo, Stepper};

use crate::checkpoint::round_trip::names;

const KILLS: usize = 100;

/// Of which at least so many must have come before the renaming.
const INTERRUPTED: usize = 25;

/// And of these so many before the last byte was written: others came while the file was flushed.
const HALF_WRITTEN: usize = 5;

const ELEMENTS: usize = 1 << 18;

const FOLDER: &str = "INSTEP_TEST_FOLDER";

const FILE: &str = "last.safetensors";

fn stepper() -> Stepper {
    let layout = Layout::builder().param("a", ELEMENTS - 5).param("b", 5).build().unwrap();
    Stepper::host(&layout, Adam::default(), Solo::default()).unwrap()
}

/// Paints everything with the generation's number and saves it.
fn save(stepper: &mut Stepper, generation: u64, path: &Path) {
    let layout = stepper.layout().clone();
    for id in layout.ids() {
        stepper.params_mut().unwrap().get_mut(id).unwrap().fill(generation as f32);
        for name in ["exp_avg", "exp_avg_sq"] {
            stepper.state_mut(id, name).unwrap().fill(generation as f32);
        }
        stepper.set_step_count(id, generation).unwrap();
    }
    println!("saving {generation}");
    let scalars = [("generation".to_owned(), Scalar::U64(generation))].into();
    checkpoint::save(stepper, &Extras { scalars, ..Extras::default() }, path).unwrap();
}

/// Loads, and sees that all of it is of one generation.
fn generation(stepper: &mut Stepper, path: &Path) -> u64 {
    let extras = checkpoint::load(stepper, path).unwrap();
    let Scalar::U64(generation) = extras.scalars["generation"] else { panic!("{extras:?}") };
    let layout = stepper.layout().clone();
    for id in layout.ids() {
        let value = stepper.params().unwrap().get(id).unwrap();
        let states = ["exp_avg", "exp_avg_sq"].map(|name| stepper.state(id, name).unwrap());
        let all = [value, states[0], states[1]].concat();
        assert!(all.iter().all(|x| *x == generation as f32), "a mixture of generations");
        assert_eq!(stepper.step_count(id).unwrap(), generation);
    }
    generation
}

/// Not a case of its own: the run that is killed.
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

/// A child that does not outlive the test.
struct Saving(Child);

impl Drop for Saving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a run, kills it `after` its first save has begun, and returns the last generation that it began to save.
fn kill_one(folder: &Path, after: Duration) -> u64 {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "checkpoint::kill::saves_until_it_is_killed", "--ignored", "--nocapture"]);
    let mut child = Saving(command.env(FOLDER, folder).stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    let begun = |line: String| line.rsplit_once("saving ").and_then(|(_, number)| number.parse().ok());
    let first: u64 = lines.by_ref().find_map(|line| begun(line.unwrap())).expect("the child saves");
    std::thread::sleep(after);
    child.0.kill().unwrap();
    let status = child.0.wait().unwrap();
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&status),
        Some(9),
        "it ended by itself: {status}"
    );
    lines.filter_map(|line| begun(line.ok()?)).last().unwrap_or(first)
}

#[test]
fn a_run_killed_at_any_moment_leaves_the_last_whole_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE);
    let mut stepper = stepper();
    save(&mut stepper, 1, &path);
    let since = Instant::now();
    save(&mut stepper, 2, &path);
    // Any moment of a save and somewhat more, so that some kills find the first one done.
    let span_us = since.elapsed().as_micros() as u64 * 3 / 2;
    let random = RandomState::new();
    let (mut interrupted, mut half_written, mut last) = (0, 0, 2);
    for kill in 0..KILLS {
        let mut hasher = random.build_hasher();
        hasher.write_usize(kill);
        let begun = kill_one(folder.path(), Duration::from_micros(hasher.finish() % span_us));
        let now = generation(&mut stepper, &path);
        assert!((begun - 1..=begun).contains(&now), "generation {now} is there, and {begun} was being saved");
        assert!(now >= last, "generation {now} is there, after {last}");
        last = now;
        // At most the last run's leftover is there, whatever the others left.
        let leftovers: Vec<_> = names(folder.path()).into_iter().filter(|name| name != FILE).collect();
        assert!(leftovers.len() <= 1, "{leftovers:?}");
        if let Some(name) = leftovers.first() {
            let whole_bytes = fs::metadata(&path).unwrap().len();
            let left = File::open(folder.path().join(name)).unwrap().metadata().unwrap().len();
            interrupted += 1;
            half_written += usize::from(left < whole_bytes);
        }
    }
    let report = format!(
        "{interrupted} of {KILLS} kills came before the renaming, {half_written} of them in the writing"
    );
    println!("{report}; generation {last} is there");
    assert!(interrupted >= INTERRUPTED && half_written >= HALF_WRITTEN, "{report}");
}
