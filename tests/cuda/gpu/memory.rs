//! Device memory and a stream for tests: f32 in and out, and a wait with a deadline.
//!
//! It calls the driver directly, because the tests judge the library. [`Gpu::open`] makes the device's context current,
//! so all calls must come from the same thread.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use instep::{EventHandle, StreamHandle};

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

const RTLD_NOW: c_int = 2;
const SUCCESS: i32 = 0;
const NOT_READY: i32 = 600;

macro_rules! driver {
    ($($name:ident: $symbol:literal($($type:ty),*);)*) => {
        /// The driver's functions, with the types of `cuda.h`.
        struct Driver {
            $($name: unsafe extern "C" fn($($type),*) -> i32,)*
        }

        fn driver() -> &'static Driver {
            static DRIVER: OnceLock<Driver> = OnceLock::new();
            DRIVER.get_or_init(|| {
                let path = std::env::var("INSTEP_CUDA").unwrap_or_else(|_| "libcuda.so.1".to_owned());
                let path = CString::new(path).unwrap();
                // SAFETY: strings that end in NUL; each symbol has the type that `cuda.h` gives it.
                unsafe {
                    let library = dlopen(path.as_ptr(), RTLD_NOW);
                    assert!(!library.is_null(), "{path:?} cannot be opened");
                    Driver {
                        $($name: {
                            let symbol = dlsym(library, $symbol.as_ptr());
                            assert!(!symbol.is_null(), "{path:?} has no {:?}", $symbol);
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> i32>(symbol)
                        },)*
                    }
                }
            })
        }
    };
}

driver! {
    init: c"cuInit"(u32);
    device: c"cuDeviceGet"(*mut i32, i32);
    retain: c"cuDevicePrimaryCtxRetain"(*mut *mut c_void, i32);
    make_current: c"cuCtxSetCurrent"(*mut c_void);
    create_stream: c"cuStreamCreate"(*mut *mut c_void, u32);
    query_stream: c"cuStreamQuery"(*mut c_void);
    synchronize: c"cuCtxSynchronize"();
    create_event: c"cuEventCreate"(*mut *mut c_void, u32);
    record: c"cuEventRecord"(*mut c_void, *mut c_void);
    wait: c"cuStreamWaitEvent"(*mut c_void, *mut c_void, u32);
    copy: c"cuMemcpyDtoDAsync_v2"(u64, u64, usize, *mut c_void);
    fill: c"cuMemsetD32Async"(u64, u32, usize, *mut c_void);
    allocate: c"cuMemAlloc_v2"(*mut u64, usize);
    upload: c"cuMemcpyHtoD_v2"(u64, *const c_void, usize);
    download: c"cuMemcpyDtoH_v2"(*mut c_void, u64, usize);
}

/// Device 0, current on this thread, with a stream.
pub(crate) struct Gpu {
    context: *mut c_void,
    stream: *mut c_void,
}

impl Gpu {
    pub(crate) fn open() -> Gpu {
        let (mut device, mut context, mut stream) = (0, std::ptr::null_mut(), std::ptr::null_mut());
        let driver = driver();
        // SAFETY: out-pointers lead to locals. The context is never released; the stream lives as long as the process.
        unsafe {
            assert_eq!((driver.init)(0), SUCCESS, "a driver");
            assert_eq!((driver.device)(&mut device, 0), SUCCESS, "a GPU");
            assert_eq!((driver.retain)(&mut context, device), SUCCESS);
            assert_eq!((driver.make_current)(context), SUCCESS);
            assert_eq!((driver.create_stream)(&mut stream, 1), SUCCESS);
        }
        Gpu { context, stream }
    }

    /// Makes the context current on this thread, or none.
    pub(crate) fn set_current(&self, is_current: bool) {
        let context = if is_current { self.context } else { std::ptr::null_mut() };
        // SAFETY: a context that is never released, or none.
        assert_eq!(unsafe { (driver().make_current)(context) }, SUCCESS);
    }

    /// Makes another stream of the same context.
    pub(crate) fn beside(&self) -> Gpu {
        let mut stream = std::ptr::null_mut();
        // SAFETY: the out-pointer leads to a local. The stream lives as long as the process.
        assert_eq!(unsafe { (driver().create_stream)(&mut stream, 1) }, SUCCESS);
        Gpu { stream, ..*self }
    }

    /// Makes an event that lives as long as the process.
    pub(crate) fn event() -> EventHandle {
        let mut event = std::ptr::null_mut();
        // SAFETY: the out-pointer leads to a local; 2 is an event without times.
        assert_eq!(unsafe { (driver().create_event)(&mut event, 2) }, SUCCESS);
        EventHandle(event.expose_provenance())
    }

    pub(crate) fn record(&self, event: EventHandle) {
        // SAFETY: an event of `event`, and a live stream.
        assert_eq!(unsafe { (driver().record)(event.0 as *mut c_void, self.stream) }, SUCCESS);
    }

    pub(crate) fn wait_for(&self, event: EventHandle) {
        // SAFETY: as above.
        assert_eq!(unsafe { (driver().wait)(self.stream, event.0 as *mut c_void, 0) }, SUCCESS);
    }

    /// Asserts that the stream may not wait for this event now.
    pub(crate) fn is_refused(&self, event: EventHandle) {
        // SAFETY: as above.
        assert_ne!(unsafe { (driver().wait)(self.stream, event.0 as *mut c_void, 0) }, SUCCESS);
    }

    /// Fills memory on the stream with one value.
    pub(crate) fn fill(&self, address: *mut f32, value: f32, count: usize) {
        // SAFETY: device memory that is long enough.
        let filled = unsafe { (driver().fill)(address.addr() as u64, value.to_bits(), count, self.stream) };
        assert_eq!(filled, SUCCESS);
    }

    /// Copies memory on the stream.
    pub(crate) fn copy(&self, from: *mut f32, to: *mut f32, count: usize) {
        let [from, to] = [from, to].map(|address| address.addr() as u64);
        // SAFETY: device memory that is long enough.
        assert_eq!(unsafe { (driver().copy)(to, from, 4 * count, self.stream) }, SUCCESS);
    }

    pub(crate) fn stream(&self) -> StreamHandle {
        StreamHandle(self.stream.expose_provenance())
    }

    /// Allocates memory with `values`, and never frees it.
    pub(crate) fn upload(&self, values: &[f32]) -> *mut f32 {
        let mut address = 0;
        // SAFETY: writes one address.
        assert_eq!(unsafe { (driver().allocate)(&mut address, size_of_val(values)) }, SUCCESS);
        let address = address as usize as *mut f32;
        self.write(address, values);
        address
    }

    pub(crate) fn write(&self, address: *mut f32, values: &[f32]) {
        let (from, bytes) = (values.as_ptr().cast(), size_of_val(values));
        // SAFETY: device memory that is long enough.
        assert_eq!(unsafe { (driver().upload)(address.addr() as u64, from, bytes) }, SUCCESS);
    }

    /// Reads memory after all work on the stream.
    pub(crate) fn read(&self, address: *mut f32, count: usize) -> Vec<f32> {
        self.wait(Duration::from_secs(30), || {});
        let mut values = vec![0.0; count];
        let (to, bytes) = (values.as_mut_ptr().cast(), 4 * count);
        // SAFETY: device memory that is long enough.
        assert_eq!(unsafe { (driver().download)(to, address.addr() as u64, bytes) }, SUCCESS);
        values
    }

    /// Returns whether all work on the stream ends within the deadline; calls `ask` meanwhile.
    pub(crate) fn ends(&self, deadline: Duration, mut ask: impl FnMut()) -> bool {
        let since = Instant::now();
        // SAFETY: a live stream.
        while unsafe { (driver().query_stream)(self.stream) } == NOT_READY {
            if since.elapsed() > deadline {
                return false;
            }
            ask();
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// Waits for all work of the context.
    pub(crate) fn synchronize(&self) {
        // SAFETY: the context is current on this thread.
        assert_eq!(unsafe { (driver().synchronize)() }, SUCCESS);
    }

    fn wait(&self, deadline: Duration, ask: impl FnMut()) {
        assert!(self.ends(deadline, ask), "the stream did not end within {deadline:?}");
    }
}
