//! An NCCL communicator as a value: its owner may call NCCL with it, and ending it takes it by value.
//!
//! It never blocks inside NCCL (`blocking = 0`): a call in progress is polled until it is done, late or no longer
//! wanted, and nothing else touches its stream before. An abort may wait for NCCL's threads, so it runs on a thread of
//! its own. Two threads never use a communicator at once.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::mem::size_of;
use std::time::Duration;
use std::{ptr, thread};

use crate::collective::Call;
use crate::cuda::context::with_device;
use crate::cuda::nccl::bindings::{
    NCCL_API_MAGIC, NCCL_VERSION_CODE, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t,
    ncclUniqueId,
};
use crate::cuda::nccl::library::Library;
use crate::cuda::nccl::polling::{Wall, poll};
use crate::cuda::nccl::{Options, UniqueId};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::op::CollectiveKind;

/// `NCCL_CONFIG_UNDEF_INT`: NCCL chooses the value.
const UNDEFINED: i32 = i32::MIN;

/// One rank's communicator.
pub(super) struct Raw {
    library: &'static Library,
    comm: ncclComm_t,
    rank: u32,
    device: u32,
}

// SAFETY: NCCL lets any thread use a communicator, one at a time, with the device current.
unsafe impl Send for Raw {}

impl Raw {
    /// Connects to all ranks that hold the id. An error of `wanted` ends the wait.
    pub(super) fn connect(
        library: &'static Library,
        options: &Options,
        id: &UniqueId,
        wanted: impl Fn() -> Result<()>,
    ) -> Result<Raw> {
        let mut raw = Raw { library, comm: ptr::null_mut(), rank: options.rank, device: options.device };
        let id = ncclUniqueId { internal: id.map(|byte| byte as _) };
        let (ranks, rank) = (options.world_size as i32, options.rank as i32);
        let mut config = config();
        let outcome = with_device(options.device, || {
            // SAFETY: the device is current, the config is initialised, and the handle outlives the call.
            let code = unsafe {
                library.functions.ncclCommInitRankConfig(&mut raw.comm, ranks, id, rank, &mut config)
            };
            raw.settle("ncclCommInitRankConfig", code, options.deadline, wanted)
        });
        match outcome {
            Ok(()) => Ok(raw),
            Err(error) => {
                raw.abort_detached();
                Err(error)
            }
        }
    }

    /// Enqueues one collective and returns once all of it is on the stream.
    ///
    /// # Errors
    /// `Unsupported` for buffers in host memory; else as for [`Collective::enqueue`](crate::Collective::enqueue).
    pub(super) fn enqueue(&self, call: &Call<'_>, wanted: impl Fn() -> Result<()>) -> Result<()> {
        let (src, dst) = (call.src().cast::<c_void>(), call.dst().cast::<c_void>());
        let stream = ptr::with_exposed_provenance_mut(call.require_stream()?.0);
        let dtype = match call.dtype {
            DType::F32 => ncclDataType_t::ncclFloat32,
            DType::BF16 => ncclDataType_t::ncclBfloat16,
            DType::F16 => ncclDataType_t::ncclFloat16,
        };
        // Whole numbers are combined as what they are.
        let (dtype, unit, operation) = match call.kind {
            CollectiveKind::Sum64 => (ncclDataType_t::ncclUint64, 8, ncclRedOp_t::ncclSum),
            CollectiveKind::Max32 => (ncclDataType_t::ncclUint32, 4, ncclRedOp_t::ncclMax),
            CollectiveKind::Min32 => (ncclDataType_t::ncclUint32, 4, ncclRedOp_t::ncclMin),
            _ => (dtype, call.dtype.bytes(), ncclRedOp_t::ncclSum),
        };
        // NCCL counts the elements of the shorter buffer.
        let count = (call.src_bytes().min(call.dst_bytes()) / unit) as usize;
        let functions = &self.library.functions;
        with_device(self.device, || {
            // SAFETY: the device is current; the call's buffers and stream are there by the promise of its maker.
            let (name, code) = unsafe {
                match call.kind {
                    CollectiveKind::AllReduce
                    | CollectiveKind::Sum64
                    | CollectiveKind::Max32
                    | CollectiveKind::Min32 => (
                        "ncclAllReduce",
                        functions.ncclAllReduce(src, dst, count, dtype, operation, self.comm, stream),
                    ),
                    CollectiveKind::Broadcast => (
                        "ncclBroadcast",
                        functions.ncclBroadcast(src, dst, count, dtype, 0, self.comm, stream),
                    ),
                    CollectiveKind::ReduceScatter => (
                        "ncclReduceScatter",
                        functions.ncclReduceScatter(src, dst, count, dtype, operation, self.comm, stream),
                    ),
                    CollectiveKind::AllGather => {
                        ("ncclAllGather", functions.ncclAllGather(src, dst, count, dtype, self.comm, stream))
                    }
                }
            };
            self.settle(name, code, call.deadline(), wanted)
        })
    }

    /// Returns an error that occurred since the last call, if any.
    pub(super) fn check(&self) -> Result<()> {
        match self.state() {
            ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress => Ok(()),
            code => Err(self.library.error(self.rank, "ncclCommGetAsyncError", code)),
        }
    }

    /// Waits until all collectives have ended on all ranks of this machine, then frees the communicator.
    pub(super) fn finish(self, deadline: Duration, wanted: impl Fn() -> Result<()>) -> Result<()> {
        let functions = &self.library.functions;
        let outcome = with_device(self.device, || {
            // SAFETY: a live communicator, on its device.
            let code = unsafe { functions.ncclCommFinalize(self.comm) };
            self.settle("ncclCommFinalize", code, deadline, wanted)
        });
        if let Err(error) = outcome {
            self.abort_detached();
            return Err(error);
        }
        with_device(self.device, || {
            // SAFETY: as above; nothing uses the handle after this, so NCCL may finish freeing it in the background.
            match unsafe { functions.ncclCommDestroy(self.comm) } {
                ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress => Ok(()),
                code => Err(self.library.error(self.rank, "ncclCommDestroy", code)),
            }
        })
    }

    /// Ends all calls in progress, on the device too. May block.
    pub(super) fn abort(self) {
        if self.comm.is_null() {
            return;
        }
        // A failure here has no one to report to.
        let _ = with_device(self.device, || {
            // SAFETY: a live communicator, on its device, which nothing uses after this.
            unsafe { self.library.functions.ncclCommAbort(self.comm) };
            Ok(())
        });
    }

    /// Aborts on another thread, without waiting.
    pub(super) fn abort_detached(self) {
        detached(move || self.abort());
    }

    /// Registers memory, so that NCCL can reach it faster; `None` if NCCL declines.
    pub(super) fn register(&self, address: *mut c_void, bytes: usize) -> Option<Registration> {
        let functions = &self.library.functions;
        if functions.ncclCommRegister.is_err() || functions.ncclCommDeregister.is_err() {
            return None;
        }
        let mut handle = ptr::null_mut();
        // SAFETY: memory that the library has made, of this length.
        let code = unsafe { functions.ncclCommRegister(self.comm, address, bytes, &mut handle) };
        (code == ncclResult_t::ncclSuccess && !handle.is_null()).then_some(Registration(handle))
    }

    /// Removes a registration of this communicator.
    pub(super) fn deregister(&self, registration: Registration) {
        // SAFETY: `register` made it, which found this function. If it fails, the communicator frees it when it ends.
        unsafe { self.library.functions.ncclCommDeregister(self.comm, registration.0) };
    }

    pub(super) fn library(&self) -> &'static Library {
        self.library
    }

    fn state(&self) -> ncclResult_t {
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: a live communicator; writes one number.
        match unsafe { self.library.functions.ncclCommGetAsyncError(self.comm, &mut state) } {
            ncclResult_t::ncclSuccess => state,
            code => code,
        }
    }

    fn settle(
        &self,
        call: &'static str,
        code: ncclResult_t,
        deadline: Duration,
        wanted: impl Fn() -> Result<()>,
    ) -> Result<()> {
        let in_progress = ncclResult_t::ncclInProgress;
        let code = match code == in_progress && !self.comm.is_null() {
            true => {
                let look = || Some(self.state()).filter(|code| *code != in_progress);
                poll(Wall::start(), deadline, wanted, look)?
            }
            false => Some(code),
        };
        match code {
            Some(ncclResult_t::ncclSuccess) => Ok(()),
            Some(code) => Err(self.library.error(self.rank, call, code)),
            None => {
                let message = format!("still in progress after {} ms", deadline.as_millis());
                Err(Error::Collective { rank: self.rank, call, code: in_progress.0 as i32, message })
            }
        }
    }
}

/// Memory that is registered with a communicator.
#[derive(Debug)]
pub(super) struct Registration(*mut c_void);

// SAFETY: a name, used only with the communicator.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

/// Runs a call that may block on a thread of its own. If no thread can be started, the communicator is leaked.
pub(super) fn detached(work: impl FnOnce() + Send + 'static) {
    drop(thread::Builder::new().name("instep-nccl-end".to_owned()).spawn(work));
}

/// Returns NCCL_CONFIG_INITIALIZER, which is a macro, with non-blocking calls.
fn config() -> ncclConfig_t {
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: NCCL_API_MAGIC,
        version: NCCL_VERSION_CODE,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
        graphUsageMode: UNDEFINED,
        numRmaCtx: UNDEFINED,
        maxP2pPeers: UNDEFINED,
        graphStreamOrdering: UNDEFINED,
        // Several communicators share a device, so collectives must run in the order in which they are issued.
        launchOrderImplicit: 1,
        numRmaSig: UNDEFINED,
        rmaEagerInit: UNDEFINED,
        hostCftMode: UNDEFINED,
        nvlsHostMode: UNDEFINED,
    }
}
