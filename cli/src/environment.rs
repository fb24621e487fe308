//! Lists the environment variables that the library and this command read, and detects misspelt names.
//!
//! A name that resembles no variable of the list is ignored. A test checks that the list is complete.

use strsim::osa_distance;

/// Every variable that a program reads at run time. The variables that only builds or tests read are not listed.
const KNOWN: [&str; 10] = [
    "INSTEP_BENCH_KERNELS",
    "INSTEP_CUDA",
    "INSTEP_DEADLINE_MS",
    "INSTEP_ID_FILE",
    "INSTEP_ISA",
    "INSTEP_LEDGER",
    "INSTEP_NCCL",
    "INSTEP_PREFETCH",
    "INSTEP_SPIN_US",
    "INSTEP_THREADS",
];

/// A name with more wrong letters than this number is not reported as misspelt.
const MOST_EDITS: usize = 2;

/// Returns a line for each misspelt name. A misspelt name begins with `INST`, and differs from the name of a variable
/// by at most two letters. Upper and lower case of a letter count as the same letter.
pub fn misspelt(names: impl Iterator<Item = String>) -> Vec<String> {
    let ours =
        names.filter(|name| name.to_uppercase().starts_with("INST") && !KNOWN.contains(&name.as_str()));
    let told = ours.filter_map(|name| {
        let distance = |known: &&&str| osa_distance(&name.to_uppercase(), known);
        let meant = KNOWN.iter().min_by_key(distance)?;
        let is_close = distance(&meant) <= MOST_EDITS;
        is_close.then(|| format!("{name} is set, and nothing reads it; did you mean {meant}?"))
    });
    told.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_variable_is_named_with_what_was_meant_and_no_other_is() {
        let told = |name: &str| misspelt([name.to_owned()].into_iter());
        for (wrong, meant) in [
            ("INSTEP_THREDS", "INSTEP_THREADS"),
            ("INSTEP_IAS", "INSTEP_ISA"),
            ("instep_threads", "INSTEP_THREADS"),
            ("INSTEP_DEADLINE", ""),
            ("INSTP_PREFETCH", "INSTEP_PREFETCH"),
        ] {
            let lines = told(wrong);
            assert_eq!(lines.first().is_some_and(|line| line.contains(meant)), !meant.is_empty(), "{wrong}");
        }
        for right in KNOWN.into_iter().chain(["INSTEP_REQUIRE_GPU", "INSTEP_GPU_SEED", "INSTANCE", "PATH"]) {
            assert!(told(right).is_empty(), "{right}");
        }
    }

    /// If the list lacked a variable, the variable's correct name could be reported as misspelt, and wrong spellings of
    /// it would not be reported.
    #[test]
    fn the_list_has_every_variable_of_the_library_and_of_this_command() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut folders = vec![root.join("src"), root.join("cli/src")];
        let mut found = std::collections::BTreeSet::new();
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs")
                    && !path.ends_with("environment.rs")
                {
                    let text = std::fs::read_to_string(&path).unwrap();
                    let words = text.split('"').filter(|word| word.starts_with("INSTEP_"));
                    let is_name =
                        |word: &&str| word.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
                    found.extend(words.filter(is_name).map(str::to_owned));
                }
            }
        }
        // The variables of the build script and of a test are not in the list.
        let built =
            ["INSTEP_KERNELS_FATBIN", "INSTEP_KERNELS_MISSING", "INSTEP_REQUIRE_KERNELS", "INSTEP_COMMIT"];
        built.iter().for_each(|name| _ = found.remove(*name));
        assert_eq!(found.into_iter().collect::<Vec<_>>(), KNOWN);
    }
}
