//! In the documents, each link leads to a file, and each guarantee names tests that run.
//!
//! A test counts as run only if its module is reachable from tests/main.rs.

use std::path::Path;

use super::{ROOT, files, name, read};

#[test]
fn every_link_of_the_documents_leads_somewhere_and_ci_runs_every_example() {
    let mut checked = 0;
    let mut documents = files("docs", &["md"]);
    let others = [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "benches/README.md",
        "cli/README.md",
        "kernels/README.md",
        "integrations/burn/README.md",
        "integrations/candle/README.md",
    ];
    documents.extend(others.map(|document| Path::new(ROOT).join(document)));
    for document in documents {
        let folder = document.parent().unwrap();
        for link in read(&document).split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next()) {
            if !link.starts_with("http") {
                assert!(folder.join(link).exists(), "{} links to {link}", name(&document));
                checked += 1;
            }
        }
    }
    assert!(checked > 30, "the scan finds links");
    let ci = read(&Path::new(ROOT).join(".ci/run"));
    assert!(ci.contains("for example in examples/*.rs; do"), "CI runs all examples");
}

/// Nobody reads a page that grows by a line with every change. Longer text belongs to a page of docs/.
#[test]
fn the_readme_is_short_narrow_and_without_long_paragraphs() {
    let readme = read(&Path::new(ROOT).join("README.md"));
    assert!(readme.lines().count() <= 120, "README.md: {} lines, at most 120", readme.lines().count());
    let wide = readme.lines().find(|line| line.chars().count() > 120);
    assert_eq!(wide, None, "README.md: more than 120 columns");
    let prose = readme.split("```").step_by(2).flat_map(|text| text.split("\n\n"));
    for paragraph in prose.map(str::trim).filter(|text| !text.starts_with('|')) {
        assert!(paragraph.lines().count() <= 4, "README.md: a paragraph above four lines:\n{paragraph}");
    }
}

#[test]
fn the_cuda_program_of_the_readme_is_the_examples() {
    let [readme, example] =
        ["README.md", "examples/cuda_ddp/src/main.rs"].map(|path| read(&Path::new(ROOT).join(path)));
    let (_, shown) = readme.split_once("```rust,ignore\n").unwrap();
    let shown = shown.split("```").next().unwrap().trim_end();
    let indented =
        shown.lines().map(|line| if line.is_empty() { String::new() } else { format!("    {line}") });
    let indented = indented.collect::<Vec<_>>().join("\n");
    assert!(
        shown.lines().count() > 15 && example.contains(&indented),
        "README shows another program:\n{indented}"
    );
}

/// The page uses three words: shard, full, local. Ten more words for them hid what a rank holds.
#[test]
fn the_page_on_sharding_says_shard_full_and_local() {
    let page = read(&Path::new(ROOT).join("docs/sharding.md")).to_lowercase();
    let retired = ["cut", "kept", "held", "home", "whole", "torn", "away", "brought", "absent"];
    let words: Vec<&str> = page.split(|letter: char| !letter.is_ascii_alphanumeric()).collect();
    assert!(words.len() > 1000 && words.contains(&"shard"), "the scan finds words");
    for (at, word) in words.iter().enumerate() {
        let is_shared_out = ["share", "shares", "shared"].contains(word) && words.get(at + 1) == Some(&"out");
        assert!(
            !retired.contains(word) && !is_shared_out,
            "docs/sharding.md: `{word}`; say shard, full or local"
        );
    }
}

#[test]
fn names_of_sharding_say_shard_full_and_local() {
    let retired = [
        "shared_out",
        "is_shared_out",
        "is_cut",
        "torn",
        "is_torn",
        "is_away",
        "absent_bytes",
        "is_kept_in_shards",
        "kept_shards",
    ];
    let sources = files("src", &["rs"]);
    assert!(sources.len() > 150, "the scan finds sources");
    for path in sources {
        for word in read(&path).split(|letter: char| !(letter.is_alphanumeric() || letter == '_')) {
            assert!(!retired.contains(&word), "{}: `{word}`; say shard, full or local", name(&path));
        }
    }
}

/// A reader learns 15 words; all others are common in the field.
#[test]
fn the_glossary_has_at_most_15_words() {
    let architecture = read(&Path::new(ROOT).join("ARCHITECTURE.md"));
    let (_, glossary) = architecture.split_once("## Glossary").unwrap();
    let rows = glossary.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| Word ")).count();
    assert!((5..=15).contains(&rows), "ARCHITECTURE.md: {rows} words");
}

#[test]
fn every_guarantee_names_tests_that_exist() {
    let guarantees = read(&Path::new(ROOT).join("docs/guarantees.md"));
    let rows = guarantees.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| Guarantee "));
    let rows: Vec<&str> = rows.collect();
    assert!(rows.len() > 30, "the scan finds guarantees");
    for row in rows {
        let named: Vec<&str> =
            row.split('`').filter(|word| word.ends_with(".rs") || word.ends_with(".py")).collect();
        assert!(!named.is_empty(), "no test is named: {row}");
        for path in named {
            assert!(Path::new(ROOT).join(path).is_file(), "{path} does not exist: {row}");
            let runs = !path.starts_with("tests/") || path == "tests/allocations.rs" || is_in_the_crate(path);
            assert!(runs, "{path} is not run: {row}");
        }
    }
}

/// Returns whether each folder on the path to this file under `tests/` declares the next.
fn is_in_the_crate(path: &str) -> bool {
    let module = path.trim_start_matches("tests/").trim_end_matches(".rs").trim_end_matches("/mod");
    let mut declared_in = String::from("tests/main.rs");
    let mut folder = String::from("tests");
    module.split('/').all(|step| {
        let declaration = format!("mod {step};");
        let found = read(&Path::new(ROOT).join(&declared_in))
            .lines()
            .any(|line| line.trim_start_matches("pub(crate) ") == declaration);
        folder = format!("{folder}/{step}");
        declared_in = format!("{folder}/mod.rs");
        found
    })
}
