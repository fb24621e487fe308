//! NCCL in a build without feature `cuda`: the same names, and constructors that return an error.
//!
//! No value of [`Nccl`] exists, so no method of it runs.

use std::convert::Infallible;
use std::sync::Arc;

use crate::collective::{Call, Collective};
use crate::cuda::nccl::{Options, Source, UniqueId};
use crate::error::{Error, Result};

/// One rank's end of a group of GPUs. This build has none; rebuild with `--features cuda`.
#[derive(Clone, Debug)]
pub struct Nccl(Infallible);

impl Nccl {
    pub(super) fn open(options: &Options, _: &Source<'_>) -> Result<Nccl> {
        options.refuse_ledger().and_then(|()| options.refuse()).and(Err(unavailable()))
    }

    pub(super) fn open_beside(host: Arc<dyn Collective>, options: &Options) -> Result<Nccl> {
        let error = options.refuse().err().unwrap_or_else(unavailable);
        host.abort(&error);
        Err(error)
    }

    /// Returns settings that are likely to make it slow.
    pub fn warnings(&self) -> &[String] {
        match self.0 {}
    }

    /// Waits until every collective has ended on all ranks, and ends the group.
    ///
    /// # Errors
    /// None: there is no group to close.
    pub fn close(&self) -> Result<()> {
        match self.0 {}
    }
}

/// Returns the NCCL library's version.
///
/// # Errors
/// `NcclUnavailable`.
pub fn version() -> Result<u32> {
    Err(unavailable())
}

/// Makes an id for [`Nccl::with_id`].
///
/// # Errors
/// `NcclUnavailable`.
pub fn unique_id() -> Result<UniqueId> {
    Err(unavailable())
}

pub(super) fn unavailable() -> Error {
    Error::NcclUnavailable { why: "this build cannot load it; rebuild with `--features cuda`".to_owned() }
}

impl Collective for Nccl {
    fn rank(&self) -> u32 {
        match self.0 {}
    }

    fn world_size(&self) -> u32 {
        match self.0 {}
    }

    fn enqueue(&self, _: &mut Call<'_>) -> Result<()> {
        match self.0 {}
    }

    fn abort(&self, _: &Error) {
        match self.0 {}
    }
}
