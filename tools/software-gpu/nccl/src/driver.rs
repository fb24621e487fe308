//! The software GPU's driver as this library calls it: the driver in the same folder.
//!
//! Another driver could not run this library's work, so no other driver is accepted. The driver is loaded once and
//! stays.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;

/// The same struct as `ForeignWork` of the driver.
#[repr(C)]
pub(crate) struct Work {
    pub(crate) name: *const c_char,
    pub(crate) source: u64,
    pub(crate) source_bytes: usize,
    pub(crate) target: u64,
    pub(crate) target_bytes: usize,
    /// Work of one order runs in the order in which it was enqueued, even on several streams.
    pub(crate) order: u64,
    /// The number of works of this one's launch.
    pub(crate) together: usize,
    pub(crate) step: unsafe extern "C" fn(*mut c_void, u64, *const u8, *mut u8) -> c_int,
    pub(crate) release: unsafe extern "C" fn(*mut c_void),
    pub(crate) call: *mut c_void,
}

pub(crate) struct Driver {
    /// Returns the stream of a handle, which may be a default stream's number; 0 if there is none.
    pub(crate) resolve: unsafe extern "C" fn(usize) -> usize,
    pub(crate) enqueue: unsafe extern "C" fn(usize, *const Work) -> u32,
    pub(crate) pump: extern "C" fn(),
    pub(crate) current_device: unsafe extern "C" fn(*mut c_int) -> u32,
    pub(crate) allocate: unsafe extern "C" fn(*mut u64, usize) -> u32,
    pub(crate) free: unsafe extern "C" fn(u64) -> u32,
}

/// Returns the driver, or `None` if it is not in this library's folder.
pub(crate) fn driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
    DRIVER.get_or_init(open).as_ref()
}

// The fields of `Driver` are the types.
#[allow(clippy::missing_transmute_annotations)]
fn open() -> Option<Driver> {
    // SAFETY: an address of this library; the strings are the loader's; each symbol has the type that its source gives.
    unsafe {
        let mut own: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr((driver as *const c_void).cast(), &mut own) == 0 {
            return None;
        }
        let path = CStr::from_ptr(own.dli_fname);
        let folder = Path::new(std::ffi::OsStr::from_bytes(path.to_bytes())).parent()?;
        let path = CString::new(folder.join("libcuda.so").as_os_str().as_bytes()).ok()?;
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        if library.is_null() {
            return None;
        }
        let symbol = |name: &CStr| Some(libc::dlsym(library, name.as_ptr())).filter(|found| !found.is_null());
        Some(Driver {
            resolve: std::mem::transmute::<*mut c_void, _>(symbol(c"softwareGpuResolve")?),
            enqueue: std::mem::transmute::<*mut c_void, _>(symbol(c"softwareGpuEnqueue")?),
            pump: std::mem::transmute::<*mut c_void, _>(symbol(c"softwareGpuPump")?),
            current_device: std::mem::transmute::<*mut c_void, _>(symbol(c"cuCtxGetDevice")?),
            allocate: std::mem::transmute::<*mut c_void, _>(symbol(c"cuMemAlloc_v2")?),
            free: std::mem::transmute::<*mut c_void, _>(symbol(c"cuMemFree_v2")?),
        })
    }
}
