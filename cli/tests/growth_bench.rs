//! Tests which rows `instep bench --only growth` writes.
//!
//! No test depends on the value of a time; a time only has to be above 0.

use std::fs;

use crate::support::{Folder, assert_refused};

/// Runs the growth bench and returns its CSV rows as (case, quantity).
fn growth(words: &[&str]) -> Vec<(String, String)> {
    let folder = Folder::new();
    let file = folder.path("growth.csv");
    let file = file.to_str().unwrap();
    let words = [&["bench", "--only", "growth", "--rounds", "1", "--csv", file], words].concat();
    let output = folder.run(&words);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = fs::read_to_string(file).unwrap();
    let rows = text.lines().filter_map(|line| line.strip_prefix("growth,"));
    let cells = rows.map(|row| row.split(',').collect::<Vec<_>>());
    let pairs = cells.map(|cells| {
        assert!(cells[4].parse::<f64>().unwrap() > 0.0, "{cells:?}");
        (cells[0].to_owned(), cells[3].to_owned())
    });
    pairs.collect()
}

#[test]
fn growth_has_a_row_for_each_call_number_of_parameters_and_way_to_register_optimizers() {
    let rows = growth(&["--parameters", "3,1500"]);
    for case in ["shared 3", "shared 1500", "groups 3", "groups 1500", "each 3", "each 1500"] {
        let quantities: Vec<&str> =
            rows.iter().filter(|(of, _)| of == case).map(|(_, quantity)| quantity.as_str()).collect();
        let calls = ["layout", "lookup", "build", "begin", "handover", "finish", "rebind"];
        let checkpoint = ["checkpoint_write", "checkpoint_read"];
        let expected = calls.iter().chain(&checkpoint).map(|call| format!("{call}_ns_per_parameter"));
        assert_eq!(quantities, expected.collect::<Vec<_>>(), "{case}");
    }
    assert_eq!(rows.len(), 6 * 9);
}

#[test]
fn growth_needs_a_parameter_and_the_host() {
    let folder = Folder::new();
    let refused = folder.run(&["bench", "--only", "growth", "--parameters", "0"]);
    assert_refused(&refused, "0 is not in 1..=10000000");
}
