//! A test of the writer that goes on after a failure.
//!
//! No failure is lost: it is reported at once or at the end.

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
    let mut writer = LateErrors::new(Full, true);
    assert!(writer.write_all(&[1; 9]).is_ok() && writer.write_all(&[2]).is_ok());
    assert_eq!(writer.flush().unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert!(LateErrors::new(Full, false).write_all(&[1]).is_err());
}
