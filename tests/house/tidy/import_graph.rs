//! The graph of imports between files has no cycle, and inside `src/stepper/` no import points up.
//!
//! An import of a name that a `mod.rs` re-exports counts as an import of the file that defines the name. The re-export
//! itself does not count. Tests at the end of a file do not count, because they may import anything.

use super::{code_lines, files, name, read};
use std::collections::{BTreeMap, BTreeSet};

/// The files of `src/stepper/`, lowest first: a file imports only files of lower rows.
const STEPPER: [&[&str]; 16] = [
    &["state/agreement", "state/borrowed", "state/options", "state/run", "state/written", "tensor"],
    &["state/optimizers"],
    &["state/hypers"],
    &["stepper"],
    &["claims"],
    &["control_access", "as_f32"],
    &["views"],
    &["access", "counts", "learning_rates"],
    &["open_pass"],
    &["pass"],
    &["graphs", "rebuild", "scaling", "taking_part"],
    &["builder"],
    &["offload", "unshard"],
    &["shards"],
    &["build"],
    &["borrowing", "foresight", "gpu", "together"],
];

/// The module paths of a crate with their files, such as `["stepper", "pass"]` and `src/stepper/pass.rs`.
struct Crate {
    modules: BTreeMap<Vec<String>, String>,
    /// The names that each module re-exports, with the paths that they stand for.
    reexports: BTreeMap<Vec<String>, BTreeMap<String, Vec<String>>>,
    imports: Vec<(Vec<String>, Vec<String>)>,
}

impl Crate {
    fn read(root: &str) -> Crate {
        let mut found = Crate { modules: BTreeMap::new(), reexports: BTreeMap::new(), imports: Vec::new() };
        let mut texts = Vec::new();
        for path in files(root, &["rs"]) {
            let file = name(&path);
            let inside = file.strip_prefix(&format!("{root}/")).unwrap().trim_end_matches(".rs");
            let mut module: Vec<String> = inside.split('/').map(str::to_owned).collect();
            if ["mod", "lib", "main"].contains(&module.last().unwrap().as_str()) {
                module.pop();
            }
            let text = read(&path);
            // A file of another folder, which imports nothing from here.
            for (_, shared) in text.match_indices("#[path = ").map(|(at, _)| text[at..].split_at(9)) {
                let (_, declared) = shared.split_once("\nmod ").unwrap();
                let child = declared.split(';').next().unwrap().to_owned();
                let file = shared.split('"').nth(1).unwrap().to_owned();
                found.modules.insert(module.iter().cloned().chain([child]).collect(), file);
            }
            texts.push((module.clone(), text));
            found.modules.insert(module, file);
        }
        for (module, text) in &texts {
            found.scan(module, text);
        }
        found
    }

    fn scan(&mut self, module: &[String], text: &str) {
        let product = text.split("#[cfg(test)]\nmod ").next().unwrap();
        let code: String = code_lines(product).map(|(_, line)| format!("{line}\n")).collect();
        let mut rest = code.as_str();
        let mut other = String::new();
        while let Some(at) = next_use(rest) {
            let (before, from) = rest.split_at(at);
            let (statement, after) = from.split_once(';').unwrap();
            other.push_str(before);
            let (visibility, tree) = statement.split_once("use ").unwrap();
            for path in flatten(tree) {
                let Some(path) = self.absolute(module, &path) else { continue };
                if visibility.trim().starts_with("pub") {
                    let exported = path.last().unwrap().clone();
                    self.reexports.entry(module.to_vec()).or_default().insert(exported, path);
                } else {
                    self.imports.push((module.to_vec(), path));
                }
            }
            rest = after;
        }
        other.push_str(rest);
        for start in ["crate::", "super::"] {
            for (at, _) in other.match_indices(start) {
                if ["::", "pub(in "].iter().any(|before| other[..at].ends_with(before)) {
                    continue;
                }
                let word = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
                let written: String = other[at..].chars().take_while(|c| word(*c)).collect();
                let path: Vec<String> = written.split("::").map(str::to_owned).collect();
                self.imports.extend(self.absolute(module, &path).map(|path| (module.to_vec(), path)));
            }
        }
    }

    /// Returns the path from the root of the crate; `None` for another crate's path.
    fn absolute(&self, module: &[String], path: &[String]) -> Option<Vec<String>> {
        let (mut base, mut rest) = (module.to_vec(), path);
        match rest[0].as_str() {
            "crate" => (base, rest) = (Vec::new(), &rest[1..]),
            "self" => rest = &rest[1..],
            "super" => {
                while rest.first().is_some_and(|part| part == "super") {
                    base.pop();
                    rest = &rest[1..];
                }
            }
            child => {
                base.push(child.to_owned());
                self.modules.contains_key(&base).then_some(())?;
                base.pop();
            }
        }
        base.extend(rest.iter().cloned());
        Some(base)
    }

    /// Returns the file that a path leads to, through re-exports.
    fn file_of(&self, path: &[String]) -> Option<&str> {
        let depth = (0..=path.len()).rev().find(|depth| self.modules.contains_key(&path[..*depth]))?;
        let exported = path.get(depth).and_then(|name| self.reexports.get(&path[..depth])?.get(name));
        match exported {
            Some(target) if target[..] != *path => self.file_of(target),
            _ => self.modules.get(&path[..depth]).map(String::as_str),
        }
    }

    /// Returns the files that each file imports.
    fn edges(&self) -> BTreeMap<String, BTreeSet<String>> {
        let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (module, path) in &self.imports {
            let own = &self.modules[module];
            if let Some(file) = self.file_of(path).filter(|file| file != own) {
                edges.entry(own.clone()).or_default().insert(file.to_owned());
            }
        }
        edges
    }
}

/// Returns the start of the next `use` statement, including its visibility.
fn next_use(code: &str) -> Option<usize> {
    let mut at = 0;
    for line in code.split_inclusive('\n') {
        let trimmed = line.trim_start();
        let is_use = ["use ", "pub use ", "pub(crate) use ", "pub(super) use "];
        if is_use.iter().any(|start| trimmed.starts_with(start)) {
            return Some(at);
        }
        at += line.len();
    }
    None
}

/// Returns `a::{b, c::d}` as `[a, b]` and `[a, c, d]`.
fn flatten(tree: &str) -> Vec<Vec<String>> {
    let parts = |path: &str| -> Vec<String> {
        path.trim().split("::").filter(|part| !part.is_empty()).map(|part| part.trim().to_owned()).collect()
    };
    let Some((head, inside)) = tree.split_once('{') else {
        return vec![parts(tree.split(" as ").next().unwrap())];
    };
    let inside = inside.trim_end().strip_suffix('}').unwrap();
    let (mut depth, mut start, mut paths) = (0, 0, Vec::new());
    for (at, c) in inside.char_indices().chain([(inside.len(), ',')]) {
        depth += i32::from(c == '{') - i32::from(c == '}');
        if c == ',' && depth == 0 {
            let item = inside[start..at].trim();
            start = (at + 1).min(inside.len());
            if !item.is_empty() {
                let below = flatten(item).into_iter().map(|path| {
                    let own = path.into_iter().filter(|part| part != "self");
                    parts(head).into_iter().chain(own).collect()
                });
                paths.extend(below);
            }
        }
    }
    paths
}

/// Returns a cycle of files, if there is one.
fn find_circle(edges: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<String>> {
    fn visit(
        file: &str,
        edges: &BTreeMap<String, BTreeSet<String>>,
        done: &mut BTreeSet<String>,
        path: &mut Vec<String>,
    ) -> Option<Vec<String>> {
        if let Some(at) = path.iter().position(|known| known == file) {
            return Some(path[at..].to_vec());
        }
        if done.contains(file) {
            return None;
        }
        path.push(file.to_owned());
        let found = edges.get(file).into_iter().flatten().find_map(|next| visit(next, edges, done, path));
        path.pop();
        done.insert(file.to_owned());
        found
    }
    let mut done = BTreeSet::new();
    edges.keys().find_map(|file| visit(file, edges, &mut done, &mut Vec::new()))
}

/// The sources of each crate, and the smallest number of imports between its files that the scan must find.
const CRATES: [(&str, usize); 8] = [
    ("src", 1000),
    ("cli/src", 200),
    ("capi/src", 80),
    ("python/src", 30),
    ("tools/fuzz/src", 40),
    ("tools/software-gpu/src", 120),
    ("tools/software-gpu/nccl/src", 15),
    ("tools/software-gpu/ptx/src", 80),
];

#[test]
fn no_files_import_each_other_in_a_circle() {
    for (root, least) in CRATES {
        let edges = Crate::read(root).edges();
        let found = edges.values().map(BTreeSet::len).sum::<usize>();
        assert!(found >= least, "the scan finds {found} imports of {root}, fewer than {least}");
        assert_eq!(find_circle(&edges), None, "{root} has a circle of imports");
    }
}

#[test]
fn imports_inside_the_stepper_never_point_up() {
    let edges = Crate::read("src").edges();
    let row_of = |file: &str| {
        let inside = file.strip_prefix("src/stepper/")?.trim_end_matches(".rs");
        let row = STEPPER.iter().position(|row| row.contains(&inside));
        Some(row.unwrap_or_else(|| panic!("{file} is in no row, or a name is imported through it")))
    };
    let mut checked = 0;
    for (file, imported) in &edges {
        for other in imported {
            if let (Some(own), Some(below)) = (row_of(file), row_of(other)) {
                assert!(below < own, "{file} must not import {other}");
                checked += 1;
            }
        }
    }
    assert!(checked > 30, "the scan finds imports");
    for file in STEPPER.concat() {
        assert!(super::Path::new(super::ROOT).join(format!("src/stepper/{file}.rs")).is_file(), "{file}");
    }
}

#[test]
fn a_circle_is_found_through_a_re_export_a_grouped_import_and_a_glob() {
    let module = |path: &str| path.split("::").map(str::to_owned).collect::<Vec<String>>();
    let circle = |up: &str| {
        let modules =
            [(Vec::new(), "lib"), (module("a"), "a"), (module("a::low"), "low"), (module("a::high"), "high")];
        let modules = modules.map(|(module, file)| (module, file.to_owned())).into();
        let mut planted = Crate { modules, reexports: BTreeMap::new(), imports: Vec::new() };
        planted.scan(&module("a"), "mod low;\nmod high;\npub use high::High;\n");
        planted.scan(&module("a::high"), "use super::{\n    low::Low,\n};\n");
        planted.scan(&module("a::low"), up);
        find_circle(&planted.edges()).map(|circle| circle.len())
    };
    assert_eq!(circle(""), None);
    assert_eq!(circle("fn up(_: crate::a::High) {}\n"), Some(2));
    assert_eq!(circle("use super::high::*;\n"), Some(2));
}
