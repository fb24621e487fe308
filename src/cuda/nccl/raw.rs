//! An NCCL communicator as a value. The value's owner may call NCCL with the communicator. Ending the communicator
//! consumes the value.
//!
//! Calls never block inside NCCL (`blocking = 0`). A call in progress is polled until it is done, its deadline has
//! passed, or the check `wanted` returns an error. While a call is in progress, nothing else touches its stream. An
//! abort may wait for NCCL's threads, so it runs on a separate thread. Two threads never use the same communicator at
//! the same time.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;
use std::{env, mem, ptr};

use crate::collective::{Call, CallKey};
use crate::cuda::Cuda;
use crate::cuda::driver::{Driver, Entered};
use crate::cuda::nccl::UniqueId;
use crate::cuda::nccl::bindings::{
    NCCL_API_MAGIC, NCCL_VERSION_CODE, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t,
    ncclUniqueId,
};
use crate::cuda::nccl::ending::{detached, note_abort};
use crate::cuda::nccl::library::Library;
use crate::cuda::nccl::options::Ctas;
use crate::cuda::order::{is_ordered, on_device};
use crate::cuda::owned::{Arena, Event, OwnedStream};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::handle::StreamHandle;
use crate::op::CollectiveKind;
use crate::poll::{Wall, poll};

/// `NCCL_CONFIG_UNDEF_INT`: NCCL chooses the value.
const UNDEFINED: i32 = i32::MIN;
/// `NCCL_CTA_POLICY_EFFICIENCY`.
const EFFICIENT: i32 = 1;

/// How long a wait polls before it begins to sleep. NCCL starts a thread for each collective. The thread ends within
/// microseconds unless it must first connect to other ranks.
const AWAKE: Duration = Duration::from_micros(50);

pub(super) struct Raw {
    pub(super) library: &'static Library,
    pub(super) driver: Arc<dyn Driver>,
    comm: ncclComm_t,
    pub(super) seat: Seat,
    /// Whether a framework made the communicator, and will end it.
    pub(super) is_borrowed: bool,
}

/// This rank's place in a communicator.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seat {
    pub(super) rank: u32,
    pub(super) ranks: u32,
    pub(super) ctas: Ctas,
}

// SAFETY: NCCL lets any thread use a communicator, one at a time, with the device current.
unsafe impl Send for Raw {}

impl Raw {
    /// Connects to all ranks that have the same id. The wait ends if `wanted` returns an error.
    pub(super) fn connect(
        library: &'static Library,
        driver: &Arc<dyn Driver>,
        seat: Seat,
        id: &UniqueId,
        deadline: Duration,
        wanted: impl Fn() -> Result<()>,
    ) -> Result<Raw> {
        let (driver, _entered) = (Arc::clone(driver), Entered::new(&**driver)?);
        let mut raw = Raw { library, driver, comm: ptr::null_mut(), seat, is_borrowed: false };
        let id = ncclUniqueId { internal: id.map(|byte| byte as _) };
        let (ranks, rank) = (seat.ranks as i32, seat.rank as i32);
        let mut config = config(seat.ctas);
        // SAFETY: the device is current, the config is initialised, and the handle outlives the call.
        let code =
            unsafe { library.functions.ncclCommInitRankConfig(&mut raw.comm, ranks, id, rank, &mut config) };
        match raw.settle("ncclCommInitRankConfig", code, deadline, wanted) {
            Ok(()) => {
                raw.settle_order();
                Ok(raw)
            }
            Err(error) => {
                raw.abort_detached();
                Err(error)
            }
        }
    }

    /// Wraps a communicator that a framework has made, and that the framework will end.
    ///
    /// # Safety
    /// `comm` is null, or a communicator of this library that lives until the returned value has been dropped.
    pub(super) unsafe fn adopt(library: &'static Library, comm: *mut c_void) -> Result<Raw> {
        if comm.is_null() {
            let remedy = "make it before it is adopted";
            return Err(Error::config("communicator", "null", "no communicator", remedy));
        }
        let comm: ncclComm_t = comm.cast();
        let functions = &library.functions;
        let (mut rank, mut ranks, mut device) = (0, 0, 0);
        // SAFETY: the communicator is alive by the contract, and each call writes one number.
        let told = unsafe {
            [
                ("ncclCommUserRank", functions.ncclCommUserRank(comm, &mut rank)),
                ("ncclCommCount", functions.ncclCommCount(comm, &mut ranks)),
                ("ncclCommCuDevice", functions.ncclCommCuDevice(comm, &mut device)),
            ]
        };
        if let Some((name, code)) = told.into_iter().find(|(_, code)| *code != ncclResult_t::ncclSuccess) {
            return Err(library.error(0, name, code));
        }
        let seat = Seat { rank: rank as u32, ranks: ranks as u32, ctas: Ctas::default() };
        let driver = Cuda::open(device as u32)?.driver;
        let raw = Raw { library, driver, comm, seat, is_borrowed: true };
        raw.settle_order();
        Ok(raw)
    }

    /// Selects ordering by events for all calls of the device, unless NCCL orders this communicator's calls.
    fn settle_order(&self) {
        if !is_ordered(self.library.version, self.is_borrowed, |name| env::var(name).ok()) {
            on_device(self.driver.ordinal()).is_by_events = true;
        }
    }

    /// Runs `work`, which enqueues collectives of this communicator on a stream, with the device current. The
    /// collectives are ordered with the collectives of the device's other communicators.
    pub(super) fn in_order(&self, stream: StreamHandle, work: impl FnOnce() -> Result<()>) -> Result<()> {
        on_device(self.driver.ordinal()).enqueue(Some(self.comm.addr()), &self.driver, stream, work)
    }

    /// All-gathers the same number of bytes from every rank, and waits for the result. Returns the bytes in the order
    /// of the ranks, or `None` if the deadline has passed.
    pub(super) fn gather(
        &self,
        own: &[u8],
        deadline: Duration,
        wanted: impl Fn() -> Result<()>,
    ) -> Result<Option<Vec<u8>>> {
        // This uses a separate driver object, so that its memory pool is freed with it.
        let driver = Cuda::open(self.driver.ordinal())?.driver;
        let _entered = Entered::new(&*driver)?;
        // The memory may be dropped in any state: it is freed after the work on its stream, and queued work still runs.
        let (stream, event) = (OwnedStream::with_priority(&driver, 0)?, Event::new(&driver, false)?);
        let (stream, bytes) = (stream.handle(), own.len() as u64 * u64::from(self.seat.ranks));
        let [from, to] = [own.len() as u64, bytes].map(|bytes| Arena::new(&driver, bytes, stream));
        let (from, to) = (from?, to?);
        // SAFETY: the memory was allocated for these bytes.
        unsafe { driver.upload(from.address(), own, stream)? };
        let kind = CollectiveKind::AllGather;
        let key = CallKey { kind, pass: 0, bucket: None, dtype: DType::F32, bytes, agreement: 0 };
        // SAFETY: both allocations have these lengths, and only this stream touches them.
        let call = unsafe { Call::new(key, self.seat.ranks, from.base(), to.base(), deadline, Some(stream)) };
        self.in_order(stream, || self.enqueue(&call, &wanted))?;
        event.record(stream)?;
        let wanted = || wanted().and_then(|()| self.check());
        let look = || Ok(event.is_passed()?.then_some(()));
        if poll(Wall::start(), AWAKE, deadline, wanted, look)?.is_none() {
            return Ok(None);
        }
        let mut all = vec![0; bytes as usize];
        // SAFETY: the gather has filled these bytes.
        unsafe { driver.download(&mut all, to.address(), stream)? };
        Ok(Some(all))
    }

    /// Enqueues all collectives that `add` adds, as one launch. Returns once the launch is on the stream. The device is
    /// current. NCCL's group (`ncclGroupStart`) is ended even if `add` fails, because NCCL would otherwise add this
    /// thread's later calls to the group.
    pub(super) fn group(
        &self,
        deadline: &Cell<Duration>,
        wanted: impl Fn() -> Result<()>,
        add: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        // SAFETY: the call takes no argument, and the group belongs to this thread.
        let code = unsafe { self.library.functions.ncclGroupStart() };
        self.settle("ncclGroupStart", code, deadline.get(), &wanted)?;
        // The user's host collective may panic here, when it compares calls.
        let added = catch_unwind(AssertUnwindSafe(add));
        // SAFETY: the call takes no argument, and ends the group that was started above.
        let code = unsafe { self.library.functions.ncclGroupEnd() };
        let ended = self.settle("ncclGroupEnd", code, deadline.get(), wanted);
        added.unwrap_or_else(|panic| resume_unwind(panic)).and(ended)
    }

    /// Enqueues one collective, with the device current, and returns once all of it is on the stream.
    pub(super) fn enqueue(&self, call: &Call<'_>, wanted: impl Fn() -> Result<()>) -> Result<()> {
        let (name, code) = self.call(call)?;
        self.settle(name, code, call.deadline(), wanted)
    }

    /// Adds a collective to the NCCL group that this thread has started.
    pub(super) fn add(&self, call: &Call<'_>) -> Result<()> {
        match self.call(call)? {
            (_, ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress) => Ok(()),
            (name, code) => Err(self.library.error(self.seat.rank, name, code)),
        }
    }

    /// Calls NCCL's function for this collective, and returns the function's name and result code.
    fn call(&self, call: &Call<'_>) -> Result<(&'static str, ncclResult_t)> {
        let (src, dst) = (call.src().cast::<c_void>(), call.dst().cast::<c_void>());
        let stream = ptr::with_exposed_provenance_mut(call.require_stream()?.0);
        let dtype = match call.dtype {
            DType::F32 => ncclDataType_t::ncclFloat32,
            DType::BF16 => ncclDataType_t::ncclBfloat16,
            DType::F16 => ncclDataType_t::ncclFloat16,
        };
        // Integers are summed or compared in their own type.
        let (dtype, unit, operation) = match call.kind {
            CollectiveKind::Sum64 => (ncclDataType_t::ncclUint64, 8, ncclRedOp_t::ncclSum),
            CollectiveKind::Max32 => (ncclDataType_t::ncclUint32, 4, ncclRedOp_t::ncclMax),
            CollectiveKind::Min32 => (ncclDataType_t::ncclUint32, 4, ncclRedOp_t::ncclMin),
            _ => (dtype, call.dtype.bytes(), ncclRedOp_t::ncclSum),
        };
        // NCCL counts the elements of the shorter buffer.
        let count = (call.src_bytes().min(call.dst_bytes()) / unit) as usize;
        // SAFETY: the code that made the call promises that its buffers and its stream are valid.
        Ok(unsafe {
            use CollectiveKind::{AllGather, AllReduce, Broadcast, Max32, Min32, ReduceScatter, Sum64};
            let (f, comm) = (&self.library.functions, self.comm);
            match call.kind {
                AllReduce | Sum64 | Max32 | Min32 => {
                    ("ncclAllReduce", f.ncclAllReduce(src, dst, count, dtype, operation, comm, stream))
                }
                Broadcast => ("ncclBroadcast", f.ncclBroadcast(src, dst, count, dtype, 0, comm, stream)),
                ReduceScatter => (
                    "ncclReduceScatter",
                    f.ncclReduceScatter(src, dst, count, dtype, operation, comm, stream),
                ),
                AllGather => ("ncclAllGather", f.ncclAllGather(src, dst, count, dtype, comm, stream)),
            }
        })
    }

    /// Returns the communicator's asynchronous error, if there is one.
    pub(super) fn check(&self) -> Result<()> {
        match self.state() {
            ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress => Ok(()),
            code => Err(self.library.error(self.seat.rank, "ncclCommGetAsyncError", code)),
        }
    }

    /// Waits until all collectives have ended on all ranks of this machine, then frees the communicator.
    pub(super) fn finish(self, deadline: Duration, wanted: impl Fn() -> Result<()>) -> Result<()> {
        if self.is_borrowed {
            return Ok(());
        }
        let (functions, driver) = (&self.library.functions, Arc::clone(&self.driver));
        let _entered = Entered::new(&*driver)?;
        // SAFETY: the communicator is alive, and its device is current.
        let code = unsafe { functions.ncclCommFinalize(self.comm) };
        if let Err(error) = self.settle("ncclCommFinalize", code, deadline, wanted) {
            self.abort_detached();
            return Err(error);
        }
        // SAFETY: the communicator is alive, and its device is current. Nothing uses the handle after this, so NCCL may
        // finish freeing it in the background.
        match unsafe { functions.ncclCommDestroy(self.comm) } {
            ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress => Ok(()),
            code => Err(self.library.error(self.seat.rank, "ncclCommDestroy", code)),
        }
    }

    /// Ends all calls in progress, including their work on the device, unless a framework owns the communicator. This
    /// call may block.
    pub(super) fn abort(self) {
        if self.comm.is_null() || self.is_borrowed {
            return;
        }
        // There is no caller to whom a failure could be reported.
        if let Ok(_entered) = Entered::new(&*self.driver) {
            // SAFETY: the communicator is alive, and its device is current. Nothing uses the communicator after this.
            unsafe { self.library.functions.ncclCommAbort(self.comm) };
            note_abort();
        }
    }

    /// Aborts the communicator on another thread, and does not wait for that thread.
    pub(super) fn abort_detached(self) {
        detached(move || self.abort());
    }

    /// Registers memory, so that NCCL can access it faster. Returns `None` if NCCL declines.
    pub(super) fn register(&self, address: *mut c_void, bytes: usize) -> Option<Registration> {
        let functions = &self.library.functions;
        let is_known = functions.ncclCommRegister.is_some() && functions.ncclCommDeregister.is_some();
        // A framework may end the communicator first, and then the registration could not be removed.
        if self.is_borrowed || !is_known {
            return None;
        }
        let mut handle = ptr::null_mut();
        // SAFETY: the library has made this memory, with this length.
        let code = unsafe { functions.ncclCommRegister(self.comm, address, bytes, &mut handle) };
        (code == ncclResult_t::ncclSuccess && !handle.is_null())
            .then(|| Registration(handle.expose_provenance()))
    }

    pub(super) fn deregister(&self, registration: Registration) {
        let handle = ptr::with_exposed_provenance_mut(registration.0);
        // SAFETY: `register` made the handle, and found this function. If the call fails, the communicator frees the
        // handle when it ends.
        unsafe { self.library.functions.ncclCommDeregister(self.comm, handle) };
    }

    fn state(&self) -> ncclResult_t {
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the communicator is alive, and the call writes one number.
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
        let code = if code == in_progress && !self.comm.is_null() {
            let look = || Ok(Some(self.state()).filter(|code| *code != in_progress));
            poll(Wall::start(), AWAKE, deadline, wanted, look)?
        } else {
            Some(code)
        };
        match code {
            Some(ncclResult_t::ncclSuccess) => Ok(()),
            Some(code) => Err(self.library.error(self.seat.rank, call, code)),
            None => {
                let message = format!("still in progress after {} ms", deadline.as_millis());
                Err(Error::Collective { rank: self.seat.rank, call, code: in_progress.0 as i32, message })
            }
        }
    }
}

/// Memory that is registered with a communicator.
pub(super) struct Registration(usize);

/// Returns the values of the macro `NCCL_CONFIG_INITIALIZER`, but with non-blocking calls and these limits on blocks.
fn config(ctas: Ctas) -> ncclConfig_t {
    let number = |ctas: Option<u32>| ctas.map_or(UNDEFINED, |ctas| ctas as i32);
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: NCCL_API_MAGIC,
        version: NCCL_VERSION_CODE,
        blocking: 0,
        maxCTAs: number(ctas.most),
        netName: ptr::null(),
        commName: ptr::null(),
        CTAPolicy: if ctas.efficient { EFFICIENT } else { UNDEFINED },
        nvlsCTAs: number(ctas.nvls),
        // Several communicators share a device, so collectives must run in the order in which they are issued.
        launchOrderImplicit: 1,
        // SAFETY: all fields are numbers and addresses, for which all bits are valid.
        ..unsafe { mem::transmute::<[i32; 30], ncclConfig_t>([UNDEFINED; 30]) }
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/cuda/nccl/raw.rs"]
mod tests;
