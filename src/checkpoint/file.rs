//! A file that is replaced as a whole: written beside itself, flushed, renamed, and its folder flushed.
//!
//! A run that is killed meanwhile leaves the old file and a hidden one that ends in `.instep-partial`. This file must
//! never leave half a file under the name that was asked for, and must remove no file that a live run may still be
//! writing to another name.

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Error, Result};

const SUFFIX: &str = ".instep-partial";

/// Hexadecimal digits that keep two writers apart.
const DIGITS: usize = 16;

/// A writer that has not written for this long is dead.
const ABANDONED: Duration = Duration::from_secs(24 * 60 * 60);

/// A file on its way, removed unless it arrives.
struct Partial {
    path: PathBuf,
    file: File,
    arrived: bool,
}

/// Puts what `write` writes in the place of the file at `path`.
///
/// # Errors
/// `Checkpoint` if the path cannot be a regular file, `File` if the system refuses, and what `write` returns. The file
/// is as it was then, unless it is the folder that could not be flushed.
pub fn replace(path: &Path, write: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    // The target of a link is replaced, not the link.
    let resolved = if path.is_symlink() { std::fs::canonicalize(path).ok() } else { None };
    let path = resolved.as_deref().unwrap_or(path);
    let Some(name) = path.file_name() else {
        return Err(Error::checkpoint(path.display(), "is no name of a file"));
    };
    match std::fs::metadata(path) {
        Ok(found) if !found.is_file() => {
            return Err(Error::checkpoint(path.display(), "is there, and is not a regular file"));
        }
        _ => {}
    }
    let permissions = std::fs::metadata(path).map(|found| found.permissions()).ok();
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    // Leftovers do no harm, so neither does one that cannot be removed.
    let _ = remove_leftovers(folder, name);
    let refused = |error| Error::file(path.display())(error);
    let mut partial = Partial::create(folder, name).map_err(refused)?;
    if let Some(permissions) = permissions {
        partial.file.set_permissions(permissions).map_err(refused)?;
    }
    write(&mut partial.file)?;
    partial.file.sync_all().map_err(refused)?;
    std::fs::rename(&partial.path, path).map_err(refused)?;
    partial.arrived = true;
    // The rename is on disk when the folder is.
    let flushed = File::open(folder).and_then(|folder| folder.sync_all());
    flushed.map_err(Error::file(format_args!("the folder {}", folder.display())))
}

impl Partial {
    fn create(folder: &Path, name: &OsStr) -> io::Result<Partial> {
        // The standard library's own source of randomness.
        let number = RandomState::new().build_hasher().finish();
        let mut own = OsString::from(".");
        own.push(name);
        own.push(format!(".{number:0DIGITS$x}{SUFFIX}"));
        let path = folder.join(own);
        let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
        Ok(Partial { path, file, arrived: false })
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.arrived {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Another writer to this name gets an error when it renames; files for other names stay for a day.
fn remove_leftovers(folder: &Path, name: &OsStr) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let found = entry.file_name();
        let Some(target) = target(found.as_encoded_bytes()) else { continue };
        let silent = || entry.metadata()?.modified()?.elapsed().map_err(io::Error::other);
        if target == name.as_encoded_bytes() || silent().is_ok_and(|silent| silent > ABANDONED) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
    Ok(())
}

/// The name that a leftover was to get, if it is one.
fn target(found: &[u8]) -> Option<&[u8]> {
    let stem = found.strip_prefix(b".")?.strip_suffix(SUFFIX.as_bytes())?;
    let (name, number) = stem.split_at_checked(stem.len().checked_sub(DIGITS + 1)?)?;
    let digits = number.strip_prefix(b".")?;
    let is_digit = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
    (!name.is_empty() && digits.iter().all(is_digit)).then_some(name)
}
