//! CI runs some checks in turns: eight consecutive turns cover every lane, and every entry of a lane's lists.
//!
//! The tests run the schedule of `.ci/run` and its function `share` in bash. A lane that counts turns in another way
//! fails here.

use std::path::Path;
use std::process::Command;

use super::{ROOT, files, name, read};

const TURNS: usize = 8;

fn bash(script: &str) -> String {
    let done = Command::new("bash").current_dir(ROOT).args(["-c", script]).output().unwrap();
    assert!(done.status.success(), "{script}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

/// A lane of a turn, and its share of the lane's lists: `visit` of `visits`, counted from 0.
struct Lane {
    name: String,
    visit: usize,
    visits: usize,
}

/// The lanes of each turn.
fn schedule() -> Vec<Vec<Lane>> {
    let said = bash("bash .ci/run --turns");
    let lane = |word: &str| {
        let (name, share) = word.split_once(':')?;
        let (visit, visits) = share.split_once('/')?;
        Some(Lane { name: name.to_owned(), visit: visit.parse().ok()?, visits: visits.parse().ok()? })
    };
    let lanes =
        said.lines().map(|line| line.split_whitespace().skip(2).map(|word| lane(word).unwrap()).collect());
    let turns: Vec<Vec<Lane>> = lanes.collect();
    assert_eq!(turns.len(), TURNS, ".ci/run --turns: {said}");
    turns
}

/// Returns the functions of `.ci/run` whose names begin with `prefix`: the rest of the name, and the body.
fn functions(prefix: &str) -> Vec<(String, String)> {
    let ci = read(&Path::new(ROOT).join(".ci/run"));
    let bodies = ci.split("\n}\n").filter_map(|text| text.rsplit_once("() {\n"));
    let named = bodies.map(|(before, body)| (before.rsplit('\n').next().unwrap(), body));
    let chosen =
        named.filter_map(|(name, body)| Some((name.strip_prefix(prefix)?.to_owned(), body.to_owned())));
    chosen.collect()
}

#[test]
fn eight_turns_of_ci_reach_every_lane() {
    let (turns, lanes) = (schedule(), functions("lane_"));
    assert!(lanes.len() > 20, "the scan finds lanes");
    for (lane, body) in lanes {
        let runs: Vec<&Lane> = turns.iter().flatten().filter(|run| run.name == lane).collect();
        assert!(!runs.is_empty(), ".ci/run: lane {lane} has no turn");
        // Each run takes another share.
        assert!(runs.iter().all(|run| run.visits == runs.len()), ".ci/run: lane {lane}, share");
        assert!(runs.iter().map(|run| run.visit).eq(0..runs.len()), ".ci/run: lane {lane}, share");
        let own = body.replace("1 + turn % 100", "").contains("turn %");
        assert!(!own, ".ci/run: lane {lane} counts turns; use share");
    }
}

#[test]
fn eight_turns_of_ci_reach_every_entry_of_a_list() {
    let share = &functions("share")[0].1;
    for visits in [1, 2, 8] {
        let visit = format!(
            "for visit in $(seq 0 {}); do (share $(seq $n) | grep . || echo 0) | tr '\\n' ' '; done",
            visits - 1
        );
        let said = bash(&format!(
            "share() {{\n{share}\n}}\nvisits={visits}\nfor n in {{1..50}}; do {visit}; echo; done"
        ));
        assert_eq!(said.lines().count(), 50);
        // A visit without an entry, a 0 here, would run a script without names, which means all.
        for (line, entries) in said.lines().zip(1..) {
            let mut seen: Vec<usize> = line.split_whitespace().map(|entry| entry.parse().unwrap()).collect();
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen.len(), entries, "share: {visits} visits of {entries} entries reach {line}");
        }
    }
}

#[test]
fn eight_turns_reach_every_case_of_a_python_test() {
    let mut found = 0;
    for path in files("python/tests", &["py"]) {
        for marked in read(&path).split("mark.turns(").skip(1) {
            let turns: usize = marked.split(')').next().unwrap().parse().unwrap();
            assert!(turns <= TURNS, "{}: turns({turns}); at most {TURNS}", name(&path));
            found += 1;
        }
    }
    assert!(found > 5, "the scan finds marks");
}

#[test]
fn contributing_names_every_lane_that_takes_turns() {
    let page = read(&Path::new(ROOT).join("CONTRIBUTING.md"));
    let (_, table) = page.split_once("### What takes turns").unwrap();
    let table = table.split("\n## ").next().unwrap();
    let turns = schedule();
    for Lane { name, .. } in turns.iter().flatten().filter(|lane| lane.visits < TURNS) {
        assert!(
            table.contains(&format!("`{name}`")),
            "CONTRIBUTING.md: `{name}` takes turns and is in no row"
        );
    }
}
