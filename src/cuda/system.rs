//! The driver of this machine, over cudarc's bindings: one driver call per method.
//!
//! It uses raw addresses and handles. cudarc's slices would order all accesses to one flat buffer and so prevent the
//! overlap that this library exists for. A method adds nothing to its call but the check of the answer.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::context::{Primary, check};
use super::driver::{Driver, Graph, Kernel, Mapped, Module, Shape};
use crate::error::{Error, Result};
use crate::handle::{DevicePtr, EventHandle, Place, StreamHandle};

/// One device of this machine's driver.
struct System {
    ordinal: u32,
    primary: Primary,
    multiprocessors: u32,
    l2_bytes: u64,
    name: String,
}

/// Opens a device.
pub(super) fn open(ordinal: u32) -> Result<Arc<dyn Driver>> {
    let primary = Primary::of(ordinal)?;
    let attribute = |attribute| {
        let mut value = 0;
        // SAFETY: the device is the driver's own; writes one number.
        let answer = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, primary.device) };
        check("cuDeviceGetAttribute", answer).map(|()| value)
    };
    if attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? == 0 {
        let wrong = "this GPU has no stream-ordered memory";
        return Err(Error::unsupported(format_args!("cuda:{ordinal}"), wrong, "use another GPU"));
    }
    let l2_bytes = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as u64;
    let counted = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let mut name = [0u8; 256];
    // SAFETY: the driver writes a string of at most that many bytes.
    let answer = unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, primary.device) };
    check("cuDeviceGetName", answer)?;
    let name = CStr::from_bytes_until_nul(&name).map(|name| name.to_string_lossy().into_owned());
    let name = name.unwrap_or_default();
    Ok(Arc::new(System { ordinal, primary, multiprocessors: counted as u32, l2_bytes, name }))
}

fn stream_of(stream: StreamHandle) -> sys::CUstream {
    ptr::with_exposed_provenance_mut(stream.0)
}

fn event_of(event: EventHandle) -> sys::CUevent {
    ptr::with_exposed_provenance_mut(event.0)
}

// SAFETY: memory comes from the driver. For every unsafe block below: handles and addresses are the caller's promise
// (see the trait), out-pointers lead to locals, and the context is current between `enter` and `leave`.
unsafe impl Driver for System {
    fn ordinal(&self) -> u32 {
        self.ordinal
    }

    fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn l2_bytes(&self) -> u64 {
        self.l2_bytes
    }

    fn enter(&self) -> Result<()> {
        self.primary.enter()
    }

    fn leave(&self) {
        self.primary.leave();
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
            // A default stream belongs to the current context.
            return Ok(());
        }
        let mut context = ptr::null_mut();
        // SAFETY: as above.
        check("cuStreamGetCtx", unsafe { sys::cuStreamGetCtx(stream_of(stream), &mut context) })?;
        if self.primary.is(context) {
            return Ok(());
        }
        let thing = format_args!("stream {:#x}", stream.0);
        let remedy = format_args!("use one of the primary context of cuda:{}", self.ordinal);
        Err(Error::unsupported(thing, "belongs to another device or context", remedy))
    }

    fn inspect_memory(&self, address: DevicePtr) -> Result<Place> {
        use sys::CUpointer_attribute::{
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        };
        let ask = |attribute| {
            let mut answer: u32 = 0;
            // SAFETY: as above; both attributes have 32 bits, and an unknown address gives an error.
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
        // SAFETY: as above. cudarc picks the name that this driver version has.
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

    unsafe fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: u64, stream: StreamHandle) -> Result<()> {
        // SAFETY: as above.
        let answer = unsafe { sys::cuMemcpyDtoDAsync_v2(to.0, from.0, bytes as usize, stream_of(stream)) };
        check("cuMemcpyDtoDAsync", answer)
    }

    unsafe fn upload(&self, to: DevicePtr, from: &[u8], stream: StreamHandle) -> Result<()> {
        let bytes = from.len();
        // SAFETY: as above; the slice outlives the copy, because the call waits for the stream.
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
        // Other threads may allocate and wait during the capture.
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
