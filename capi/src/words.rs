//! Replaces names of the Rust interface in error texts by names of the C header.
//!
//! A test reads the library's sources. It fails if an error text has a Rust name that is not listed here.

/// Names of the Rust interface, each with its C name. If a name is a prefix of another, the longer name comes first.
const WORDS: [(&str, &str); 22] = [
    ("Borrowed::param", "instep_memory.params"),
    ("Clip::Global", "INSTEP_CLIP_GLOBAL"),
    ("Clip::PerBucket", "INSTEP_CLIP_PER_BUCKET"),
    ("Clip::Previous", "INSTEP_CLIP_PREVIOUS"),
    ("Divisor::WorldSize", "INSTEP_INPUTS_BY_WORLD_SIZE"),
    ("Gradients::Keep", "INSTEP_GRADIENTS_KEEP"),
    ("Gradients::Release", "INSTEP_GRADIENTS_RELEASE"),
    ("Gradients::Zero", "INSTEP_GRADIENTS_ZERO"),
    ("SegmentAction::Step", "INSTEP_ACTION_STEP"),
    ("Stepper::rebind", "instep_stepper_rebind"),
    ("Stepper::set_unused", "instep_stepper_set_unused"),
    ("Stepper::write", "instep_stepper_write"),
    ("StepperBuilder::copy_params", "the option copy"),
    ("StepperBuilder::ema", "the option ema_decay"),
    ("StepperBuilder::then", "a group of its own"),
    ("StepperBuilder::uneven_inputs", "the option inputs"),
    ("Sums::by_caller", "sums_by_caller"),
    ("Unused::Refuse", "INSTEP_UNUSED_REFUSE"),
    ("Unused::Skip", "INSTEP_UNUSED_SKIP"),
    ("Unused::StepZero", "INSTEP_UNUSED_STEP_ZERO"),
    ("call bucket_ready", "call instep_stepper_bucket_ready"),
    ("call step first", "call instep_bucket_step_step first"),
];

/// Returns an error's text in the words of the header.
pub(crate) fn in_c(text: String) -> String {
    WORDS
        .iter()
        .filter(|(rust, _)| text.contains(rust))
        .fold(text.clone(), |text, (rust, c)| text.replace(rust, c))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    /// Rust names in error texts about features that the C library does not have. Such features are strategies,
    /// offload, captured passes, custom and second optimizers, states of a loss scaler, hooks, schedules, NCCL and MPI.
    const UNREACHED: [&str; 19] = [
        "Accumulation::Local",
        "Cuda::compute_stream",
        "Nccl::beside",
        "OffloadPolicy::pin_memory",
        "Precision::F32",
        "StepParam::enqueue_param",
        "StepParam::reaches",
        "Stepper::add_optimizer_for",
        "Stepper::gather",
        "Stepper::optimizers",
        "Stepper::set_hyper",
        "Stepper::set_lr_schedule",
        "StepperBuilder::loss_scale",
        "StepperBuilder::then_for",
        "Strategy::Fsdp",
        "Strategy::Replicated",
        "Strategy::Zero",
        "Threading::Serialized",
        "Self::",
    ];

    fn sources(folder: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if path.is_dir() && !["tests", "bench", "interleavings"].contains(&name) {
                sources(&path, found);
            } else if name.ends_with(".rs") && !["abi.rs", "tests.rs", "bindings.rs"].contains(&name) {
                let text = fs::read_to_string(&path).unwrap();
                found.push(text.split("#[cfg(test)]").next().unwrap().to_owned());
            }
        }
    }

    /// Returns the texts in double quotes, without the code between them.
    fn quoted(source: &str) -> impl Iterator<Item = &str> {
        let lines = source.lines().map(str::trim_start).filter(|line| !line.starts_with("//"));
        lines.flat_map(|line| line.split('"').skip(1).step_by(2))
    }

    /// Returns the Rust paths in a text, such as `Type::member`.
    fn paths(text: &str) -> Vec<&str> {
        let is_name = |c: char| c.is_alphanumeric() || c == '_';
        let of = |(at, _): (usize, &str)| {
            let (before, after) = (&text[..at], &text[at + 2..]);
            let start = before.rfind(|c| !is_name(c)).map_or(0, |at| at + 1);
            let end = after.find(|c| !is_name(c)).unwrap_or(after.len());
            let path = &text[start..at + 2 + end];
            (path.starts_with(|c: char| c.is_ascii_uppercase()) && end > 0).then_some(path)
        };
        text.match_indices("::").filter_map(of).collect()
    }

    #[test]
    fn every_name_of_rust_in_an_error_has_a_word_of_c_or_is_out_of_reach() {
        let mut all = Vec::new();
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../src"), &mut all);
        let found: BTreeSet<&str> = all.iter().flat_map(|source| quoted(source)).flat_map(paths).collect();
        assert!(found.len() > 20, "the scan finds names: {found:?}");
        for path in &found {
            let is_known = WORDS.iter().any(|(rust, _)| rust == path);
            let is_unreached = UNREACHED.iter().any(|start| path.starts_with(start));
            assert!(is_known || is_unreached, "an error says `{path}`: how does C call that?");
        }
        for rust in WORDS.iter().map(|(rust, _)| rust).chain(&UNREACHED) {
            let is_used = all.iter().flat_map(|source| quoted(source)).any(|text| text.contains(rust));
            assert!(is_used, "no error says {rust}");
        }
    }

    #[test]
    fn words_that_look_like_c_are_in_the_header() {
        let header =
            fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("include/instep.h")).unwrap();
        for (_, c) in WORDS {
            let name = c.trim_start_matches("the option ").split('.').next().unwrap();
            if c.starts_with("the option") || name.to_lowercase().starts_with("instep_") {
                assert!(header.contains(name), "the header has no {name}");
            }
        }
    }

    #[test]
    fn a_text_is_said_in_words_of_c() {
        let text = "memory: a GPU's; use Gradients::Keep or Gradients::Zero".to_owned();
        let said = "memory: a GPU's; use INSTEP_GRADIENTS_KEEP or INSTEP_GRADIENTS_ZERO";
        assert_eq!(in_c(text), said);
        assert_eq!(in_c("w: call Stepper::set_unused".into()), "w: call instep_stepper_set_unused");
    }
}
