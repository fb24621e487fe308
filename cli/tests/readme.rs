//! The example of the README runs unchanged.
//!
//! The test must read the README itself, because a copy could differ from what users read.

use crate::support::{input, replayed};

#[test]
fn the_readmes_configuration_runs() {
    let readme = include_str!("../README.md");
    let config = readme.split("```json\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let output = replayed(config, &input(&[("a", &[3]), ("b", &[2, 2]), ("c", &[])], 2), &[]);
    assert_eq!(output.metadata.len(), 3);
    assert_eq!(output.tensors.len(), 9);
}
