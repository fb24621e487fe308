//! Finds the NCCL library and turns its answers into errors.
//!
//! If `INSTEP_NCCL` names a file, only that is tried. Otherwise the order is: a library that the process has loaded
//! already (a framework's), `libnccl.so.2`, `libnccl.so`. The library is never unloaded, because it runs threads. Every
//! function that is not optional is looked up before the first call. Memory that it has allocated is freed exactly once.
#![allow(unsafe_code)]

use std::ffi::{CStr, OsString, c_char, c_void};
use std::ptr::{self, NonNull};
use std::sync::{Mutex, PoisonError};

use libloading::Library as Loaded;
use libloading::os::unix::Library as Process;

use crate::collective::Allocation;
use crate::cuda::context::{reason, with_device};
use crate::cuda::nccl::UniqueId;
use crate::cuda::nccl::bindings::{Functions, ncclComm_t, ncclResult_t, ncclUniqueId};
use crate::error::{Error, Result};
use crate::handle::Address;

/// The first version with non-blocking communicators.
const OLDEST: u32 = 21400;

/// The functions; all that are not optional exist.
pub(super) struct Library {
    pub(super) functions: Functions,
    pub(super) version: u32,
}

static FOUND: Mutex<Option<&'static Library>> = Mutex::new(None);

impl Library {
    /// Returns the library of this process. A failed search is repeated at the next call.
    pub(super) fn get() -> Result<&'static Library> {
        let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(library) = *found {
            return Ok(library);
        }
        let library = Library::find(std::env::var_os("INSTEP_NCCL"))?;
        Ok(found.insert(Box::leak(Box::new(library))))
    }

    fn find(named: Option<OsString>) -> Result<Library> {
        if let Some(path) = named {
            // SAFETY: the user has named it as NVIDIA's library, whose initializers any program may run.
            return Library::open(|| unsafe { Loaded::new(&path) }).map_err(|why| Error::NcclUnavailable {
                why: format!("INSTEP_NCCL={}: {why}", path.display()),
            });
        }
        // SAFETY: the name is NUL-terminated, and the address is only compared with null.
        let loaded = unsafe { Process::this().get::<*const ()>(c"ncclGetVersion").is_ok() };
        let mut tried = vec![format!("this process: {}", if loaded { "incomplete" } else { "none loaded" })];
        if loaded && let Ok(library) = Library::open(|| Ok(Process::this().into())) {
            return Ok(library);
        }
        for name in ["libnccl.so.2", "libnccl.so"] {
            // SAFETY: it is NVIDIA's library by name, whose initializers any program may run.
            match Library::open(|| unsafe { Loaded::new(name) }) {
                Ok(library) => return Ok(library),
                // The loader's text begins with the name already.
                Err(why) if why.starts_with(name) => tried.push(why),
                Err(why) => tried.push(format!("{name}: {why}")),
            }
        }
        let pip = "PyTorch's wheels bring site-packages/nvidia/nccl/lib/libnccl.so.2";
        let why = format!("tried {}; INSTEP_NCCL can name the file ({pip})", tried.join("; "));
        Err(Error::NcclUnavailable { why })
    }

    fn open(load: impl FnOnce() -> Result<Loaded, libloading::Error>) -> Result<Library, String> {
        // SAFETY: looks symbols up by NCCL's names, whose types NCCL's header gives.
        let functions = load().map(|library| unsafe { Functions::from_library(library) });
        let functions = functions.map_err(|error| reason(&error))?;
        macro_rules! found {
            ($($name:ident)*) => { [$((stringify!($name), functions.$name.is_ok())),*] };
        }
        let needed = found! {
            ncclGetVersion ncclGetErrorString ncclGetUniqueId
            ncclCommInitRankConfig ncclCommUserRank ncclCommCount ncclCommCuDevice ncclCommGetAsyncError
            ncclCommFinalize ncclCommDestroy ncclCommAbort
            ncclAllReduce ncclBroadcast ncclReduceScatter ncclAllGather
        };
        if let Some((name, _)) = needed.iter().find(|(_, found)| !found) {
            return Err(format!("it has no {name}; NCCL 2.14 is the oldest that serves"));
        }
        let mut version = 0;
        // SAFETY: writes one int.
        let code = unsafe { functions.ncclGetVersion(&mut version) };
        let version = u32::try_from(version).unwrap_or(0);
        if code != ncclResult_t::ncclSuccess || version < OLDEST {
            return Err(format!("its version is {version}; {OLDEST} is the oldest that serves"));
        }
        Ok(Library { functions, version })
    }

    /// Converts an answer other than success to an error.
    pub(super) fn error(&self, rank: u32, call: &'static str, code: ncclResult_t) -> Error {
        // SAFETY: it answers every number with a string of its own, which lives as long as the library.
        let mut message = unsafe { text(self.functions.ncclGetErrorString(code)) };
        if self.functions.ncclGetLastError.is_ok() {
            let none: ncclComm_t = std::ptr::null_mut();
            // SAFETY: it answers with a string of its own; the communicator is documented as unused.
            let last = unsafe { text(self.functions.ncclGetLastError(none)) };
            if !last.is_empty() {
                message = format!("{message}: {last}");
            }
        }
        Error::Collective { rank, call, code: code.0 as i32, message }
    }
}

/// Device memory that NCCL has allocated. Freed when dropped.
pub(super) struct Memory {
    library: &'static Library,
    device: u32,
    address: Address,
    before_it_is_freed: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Library {
    /// Allocates device memory, or returns `None` if the library cannot.
    pub(super) fn allocate(&'static self, rank: u32, device: u32, bytes: usize) -> Result<Option<Memory>> {
        if self.functions.ncclMemAlloc.is_err() || self.functions.ncclMemFree.is_err() {
            return Ok(None);
        }
        let mut address = ptr::null_mut();
        // SAFETY: the device is current; writes one address.
        let code = with_device(device, || Ok(unsafe { self.functions.ncclMemAlloc(&mut address, bytes) }))?;
        if code != ncclResult_t::ncclSuccess {
            return Err(self.error(rank, "ncclMemAlloc", code));
        }
        let address = NonNull::new(address.cast()).map(Address::of);
        Ok(address.map(|address| Memory { library: self, device, address, before_it_is_freed: None }))
    }
}

impl Memory {
    pub(super) fn address(&self) -> *mut c_void {
        self.address.as_ptr().cast()
    }

    /// Lends it until the allocation is dropped: then `before` runs, and then it is freed.
    pub(super) fn lend(mut self, before: impl FnOnce() + Send + Sync + 'static) -> Allocation {
        self.before_it_is_freed = Some(Box::new(before));
        // SAFETY: memory of this device, as long as was asked for, which its owner frees.
        unsafe { Allocation::new(self.address.as_ptr(), Box::new(self)) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(before) = self.before_it_is_freed.take() {
            before();
        }
        // A failure here means that the device is gone, and the memory with it.
        let _ = with_device(self.device, || {
            // SAFETY: `ncclMemAlloc` made it, and its user has dropped it.
            unsafe { self.library.functions.ncclMemFree(self.address()) };
            Ok(())
        });
    }
}

/// # Safety
/// Null, or a string that nothing changes meanwhile.
unsafe fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: not null, so a string that nothing changes, by the contract.
    unsafe { CStr::from_ptr(string) }.to_string_lossy().trim().to_owned()
}

/// Returns the NCCL library's version in its header's encoding: 23203 is 2.32.3.
///
/// # Errors
/// `NcclUnavailable` says what was tried.
pub fn version() -> Result<u32> {
    Library::get().map(|library| library.version)
}

/// Makes an id for [`Nccl::with_id`](crate::cuda::Nccl::with_id). The process that makes it must live until all ranks
/// have joined.
///
/// # Errors
/// `NcclUnavailable`; `Collective` if there is no network interface to listen on.
pub fn unique_id() -> Result<UniqueId> {
    let library = Library::get()?;
    let mut id = ncclUniqueId { internal: [0; 128] };
    // SAFETY: writes one id.
    match unsafe { library.functions.ncclGetUniqueId(&mut id) } {
        ncclResult_t::ncclSuccess => Ok(id.internal.map(|byte| byte as u8)),
        code => Err(library.error(0, "ncclGetUniqueId", code)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(named: Option<&str>) -> String {
        match Library::find(named.map(OsString::from)) {
            Err(Error::NcclUnavailable { why }) => why,
            Err(other) => panic!("{other}"),
            Ok(library) => panic!("found {}", library.version),
        }
    }

    #[test]
    fn a_library_that_is_named_and_not_there_or_not_nccl_is_refused_by_name() {
        let why = refusal(Some("/nowhere/libnccl.so.2"));
        assert!(why.starts_with("INSTEP_NCCL=/nowhere/libnccl.so.2: "), "{why}");
        let why = refusal(Some("libc.so.6"));
        assert!(why.contains("no ncclGetVersion"), "{why}");
    }

    #[test]
    fn a_machine_without_the_library_is_told_what_was_tried() {
        match Library::find(None) {
            Ok(library) => assert!(library.version >= OLDEST),
            Err(Error::NcclUnavailable { why }) => {
                for tried in ["this process", "libnccl.so.2: ", "libnccl.so: ", "No such file", "INSTEP_NCCL"]
                {
                    assert!(why.contains(tried), "{why}");
                }
            }
            Err(other) => panic!("{other}"),
        }
    }
}
