//! A writer that reports a failure only at its end. A rank with a full disk therefore still takes part in all
//! collectives.
//!
//! After the first error, the writer accepts all further bytes and drops them.

use std::io::{self, Write};

pub(super) struct Patient<W> {
    out: W,
    /// Whether errors are reported only at the end, and not at once.
    waits: bool,
    failed: Option<io::Error>,
}

impl<W: Write> Patient<W> {
    pub(super) fn new(out: W, waits: bool) -> Patient<W> {
        Patient { out, waits, failed: None }
    }
}

impl<W: Write> Write for Patient<W> {
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
mod tests {
    use super::*;

    struct Full;

    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::Error::from(io::ErrorKind::StorageFull))
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_failure_is_reported_at_the_end_or_at_once() {
        let mut patient = Patient::new(Full, true);
        assert!(patient.write_all(&[1; 9]).is_ok() && patient.write_all(&[2]).is_ok());
        assert_eq!(patient.flush().unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert!(Patient::new(Full, false).write_all(&[1]).is_err());
    }
}
