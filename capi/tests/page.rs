//! Tests that each C snippet of `docs/c.md` and the README is part of a program that is compiled and run.
//!
//! Lines are compared without their indentation.

use crate::{programs, read};

#[test]
fn every_snippet_in_c_is_part_of_a_program() {
    let plain = |text: &str| text.lines().map(str::trim).collect::<Vec<_>>().join("\n");
    let on_a_gpu = ["gpu/ddp.c"].map(|path| plain(&read(path)));
    let programs: Vec<String> = programs().iter().map(|path| plain(&read(path))).chain(on_a_gpu).collect();
    let pages = ["../docs/c.md", "../README.md"].map(read).concat();
    let mut checked = 0;
    for block in pages.split("```c").skip(1) {
        let (_, snippet) = block.split_once('\n').unwrap();
        let snippet = plain(snippet.split("```").next().unwrap().trim());
        assert!(programs.iter().any(|program| program.contains(&snippet)), "in no program:\n{snippet}");
        checked += 1;
    }
    assert!(checked >= 6, "the scan finds snippets");
}
