//! The GPU's kernels run as fibers on the CPU, under AddressSanitizer if it is loaded, or on a real GPU.
//!
//! scripts/host-run-lane.py sets `INSTEP_HOST_RUN` to the shared object with the fibers. Kernels are launched one at a
//! time, because fibers share their threads' stacks and shared memory.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ops::DerefMut;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::support::hardware::{self, Kernels};

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

type HostRun =
    unsafe extern "C" fn(kernel: *const c_char, args: *const c_void, blocks: u32, threads: u32, order: u32);
type Fence = unsafe extern "C" fn(address: *const c_void, bytes: usize);

struct Fibers {
    run: HostRun,
    /// AddressSanitizer's functions, if the lane has preloaded it.
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

/// Returns the library's kernels on a GPU, if the tests must run there.
fn on_hardware() -> Option<&'static Kernels> {
    static KERNELS: OnceLock<Option<Kernels>> = OnceLock::new();
    KERNELS.get_or_init(|| hardware::is_required().then(|| Kernels::load(None))).as_ref()
}

/// Returns the naive kernel's binary on a GPU. The library does not embed it.
fn naive_on_hardware() -> &'static Kernels {
    static KERNELS: OnceLock<Kernels> = OnceLock::new();
    KERNELS.get_or_init(|| {
        let path = std::env::var_os("INSTEP_GPU_NAIVE").expect("scripts/gpu-bundle.sh compiles it");
        Kernels::load(Some(&std::fs::read(path).unwrap()))
    })
}

/// Returns memory that the kernels and the CPU reach under the same address.
pub(crate) fn words(value: u64, count: usize) -> Box<dyn DerefMut<Target = [u64]>> {
    match on_hardware() {
        Some(kernels) => Box::new(kernels.words(value, count)),
        None => Box::new(vec![value; count]),
    }
}

/// Forbids the kernels these bytes, or allows them again; without AddressSanitizer only the guards' values detect an
/// access.
pub(crate) fn forbid(bytes: &[u8], forbidden: bool) {
    if on_hardware().is_some() {
        return;
    }
    if let Some((close, open)) = fibers().fences {
        let call = if forbidden { close } else { open };
        // SAFETY: changes what the sanitizer knows of live memory, not the memory.
        unsafe { call(bytes.as_ptr().cast(), bytes.len()) }
    }
}

/// Launches a kernel of the GPU and waits for it. A real GPU runs blocks and threads in its own order.
///
/// # Safety
/// `args` is the kernel's struct, and each of its pointers leads to memory of the length that it says.
pub(crate) unsafe fn launch<Args>(kernel: &CStr, args: &Args, blocks: u32, threads: u32, order: u32) {
    // Another test's failure is not this one's.
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the caller's promise; the lock keeps other launches away.
    unsafe {
        match on_hardware() {
            Some(_) if kernel.to_bytes().starts_with(b"instep_naive_") => {
                naive_on_hardware().launch(kernel, args, blocks, threads);
            }
            Some(kernels) => kernels.launch(kernel, args, blocks, threads),
            None => (fibers().run)(kernel.as_ptr(), std::ptr::from_ref(args).cast(), blocks, threads, order),
        }
    }
}
