//! Device memory and a stream for tests: f32 in and out, and a wait with a deadline.
//!
//! [`Gpu::open`] makes the device's context current, so every call comes from the thread that called it.

use std::time::{Duration, Instant};

use cudarc::driver::{result, sys};
use instep::StreamHandle;

/// Device 0, current on this thread, with a stream.
pub(crate) struct Gpu {
    stream: sys::CUstream,
}

impl Gpu {
    pub(crate) fn open() -> Gpu {
        result::init().expect("a driver");
        let device = result::device::get(0).expect("a GPU");
        // SAFETY: the context is never released; the stream lives as long as the process.
        unsafe {
            let context = result::primary_ctx::retain(device).unwrap();
            assert_eq!(sys::cuCtxSetCurrent(context), sys::CUresult::CUDA_SUCCESS);
            let mut stream = std::ptr::null_mut();
            assert_eq!(sys::cuStreamCreate(&mut stream, 1), sys::CUresult::CUDA_SUCCESS);
            Gpu { stream }
        }
    }

    pub(crate) fn stream(&self) -> StreamHandle {
        StreamHandle(self.stream.expose_provenance())
    }

    /// Allocates memory with `values`, which is never freed.
    pub(crate) fn upload(&self, values: &[f32]) -> *mut f32 {
        // SAFETY: exactly the bytes that are written next.
        let address = unsafe { result::malloc_sync(size_of_val(values)) }.unwrap() as usize as *mut f32;
        self.write(address, values);
        address
    }

    pub(crate) fn write(&self, address: *mut f32, values: &[f32]) {
        // SAFETY: device memory that is long enough.
        unsafe { result::memcpy_htod_sync(address.addr() as u64, values) }.unwrap();
    }

    /// Reads after all work on the stream.
    pub(crate) fn read(&self, address: *mut f32, count: usize) -> Vec<f32> {
        self.wait(Duration::from_secs(30), || {});
        let mut values = vec![0.0; count];
        // SAFETY: device memory that is long enough.
        unsafe { result::memcpy_dtoh_sync(&mut values, address.addr() as u64) }.unwrap();
        values
    }

    /// Returns whether all work on the stream ends within the deadline; calls `ask` meanwhile.
    pub(crate) fn ends(&self, deadline: Duration, mut ask: impl FnMut()) -> bool {
        let since = Instant::now();
        // SAFETY: a live stream.
        while unsafe { sys::cuStreamQuery(self.stream) } == sys::CUresult::CUDA_ERROR_NOT_READY {
            if since.elapsed() > deadline {
                return false;
            }
            ask();
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    fn wait(&self, deadline: Duration, ask: impl FnMut()) {
        assert!(self.ends(deadline, ask), "the stream did not end within {deadline:?}");
    }
}
