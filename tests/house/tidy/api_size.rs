//! The size of the interface that trainers call: public methods of a stepper, its passes and their views.
//!
//! A framework needs a binding for each method. A new method replaces another, or several methods become one with a
//! selector.

use super::{code_lines, files, name, read};

/// The counted types, without their builders.
const TYPES: [&str; 4] = ["Stepper", "Pass", "Params", "Grads"];
const MOST: usize = 78;

/// Returns the type of an inherent `impl` line.
fn implemented(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("impl")?;
    let rest = match rest.strip_prefix('<') {
        Some(generics) => generics.split_once("> ")?.1,
        None => rest.strip_prefix(' ')?,
    };
    let end = rest.find(|c: char| !c.is_alphanumeric())?;
    (!rest.contains(" for ")).then_some(&rest[..end])
}

#[test]
fn a_stepper_its_passes_and_views_have_few_public_methods() {
    let mut found = Vec::new();
    for path in files("src", &["rs"]) {
        let text = read(&path);
        let mut counted = false;
        for (_, line) in code_lines(&text) {
            if line.starts_with(|c: char| c != ' ' && c != '}') {
                counted = implemented(line).is_some_and(|of| TYPES.contains(&of));
            }
            let method = ["pub fn ", "pub unsafe fn ", "pub const fn "];
            if counted && method.iter().any(|start| line.trim_start().starts_with(start)) {
                found.push(format!("{}: {}", name(&path), line.trim()));
            }
        }
    }
    assert!(found.iter().any(|method| method.contains("pub fn begin(")), "the scan finds methods");
    assert!(found.iter().any(|method| method.contains("pub unsafe fn replay(")), "also unsafe ones");
    assert!(found.len() <= MOST, "{} public methods:\n{}", found.len(), found.join("\n"));
}
