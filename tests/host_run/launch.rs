//! The shared object that runs the GPU's kernels, and AddressSanitizer, if it is there.
//!
//! The object is the one that scripts/host-run-lane.py names in `INSTEP_HOST_RUN`; nothing else of the tests depends on
//! it. Must launch one kernel at a time: the fibers share their threads' stacks and shared memory.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::{Mutex, OnceLock};

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

type HostRun =
    unsafe extern "C" fn(kernel: *const c_char, args: *const c_void, blocks: u32, threads: u32, order: u32);
type Fence = unsafe extern "C" fn(address: *const c_void, bytes: usize);

struct Fibers {
    run: HostRun,
    /// Of AddressSanitizer, if the lane has put it in front.
    fences: Option<(Fence, Fence)>,
}

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn fibers() -> &'static Fibers {
    static FIBERS: OnceLock<Fibers> = OnceLock::new();
    FIBERS.get_or_init(|| {
        let path = std::env::var("INSTEP_HOST_RUN").expect("scripts/host-run-lane.py names the kernels");
        let path = CString::new(path).unwrap();
        // SAFETY: the symbols have the types that tests/host_run/launch.cpp and the sanitizer's interface declare.
        unsafe {
            let library = dlopen(path.as_ptr(), 2);
            assert!(!library.is_null(), "{path:?} cannot be opened");
            let run = dlsym(library, c"instep_host_run".as_ptr());
            assert!(!run.is_null(), "{path:?} launches nothing");
            let close = dlsym(std::ptr::null_mut(), c"__asan_poison_memory_region".as_ptr());
            let open = dlsym(std::ptr::null_mut(), c"__asan_unpoison_memory_region".as_ptr());
            let fence = |symbol: *mut c_void| std::mem::transmute::<*mut c_void, Fence>(symbol);
            Fibers {
                run: std::mem::transmute::<*mut c_void, HostRun>(run),
                fences: (!close.is_null()).then(|| (fence(close), fence(open))),
            }
        }
    })
}

/// Forbids the kernels these bytes, or allows them again; without AddressSanitizer the guards' values must do.
pub(crate) fn forbid(bytes: &[u8], forbidden: bool) {
    if let Some((close, open)) = fibers().fences {
        let call = if forbidden { close } else { open };
        // SAFETY: changes what the sanitizer knows of live memory, not the memory.
        unsafe { call(bytes.as_ptr().cast(), bytes.len()) }
    }
}

/// Launches a kernel of the GPU.
///
/// # Safety
/// `args` is the kernel's struct, and what it points to is as long as it says.
pub(crate) unsafe fn launch<Args>(kernel: &CStr, args: &Args, blocks: u32, threads: u32, order: u32) {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    // SAFETY: the caller's promise; the lock keeps other launches away.
    unsafe { (fibers().run)(kernel.as_ptr(), std::ptr::from_ref(args).cast(), blocks, threads, order) }
}
