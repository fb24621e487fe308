//! The reason why a command failed, in one line that names the cause.
//!
//! Every variant means exit status 2. No message contains a debug form of another error.

use std::fmt::Display;
use std::io;
use std::path::Path;

/// The error of every command.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The configuration, or an option of `plan`, violates a rule that the README states.
    #[error("config: {0}")]
    Config(String),
    /// The tensor file is broken, or does not fit the configuration.
    #[error("{0}")]
    Tensors(String),
    /// A bench computed a wrong result, or options of `bench` do not fit together or do not fit `--device`.
    #[error("bench: {0}")]
    Bench(String),
    /// A file could not be read or written.
    #[error("{what}: {error}")]
    File {
        /// The file.
        what: String,
        /// The system's reason.
        error: io::Error,
    },
    /// An error of the library.
    #[error(transparent)]
    Library(instep::Error),
}

impl From<instep::Error> for Failure {
    fn from(error: instep::Error) -> Failure {
        match error {
            // Inputs are tensor files, so the message does not call them checkpoints.
            instep::Error::Checkpoint(refusal) => Failure::Tensors(refusal.to_string()),
            other => Failure::Library(other),
        }
    }
}

impl Failure {
    /// Makes an error about the configuration.
    pub(crate) fn config(thing: impl Display, wrong: impl Display, remedy: impl Display) -> Failure {
        Failure::Config(format!("{thing}: {wrong}; {remedy}"))
    }

    /// Makes an error about JSON that does not parse. The parser's message may contain names of Rust types, which a
    /// user does not know. These names are replaced by plain words.
    pub(crate) fn json(error: &serde_json::Error) -> Failure {
        let types = [
            ("usize", "a whole number"),
            ("u64", "a whole number"),
            ("u32", "a whole number"),
            ("f64", "a number"),
        ];
        let text = types.iter().fold(error.to_string(), |text, (rust, plain)| {
            text.replace(&format!("expected {rust}"), &format!("expected {plain}"))
        });
        Failure::Config(text)
    }

    /// Makes an error about a tensor file.
    pub(crate) fn tensors(thing: impl Display, wrong: impl Display, remedy: impl Display) -> Failure {
        Failure::Tensors(format!("{thing}: {wrong}; {remedy}"))
    }

    /// Returns a function for `map_err` that wraps the system's error about a file.
    pub fn file(path: &Path) -> impl FnOnce(io::Error) -> Failure {
        let what = path.display().to_string();
        |error| Failure::File { what, error }
    }

    /// Adds the file's path to an error about the configuration.
    pub(crate) fn configured(self, path: &Path) -> Failure {
        match self {
            Failure::Config(why) => Failure::Config(format!("{}: {why}", path.display())),
            other => other,
        }
    }

    /// Adds the file's path to an error about its tensors.
    pub(crate) fn inside(self, path: &Path) -> Failure {
        match self {
            Failure::Tensors(why) => Failure::Tensors(format!("{}: {why}", path.display())),
            other => other,
        }
    }
}
