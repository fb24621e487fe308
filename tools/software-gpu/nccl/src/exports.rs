//! The functions of NCCL, under the names and with the types of `nccl.h`.
//!
//! Each function reads its arguments, and passes the rest to the communicator or to the call that it makes.
#![allow(unsafe_code, non_snake_case, unreachable_pub)]

use std::ffi::{c_char, c_int, c_void};
use std::fs;
use std::io::Read;
use std::ptr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use crate::communicator::{self, Communicator, OUTSTANDING, Task, found, start_helper};
use crate::driver::{Work, driver};
use crate::group;
use crate::header::{
    NCCL_API_MAGIC, cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t,
    ncclResult_t as Code, ncclUniqueId,
};
use crate::pieces::Kind;
use crate::settings;
use crate::shared::Shared;
use crate::sums;
use crate::transfer::{self, Call};

/// Exported functions: each body returns a code. A call that must fail does not run.
macro_rules! exported {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "` of `nccl.h`.")]
        ///
        /// # Safety
        /// The arguments are those that `nccl.h` documents.
        #[unsafe(no_mangle)]
        #[allow(unused_unsafe, clippy::too_many_arguments, clippy::redundant_closure_call)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> Code {
            let code = match settings::failure(stringify!($name)) {
                Some(code) => Code(code),
                // SAFETY: the caller keeps to `nccl.h`: pointers lead to what the call reads or writes.
                None => (|| unsafe { $body })(),
            };
            if !matches!(code, Code::ncclSuccess | Code::ncclInProgress) {
                group::fails(code);
            }
            code
        }
    )*};
}

exported! {
    fn ncclGetVersion(version: *mut c_int) {
        version.write(settings::version() as c_int);
        Code::ncclSuccess
    }

    fn ncclGetUniqueId(id: *mut ncclUniqueId) {
        let mut bytes = [0u8; 16];
        if fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).is_err() {
            return Code::ncclSystemError;
        }
        let mut made = ncclUniqueId { internal: [0; 128] };
        let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(|digit| b"0123456789abcdef"[digit as usize]);
        made.internal.iter_mut().zip(digits).for_each(|(place, digit)| *place = digit as c_char);
        id.write(made);
        Code::ncclSuccess
    }

    fn ncclCommInitRank(handle: *mut ncclComm_t, ranks: c_int, id: ncclUniqueId, rank: c_int) {
        join(handle, ranks, id, rank, true)
    }

    fn ncclCommInitRankConfig(
        handle: *mut ncclComm_t, ranks: c_int, id: ncclUniqueId, rank: c_int, config: *mut ncclConfig_t,
    ) {
        let settled = config.is_null() || (*config).magic == NCCL_API_MAGIC && (*config).size == size_of::<ncclConfig_t>();
        if !settled {
            return Code::ncclInvalidArgument;
        }
        join(handle, ranks, id, rank, config.is_null() || (*config).blocking != 0)
    }

    fn ncclCommUserRank(handle: ncclComm_t, rank: *mut c_int) {
        rank.write(found(handle, "ncclCommUserRank").rank as c_int);
        Code::ncclSuccess
    }

    fn ncclCommCount(handle: ncclComm_t, ranks: *mut c_int) {
        ranks.write(found(handle, "ncclCommCount").ranks as c_int);
        Code::ncclSuccess
    }

    fn ncclCommCuDevice(handle: ncclComm_t, device: *mut c_int) {
        device.write(found(handle, "ncclCommCuDevice").device as c_int);
        Code::ncclSuccess
    }

    fn ncclCommFinalize(handle: ncclComm_t) {
        let communicator = found(handle, "ncclCommFinalize");
        match communicator.begin(Task::Finalize) {
            Ok(()) => communicator.begun(),
            Err((code, _)) => code,
        }
    }

    fn ncclCommDestroy(handle: ncclComm_t) {
        let communicator = found(handle, "ncclCommDestroy");
        communicator::remove(handle);
        communicator.shared.end();
        Code::ncclSuccess
    }

    fn ncclCommAbort(handle: ncclComm_t) {
        let communicator = found(handle, "ncclCommAbort");
        communicator.abort();
        communicator::remove(handle);
        if let Some(driver) = driver() {
            (driver.pump)();
        }
        Code::ncclSuccess
    }

    fn ncclCommGetAsyncError(handle: ncclComm_t, state: *mut Code) {
        state.write(found(handle, "ncclCommGetAsyncError").look());
        Code::ncclSuccess
    }

    fn ncclAllReduce(
        source: *const c_void, target: *mut c_void, count: usize, dtype: ncclDataType_t, operation: ncclRedOp_t,
        handle: ncclComm_t, stream: cudaStream_t,
    ) {
        collective(c"ncclAllReduce", Kind::AllReduce, source, target, count, (dtype, operation), handle, stream)
    }

    fn ncclReduceScatter(
        source: *const c_void, target: *mut c_void, count: usize, dtype: ncclDataType_t, operation: ncclRedOp_t,
        handle: ncclComm_t, stream: cudaStream_t,
    ) {
        collective(c"ncclReduceScatter", Kind::ReduceScatter, source, target, count, (dtype, operation), handle, stream)
    }

    fn ncclAllGather(
        source: *const c_void, target: *mut c_void, count: usize, dtype: ncclDataType_t, handle: ncclComm_t,
        stream: cudaStream_t,
    ) {
        collective(c"ncclAllGather", Kind::AllGather, source, target, count, (dtype, ncclRedOp_t::ncclSum), handle, stream)
    }

    fn ncclBroadcast(
        source: *const c_void, target: *mut c_void, count: usize, dtype: ncclDataType_t, root: c_int,
        handle: ncclComm_t, stream: cudaStream_t,
    ) {
        collective(c"ncclBroadcast", Kind::Broadcast(root as usize), source, target, count, (dtype, ncclRedOp_t::ncclSum), handle, stream)
    }

    fn ncclGroupStart() {
        group::start();
        Code::ncclSuccess
    }

    fn ncclGroupEnd() {
        group::end()
    }

    fn ncclMemAlloc(address: *mut *mut c_void, bytes: usize) {
        let mut made = 0;
        match driver() {
            None => Code::ncclSystemError,
            Some(driver) if (driver.allocate)(&mut made, bytes) != 0 => Code::ncclUnhandledCudaError,
            Some(_) => {
                address.write(ptr::with_exposed_provenance_mut(made as usize));
                Code::ncclSuccess
            }
        }
    }

    fn ncclMemFree(address: *mut c_void) {
        match driver().map(|driver| (driver.free)(address.expose_provenance() as u64)) {
            Some(0) => Code::ncclSuccess,
            _ => Code::ncclUnhandledCudaError,
        }
    }

    fn ncclCommRegister(handle: ncclComm_t, _address: *mut c_void, _bytes: usize, registration: *mut *mut c_void) {
        found(handle, "ncclCommRegister");
        registration.write(handle.cast());
        Code::ncclSuccess
    }

    fn ncclCommDeregister(handle: ncclComm_t, registration: *mut c_void) {
        found(handle, "ncclCommDeregister");
        if registration == handle.cast() { Code::ncclSuccess } else { Code::ncclInvalidArgument }
    }
}

/// Makes a communicator of the current device, which joins the ranks of an id.
///
/// # Safety
/// The arguments are those that `nccl.h` documents for `ncclCommInitRank`.
unsafe fn join(handle: *mut ncclComm_t, ranks: c_int, id: ncclUniqueId, rank: c_int, blocking: bool) -> Code {
    if !(0..ranks).contains(&rank) {
        return Code::ncclInvalidArgument;
    }
    let (mut device, Some(driver)) = (0, driver()) else { return Code::ncclSystemError };
    // SAFETY: writes one number.
    if unsafe { (driver.current_device)(&mut device) } != 0 {
        return Code::ncclUnhandledCudaError;
    }
    let digits = id.internal.iter().take_while(|digit| **digit != 0).map(|digit| char::from(*digit as u8));
    let name = format!("/software-nccl-{}", digits.filter(char::is_ascii_hexdigit).collect::<String>());
    let Some(shared) = Shared::open(&name, rank as usize, ranks as usize) else {
        return Code::ncclSystemError;
    };
    let made = Arc::new(Communicator::new(rank as usize, ranks as usize, device as u64, blocking, shared));
    if ranks > 1 {
        start_helper();
    }
    // SAFETY: the caller's place for the handle.
    unsafe { handle.write(communicator::insert(Arc::clone(&made))) };
    made.begun()
}

/// Begins a collective. Its work is enqueued on the stream at the last query of the call.
#[allow(clippy::too_many_arguments)]
fn collective(
    name: &'static std::ffi::CStr,
    kind: Kind,
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    (dtype, operation): (ncclDataType_t, ncclRedOp_t),
    handle: ncclComm_t,
    stream: cudaStream_t,
) -> Code {
    let communicator = found(handle, &name.to_string_lossy());
    let Some(bytes) = sums::bytes_of(dtype).and_then(|each| count.checked_mul(each)) else {
        return Code::ncclInvalidArgument;
    };
    if matches!(kind, Kind::Broadcast(root) if root >= communicator.ranks) || !sums::knows(operation, dtype) {
        return Code::ncclInvalidArgument;
    }
    // SAFETY: a handle of the driver's, or a default stream's number.
    let stream = driver().map_or(0, |driver| unsafe { (driver.resolve)(stream.expose_provenance()) });
    if stream == 0 {
        return Code::ncclUnhandledCudaError;
    }
    let (source_bytes, target_bytes) = kind.lengths(bytes, communicator.rank, communicator.ranks);
    let call = Call {
        communicator: Arc::clone(&communicator),
        kind,
        bytes,
        dtype,
        operation,
        runs: Mutex::default(),
    };
    communicator.calls.fetch_add(1, Ordering::AcqRel);
    OUTSTANDING.fetch_add(1, Ordering::Relaxed);
    let work = Work {
        name: name.as_ptr(),
        source: source.expose_provenance() as u64,
        source_bytes,
        target: target.expose_provenance() as u64,
        target_bytes,
        order: handle.expose_provenance() as u64,
        together: 1,
        step: transfer::step,
        release: transfer::release,
        call: Box::into_raw(Box::new(call)).cast(),
    };
    group::add(communicator, stream, work)
}

/// `ncclGetErrorString` of `nccl.h`.
///
/// # Safety
/// The arguments are those that `nccl.h` documents.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetErrorString(code: Code) -> *const c_char {
    let text = match code {
        Code::ncclSuccess => c"no error",
        Code::ncclUnhandledCudaError => c"unhandled cuda error",
        Code::ncclSystemError => c"unhandled system error",
        Code::ncclInternalError => c"internal error",
        Code::ncclInvalidArgument => c"invalid argument",
        Code::ncclInvalidUsage => c"invalid usage",
        Code::ncclRemoteError => c"remote process exited or there was a network error",
        Code::ncclInProgress => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

/// `ncclGetLastError` of `nccl.h`; the software GPU keeps no text.
///
/// # Safety
/// The arguments are those that `nccl.h` documents.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetLastError(_handle: ncclComm_t) -> *const c_char {
    c"the software GPU keeps no text of errors".as_ptr()
}
