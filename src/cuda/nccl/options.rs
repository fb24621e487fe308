//! The rank and its options, set by the caller or read from torchrun's environment.
//!
//! This file opens no file and loads no library, so wrong options are refused before any rank waits.

use std::time::Duration;

use crate::error::{Error, Result, refuse};

/// Options with which a rank joins its group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Number of this rank, from 0.
    pub rank: u32,
    /// Number of ranks, each a process with its own GPU.
    pub world_size: u32,
    /// Ordinal of this rank's GPU among the GPUs that are visible to the process.
    pub device: u32,
    /// Name of this run. [`Nccl::from_file`](crate::cuda::Nccl::from_file) writes this name and the id to one file. The
    /// name must differ from the names of earlier runs, because an earlier run may have left its file.
    pub job: String,
    /// Longest wait for the other ranks when the group is made and when it is closed.
    pub deadline: Duration,
    /// If true, the ranks compare every collective before they enqueue it. A difference is then a `Mismatch` and not a
    /// hang. Each comparison costs an all-reduce of the host collective, so use the ledger to find faults. The ledger
    /// works only with [`Nccl::beside`](crate::cuda::Nccl::beside), which has a host collective.
    pub ledger: bool,
    /// Limits the share of the GPU that the NCCL kernels of this group take.
    pub ctas: Ctas,
}

/// Limits the thread blocks of NCCL's kernels. These kernels take multiprocessors from backward and from steps. By
/// default, NCCL chooses.
///
/// # Source
/// `maxCTAs`, `CTAPolicy` (NCCL 2.27) and `nvlsCTAs` (2.28) of `ncclConfig_t`. An older NCCL ignores fields that it
/// lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ctas {
    /// Largest number of blocks of one collective: `maxCTAs`.
    pub most: Option<u32>,
    /// Whether NCCL prefers few blocks to the highest bandwidth: `NCCL_CTA_POLICY_EFFICIENCY`.
    pub efficient: bool,
    /// Number of blocks of a collective, if the NVLink switch computes its sums: `nvlsCTAs`.
    pub nvls: Option<u32>,
}

impl Default for Options {
    /// Returns the options of a group of one rank.
    fn default() -> Self {
        let (job, deadline, ctas) = (String::new(), Duration::from_secs(60), Ctas::default());
        Options { rank: 0, world_size: 1, device: 0, job, deadline, ledger: false, ctas }
    }
}

impl Options {
    /// Reads the options from environment variables. `RANK` and `WORLD_SIZE` must be set. `LOCAL_RANK` is the GPU, by
    /// default 0. `TORCHELASTIC_RUN_ID`, `TORCHELASTIC_RESTART_COUNT` and `MASTER_PORT` form the job.
    /// `INSTEP_DEADLINE_MS` sets the deadline, and `INSTEP_LEDGER` (0 or 1) sets the ledger.
    ///
    /// # Errors
    /// `Config` names the variable.
    pub fn from_environment() -> Result<Options> {
        Options::read(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    fn read(lookup: impl Fn(&'static str) -> Option<String>) -> Result<Options> {
        let number = |name: &'static str, largest: u64| match lookup(name) {
            None => Ok(None),
            Some(text) => match text.parse::<u64>() {
                Ok(value) if value <= largest => Ok(Some(value)),
                _ => Err(Error::range(name, text, format_args!("a whole number up to {largest}"))),
            },
        };
        let ordinal = |name| Ok(number(name, u32::MAX.into())?.map(|value| value as u32));
        let launcher = "start the program with torchrun, or set RANK=0 WORLD_SIZE=1 for one process alone";
        let unset = |name| Error::config(name, "unset", "ranks cannot meet without it", launcher);
        let mut options = Options {
            rank: ordinal("RANK")?.ok_or_else(|| unset("RANK"))?,
            world_size: ordinal("WORLD_SIZE")?.ok_or_else(|| unset("WORLD_SIZE"))?,
            device: ordinal("LOCAL_RANK")?.unwrap_or(0),
            ..Options::default()
        };
        if let Some(run) = lookup("TORCHELASTIC_RUN_ID").filter(|run| !run.is_empty()) {
            // torchrun calls every run "none" unless it is given a name. Concurrent runs have different ports.
            let [restart, port] = ["TORCHELASTIC_RESTART_COUNT", "MASTER_PORT"].map(&lookup);
            options.job = [Some(run), restart, port].map(Option::unwrap_or_default).join(":");
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
        let Options { rank, world_size, ctas, .. } = *self;
        // NCCL takes these numbers as C ints.
        for (field, number) in
            [("WORLD_SIZE", Some(world_size)), ("ctas.most", ctas.most), ("ctas.nvls", ctas.nvls)]
        {
            if let Some(number) = number.filter(|number| !(1..=i32::MAX as u32).contains(number)) {
                return Err(Error::range(field, number, "1 or more, and less than 2^31"));
            }
        }
        if rank >= world_size {
            return Err(Error::range("RANK", rank, format_args!("a rank below WORLD_SIZE, {world_size}")));
        }
        refuse! {
            "INSTEP_DEADLINE_MS" = 0, if self.deadline.is_zero() => "out of range", "use 1 or more";
        }
        Ok(())
    }

    /// Refuses options that need a host collective beside NCCL.
    pub(super) fn refuse_ledger(&self) -> Result<()> {
        refuse! {
            "INSTEP_LEDGER" = 1, if self.ledger
                => "ranks have no host collective to compare calls over", "use Nccl::beside, or no ledger";
        }
        Ok(())
    }

    /// Returns an error if a rank could mistake the file of another run for its own file.
    pub(super) fn refuse_job(&self) -> Result<()> {
        refuse! {
            "job" = "(empty)", if self.job.is_empty()
                => "a file of another run would be taken for this one's", "name this run; torchrun sets TORCHELASTIC_RUN_ID";
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/cuda/nccl/options.rs"]
mod tests;
