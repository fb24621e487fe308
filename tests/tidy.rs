//! House rules as a test: layers, unsafe files, file lengths, the table of optimizers.
//!
//! Reads the tree as text, so a rule is broken when the text breaks it. A rule that is not here is an opinion.

use std::fs;
use std::path::{Path, PathBuf};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Lowest first; modules of one row never import each other, and no row imports a higher one.
const LAYERS: [&[&str]; 11] = [
    &["text"],
    &["abi", "dtype", "error", "handle", "sync"],
    &["layout", "optim", "pool"],
    &["op"],
    &["launch", "collective"],
    &["device"],
    &["schedule", "hazard", "timeline"],
    &["host", "cuda"],
    &["stepper"],
    &["checkpoint", "overlap"],
    &["bench"],
];

/// The only files that may contain unsafe code, and why is in each one's header.
const UNSAFE: &[&str] = &[
    "benches/peers/entry/src/gpu.rs",
    "benches/peers/entry/src/lib.rs",
    "src/abi.rs",
    "src/bench/gpu.rs",
    "src/bench/host.rs",
    "src/bench/load.rs",
    "src/bench/trainer.rs",
    "src/collective.rs",
    "src/cuda/context.rs",
    "src/cuda/custom.rs",
    "src/cuda/device.rs",
    "src/cuda/device_impl.rs",
    "src/cuda/driver.rs",
    "src/cuda/external.rs",
    "src/cuda/graph.rs",
    "src/cuda/kernels.rs",
    "src/cuda/memory.rs",
    "src/cuda/nccl/bindings.rs",
    "src/cuda/nccl/communicator.rs",
    "src/cuda/nccl/library.rs",
    "src/cuda/nccl/memory.rs",
    "src/cuda/nccl/raw.rs",
    "src/cuda/nccl/stub.rs",
    "src/cuda/pinned.rs",
    "src/cuda/streams.rs",
    "src/cuda/system.rs",
    "src/cuda/timing.rs",
    "src/cuda/waits.rs",
    "src/device.rs",
    "src/host/arena.rs",
    "src/host/custom.rs",
    "src/host/kernels.rs",
    "src/host/mod.rs",
    "src/host/ranks.rs",
    "src/host/rendezvous.rs",
    "src/host/runner.rs",
    "src/host/solo.rs",
    "src/launch/region.rs",
    "src/overlap/bucket.rs",
    "src/overlap/compress.rs",
    "src/overlap/hooks.rs",
    "src/stepper/build.rs",
    "src/stepper/control_access.rs",
    "src/stepper/gpu.rs",
    "src/stepper/graphs.rs",
    "src/stepper/rebuild.rs",
    "src/stepper/scaling.rs",
    "src/stepper/stored.rs",
    "src/stepper/views.rs",
];

/// Written by `cargo run -p bindings`, as long and as terse as the header is.
const GENERATED: [&str; 2] = ["src/abi.rs", "src/cuda/nccl/bindings.rs"];

fn files(under: &str, extensions: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![Path::new(ROOT).join(under)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if extensions.iter().any(|x| path.extension().is_some_and(|e| e == *x)) {
                found.push(path);
            }
        }
    }
    assert!(!found.is_empty(), "{under} is empty");
    found.sort();
    found
}

fn name(path: &Path) -> String {
    path.strip_prefix(ROOT).unwrap().to_string_lossy().replace('\\', "/")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn code_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//"))
}

fn layer_of(module: &str) -> Option<usize> {
    LAYERS.iter().position(|row| row.contains(&module))
}

#[test]
fn imports_never_point_up_nor_sideways() {
    let mut checked = 0;
    for path in files("src", &["rs"]) {
        let name = name(&path);
        let own =
            name.trim_start_matches("src/").split('/').next().unwrap().trim_end_matches(".rs").to_owned();
        if own == "lib" {
            continue;
        }
        let own_layer = layer_of(&own).unwrap_or_else(|| panic!("{name} is in no layer"));
        for (line, text) in code_lines(&read(&path)) {
            for reference in text.split("crate::").skip(1) {
                let module: String =
                    reference.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                let Some(layer) = layer_of(&module) else {
                    // A grouped or re-exported import would hide the layer.
                    panic!("{name}:{}: crate::{module} names no layer", line + 1);
                };
                checked += 1;
                let fine = module == own || layer < own_layer;
                assert!(fine, "{name}:{}: {own} must not import {module}", line + 1);
            }
        }
    }
    assert!(checked > 50, "the scan finds imports");
}

#[test]
fn ops_reach_a_device_only_from_run() {
    for path in files("src", &["rs"]) {
        let (name, text) = (name(&path), read(&path));
        let feeds =
            code_lines(&text).any(|(_, line)| line.contains("device.submit(") || line.contains(".drain()"));
        // A bench of one launch has no schedule.
        assert_eq!(
            feeds && !name.ends_with("emitter.rs") && !name.starts_with("src/schedule"),
            ["src/stepper/run.rs", "src/bench/gpu.rs"].contains(&name.as_str()),
            "{name}"
        );
    }
}

#[test]
fn the_drivers_bindings_are_named_where_they_are_wrapped() {
    let named = |path: &PathBuf| code_lines(&read(path)).any(|(_, line)| line.contains("cudarc::"));
    let files: Vec<String> =
        files("src", &["rs"]).iter().filter(|path| named(path)).map(|path| name(path)).collect();
    assert_eq!(files, ["src/cuda/context.rs", "src/cuda/interop.rs", "src/cuda/system.rs"]);
}

#[test]
fn unsafe_code_stays_in_the_named_files_and_each_block_says_why() {
    for path in ["src", "cli", "examples", "benches"].iter().flat_map(|tree| files(tree, &["rs"])) {
        let name = name(&path);
        let text = read(&path);
        let lines: Vec<&str> = text.lines().collect();
        let allowed = UNSAFE.contains(&name.as_str());
        let mut found = false;
        for (at, line) in code_lines(&text) {
            let code = line.split("//").next().unwrap();
            assert!(!code.contains("unsafe_code)]") || allowed, "{name}:{}: allows unsafe", at + 1);
            let words: Vec<&str> = code.split(|c: char| !(c.is_alphanumeric() || c == '_')).collect();
            if !words.contains(&"unsafe") {
                continue;
            }
            found = true;
            assert!(allowed, "{name}:{}: unsafe outside the named files", at + 1);
            let declares = ["unsafe fn", "unsafe extern", "unsafe trait"].iter().any(|d| code.contains(d));
            if declares || GENERATED.contains(&name.as_str()) {
                continue;
            }
            let explained = (1..=5).any(|back| at >= back && lines[at - back].contains("SAFETY:"));
            assert!(explained, "{name}:{}: no SAFETY line", at + 1);
        }
        assert!(found || !allowed, "{name} no longer needs to be named");
    }
}

#[test]
fn files_are_short_and_open_with_what_they_are() {
    let trees = ["src", "kernels", "tests", "examples", "cli", "tools", "benches", "build"];
    for path in trees.iter().flat_map(|tree| files(tree, &["rs", "h", "cpp", "cu", "cuh", "c", "def"])) {
        let name = name(&path);
        let text = read(&path);
        let count = text.lines().count();
        assert!(count <= 500 || GENERATED.contains(&name.as_str()), "{name} has {count} lines");
        let header =
            text.lines().take_while(|l| l.starts_with("//!") || l.starts_with("/*") || l.starts_with(" *"));
        let header = header.count();
        assert!(header >= 2, "{name} does not say what it is");
    }
}

#[test]
fn nothing_is_unwrapped_or_left_undone_outside_tests() {
    for path in files("src", &["rs"]).into_iter().chain(files("cli/src", &["rs"])) {
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

/// Where each optimizer of the table is named, and no compiler asks for it.
const NAMES_EVERY_OPTIMIZER: [&str; 14] = [
    "CHANGELOG.md",
    "README.md",
    "benches/README.md",
    "cli/README.md",
    "cli/tests/against_torch.py",
    "cli/tests/bits.rs",
    "cli/tests/gpu_bench.rs",
    "cli/tests/resume.rs",
    "src/overlap/standard.rs",
    "tests/optimizers.rs",
    "tests/refusals.rs",
    "tests/registry.rs",
    "tests/vectors.py",
    "tools/fuzz/src/mutate.rs",
];

#[test]
fn every_optimizer_has_its_header_its_type_and_its_formula_once_and_is_named_wherever_all_are() {
    let table = read(&Path::new(ROOT).join("kernels/optimizers.def"));
    let optimizers = files("src/optim", &["rs"]).iter().map(|p| read(p)).collect::<String>();
    let reference = read(&Path::new(ROOT).join("tests/reference.rs"));
    let rows: Vec<&str> = table.lines().filter_map(|line| line.strip_prefix("OPTIMIZER(")).collect();
    assert!(rows.len() >= 2);
    let mut missing = Vec::new();
    for row in rows {
        let (name, rest) = row.split_once(", ").unwrap();
        let rule = rest.split(',').next().unwrap();
        let mut require = |holds: bool, what: String| missing.extend((!holds).then_some(what));
        let header =
            fs::read_to_string(Path::new(ROOT).join(format!("kernels/rules/{name}.h"))).unwrap_or_default();
        require(header.contains(&format!("struct {rule} ")), format!("kernels/rules/{name}.h has no {rule}"));
        require(
            optimizers.contains(&format!("INSTEP_OPTIMIZER_{name}")),
            format!("src/optim knows no {name}"),
        );
        require(reference.to_lowercase().contains(name), format!("tests/reference.rs knows no {name}"));
        for path in NAMES_EVERY_OPTIMIZER {
            let text = read(&Path::new(ROOT).join(path)).to_lowercase();
            // What is not there yet is named behind the README's first program.
            let text = if path == "README.md" { text.split("```").next().unwrap() } else { &text };
            let names = text.split(|c: char| !(c.is_alphanumeric() || c == '_')).any(|word| word == name);
            require(names, format!("{path} does not name {name}"));
        }
        for path in files("kernels", &["h", "cpp", "cu", "cuh"]) {
            let defines = read(&path).contains(&format!("struct {rule} "));
            let is_its = path.ends_with(format!("rules/{name}.h"));
            require(!defines || is_its, format!("{rule} is written again in {path:?}"));
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

/// A loop that needs a state or a scalar of one rule by name has begun to write its formula a second time.
#[test]
fn no_loop_around_the_rules_names_one_or_what_is_inside_it() {
    let rows = read(&Path::new(ROOT).join("kernels/optimizers.def"));
    let rules = rows.lines().filter_map(|line| line.strip_prefix("OPTIMIZER(")?.split(", ").nth(1));
    let structs = read(&Path::new(ROOT).join("kernels/abi.h"));
    let mut words: Vec<String> = Vec::new();
    for rule in rules {
        let body = structs.split(&format!("typedef struct Instep{rule}Scalars {{")).nth(1).unwrap();
        let fields = body.split('}').next().unwrap().split(|c: char| !(c.is_alphanumeric() || c == '_'));
        // Names of one word, like `first`, mean other things elsewhere.
        words.extend(fields.filter(|field| field.contains('_') && *field != "uint32_t").map(str::to_owned));
        words.push(rule.to_owned());
    }
    assert!(words.iter().any(|word| word == "step_size") && words.iter().any(|word| word == "Adam"));
    let loops: Vec<_> =
        ["kernels/cpu", "kernels/gpu"].iter().flat_map(|at| files(at, &["cu", "cuh", "cpp", "h"])).collect();
    assert!(loops.len() >= 10, "{loops:?}");
    for path in loops {
        for (at, line) in read(&path).lines().enumerate() {
            let code = line.split("/*").next().unwrap();
            let named = code
                .split(|c: char| !(c.is_alphanumeric() || c == '_'))
                .find(|w| words.iter().any(|x| x == w));
            assert_eq!(named, None, "{}:{}", name(&path), at + 1);
        }
    }
}

#[test]
fn the_compiler_sees_every_struct_of_the_boundary() {
    let header = read(&Path::new(ROOT).join("kernels/abi.h"));
    let table = read(&Path::new(ROOT).join("kernels/abi_layout.c"));
    for line in header.lines() {
        let kind = line.strip_prefix("typedef struct ").or_else(|| line.strip_prefix("typedef union "));
        if let Some(name) = kind.and_then(|rest| rest.split(' ').next())
            && name != "InstepLayoutRow"
        {
            assert!(table.contains(&format!("SIZE({name})")), "abi_layout.c lacks {name}");
        }
    }
}

#[test]
fn every_ignored_test_names_what_runs_it_and_that_does() {
    let mut checked = 0;
    for path in files("tests", &["rs"]) {
        let (name, text) = (name(&path), read(&path));
        let module = name.trim_start_matches("tests/").trim_end_matches(".rs").replace('/', "::") + "::";
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

#[test]
fn every_link_of_the_documents_leads_somewhere_and_ci_runs_every_example() {
    let mut checked = 0;
    for (folder, document) in [("docs", "originals.md"), ("", "README.md"), ("", "CONTRIBUTING.md")] {
        let folder = Path::new(ROOT).join(folder);
        let text = read(&folder.join(document));
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if !link.starts_with("http") {
                assert!(folder.join(link).exists(), "{document} links to {link}");
                checked += 1;
            }
        }
    }
    assert!(checked > 30, "the scan finds links");
    let ci = read(&Path::new(ROOT).join(".ci/run"));
    assert!(ci.contains("for example in examples/*.rs; do"), "CI runs all examples");
}

#[test]
fn every_guarantee_names_tests_that_exist() {
    let readme = read(&Path::new(ROOT).join("README.md"));
    let table = readme.lines().skip_while(|line| !line.starts_with("| What you may count on")).skip(2);
    let rows: Vec<&str> = table.take_while(|line| line.starts_with("| ")).collect();
    assert!(rows.len() > 8);
    let modules = read(&Path::new(ROOT).join("tests/main.rs"));
    for row in rows {
        let named: Vec<&str> = row.split('`').filter(|word| word.ends_with(".rs")).collect();
        assert!(!named.is_empty(), "no test is named: {row}");
        for path in named {
            assert!(Path::new(ROOT).join(path).is_file(), "{path} does not exist: {row}");
            let module = path.trim_start_matches("tests/").trim_end_matches(".rs").trim_end_matches("/mod");
            let runs = !path.starts_with("tests/")
                || module == "allocations"
                || modules.contains(&format!("mod {module};"));
            assert!(runs, "{path} is not run: {row}");
        }
    }
}
