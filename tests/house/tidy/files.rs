//! Rules for every file: its length, its header, and a lane that runs each ignored test.
//!
//! Library code has no unwrap and no unfinished part. `src/` has no test's body: unit tests of what is private stand in
//! `tests/unit/`, in a file of the same name.

use std::path::Path;

use super::{GENERATED, ROOT, code_lines, files, name, read};

#[test]
fn files_are_short_and_open_with_what_they_are() {
    let trees = [
        "src",
        "capi",
        "python",
        "kernels",
        "tests",
        "examples",
        "integrations",
        "cli",
        "tools",
        "benches",
        "build",
        "reference",
    ];
    for path in trees.iter().flat_map(|tree| files(tree, &["rs", "h", "cpp", "cu", "cuh", "c", "def"])) {
        let name = name(&path);
        let text = read(&path);
        let count = text.lines().count();
        assert!(count <= 800 || GENERATED.contains(&name.as_str()), "{name} has {count} lines");
        assert!(count <= 60 || name != "kernels/gpu/naive.cu", "{name} is to be read first: {count} lines");
        let header =
            text.lines().take_while(|l| l.starts_with("//!") || l.starts_with("/*") || l.starts_with(" *"));
        let header = header.count();
        assert!(header >= 2, "{name} does not say what it is");
    }
}

#[test]
fn nothing_is_unwrapped_or_left_undone_outside_tests() {
    for path in
        files("src", &["rs"]).into_iter().chain(files("cli/src", &["rs"])).chain(files("capi/src", &["rs"]))
    {
        let name = name(&path);
        if GENERATED.contains(&name.as_str()) || name.contains("/tests/") {
            continue;
        }
        let text = read(&path);
        let product = text.split("#[cfg(test)]").next().unwrap();
        for (at, line) in code_lines(product) {
            for word in [".unwrap()", ".expect(", "todo!", "unimplemented!", "dbg!"] {
                assert!(!line.contains(word), "{name}:{}: {word}", at + 1);
            }
        }
    }
}

#[test]
fn unit_tests_stand_in_a_folder_of_their_own_under_the_name_of_what_they_test() {
    let mut known = 0;
    for path in files("src", &["rs"]) {
        let (name, text) = (name(&path), read(&path));
        let module = name.trim_start_matches("src/").trim_end_matches(".rs").trim_end_matches("/mod");
        for (at, line) in code_lines(&text) {
            let own = format!("tests/unit/{module}.rs");
            assert!(!line.contains("#[test]"), "{name}:{}: this test belongs in {own}", at + 1);
            let Some(place) = line.strip_prefix("#[path = \"").filter(|p| p.contains("tests/unit/")) else {
                continue;
            };
            let is_own = place.trim_start_matches("../").trim_end_matches("\"]") == own;
            assert!(is_own || place.contains("/samples.rs"), "{name}:{}: tests of {own} in {place}", at + 1);
            known += 1;
        }
    }
    assert_eq!(
        known,
        files("tests/unit", &["rs"]).len(),
        "a file of tests/unit that no module of src names is not run"
    );
}

#[test]
fn every_ignored_test_names_what_runs_it_and_that_does() {
    let mut checked = 0;
    for path in files("tests", &["rs"]) {
        let (name, text) = (name(&path), read(&path));
        let module = name.trim_start_matches("tests/").trim_end_matches(".rs").trim_end_matches("/mod");
        let module = module.replace('/', "::") + "::";
        for (_, line) in code_lines(&text) {
            let Some(reason) = line.trim().strip_prefix("#[ignore") else { continue };
            let (runner, why) = reason.trim_start_matches(" = \"").split_once(": ").expect(line);
            let runner = runner.split(' ').next().unwrap();
            assert!(why.len() > 10 && Path::new(ROOT).join(runner).is_file(), "{name}: {line}");
            let starts =
                |script: &str| script.contains(&module) || script.contains(&module[..module.len() - 2]);
            assert!(starts(&read(&Path::new(ROOT).join(runner))), "{runner} does not run {module}: {line}");
            checked += 1;
        }
    }
    assert!(checked > 12, "the scan finds ignored tests");
}
