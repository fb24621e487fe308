//! Replaces a file atomically: writes a new file in the same folder, flushes it, renames it, and flushes the folder.
//!
//! A run that is killed during the write leaves the old file and a hidden partial file (`partial.rs`). An incomplete
//! file is never visible at the path. The new file has the permissions of the old file. While the new file is written,
//! its owner has write permission too.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::path::{Path, PathBuf};

use super::partial::{Partial, numbered, remove_leftovers};
use crate::error::{Error, Result};

/// The largest number of symbolic links in a chain, as on Linux. A longer chain is refused.
const MAX_LINKS: usize = 40;

/// The file-system calls that replace a file. A test implements this trait to record the order of the calls. This order
/// decides what survives a power failure.
trait Disk {
    fn sync(&self, file: &File) -> io::Result<()>;
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn sync_folder(&self, folder: &Path) -> io::Result<()>;
}

struct System;

impl Disk for System {
    fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        File::open(folder)?.sync_all()
    }
}

/// Replaces the file at `path` by a new file that `write` writes. If `path` is a symbolic link, the link's target is
/// replaced, or created if it does not exist.
///
/// # Errors
/// `Checkpoint` if the path cannot be a regular file. `File` if the system refuses a call. Also returns the errors of
/// `write`. After these errors, the old file is unchanged, with one exception: if flushing the folder fails, the new
/// file has already replaced the old file.
pub fn replace(path: &Path, write: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    replace_on(&System, path, |partial| write(&mut partial.file))
}

/// Replaces a file that several ranks write. `write` receives the number in the partial file's name. The other ranks
/// need this number to [open](open_partial) the file.
pub(super) fn replace_together(path: &Path, write: impl FnOnce(&mut File, u64) -> Result<()>) -> Result<()> {
    replace_on(&System, path, |partial| write(&mut partial.file, partial.number))
}

/// Opens the partial file that rank 0 has created for this path.
pub(super) fn open_partial(path: &Path, number: u64) -> Result<File> {
    let path = &follow_links(path)?;
    let (folder, name) = parted(path)?;
    let partial = numbered(folder, name, number);
    OpenOptions::new().write(true).open(&partial).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            let remedy = "use one path on a file system that all ranks reach, or checkpoint::save";
            Error::checkpoint(partial.display(), "rank 0 writes it, and it is not here", remedy)
        }
        _ => Error::file(partial.display())(error),
    })
}

/// Returns the folder of a file, and the file's name in this folder.
fn parted(path: &Path) -> Result<(&Path, &OsStr)> {
    let Some(name) = path.file_name() else {
        return Err(Error::checkpoint(path.display(), "not the name of a file", "name a file to write"));
    };
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => Ok((parent, name)),
        _ => Ok((Path::new("."), name)),
    }
}

fn replace_on(disk: &impl Disk, path: &Path, write: impl FnOnce(&mut Partial) -> Result<()>) -> Result<()> {
    let path = &follow_links(path)?;
    let refused = |error| Error::file(path.display())(error);
    let (folder, name) = parted(path)?;
    let permissions: Option<Permissions> = match std::fs::metadata(path) {
        Ok(found) if !found.is_file() => {
            return Err(Error::checkpoint(
                path.display(),
                "exists and is not a regular file",
                "choose another name",
            ));
        }
        Ok(found) => Some(found.permissions()),
        Err(_) => None,
    };
    // A leftover file does no harm, so an error here is ignored.
    let _ = remove_leftovers(folder, name);
    let mut partial = Partial::create(folder, name, permissions.clone().map(to_write)).map_err(refused)?;
    write(&mut partial)?;
    if let Some(permissions) = permissions {
        partial.file.set_permissions(permissions).map_err(refused)?;
    }
    disk.sync(&partial.file).map_err(refused)?;
    disk.rename(&partial.path, path).map_err(refused)?;
    partial.arrived = true;
    // The rename is on disk once the folder is flushed.
    disk.sync_folder(folder).map_err(Error::file(format_args!("the folder {}", folder.display())))
}

/// Adds write permission for the owner. The partial file has the returned permissions while this process or another
/// rank writes it.
fn to_write(mut permissions: Permissions) -> Permissions {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        permissions.set_mode(permissions.mode() | 0o200);
    }
    #[cfg(not(unix))]
    permissions.set_readonly(false);
    permissions
}

/// Returns the path at the end of a chain of symbolic links, whether or not a file exists at this path.
fn follow_links(path: &Path) -> Result<PathBuf> {
    let mut target = path.to_owned();
    for _ in 0..=MAX_LINKS {
        if !target.is_symlink() {
            return Ok(target);
        }
        let next = std::fs::read_link(&target).map_err(Error::file(path.display()))?;
        // A relative link starts at the link's folder. An absolute link replaces the path.
        target = target.parent().unwrap_or(Path::new("")).join(next);
    }
    Err(Error::checkpoint(path.display(), "leads through too many symbolic links", "name the file itself"))
}

#[cfg(test)]
#[path = "../../tests/unit/checkpoint/file.rs"]
mod tests;
