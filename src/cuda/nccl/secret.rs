//! The secret that the ranks of one job share, if their launcher gives them one.
//!
//! `handshake.rs` uses it to prove who belongs to the job. A secret is never printed and never sent.

use std::fmt;

use crate::error::{Error, Result};

/// Shortest secret. Anyone who can connect receives a proof against which guesses can be tested, so it must be long.
const SHORTEST_BYTES: usize = 16;

/// A secret that only the ranks of a job know. Its `Debug` output does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Takes at least 16 bytes, which should be random: `openssl rand -hex 32` prints a good secret.
    ///
    /// # Errors
    /// `Config` if there are fewer.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Secret> {
        let bytes = bytes.into();
        if bytes.len() < SHORTEST_BYTES {
            let (value, wrong) = (format_args!("({} bytes)", bytes.len()), "too short to keep strangers out");
            return Err(Error::config(
                "INSTEP_JOB_SECRET",
                value,
                wrong,
                "use at least 16 random bytes, or unset it",
            ));
        }
        Ok(Secret(bytes))
    }

    #[cfg(any(feature = "cuda", test))]
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}
