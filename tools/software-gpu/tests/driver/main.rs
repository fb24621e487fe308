//! Tests of the driver by its own calls: what it allows, what it refuses, and that each fault is caught by its name.
//!
//! A fault ends the process, so each test runs in a separate process of this binary. Copies and fills touch memory as
//! kernels do, so few tests have a kernel.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, unsafe_code)]
// Every unsafe block is one call of the driver; a scene that breaks a call's contract does so to be caught.
#![allow(clippy::undocumented_unsafe_blocks, unused_unsafe)]

mod calls;
mod captures;
mod claims;
mod faults;
mod kernels;
mod orders;
mod traces;

use std::process::Command;

/// The variable that names the test of a process.
const ALONE: &str = "SOFTWARE_GPU_ALONE";
/// Seeds with which every test runs.
const SEEDS: [&str; 4] = ["0", "1", "2", "3"];

/// Runs the body of a test in separate processes, with every seed, and returns the output of each.
fn alone<Body: FnOnce()>(environment: &[(&str, &str)], body: Body) -> Vec<(bool, String)> {
    // The closure's path is crate, module, test and "{{closure}}".
    let path = std::any::type_name::<Body>();
    let (test, _) = path.split_once("::").and_then(|(_, rest)| rest.split_once("::{{")).expect(path);
    if std::env::var(ALONE).as_deref() == Ok(test) {
        body();
        std::process::exit(0);
    }
    let run = |seed| {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", test, "--nocapture"]).env(ALONE, test).env("INSTEP_GPU_SEED", seed);
        let done = child.envs(environment.iter().copied()).output().unwrap();
        let said =
            [&done.stdout, &done.stderr].map(|text| String::from_utf8_lossy(text).into_owned()).concat();
        (done.status.success(), said)
    };
    SEEDS.map(run).to_vec()
}

/// Asserts that a test ends well with every seed.
fn ends_well<Body: FnOnce()>(body: Body) {
    with_settings(&[], body);
}

fn with_settings<Body: FnOnce()>(environment: &[(&str, &str)], body: Body) {
    alone(environment, body).into_iter().for_each(|(well, said)| assert!(well, "{said}"));
}

/// Asserts that a test ends with this fault under every seed.
fn is_caught<Body: FnOnce()>(rule: &str, body: Body) {
    for (well, said) in alone(&[], body) {
        assert!(!well && said.contains(&format!("software gpu: {rule}: ")), "not caught as {rule}: {said}");
    }
}
