//! Why a command gave up, in one line that names the thing.
//!
//! Every variant means exit status 2. Must stay printable without its cause's debug form.

use std::io;
use std::path::Path;

/// What every command may end with.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The configuration is not what the README describes.
    #[error("config: {0}")]
    Config(String),
    /// The tensor file is broken, or does not fit the configuration.
    #[error("{0}")]
    Tensors(String),
    /// A bench computes something else than it should, or was asked for something that its device does not have.
    #[error("bench: {0}")]
    Bench(String),
    /// A file could not be read or written.
    #[error("{what}: {error}")]
    File {
        /// Which one, and what was done with it.
        what: String,
        /// The system's reason.
        error: io::Error,
    },
    /// The library refused or failed.
    #[error(transparent)]
    Library(instep::Error),
}

impl From<instep::Error> for Failure {
    fn from(error: instep::Error) -> Failure {
        match error {
            // Inputs are tensor files, but no checkpoints.
            instep::Error::Checkpoint { place, why } => Failure::Tensors(format!("{place} {why}")),
            other => Failure::Library(other),
        }
    }
}

impl Failure {
    /// An error of the system about a file.
    pub fn file(path: &Path) -> impl FnOnce(io::Error) -> Failure {
        let what = path.display().to_string();
        |error| Failure::File { what, error }
    }

    /// Says which tensor file the trouble is in, where it does not say so itself.
    pub(crate) fn inside(self, path: &Path) -> Failure {
        match self {
            Failure::Tensors(why) => Failure::Tensors(format!("{}: {why}", path.display())),
            other => other,
        }
    }
}
