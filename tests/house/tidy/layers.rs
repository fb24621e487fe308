//! The order of the modules: an import never points up, and only one place drives devices.
//!
//! ARCHITECTURE.md shows the same table. The table must have each module of `src/`.

use super::{code_lines, files, name, read};
use std::path::PathBuf;

/// The lowest row is first; modules of one row never import each other, and no row imports a higher one.
const LAYERS: [&[&str]; 12] = [
    &["text"],
    &["abi", "dtype", "error", "handle", "sync"],
    &["layout", "optim", "poll", "pool"],
    &["op"],
    &["launch", "collective"],
    &["device"],
    &["schedule", "hazard", "timeline"],
    &["host", "forecast"],
    &["cuda"],
    &["bucket_step", "stepper"],
    &["checkpoint", "overlap"],
    &["bench"],
];

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
            ["src/stepper/state/run.rs", "src/bench/gpu.rs"].contains(&name.as_str()),
            "{name}"
        );
    }
}

#[test]
fn cudarc_is_named_only_in_the_driver_layer_and_where_its_slices_are_lent() {
    let named = |path: &PathBuf| code_lines(&read(path)).any(|(_, line)| line.contains("cudarc::"));
    let files: Vec<String> =
        files("src", &["rs"]).iter().filter(|path| named(path)).map(|path| name(path)).collect();
    assert_eq!(files, ["src/bucket_step/gpu.rs", "src/cuda/library.rs", "src/cuda/system.rs"]);
}
