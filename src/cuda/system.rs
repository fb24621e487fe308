//! The driver of this machine, over cudarc's bindings.
//!
//! cudarc loads the library lazily and panics where it is missing, even when it formats an error: so the library is
//! looked for first, and errors are text of our own. The primary context is retained, as the CUDA runtime and every
//! framework does, so that their pointers and streams are ours too. Must stay the only file that names cudarc.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::driver::{Driver, Graph, Kernel, Mapped, Module, Shape};
use crate::error::{Error, Result};
use crate::handle::{DevicePtr, EventHandle, Place, StreamHandle};

/// One device of this machine's driver.
struct System {
    ordinal: u32,
    device: sys::CUdevice,
    context: sys::CUcontext,
    multiprocessors: u32,
}

// SAFETY: a context may be used from every thread that makes it current.
unsafe impl Send for System {}
// SAFETY: as above; the driver's calls are thread-safe.
unsafe impl Sync for System {}

/// How many devices there are.
pub(super) fn device_count() -> Result<u32> {
    let unavailable = |why: String| Error::DriverUnavailable { why };
    // SAFETY: looks for the library, which has no initialiser that could misbehave beyond any other use of it.
    if !unsafe { sys::is_culib_present() } {
        let why = "libcuda was not found; it comes with NVIDIA's driver, not with the toolkit";
        return Err(unavailable(why.to_owned()));
    }
    // SAFETY: the library is there; the call has no precondition.
    let answer = unsafe { sys::cuInit(0) };
    if answer != sys::CUresult::CUDA_SUCCESS {
        return Err(unavailable(format!("cuInit answers {answer:?}")));
    }
    let mut count: c_int = 0;
    // SAFETY: `count` is writable.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    Ok(count as u32)
}

/// Opens a device.
pub(super) fn open(ordinal: u32) -> Result<Arc<dyn Driver>> {
    let count = device_count()?;
    if ordinal >= count {
        return Err(Error::Unsupported {
            what: format!("cuda:{ordinal}"),
            have: match count {
                0 => "no CUDA device".to_owned(),
                _ => format!("cuda:0 to cuda:{}", count - 1),
            },
        });
    }
    let (mut device, mut context, mut multiprocessors) = (0, ptr::null_mut(), 0);
    let counted = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let pools = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
    let mut has_pools = 0;
    // SAFETY: the out-pointers are writable, the ordinal is below the count.
    unsafe {
        check("cuDeviceGet", sys::cuDeviceGet(&mut device, ordinal as c_int))?;
        check("cuDeviceGetAttribute", sys::cuDeviceGetAttribute(&mut multiprocessors, counted, device))?;
        check("cuDeviceGetAttribute", sys::cuDeviceGetAttribute(&mut has_pools, pools, device))?;
        if has_pools == 0 {
            let what = format!("stream-ordered memory on cuda:{ordinal}");
            return Err(Error::Unsupported { what, have: "none".to_owned() });
        }
        check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&mut context, device))?;
    }
    Ok(Arc::new(System { ordinal, device, context, multiprocessors: multiprocessors as u32 }))
}

fn check(call: &'static str, answer: sys::CUresult) -> Result<()> {
    if answer == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(Error::Device { call, code: answer as i32, name: format!("{answer:?}") })
}

fn stream_of(stream: StreamHandle) -> sys::CUstream {
    ptr::with_exposed_provenance_mut(stream.0)
}

fn event_of(event: EventHandle) -> sys::CUevent {
    ptr::with_exposed_provenance_mut(event.0)
}

impl Drop for System {
    fn drop(&mut self) {
        // SAFETY: retained by `open`. The context lives on if anybody else retains it; at the process's end the driver
        // may be gone already, and then answers with an error that says nothing.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

// SAFETY of every unsafe block below: handles and addresses are the caller's promise (see the trait), out-pointers lead
// to locals, and the context is current between `enter` and `leave`.
impl Driver for System {
    fn ordinal(&self) -> u32 {
        self.ordinal
    }

    fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    fn enter(&self) -> Result<()> {
        // SAFETY: as above.
        check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(self.context) })
    }

    fn leave(&self) {
        let mut popped = ptr::null_mut();
        // SAFETY: as above. It cannot fail behind an `enter`.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
    }

    fn load(&self, image: &[u8]) -> Result<Module> {
        let mut module = ptr::null_mut();
        // The driver reads the image by 8 bytes.
        let mut aligned = vec![0u64; image.len().div_ceil(8)];
        // SAFETY: as above; the copy is as long as the image, which says its own length.
        unsafe {
            ptr::copy_nonoverlapping(image.as_ptr(), aligned.as_mut_ptr().cast(), image.len());
            check("cuModuleLoadData", sys::cuModuleLoadData(&mut module, aligned.as_ptr().cast()))?;
        }
        Ok(Module(module.expose_provenance()))
    }

    fn kernel(&self, module: Module, name: &CStr) -> Result<Kernel> {
        let mut kernel = ptr::null_mut();
        let module = ptr::with_exposed_provenance_mut(module.0);
        // SAFETY: as above.
        let answer = unsafe { sys::cuModuleGetFunction(&mut kernel, module, name.as_ptr()) };
        check("cuModuleGetFunction", answer)?;
        Ok(Kernel(kernel.expose_provenance()))
    }

    unsafe fn unload(&self, module: Module) {
        // SAFETY: as above.
        let _ = unsafe { sys::cuModuleUnload(ptr::with_exposed_provenance_mut(module.0)) };
    }

    fn create_stream(&self, priority: i32) -> Result<StreamHandle> {
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: as above; the driver clamps the priority.
        let answer = unsafe { sys::cuStreamCreateWithPriority(&mut stream, flags, priority) };
        check("cuStreamCreateWithPriority", answer)?;
        Ok(StreamHandle(stream.expose_provenance()))
    }

    unsafe fn destroy_stream(&self, stream: StreamHandle) {
        // SAFETY: as above.
        let _ = unsafe { sys::cuStreamDestroy_v2(stream_of(stream)) };
    }

    unsafe fn inspect_stream(&self, stream: StreamHandle) -> Result<()> {
        if stream.0 <= 2 {
            // The default streams are those of whatever context is current.
            return Ok(());
        }
        let mut context = ptr::null_mut();
        // SAFETY: as above.
        check("cuStreamGetCtx", unsafe { sys::cuStreamGetCtx(stream_of(stream), &mut context) })?;
        if context == self.context {
            return Ok(());
        }
        let what = format!("the stream {:#x}, which is of another device or context,", stream.0);
        Err(Error::Unsupported { what, have: format!("the primary context of cuda:{}", self.ordinal) })
    }

    fn inspect_memory(&self, address: DevicePtr) -> Result<Place> {
        use sys::CUpointer_attribute::{
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        };
        let ask = |attribute| {
            let mut answer: u32 = 0;
            // SAFETY: as above; both attributes are of 32 bits, and an address that is none is answered by an error.
            let status =
                unsafe { sys::cuPointerGetAttribute((&raw mut answer).cast(), attribute, address.0) };
            check("cuPointerGetAttribute", status).map(|()| answer)
        };
        if ask(CU_POINTER_ATTRIBUTE_MEMORY_TYPE)? == sys::CUmemorytype::CU_MEMORYTYPE_HOST as u32 {
            return Ok(Place::Host);
        }
        ask(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL).map(Place::Cuda)
    }

    fn create_event(&self, timed: bool) -> Result<EventHandle> {
        let mut event = ptr::null_mut();
        let flags = match timed {
            true => sys::CUevent_flags::CU_EVENT_DEFAULT,
            false => sys::CUevent_flags::CU_EVENT_DISABLE_TIMING,
        };
        // SAFETY: as above.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags as u32) })?;
        Ok(EventHandle(event.expose_provenance()))
    }

    unsafe fn destroy_event(&self, event: EventHandle) {
        // SAFETY: as above.
        let _ = unsafe { sys::cuEventDestroy_v2(event_of(event)) };
    }

    unsafe fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        // SAFETY: as above.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event_of(event), stream_of(stream)) })
    }

    unsafe fn wait(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        // SAFETY: as above.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream_of(stream), event_of(event), 0) })
    }

    unsafe fn is_passed(&self, event: EventHandle) -> Result<bool> {
        // SAFETY: as above.
        let answer = unsafe { sys::cuEventQuery(event_of(event)) };
        if answer == sys::CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        check("cuEventQuery", answer).map(|()| true)
    }

    unsafe fn elapsed_ns(&self, from: EventHandle, to: EventHandle) -> Result<f64> {
        // SAFETY: as above. cudarc knows which of two names the driver's version has for it.
        let answer = unsafe { result::event::elapsed(event_of(from), event_of(to)) };
        answer.map(|ms| f64::from(ms) * 1e6).map_err(|error| {
            let name = format!("{:?}", error.0);
            Error::Device { call: "cuEventElapsedTime", code: error.0 as i32, name }
        })
    }

    fn allocate(&self, bytes: u64, stream: StreamHandle) -> Result<DevicePtr> {
        let mut address = 0;
        // SAFETY: as above. The driver refuses a length of zero.
        let answer = unsafe { sys::cuMemAllocAsync(&mut address, bytes.max(1) as usize, stream_of(stream)) };
        check("cuMemAllocAsync", answer)?;
        Ok(DevicePtr(address))
    }

    unsafe fn free(&self, address: DevicePtr, stream: StreamHandle) {
        // SAFETY: as above.
        let _ = unsafe { sys::cuMemFreeAsync(address.0, stream_of(stream)) };
    }

    fn allocate_mapped(&self, bytes: u64) -> Result<Mapped> {
        let (mut host, mut device) = (ptr::null_mut(), 0);
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: as above.
        unsafe {
            check("cuMemHostAlloc", sys::cuMemHostAlloc(&mut host, bytes.max(1) as usize, flags))?;
            let answer = sys::cuMemHostGetDevicePointer_v2(&mut device, host, 0);
            if let Err(error) = check("cuMemHostGetDevicePointer", answer) {
                let _ = sys::cuMemFreeHost(host);
                return Err(error);
            }
        }
        let none = Error::Device { call: "cuMemHostAlloc", code: 0, name: "a null address".to_owned() };
        let host = NonNull::new(host.cast()).ok_or(none)?;
        Ok(Mapped { host, device: DevicePtr(device) })
    }

    unsafe fn free_mapped(&self, memory: Mapped) {
        // SAFETY: as above.
        let _ = unsafe { sys::cuMemFreeHost(memory.host.as_ptr().cast()) };
    }

    unsafe fn zero(&self, address: DevicePtr, bytes: u64, stream: StreamHandle) -> Result<()> {
        // SAFETY: as above.
        let answer = unsafe { sys::cuMemsetD8Async(address.0, 0, bytes as usize, stream_of(stream)) };
        check("cuMemsetD8Async", answer)
    }

    unsafe fn upload(&self, to: DevicePtr, from: &[u8], stream: StreamHandle) -> Result<()> {
        let bytes = from.len();
        // SAFETY: as above; the slice outlives the copy, because the stream is waited for.
        unsafe {
            let answer = sys::cuMemcpyHtoDAsync_v2(to.0, from.as_ptr().cast(), bytes, stream_of(stream));
            check("cuMemcpyHtoDAsync", answer)?;
            check("cuStreamSynchronize", sys::cuStreamSynchronize(stream_of(stream)))
        }
    }

    unsafe fn download(&self, to: &mut [u8], from: DevicePtr, stream: StreamHandle) -> Result<()> {
        let bytes = to.len();
        // SAFETY: as in `upload`.
        unsafe {
            let answer = sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.0, bytes, stream_of(stream));
            check("cuMemcpyDtoHAsync", answer)?;
            check("cuStreamSynchronize", sys::cuStreamSynchronize(stream_of(stream)))
        }
    }

    unsafe fn launch(
        &self,
        kernel: Kernel,
        shape: Shape,
        stream: StreamHandle,
        args: *const c_void,
    ) -> Result<()> {
        let mut params = [args.cast_mut()];
        let function = ptr::with_exposed_provenance_mut(kernel.0);
        // SAFETY: as above; the driver copies the struct before it returns.
        let answer = unsafe {
            sys::cuLaunchKernel(
                function,
                shape.blocks,
                1,
                1,
                shape.threads,
                1,
                1,
                0,
                stream_of(stream),
                params.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check("cuLaunchKernel", answer)
    }

    unsafe fn begin_capture(&self, stream: StreamHandle) -> Result<()> {
        // Other threads may go on allocating and waiting meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: as above.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(stream_of(stream), mode) })
    }

    unsafe fn end_capture(&self, stream: StreamHandle) -> Result<Graph> {
        let (mut graph, mut exec) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: as above; the graph is not used once it is instantiated.
        unsafe {
            check("cuStreamEndCapture", sys::cuStreamEndCapture(stream_of(stream), &mut graph))?;
            let answer = sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0);
            let _ = sys::cuGraphDestroy(graph);
            check("cuGraphInstantiate", answer)?;
        }
        Ok(Graph(exec.expose_provenance()))
    }

    unsafe fn launch_graph(&self, graph: Graph, stream: StreamHandle) -> Result<()> {
        let exec = ptr::with_exposed_provenance_mut(graph.0);
        // SAFETY: as above.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(exec, stream_of(stream)) })
    }

    unsafe fn destroy_graph(&self, graph: Graph) {
        // SAFETY: as above.
        let _ = unsafe { sys::cuGraphExecDestroy(ptr::with_exposed_provenance_mut(graph.0)) };
    }
}
