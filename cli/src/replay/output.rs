//! The output file: replaced as a whole, once everything is there, or left as it was.
//!
//! A temporary file in the same folder, flushed to disk, renamed. Must never touch the inputs, nor anything that is not
//! a regular file: renaming over a device would remove it.

use std::fs::{File, Metadata, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::Failure;

/// A path that can be replaced, as far as can be told before.
pub(super) struct Target<'a> {
    path: &'a Path,
    folder: PathBuf,
}

impl<'a> Target<'a> {
    /// Checks that `path` is in a folder and is none of the inputs, under any name.
    pub(super) fn new(path: &'a Path, inputs: &[&PathBuf]) -> Result<Self, Failure> {
        let refuse = |why: String| Err(Failure::Tensors(format!("{}: {why}", path.display())));
        if path.file_name().is_none() {
            return refuse("is no name of a file".into());
        }
        let folder = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        if !std::fs::metadata(&folder).map_err(Failure::file(&folder))?.is_dir() {
            return refuse(format!("{} is not a folder", folder.display()));
        }
        match std::fs::metadata(path) {
            Ok(found) if !found.is_file() => return refuse("is there, and is not a regular file".into()),
            Ok(found) => {
                for input in inputs {
                    let input_found = std::fs::metadata(input).map_err(Failure::file(input))?;
                    if identity(&found) == identity(&input_found) {
                        return refuse(format!("is the input {} too", input.display()));
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Failure::file(path)(error)),
        }
        Ok(Target { path, folder })
    }

    /// Puts what `write` writes in the place of the file.
    pub(super) fn replace(
        &self,
        write: impl FnOnce(&mut BufWriter<&mut File>) -> io::Result<()>,
    ) -> Result<(), Failure> {
        self.try_replace(write).map_err(Failure::file(self.path))
    }

    fn try_replace(&self, write: impl FnOnce(&mut BufWriter<&mut File>) -> io::Result<()>) -> io::Result<()> {
        // Permissions of any new file: the process's mask is applied to them.
        let mut builder = tempfile::Builder::new();
        let mut temporary = builder
            .prefix(".instep-")
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(&self.folder)?;
        let mut buffered = BufWriter::new(temporary.as_file_mut());
        write(&mut buffered)?;
        buffered.flush()?;
        drop(buffered);
        temporary.as_file().sync_all()?;
        temporary.persist(self.path)?;
        // The rename itself is on disk when the folder is. The file is whole either way, so a folder that cannot be
        // flushed is no failure of the replay.
        let _ = File::open(&self.folder).and_then(|folder| folder.sync_all());
        Ok(())
    }
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}
