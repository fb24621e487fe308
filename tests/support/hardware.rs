//! The real GPU, for tests that must use it: `INSTEP_REQUIRE_GPU=1`, as benches/gpu/run.sh sets it.
//!
//! Kernels are launched through the library's own driver interface, as a stepper does. Without a GPU these helpers
//! fail; nothing is skipped.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use instep::cuda::Cuda;
use instep::cuda::driver::{Driver, Module, Shape};
use instep::{EventHandle, StreamHandle};

/// No kernel of a test takes this long, even under a sanitizer.
const DEADLINE: Duration = Duration::from_secs(60);

/// Returns whether tests that run on either must run on a GPU.
pub(crate) fn is_required() -> bool {
    std::env::var("INSTEP_REQUIRE_GPU").as_deref() == Ok("1")
}

/// Opens the first GPU.
pub(crate) fn open() -> Cuda {
    Cuda::open(0).expect("a GPU, with INSTEP_REQUIRE_GPU=1")
}

/// Makes calls that need the device to be current.
pub(crate) fn entered<T>(driver: &dyn Driver, work: impl FnOnce(&dyn Driver) -> instep::Result<T>) -> T {
    let entered = driver.enter().unwrap();
    let outcome = work(driver);
    if entered {
        driver.leave();
    }
    outcome.unwrap()
}

/// A loaded binary of kernels.
pub(crate) struct Kernels {
    driver: Arc<dyn Driver>,
    module: Module,
    done: EventHandle,
}

impl Kernels {
    /// Loads the library's kernels, or others.
    pub(crate) fn load(image: Option<&[u8]>) -> Kernels {
        let driver = Arc::clone(open().driver());
        let (module, done) = entered(&*driver, |driver| {
            Ok((driver.load(image.map_or_else(|| driver.image(), Ok)?)?, driver.create_event(false)?))
        });
        Kernels { driver, module, done }
    }

    /// Launches a kernel and waits until it has ended.
    ///
    /// # Safety
    /// `args` is the kernel's struct. Each of its pointers leads to memory of the length that it says, and the GPU can
    /// reach this memory.
    pub(crate) unsafe fn launch<Args>(&self, name: &CStr, args: &Args, blocks: u32, threads: u32) {
        let (stream, begun) = (StreamHandle::default(), Instant::now());
        entered(&*self.driver, |driver| {
            let kernel = driver.kernel(self.module, name)?;
            // SAFETY: the caller's promise; the event and the stream are alive.
            unsafe {
                let args = std::ptr::from_ref(args).cast();
                driver.launch(kernel, Shape { blocks, threads }, stream, args)?;
                driver.record(self.done, stream)?;
                while !driver.is_passed(self.done)? {
                    assert!(begun.elapsed() < DEADLINE, "{name:?} does not end");
                }
            }
            Ok(())
        });
    }

    /// Returns words of this value under one address for CPU and GPU.
    pub(crate) fn words(&self, value: u64, count: usize) -> SharedWords {
        let memory = entered(&*self.driver, |driver| driver.allocate_mapped(8 * count as u64));
        let mut words = SharedWords { driver: Arc::clone(&self.driver), memory, count };
        words.fill(value);
        words
    }
}

/// Pinned memory, which is released when dropped. No launch uses it by then, because [`Kernels::launch`] waits.
pub(crate) struct SharedWords {
    driver: Arc<dyn Driver>,
    memory: NonNull<u8>,
    count: usize,
}

impl Deref for SharedWords {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        // SAFETY: allocated so long; what the GPU writes, it has written.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.count) }
    }
}

impl DerefMut for SharedWords {
    fn deref_mut(&mut self) -> &mut [u64] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr().cast(), self.count) }
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // A test that fails already needs no second panic.
        if let Ok(entered) = self.driver.enter() {
            // SAFETY: allocated by this driver, in use no more.
            unsafe { self.driver.free_mapped(self.memory) };
            if entered {
                self.driver.leave();
            }
        }
    }
}
