//! Tests of the names and permissions of a file that is not whole yet.
//!
//! A partial file is found again by its name alone, and nobody may read it who may not read the whole one.

use super::*;

#[test]
fn partials_of_every_valid_name_fit_and_are_found_again() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a", &"x".repeat(230), &"x".repeat(255), &"ß".repeat(127), &format!("a{}", "重".repeat(84))]
    {
        let name = OsStr::new(name);
        let mut partial = Partial::create(folder.path(), name, None).unwrap();
        partial.arrived = true;
        assert!(partial.path.file_name().unwrap().len() <= MAX_NAME_BYTES);
        // A similar name, or the file of a younger run, is not removed.
        remove_leftovers(folder.path(), OsStr::new(&format!("{}y", "x".repeat(254)))).unwrap();
        assert!(partial.path.exists());
        remove_leftovers(folder.path(), name).unwrap();
        assert!(!partial.path.exists(), "{name:?}");
    }
}

#[cfg(unix)]
#[test]
fn a_partial_is_never_open_to_more_people_than_the_file() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let mode = |file: &File| file.metadata().unwrap().permissions().mode() & 0o777;
    for wanted in [0o600, 0o640, 0o400, 0o666] {
        let (permissions, path) = (Permissions::from_mode(wanted), folder.path().join("a"));
        let file = open_new(&path, Some(&permissions)).unwrap();
        assert_eq!(mode(&file) & !wanted, 0, "{wanted:o} at first");
        std::fs::remove_file(path).unwrap();
        let partial = Partial::create(folder.path(), OsStr::new("a"), Some(permissions)).unwrap();
        assert_eq!(mode(&partial.file), wanted);
    }
}
