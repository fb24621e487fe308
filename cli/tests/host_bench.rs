//! Tests the rows of `instep bench` on the host and their contents, but not how fast anything is.
//!
//! No test may depend on the value of a time; a time only has to be above 0.

use serde_json::{Value, json};

use crate::support::{Folder, assert_refused, stderr, stdout};

/// Returns the report, the table and the CSV of one quick run.
fn run(words: &[&str]) -> (Value, String, String) {
    let folder = Folder::new();
    let quick = ["bench", "--quick", "--rounds", "1", "--threads", "1", "--json", "J", "--csv", "C"];
    let output = folder.run(&[&quick, words].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(folder.names(), ["C", "J"], "nothing is left beside the files");
    let report = serde_json::from_slice(&folder.read("J")).unwrap();
    (report, stdout(&output), String::from_utf8(folder.read("C")).unwrap())
}

#[test]
fn the_picture_of_a_sweep_has_a_line_for_every_case_and_a_mark_for_every_size() {
    let folder = Folder::new();
    let sweep = ["--only", "step", "--precision", "f32,bf16", "-b", "8K", "-e", "512K", "-f", "8"];
    let quick = ["bench", "--quick", "--rounds", "1", "--threads", "1", "--optimizer", "sgd", "--svg", "P"];
    let output = folder.run(&[&quick[..], &sweep].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let picture = String::from_utf8(folder.read("P")).unwrap();
    // Each size is stepped beyond the cache, and in the cache if it fits.
    for line in ["sgd bf16 beyond", "sgd bf16 resident", "sgd f32 beyond", "sgd f32 resident"] {
        assert!(picture.contains(&format!(">{line}</text>")), "{line} in {picture}");
    }
    assert_eq!(picture.matches("<polyline").count(), 4);
    assert!(picture.contains(">2Ki<") && picture.contains(">16Ki<") && picture.ends_with("</svg>\n"));
    let marks = picture.matches("<title>").count();
    let rows = stdout(&output).lines().filter(|line| line.starts_with("sgd ")).count();
    assert_eq!(marks, rows);
    // A bucket of several segments is not on the picture, and neither is another bench.
    for (command, marks) in [
        ("bench --only step --shape l2,bucket --optimizer sgd --svg P", 1),
        ("bench --only handover --svg P", 0),
    ] {
        let words: Vec<&str> =
            command.split(' ').chain(["--quick", "--rounds", "1", "--threads", "1"]).collect();
        assert_eq!(folder.run(&words).status.code(), Some(0), "{command}");
        let picture = String::from_utf8(folder.read("P")).unwrap();
        assert_eq!(picture.matches("<title>").count(), marks, "{command}: {picture}");
        assert!(picture.ends_with("</svg>\n"), "{picture}");
    }
}

#[test]
fn a_sweep_on_the_host_has_a_row_for_every_size_in_bytes_of_gradients() {
    let sizes = [
        "--only",
        "step",
        "--optimizer",
        "sgd",
        "--precision",
        "f32,bf16",
        "-b",
        "8",
        "-e",
        "64K",
        "-f",
        "8",
    ];
    let (report, table, csv) = run(&sizes);
    let rows = report["step"].as_array().unwrap();
    let of = |precision: &str| -> Vec<(u64, u64)> {
        let rows = rows.iter().filter(|row| row["precision"] == precision && row["cache"] == "beyond");
        rows.map(|row| (row["bytes"].as_u64().unwrap(), row["elements"].as_u64().unwrap())).collect()
    };
    // 8, 64 and 512 bytes, and 4 KiB, are rounded up to a bucket without padding.
    assert_eq!(of("f32"), [(8 << 10, 2048), (32 << 10, 8192)]);
    assert_eq!(of("bf16"), [(4 << 10, 2048), (32 << 10, 16_384)]);
    assert!(rows.iter().any(|row| row["cache"] == "resident"), "some fit into the cache");
    for row in rows {
        let (time, ceiling) = (&row["step_us"], &row["ceiling_us"]);
        for spread in [time, ceiling, &row["percent_of_ceiling"]] {
            assert!(
                spread["min"].as_f64().unwrap() > 0.0 && spread["min"].as_f64() <= spread["max"].as_f64()
            );
        }
        // A gradient is read, and a parameter read and written.
        let bytes = if row["precision"] == "f32" { 12.0 } else { 6.0 };
        assert_eq!((&row["bytes_per_element"], &row["segments"]), (&json!(bytes), &json!(1)));
        let moved = bytes * row["elements"].as_f64().unwrap() * 1e-3 / time["median"].as_f64().unwrap();
        assert!((moved / row["step_gb_per_s"].as_f64().unwrap() - 1.0).abs() < 1e-9, "{row}");
        let is_of_row = |line: &str| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words.len() > 5
                && words[1] == row["precision"]
                && words[2].parse() == Ok(row["bytes"].as_u64().unwrap())
                && words[4] == row["cache"]
        };
        assert!(table.lines().any(is_of_row), "{table}");
        let name = if row["precision"] == "f32" { "sgd" } else { "sgd bf16" };
        let case = format!("step,{name} {} {},", row["elements"], row["cache"].as_str().unwrap());
        assert_eq!(csv.lines().filter(|line| line.starts_with(&case)).count(), 4, "{csv}");
    }
    // Every figure of the CSV file is in the JSON, too.
    let lines = csv.lines().filter(|line| !line.starts_with('#')).count() - 1;
    assert_eq!(report["figures"].as_array().unwrap().len(), lines);
}

#[test]
fn the_header_names_machine_and_build_in_both_forms() {
    let (report, table, _) = run(&["--only", "step", "--optimizer", "sgd", "--shape", "l2"]);
    let machine = &report["machine"];
    let header: Vec<&str> = table.lines().filter(|line| line.starts_with("# ")).collect();
    assert_eq!(header.len(), 2, "{table}");
    assert!(header[0].contains(machine["cpu"].as_str().unwrap()));
    assert!(header[1].contains(&format!(
        "instep {}, commit {}",
        env!("CARGO_PKG_VERSION"),
        machine["commit"].as_str().unwrap()
    )));
    let isas: Vec<&str> =
        machine["isa_available"].as_array().unwrap().iter().map(|isa| isa.as_str().unwrap()).collect();
    assert!(isas.contains(&"baseline") && header[1].ends_with(&isas.join(", ")));
    assert!(
        machine["cores"].as_u64().unwrap() > 0
            && machine["governor"].is_null() | machine["governor"].is_string()
    );
    let [row] = report["step"].as_array().unwrap().as_slice() else { panic!("{report}") };
    assert_eq!((&row["elements"], &row["cache"]), (&json!(64 << 10), &json!("resident")));
    assert_eq!(report["quick"], true);
}

/// Returns the number of rows of a table. The line that announces the bench, the indented lines after it, and the lines
/// of the head are not rows.
fn rows_of(table: &str, heads: usize) -> usize {
    table.lines().skip(1).filter(|line| !line.starts_with("  ")).count() - heads
}

#[test]
fn every_table_says_how_many_rows_are_to_come_and_fits_120_columns() {
    // The longest names of an optimizer and of a precision.
    let words = ["--optimizer", "momentum,adadelta", "--precision", "f32,remainder16", "--isa", "baseline"];
    let (_, text, _) = run(&[&words[..], &["--shape", "l2", "--parameters", "3,1500"]].concat());
    let wide = text.lines().filter(|line| !line.starts_with('#')).find(|line| line.chars().count() > 120);
    assert_eq!(wide, None);
    let tables: Vec<&str> = text.split("\n\n").skip(1).collect();
    for (bench, rows, heads) in [
        ("step", 4, 1),
        ("overlap", 4, 1),
        ("handover", 6, 0),
        ("launch", 4, 0),
        ("distance", 1, 0),
        ("sharding", 3, 0),
        ("growth", 6, 1),
    ] {
        let said = format!("{bench}, {rows} row{}: ", if rows == 1 { "" } else { "s" });
        let table = tables.iter().find(|table| table.starts_with(&said));
        let table = table.unwrap_or_else(|| panic!("no {said:?} in {text}"));
        assert_eq!(rows_of(table.trim_end(), heads), rows, "{table}");
    }
}

#[test]
fn sizes_that_do_not_go_together_are_refused() {
    let folder = Folder::new();
    let refuse = |words: &[&str], why: &str| {
        assert_refused(&folder.run(&[&["bench", "--quick", "--only", "step"], words].concat()), why);
    };
    refuse(&["-b", "8", "--shape", "l2"], "--shape: has sizes of its own");
    refuse(&["-b", "1M", "-e", "8"], "-b: larger than -e");
    refuse(&["-f", "1"], "--step-factor");
    refuse(&["-b", "0"], "a number like 8, 256K");
}
