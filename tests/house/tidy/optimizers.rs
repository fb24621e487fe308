//! The table of optimizers: each has one header, one type and one formula, and its name in every list.
//!
//! The loops around the rules name no rule.

use std::fs;
use std::path::Path;

use super::{ROOT, files, name, read};

/// Files that must name each optimizer of the table although no compiler requires it.
const NAMES_EVERY_OPTIMIZER: [&str; 4] =
    ["README.md", "docs/optimizers.md", "tests/numerics/vectors.py", "tests/numerics/vectors.txt"];

#[test]
fn every_optimizer_has_its_header_its_type_and_its_formula_once_and_is_named_wherever_all_are() {
    let table = read(&Path::new(ROOT).join("kernels/optimizers.def"));
    let optimizers = files("src/optim", &["rs"]).iter().map(|p| read(p)).collect::<String>();
    let reference = read(&Path::new(ROOT).join("reference/optimizers.rs"));
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
        require(reference.to_lowercase().contains(name), format!("reference/optimizers.rs knows no {name}"));
        for path in NAMES_EVERY_OPTIMIZER {
            let text = read(&Path::new(ROOT).join(path)).to_lowercase();
            // What is not there yet is named after the README's first program.
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

/// A loop that names a state or a scalar of one rule begins to repeat the rule's formula.
#[test]
fn no_loop_around_the_rules_names_one_or_what_is_inside_it() {
    let rows = read(&Path::new(ROOT).join("kernels/optimizers.def"));
    let rules = rows.lines().filter_map(|line| line.strip_prefix("OPTIMIZER(")?.split_once(", "));
    let mut words: Vec<String> = Vec::new();
    for (name, rest) in rules {
        let rule = rest.split(", ").next().unwrap();
        let header = read(&Path::new(ROOT).join(format!("kernels/rules/{name}.h")));
        let body = header.split(&format!("struct {rule}Scalars {{")).nth(1).unwrap();
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
