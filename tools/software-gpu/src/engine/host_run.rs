//! Kernels compiled for the CPU from their own source, each thread a fiber (`tests/host_run/launch.cpp`).
//!
//! They are compiled with hooks, which report every access before it happens. They run on the device's own addresses.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::OnceLock;

use super::seen::Seen;
use crate::report;
use crate::window::Window;
use crate::work::Launch;

type Run = unsafe extern "C" fn(*const c_char, *const c_void, u32, u32, u32);
type Watcher = extern "C" fn(*const c_void, usize, c_int);
type Watch = unsafe extern "C" fn(Watcher);

const READ: c_int = 0;
const WRITE: c_int = 1;

pub(crate) struct Library {
    run: Run,
}

/// The data that the hooks need while a kernel runs.
struct Watched<'a, 'b, 'c> {
    seen: &'a mut Seen<'b, 'c>,
    arguments: Range<u64>,
}

thread_local! {
    static WATCHED: Cell<*mut c_void> = const { Cell::new(ptr::null_mut()) };
}

/// Returns the library that `INSTEP_GPU_KERNELS` names, if it names one.
pub(crate) fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY.get_or_init(|| std::env::var_os("INSTEP_GPU_KERNELS").map(|path| open(Path::new(&path)))).as_ref()
}

fn open(path: &Path) -> Library {
    let shown = path.display();
    let Ok(name) = CString::new(path.as_os_str().as_bytes()) else {
        report::misuse(&format!("{shown}: no path"))
    };
    // SAFETY: the symbols have the types that `launch.cpp` declares.
    unsafe {
        let library = libc::dlopen(name.as_ptr(), libc::RTLD_NOW);
        if library.is_null() {
            report::misuse(&format!("INSTEP_GPU_KERNELS={shown} cannot be opened"));
        }
        let symbol = |name: *const c_char| {
            let found = libc::dlsym(library, name);
            if found.is_null() {
                report::misuse(&format!("INSTEP_GPU_KERNELS={shown} was made for another use"));
            }
            found
        };
        let watch = std::mem::transmute::<*mut c_void, Watch>(symbol(c"instep_host_run_watch".as_ptr()));
        watch(told);
        Library { run: std::mem::transmute::<*mut c_void, Run>(symbol(c"instep_host_run".as_ptr())) }
    }
}

impl Library {
    pub(crate) fn run(&self, seen: &mut Seen<'_, '_>, launch: &Launch, choice: u64, window: &Window) {
        let Ok(name) = CString::new(launch.kernel.name()) else { return };
        let one_dimensional = [launch.blocks, launch.threads].iter().all(|shape| shape[1..] == [1, 1]);
        if !one_dimensional || launch.shared_bytes != 0 {
            report::misuse("kernels compiled for the CPU have one dimension and no dynamic shared memory");
        }
        // Fibers come as whole warps; the first of a warp does the work of a single thread.
        let (blocks, threads) = (launch.blocks[0], launch.threads[0].next_multiple_of(32));
        // Aligned as an argument is.
        let mut words = vec![0u64; launch.arguments.len().div_ceil(8)];
        for (word, bytes) in words.iter_mut().zip(launch.arguments.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_le_bytes(whole);
        }
        let start = words.as_ptr().expose_provenance() as u64;
        let arguments = start..start + 8 * words.len() as u64;
        let mut watched = Watched { seen, arguments };
        // Blocks and threads forward, backward or shuffled.
        let order = (choice % 3) as u32;
        WATCHED.set((&raw mut watched).cast());
        // SAFETY: the kernel's own arguments; the hooks refuse a byte that is not theirs to touch.
        window.opened(|| unsafe { (self.run)(name.as_ptr(), words.as_ptr().cast(), blocks, threads, order) });
        WATCHED.set(ptr::null_mut());
    }
}

/// The hook that is called before each access of a kernel.
extern "C" fn told(address: *const c_void, bytes: usize, kind: c_int) {
    let (address, bytes) = (address.expose_provenance() as u64, bytes as u64);
    // SAFETY: set while a kernel runs on this thread, to a value that outlives the run.
    let Some(watched) = (unsafe { WATCHED.get().cast::<Watched<'_, '_, '_>>().as_mut() }) else { return };
    if watched.arguments.contains(&address) {
        return;
    }
    if let Err(stray) = watched.seen.find(address, bytes) {
        report::fault(stray.rule, &format!("a kernel touches {}", stray.what));
    }
    if kind != WRITE {
        watched.seen.accesses.read(address, bytes);
    }
    if kind != READ {
        watched.seen.accesses.write(address, bytes);
    }
}
