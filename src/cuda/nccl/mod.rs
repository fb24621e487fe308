//! NCCL as a [`Collective`]: ranks are processes, each with its own GPU.
//!
//! The library is loaded at run time, so a build does not need NCCL. Without feature `cuda`, this module does not look
//! for the library. To form a group, ranks need NCCL's id of 128 bytes. The id comes from the caller, from a file, or
//! over a [`Collective`] of the host. NCCL does the networking, so this crate opens no port.
#![allow(unsafe_code)]

mod bindings;
mod communicator;
mod ending;
mod entry;
mod file;
mod host;
mod library;
mod memory;
mod options;
mod raw;
mod shared;

pub use communicator::Nccl;
pub use library::{unique_id, version};
pub use options::{Ctas, Options};

use std::ffi::c_void;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::collective::Collective;
use crate::error::{Error, Result};

/// NCCL's id of a group. The ranks of the group find each other by this id. [`unique_id`] makes an id.
pub type UniqueId = [u8; 128];

impl Nccl {
    /// Joins the group that torchrun's environment variables describe ([`Options::from_environment`]), on this rank's
    /// GPU. Every process of the group makes this call. `INSTEP_ID_FILE` names the file of
    /// [`from_file`](Self::from_file). A group of one process needs no file.
    ///
    /// ```no_run
    /// use instep::Collective;
    /// use instep::cuda::Nccl;
    ///
    /// // INSTEP_ID_FILE=~/shared/id torchrun --nproc-per-node 8 --no-python ./my_program
    /// let comm = Nccl::from_environment()?;
    /// println!("rank {} of {}", comm.rank(), comm.world_size());
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Ordering as for [`from_file`](Self::from_file).
    ///
    /// # Errors
    /// `Config` names a variable that is missing or invalid. Other errors as for [`from_file`](Self::from_file).
    pub fn from_environment() -> Result<Nccl> {
        let options = Options::from_environment()?;
        if options.world_size == 1 {
            options.refuse_ledger()?;
            return Nccl::with_id(&options, unique_id()?);
        }
        let path = std::env::var_os("INSTEP_ID_FILE").ok_or_else(|| {
            let remedy = "name a file in a folder that all ranks see, and only you can write";
            Error::config("INSTEP_ID_FILE", "unset", "ranks cannot meet without it", remedy)
        })?;
        Nccl::from_file(&options, path)
    }

    /// Joins the ranks that read the same file, in a folder that all ranks can read. Rank 0 makes the id, and writes
    /// the id and the [job](Options::job) to the file. Other ranks see the complete file or no file. Rank 0 removes the
    /// file once all ranks have joined.
    ///
    /// A user who can write in the folder can take a rank's place. Only the owner of the file can read the file. NCCL's
    /// own connections are not authenticated.
    ///
    /// # Ordering
    /// Returns once all ranks have joined. If processes form several groups with one file, every rank must form the
    /// groups in the same order.
    ///
    /// # Errors
    /// `Config` if the job is empty, or if the options ask for a ledger. `NcclUnavailable`, `DriverUnavailable` and
    /// `Unsupported` say what this machine lacks. `File` if rank 0 cannot write the file. `Deadline` on another rank,
    /// if that rank does not find rank 0's file in time. `Collective` if NCCL cannot connect, or if a rank does not
    /// join within the deadline.
    pub fn from_file(options: &Options, path: impl AsRef<Path>) -> Result<Nccl> {
        options.refuse_job()?;
        Nccl::open(options, |connect| file::meet(options, path.as_ref(), unique_id, connect))
    }

    /// Joins the ranks that have the same id. One rank makes the id with [`unique_id`], and the caller sends it to all
    /// ranks. The job in the options is not used.
    ///
    /// # Errors
    /// Errors as for [`from_file`](Self::from_file), except errors about the job or the file.
    pub fn with_id(options: &Options, id: UniqueId) -> Result<Nccl> {
        Nccl::open(options, |connect| connect(&id, options.deadline, &|| Ok(())))
    }

    /// Joins the ranks of `host`. Each rank has the same number as in `host`. `host` can be MPI, your own collective
    /// such as `examples/tcp_ranks`, or a framework's store. The host collective sends NCCL's id, and reports failures.
    /// If a rank fails or is lost, the other ranks learn the cause as soon as their host's [`check`](Collective::check)
    /// returns it. The other ranks then need not wait until their deadline. With [`Options::ledger`], ranks also
    /// compare every call over `host`.
    ///
    /// Of the options, this call uses only the device, the deadline, the ledger and the CTAs.
    ///
    /// # Ordering
    /// Returns once all ranks have joined. After this call, only this group may use `host`.
    ///
    /// # Errors
    /// Errors as for [`with_id`](Self::with_id) and for the host's [`enqueue`](Collective::enqueue). A rank that fails
    /// here aborts `host`, so the other ranks fail too.
    pub fn beside(host: impl Collective + 'static, options: &Options) -> Result<Nccl> {
        let (rank, world_size) = (host.rank(), host.world_size());
        Nccl::open_beside(Arc::new(host), &Options { rank, world_size, ..options.clone() })
    }

    /// Uses a framework's communicator, an `ncclComm_t`. The rank, the number of ranks and the GPU are read from the
    /// communicator.
    ///
    /// The framework still owns the communicator. [`close`](Self::close) and [`abort`](Collective::abort) end only the
    /// further communicators that this crate has made. If a rank is lost, the calls on the stream therefore end only
    /// once the framework aborts the communicator. The memory of gradients is not registered with this communicator.
    ///
    /// # Ordering
    /// Before this call, all collectives of this crate's other communicators on the device have ended. This crate does
    /// not know of collectives that were enqueued before this call, so it cannot make later collectives wait for them
    /// ([`Nccl`]).
    ///
    /// # Errors
    /// `NcclUnavailable` without a usable library. `Config` for a null communicator or a deadline of zero. `Collective`
    /// if NCCL does not recognise the communicator.
    ///
    /// # Safety
    /// The communicator was made on this process's GPU, by the library that this crate uses. Unless `INSTEP_NCCL` names
    /// a file, this crate first looks for a library that the process has already loaded. [`version`] returns the
    /// version of the library that this crate uses. The communicator lives until every handle of this group, and every
    /// stepper that has a handle, has been closed or dropped. Nothing else calls NCCL with this communicator at the
    /// same time. Every rank adopts its own communicator. All ranks make the same calls in the same order, including
    /// the framework's calls.
    pub unsafe fn adopt(communicator: *mut c_void, deadline: Duration) -> Result<Nccl> {
        let options = Options { deadline, ..Options::default() };
        options.refuse()?;
        // SAFETY: guaranteed by the caller.
        let raw = unsafe { raw::Raw::adopt(library::Library::get()?, communicator)? };
        Ok(Nccl::around(raw, &options, None))
    }
}
