//! This rank's identity and the address of the rendezvous: set by the caller, or from torchrun's environment.
//!
//! Nothing here opens a connection or loads a library, so wrong options are refused before any rank waits.

use std::ffi::OsString;
use std::time::Duration;

use crate::cuda::nccl::Secret;
use crate::error::{Error, Result};

/// Options by which a rank joins its group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// This rank, from 0.
    pub rank: u32,
    /// Number of ranks, each a process with its own GPU.
    pub world_size: u32,
    /// Ordinal of this rank's GPU, among those that the process sees.
    pub device: u32,
    /// Host name or address of rank 0.
    pub master_addr: String,
    /// TCP port on which rank 0 listens until all ranks have joined.
    pub master_port: u16,
    /// Tells jobs apart that meet at one port, by mistake or one after the other. It is no secret.
    pub job: String,
    /// Secret of this job's ranks. With it, rank 0 gives a seat and NCCL's id only to a process that has proven
    /// that it knows the secret, and the other ranks believe only such a rank 0. Nothing is encrypted.
    ///
    /// Without it nothing is authenticated: everyone who can reach the port, and who knows the world size and the job,
    /// can take a rank's place. Then the port belongs on a trusted network. NCCL's own connections are never
    /// authenticated.
    pub secret: Option<Secret>,
    /// Longest wait for the other ranks when the group is made and when it is closed.
    pub deadline: Duration,
    /// Compares every collective with the other ranks before it is enqueued, so that a difference is a `Mismatch` and
    /// not a hang. It costs a round trip through rank 0 per collective, so use it to find faults.
    pub ledger: bool,
}

impl Default for Options {
    /// A group of one.
    fn default() -> Self {
        Options {
            rank: 0,
            world_size: 1,
            device: 0,
            master_addr: "127.0.0.1".to_owned(),
            master_port: 29500,
            job: String::new(),
            secret: None,
            deadline: Duration::from_secs(60),
            ledger: false,
        }
    }
}

impl Options {
    /// Reads `RANK` and `WORLD_SIZE`, which must be set; `LOCAL_RANK` (the GPU, else 0); `MASTER_ADDR` and
    /// `MASTER_PORT`, which more than one rank needs; `TORCHELASTIC_RUN_ID` (the job); `INSTEP_JOB_SECRET`;
    /// `INSTEP_DEADLINE_MS`; `INSTEP_LEDGER` (0 or 1).
    ///
    /// Under torchrun the agent itself listens on `MASTER_PORT` (`TORCHELASTIC_USE_AGENT_STORE` says so), so ranks meet
    /// on the next one. `INSTEP_MASTER_PORT` overrides both.
    ///
    /// # Errors
    /// `Config` names the variable.
    pub fn from_environment() -> Result<Options> {
        let secret = std::env::var_os("INSTEP_JOB_SECRET").map(OsString::into_encoded_bytes);
        let lookup = |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        Options::read(lookup, secret)
    }

    /// The secret is apart: its bytes need not be text, and replacing those that are not would make secrets equal.
    fn read(lookup: impl Fn(&'static str) -> Option<String>, secret: Option<Vec<u8>>) -> Result<Options> {
        let number = |name: &'static str, largest: u64| match lookup(name) {
            None => Ok(None),
            Some(text) => match text.parse::<u64>() {
                Ok(value) if value <= largest => Ok(Some(value)),
                _ => Err(Error::range(name, text, format_args!("a whole number up to {largest}"))),
            },
        };
        let ordinal = |name| Ok(number(name, u32::MAX.into())?.map(|value| value as u32));
        let unset = |name, remedy| Error::config(name, "unset", "ranks cannot meet without it", remedy);
        let launcher = "start the program with torchrun, or set RANK=0 WORLD_SIZE=1 for one process alone";
        let mut options = Options {
            rank: ordinal("RANK")?.ok_or_else(|| unset("RANK", launcher))?,
            world_size: ordinal("WORLD_SIZE")?.ok_or_else(|| unset("WORLD_SIZE", launcher))?,
            device: ordinal("LOCAL_RANK")?.unwrap_or(0),
            job: lookup("TORCHELASTIC_RUN_ID").unwrap_or_default(),
            secret: secret.map(Secret::new).transpose()?,
            ..Options::default()
        };
        if options.world_size > 1 {
            let why = "set rank 0's address in MASTER_ADDR and a port in MASTER_PORT";
            options.master_addr = lookup("MASTER_ADDR").ok_or_else(|| unset("MASTER_ADDR", why))?;
            let agent = lookup("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|text| text == "True");
            let port = match (number("INSTEP_MASTER_PORT", 65535)?, number("MASTER_PORT", 65535)?) {
                (Some(own), _) => own,
                (None, Some(theirs)) => theirs + u64::from(agent),
                (None, None) => return Err(unset("MASTER_PORT", why)),
            };
            options.master_port = u16::try_from(port).map_err(|_| {
                Error::config(
                    "MASTER_PORT",
                    port - 1,
                    "leaves no port above the agent's",
                    "choose a lower one",
                )
            })?;
        }
        if let Some(deadline_ms) = number("INSTEP_DEADLINE_MS", u64::MAX)? {
            options.deadline = Duration::from_millis(deadline_ms);
        }
        options.ledger = number("INSTEP_LEDGER", 1)? == Some(1);
        options.refuse()?;
        Ok(options)
    }

    /// Refuses options that no constructor accepts.
    pub(super) fn refuse(&self) -> Result<()> {
        if self.world_size == 0 {
            return Err(Error::range("WORLD_SIZE", 0, "1 or more"));
        }
        if self.rank >= self.world_size {
            return Err(Error::range(
                "RANK",
                self.rank,
                format_args!("a rank below WORLD_SIZE, {}", self.world_size),
            ));
        }
        if self.world_size > i32::MAX as u32 {
            return Err(Error::range("WORLD_SIZE", self.world_size, "less than 2^31, as NCCL does"));
        }
        if self.world_size > 1 && self.master_port == 0 {
            return Err(Error::config(
                "MASTER_PORT",
                0,
                "ranks cannot know a port that the system chooses",
                "name one",
            ));
        }
        if self.deadline.is_zero() {
            return Err(Error::range("INSTEP_DEADLINE_MS", 0, "1 or more"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TORCHRUN: [(&str, &str); 7] = [
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "node-0"),
        ("MASTER_PORT", "29400"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("TORCHELASTIC_RUN_ID", "none"),
    ];

    /// Reads the variables as torchrun sets them, with changes; an empty value unsets one.
    fn read(changes: &[(&str, &str)]) -> Result<Options> {
        let lookup = |name| {
            let own = changes.iter().chain(&TORCHRUN).find(|(key, _)| *key == name);
            own.filter(|(_, value)| !value.is_empty()).map(|(_, value)| (*value).to_owned())
        };
        Options::read(lookup, lookup("INSTEP_JOB_SECRET").map(String::into_bytes))
    }

    fn refused(changes: &[(&str, &str)]) -> &'static str {
        match read(changes) {
            Err(Error::Config { field, .. }) => field,
            other => panic!("{changes:?}: {other:?}"),
        }
    }

    #[test]
    fn torchruns_variables_say_who_a_rank_is_and_leave_the_agent_its_port() {
        let options = read(&[]).unwrap();
        let expected = Options {
            rank: 5,
            world_size: 8,
            device: 1,
            master_addr: "node-0".to_owned(),
            master_port: 29401,
            job: "none".to_owned(),
            ..Options::default()
        };
        assert_eq!(options, expected);
        assert_eq!(read(&[("TORCHELASTIC_USE_AGENT_STORE", "False")]).unwrap().master_port, 29400);
        assert_eq!(read(&[("INSTEP_MASTER_PORT", "7000")]).unwrap().master_port, 7000);
        assert_eq!(read(&[("INSTEP_DEADLINE_MS", "250")]).unwrap().deadline, Duration::from_millis(250));
        assert!(read(&[("INSTEP_LEDGER", "1")]).unwrap().ledger);
        let bytes = Options::read(
            |name| (name == "RANK" || name == "WORLD_SIZE").then(|| "1".to_owned()),
            Some(vec![0xff; 6]),
        );
        assert!(
            matches!(bytes, Err(Error::Config { field: "INSTEP_JOB_SECRET", .. })),
            "6 bytes that are no text"
        );
        let secret = "0123456789abcdef";
        let options = read(&[("INSTEP_JOB_SECRET", secret)]).unwrap();
        assert_eq!(options.secret, Some(Secret::new(secret).unwrap()));
        assert!(!format!("{options:?}").contains(secret));
        let alone = read(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", ""), ("MASTER_PORT", "")]);
        assert_eq!(alone.unwrap().world_size, 1);
    }

    #[test]
    fn a_variable_that_is_missing_or_out_of_range_is_named() {
        for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
            assert_eq!(refused(&[(name, "")]), name);
        }
        for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "INSTEP_MASTER_PORT", "INSTEP_LEDGER"]
        {
            for value in ["-1", "x", "99999999999"] {
                assert_eq!(refused(&[(name, value)]), name, "{value}");
            }
        }
        assert_eq!(refused(&[("INSTEP_JOB_SECRET", "0123456789abcde")]), "INSTEP_JOB_SECRET");
        assert_eq!(refused(&[("RANK", "8")]), "RANK");
        assert_eq!(refused(&[("WORLD_SIZE", "0")]), "WORLD_SIZE");
        assert_eq!(refused(&[("MASTER_PORT", "65535")]), "MASTER_PORT");
        assert_eq!(refused(&[("INSTEP_MASTER_PORT", "0")]), "MASTER_PORT");
        assert_eq!(refused(&[("INSTEP_DEADLINE_MS", "0")]), "INSTEP_DEADLINE_MS");
    }
}
