//! A writer that reports a failure only at the end, so that a rank with a full disk still takes part in all
//! collectives.
//!
//! After the first error, the writer accepts all further bytes and drops them.

use std::io::{self, Write};

pub(super) struct LateErrors<W> {
    out: W,
    /// Whether a failed write is reported only by `flush`. If false, errors are reported at once.
    waits: bool,
    failed: Option<io::Error>,
}

impl<W: Write> LateErrors<W> {
    pub(super) fn new(out: W, waits: bool) -> LateErrors<W> {
        LateErrors { out, waits, failed: None }
    }
}

impl<W: Write> Write for LateErrors<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.failed.is_some() {
            return Ok(bytes.len());
        }
        match self.out.write(bytes) {
            Err(error) if self.waits && error.kind() != io::ErrorKind::Interrupted => {
                self.failed = Some(error);
                Ok(bytes.len())
            }
            outcome => outcome,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.failed.take() {
            Some(error) => Err(error),
            None => self.out.flush(),
        }
    }
}

#[cfg(test)]
#[path = "../../tests/unit/checkpoint/late_errors.rs"]
mod tests;
