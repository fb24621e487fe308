//! The hidden file that a save writes first. When the hidden file is complete, the save gives it the name of the
//! checkpoint.
//!
//! The hidden file's name is `.NAME.DIGITS.instep-partial`, and is never longer than usual file systems allow. If the
//! save fails, the hidden file is removed. A live run may still be writing a hidden file for another name. This module
//! removes such a file only if nothing has been written to it for a day.

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions, Permissions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::layout::fold;

const SUFFIX: &str = ".instep-partial";

/// The number of hexadecimal digits in the name. The files of two writers have different digits.
const DIGITS: usize = 16;

/// The longest name, in bytes, that all usual file systems allow.
const MAX_NAME_BYTES: usize = 255;

/// The longest NAME, in bytes. The rest of the hidden file's name is two dots, the digits and the suffix.
const MAX_STEM_BYTES: usize = MAX_NAME_BYTES - 2 - DIGITS - SUFFIX.len();

/// If a hidden file has not been written to for this time, its writer is assumed to be dead.
const ABANDONED: Duration = Duration::from_secs(24 * 60 * 60);

/// A hidden file that is being written. Dropping this value removes the file, unless the file has been renamed.
pub(super) struct Partial {
    pub(super) path: PathBuf,
    /// The number in the file's name. No other file has this number.
    pub(super) number: u64,
    pub(super) file: File,
    pub(super) arrived: bool,
}

impl Partial {
    /// Creates the hidden file for a file called `name`. `permissions` are those of the file that will be replaced, if
    /// there is one.
    pub(super) fn create(
        folder: &Path,
        name: &OsStr,
        permissions: Option<Permissions>,
    ) -> io::Result<Partial> {
        // A random number from the standard library's hasher.
        let number = RandomState::new().build_hasher().finish();
        let path = numbered(folder, name, number);
        let partial = Partial { file: open_new(&path, permissions.as_ref())?, path, number, arrived: false };
        if let Some(permissions) = permissions {
            // The process's umask may have removed some permissions.
            partial.file.set_permissions(permissions)?;
        }
        Ok(partial)
    }
}

/// Returns the path of the partial file with this number.
pub(super) fn numbered(folder: &Path, name: &OsStr, number: u64) -> PathBuf {
    let mut own = OsString::from(".");
    own.push(stem(name));
    own.push(format!(".{number:0DIGITS$x}{SUFFIX}"));
    folder.join(own)
}

/// Creates a file that never has more than the given permissions.
fn open_new(path: &Path, permissions: Option<&Permissions>) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    if let Some(permissions) = permissions {
        use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
        options.mode(permissions.mode() & 0o777);
    }
    #[cfg(not(unix))]
    let _ = permissions;
    options.open(path)
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.arrived {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Removes all partial files for this name. Also removes partial files for other names if nothing has been written to
/// them for a day. If another live process is writing a partial file for this name, that process gets an error when it
/// renames the file.
pub(super) fn remove_leftovers(folder: &Path, name: &OsStr) -> io::Result<()> {
    let own = stem(name);
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let found = entry.file_name();
        let Some(target) = target(found.as_encoded_bytes()) else { continue };
        let silent = || entry.metadata()?.modified()?.elapsed().map_err(io::Error::other);
        if target == own.as_encoded_bytes() || silent().is_ok_and(|silent| silent > ABANDONED) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
    Ok(())
}

/// Returns the NAME of a partial file. If `name` is too long, NAME consists of the beginning of `name` and a hash of
/// all of `name`.
fn stem(name: &OsStr) -> OsString {
    let bytes = name.as_encoded_bytes();
    if bytes.len() <= MAX_STEM_BYTES {
        return name.to_owned();
    }
    let hash = format!("~{:016x}", fold(0xcbf2_9ce4_8422_2325, bytes));
    let (text, room) = (name.to_string_lossy(), MAX_STEM_BYTES - hash.len());
    // The name is cut between characters, because some file systems refuse names that are not UTF-8.
    let fits = text.char_indices().map(|(at, char)| at + char.len_utf8()).take_while(|end| *end <= room);
    let end = fits.last().unwrap_or(0);
    OsString::from(format!("{}{hash}", &text[..end]))
}

/// Returns the NAME in a partial file's name, or `None` if `found` is not the name of a partial file.
fn target(found: &[u8]) -> Option<&[u8]> {
    let stem = found.strip_prefix(b".")?.strip_suffix(SUFFIX.as_bytes())?;
    let (name, number) = stem.split_at_checked(stem.len().checked_sub(DIGITS + 1)?)?;
    let digits = number.strip_prefix(b".")?;
    let is_digit = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
    (!name.is_empty() && digits.iter().all(is_digit)).then_some(name)
}

#[cfg(test)]
#[path = "../../tests/unit/checkpoint/partial.rs"]
mod tests;
