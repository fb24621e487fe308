//! Device memory and a stream for tests: f32 in and out, and a wait with a deadline.
//!
//! It calls the driver past the library, which it is to judge. [`Gpu::open`] makes the device's context current, so
//! every call comes from the thread that called it.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use instep::StreamHandle;

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

const RTLD_NOW: c_int = 2;
const SUCCESS: i32 = 0;
const NOT_READY: i32 = 600;

macro_rules! driver {
    ($($name:ident: $symbol:literal($($type:ty),*);)*) => {
        /// The driver's functions, whose types `cuda.h` gives.
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
    allocate: c"cuMemAlloc_v2"(*mut u64, usize);
    upload: c"cuMemcpyHtoD_v2"(u64, *const c_void, usize);
    download: c"cuMemcpyDtoH_v2"(*mut c_void, u64, usize);
}

/// Device 0, current on this thread, with a stream.
pub(crate) struct Gpu {
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
        Gpu { stream }
    }

    pub(crate) fn stream(&self) -> StreamHandle {
        StreamHandle(self.stream.expose_provenance())
    }

    /// Allocates memory with `values`, which is never freed.
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

    /// Reads after all work on the stream.
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

    fn wait(&self, deadline: Duration, ask: impl FnMut()) {
        assert!(self.ends(deadline, ask), "the stream did not end within {deadline:?}");
    }
}
