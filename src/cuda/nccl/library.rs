//! Finds the NCCL library, and converts its result codes to errors.
//!
//! If `INSTEP_NCCL` names a file, only that file is tried. Otherwise this file first tries a library that the process
//! has already loaded (a framework's), then `libnccl.so.2`, then `libnccl.so`. The library is never unloaded, because
//! it runs threads. All required functions are looked up before the first call.
#![allow(unsafe_code)]

use std::ffi::{CStr, OsStr, OsString, c_char, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use crate::cuda::nccl::UniqueId;
use crate::cuda::nccl::bindings::{Functions, ncclComm_t, ncclResult_t, ncclUniqueId};
use crate::error::{Error, Result};

/// The first version with non-blocking communicators.
const OLDEST: u32 = 21400;

/// The functions of the library. All required functions exist.
pub(super) struct Library {
    pub(super) functions: Functions,
    pub(super) version: u32,
    _symbols: Symbols,
}

/// A function that returns the address of a library's symbol, or null. It keeps the library loaded.
type Symbols = Box<dyn Fn(&str) -> *const c_void + Send + Sync>;

/// Loads the library from a file. Without a file, uses the library that this process has already loaded.
#[cfg(feature = "cuda")]
fn load(file: Option<&OsStr>) -> Result<Symbols, String> {
    let process = || libloading::os::unix::Library::this().into();
    // SAFETY: the file is NVIDIA's library, by its name or because the user has named it. Any program may run its
    // initializers.
    let library = file.map_or_else(|| Ok(process()), |file| unsafe { libloading::Library::new(file) });
    let library = library.map_err(|error| crate::cuda::library::reason(&error))?;
    // SAFETY: the symbol is only looked up, not used.
    Ok(Box::new(move |name| unsafe { library.get(name) }.map_or(ptr::null(), |symbol| *symbol)))
}

#[cfg(not(feature = "cuda"))]
fn load(_: Option<&OsStr>) -> Result<Symbols, String> {
    Err("this build cannot load it; rebuild with `--features cuda`".to_owned())
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
        let open = |file| load(file).and_then(Library::of);
        if let Some(path) = named {
            let why = |why| format!("INSTEP_NCCL={}: {why}", path.display());
            return open(Some(&path)).map_err(|reason| Error::NcclUnavailable { why: why(reason) });
        }
        let process = load(None).map_err(|why| Error::NcclUnavailable { why })?;
        let loaded = !process("ncclGetVersion").is_null();
        let mut tried = vec![format!("this process: {}", if loaded { "incomplete" } else { "none loaded" })];
        if loaded && let Ok(library) = Library::of(process) {
            return Ok(library);
        }
        for name in ["libnccl.so.2", "libnccl.so"] {
            match open(Some(name.as_ref())) {
                Ok(library) => return Ok(library),
                // The loader's text already begins with the name.
                Err(why) if why.starts_with(name) => tried.push(why),
                Err(why) => tried.push(format!("{name}: {why}")),
            }
        }
        let pip = "PyTorch's wheels bring site-packages/nvidia/nccl/lib/libnccl.so.2";
        let why = format!("tried {}; INSTEP_NCCL can name the file ({pip})", tried.join("; "));
        Err(Error::NcclUnavailable { why })
    }

    fn of(symbols: Symbols) -> Result<Library, String> {
        // SAFETY: `symbols` returns the address of NCCL's function of a name, or null. NCCL's header gives the types.
        let functions = unsafe { Functions::new(&symbols) };
        macro_rules! found {
            ($($name:ident)*) => { [$((stringify!($name), functions.$name.is_some())),*] };
        }
        let needed = found! {
            ncclGetVersion ncclGetErrorString ncclGetUniqueId
            ncclCommInitRankConfig ncclCommUserRank ncclCommCount ncclCommCuDevice ncclCommGetAsyncError
            ncclCommFinalize ncclCommDestroy ncclCommAbort
            ncclAllReduce ncclBroadcast ncclReduceScatter ncclAllGather ncclGroupStart ncclGroupEnd
        };
        if let Some((name, _)) = needed.iter().find(|(_, found)| !found) {
            return Err(format!("it has no {name}; NCCL 2.14 is the oldest that serves"));
        }
        let mut version = 0;
        // SAFETY: the call writes one int.
        let code = unsafe { functions.ncclGetVersion(&mut version) };
        let version = u32::try_from(version).unwrap_or(0);
        if code != ncclResult_t::ncclSuccess || version < OLDEST {
            return Err(format!("its version is {version}; {OLDEST} is the oldest that serves"));
        }
        Ok(Library { functions, version, _symbols: symbols })
    }

    pub(super) fn error(&self, rank: u32, call: &'static str, code: ncclResult_t) -> Error {
        // SAFETY: for every number, the function returns a string of the library, which lives as long as the library.
        let mut message = unsafe { text(self.functions.ncclGetErrorString(code)) };
        if self.functions.ncclGetLastError.is_some() {
            let none: ncclComm_t = ptr::null_mut();
            // SAFETY: the function returns a string of the library. NCCL documents the communicator as unused.
            let last = unsafe { text(self.functions.ncclGetLastError(none)) };
            if !last.is_empty() {
                message = format!("{message}: {last}");
            }
        }
        Error::Collective { rank, call, code: code.0 as i32, message }
    }
}

/// # Safety
/// `string` is null, or a string that nothing changes during the call.
unsafe fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: the pointer is not null. By the contract, it is then a string that nothing changes.
    unsafe { CStr::from_ptr(string) }.to_string_lossy().trim().to_owned()
}

/// Returns the NCCL library's version in its header's encoding: 23203 is 2.32.3.
///
/// # Errors
/// `NcclUnavailable` says what was tried.
pub fn version() -> Result<u32> {
    Library::get().map(|library| library.version)
}

/// Makes an id for [`Nccl::with_id`](crate::cuda::Nccl::with_id). The process that makes the id must live until all
/// ranks have joined.
///
/// # Errors
/// `NcclUnavailable` if there is no usable library. `Collective` if there is no network interface to listen on.
pub fn unique_id() -> Result<UniqueId> {
    let library = Library::get()?;
    let mut id = ncclUniqueId { internal: [0; 128] };
    // SAFETY: the call writes one id.
    match unsafe { library.functions.ncclGetUniqueId(&mut id) } {
        ncclResult_t::ncclSuccess => Ok(id.internal.map(|byte| byte as u8)),
        code => Err(library.error(0, "ncclGetUniqueId", code)),
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/cuda/nccl/library.rs"]
mod tests;
