//! Writes the output file. The file is replaced only after the new content is complete. If writing fails, the file is
//! left unchanged.
//!
//! The library replaces this file in the same way as it replaces a checkpoint. This module accepts only regular files,
//! because renaming over a device would remove the device. It never replaces an input.

use std::fs::{File, Metadata};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::Failure;

/// The path of an output that has passed all checks that precede writing.
pub(super) struct Target<'a> {
    path: &'a Path,
}

impl<'a> Target<'a> {
    /// Checks that the folder of `path` exists, and that `path` is not an input under another name.
    pub(super) fn new(path: &'a Path, inputs: &[&PathBuf]) -> Result<Self, Failure> {
        let refuse = |wrong: String, remedy| Err(Failure::tensors(path.display(), wrong, remedy));
        if path.file_name().is_none() {
            return refuse("not the name of a file".into(), "name a file to write");
        }
        let folder = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        if !std::fs::metadata(&folder).map_err(Failure::file(&folder))?.is_dir() {
            return refuse(
                format!("{} is not a folder", folder.display()),
                "name a file in an existing folder",
            );
        }
        match std::fs::metadata(path) {
            Ok(found) if !found.is_file() => {
                return refuse("exists and is not a regular file".into(), "choose another name");
            }
            Ok(found) => {
                for input in inputs {
                    let input_found = std::fs::metadata(input).map_err(Failure::file(input))?;
                    if identity(&found) == identity(&input_found) {
                        return refuse(
                            format!("is also the input {}", input.display()),
                            "choose another name",
                        );
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Failure::file(path)(error)),
        }
        Ok(Target { path })
    }

    /// Replaces the file with the content that `write` writes.
    pub(super) fn replace(
        &self,
        write: impl FnOnce(&mut BufWriter<&mut File>) -> io::Result<()>,
    ) -> Result<(), Failure> {
        let written = instep::checkpoint::replace(self.path, |file| {
            let mut buffered = BufWriter::new(file);
            let written = write(&mut buffered).and_then(|()| buffered.flush());
            written.map_err(|error| instep::Error::File {
                what: self.path.display().to_string(),
                kind: error.kind(),
                why: error.to_string(),
            })
        });
        Ok(written?)
    }
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}
