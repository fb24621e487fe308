//! Tests of how a checkpoint's file is written, on a disk that records its calls and fails at any of them.
//!
//! Data reach the disk before the name, and the name before the call returns.

use std::cell::RefCell;
use std::fs;
use std::io::Write;

use super::*;

const NEW: &[u8] = b"new";

/// Makes the system's calls until the call named `fails`, and records each call.
#[derive(Default)]
struct Recorder {
    calls: RefCell<Vec<String>>,
    fails: &'static str,
}

impl Recorder {
    fn call(&self, name: &str, work: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        self.calls.borrow_mut().push(name.to_owned());
        if name == self.fails { Err(io::Error::other("the disk is gone")) } else { work() }
    }
}

impl Disk for Recorder {
    fn sync(&self, file: &File) -> io::Result<()> {
        assert_eq!(file.metadata()?.len(), NEW.len() as u64, "all of it was written before");
        self.call("sync", || System.sync(file))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.call("rename", || System.rename(from, to))
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        self.call("sync folder", || System.sync_folder(folder))
    }
}

fn save(disk: &Recorder, path: &Path) -> Result<()> {
    replace_on(disk, path, |partial| {
        disk.calls.borrow_mut().push("write".into());
        partial.file.write_all(NEW).map_err(Error::file("the test's file"))
    })
}

#[test]
fn data_are_flushed_before_the_rename_and_the_folder_after_it() {
    let folder = tempfile::tempdir().unwrap();
    let (path, disk) = (folder.path().join("a"), Recorder::default());
    save(&disk, &path).unwrap();
    assert_eq!(disk.calls.into_inner(), ["write", "sync", "rename", "sync folder"]);
    assert_eq!(fs::read(&path).unwrap(), NEW);
}

#[test]
fn a_call_that_fails_leaves_the_old_file_unless_it_is_the_folders() {
    for (fails, expected) in [("sync", &b"old"[..]), ("rename", b"old"), ("sync folder", NEW)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, b"old").unwrap();
        let refused = save(&Recorder { fails, ..Recorder::default() }, &path).unwrap_err();
        assert!(matches!(refused, Error::File { .. }), "{refused}");
        assert_eq!(fs::read(&path).unwrap(), expected, "{fails}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "{fails}: nothing else is left");
    }
}

#[cfg(unix)]
#[test]
fn links_are_followed_to_a_file_that_is_not_there_yet() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second, target] = ["first", "second", "target"].map(|name| folder.path().join(name));
    std::os::unix::fs::symlink("second", &first).unwrap();
    std::os::unix::fs::symlink(&target, &second).unwrap();
    for _ in 0..2 {
        save(&Recorder::default(), &first).unwrap();
        assert!(first.is_symlink() && second.is_symlink() && !target.is_symlink());
        assert_eq!(fs::read(&target).unwrap(), NEW);
    }
    let circle = folder.path().join("circle");
    std::os::unix::fs::symlink("circle", &circle).unwrap();
    let refused = save(&Recorder::default(), &circle).unwrap_err().to_string();
    assert!(refused.contains("too many symbolic links"), "{refused}");
}
