//! The driver of this machine, called through cudarc. Every result other than success becomes an error.
//!
//! This file uses raw addresses and handles instead of cudarc's types. If a flat buffer were a `CudaSlice` of cudarc,
//! each write to any part of the buffer would wait for all earlier accesses to the buffer, so steps could not overlap
//! with backward. cudarc's `CudaStream` and `CudaEvent` query the current context in every call. A program that has a
//! `CudaStream` or a `CudaEvent` can still pass a reference to it, which this file converts to a handle.
//!
//! The context is the device's primary context, which the CUDA runtime and every framework share. The context is never
//! released, because other code may have memory in it. After a call, the thread's previous context is current again.
//! cudarc's `CudaContext` would leave its own context current.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use cudarc::driver::sys::{CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE};
use cudarc::driver::sys::{CUdevice_attribute::*, CUevent_flags::*, CUpointer_attribute::*};
use cudarc::driver::sys::{
    CUevent, CUmemAllocationType, CUmemLocationType, CUmemPool_attribute, CUmemorytype,
};
use cudarc::driver::sys::{CUstream, CUstream_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaEvent, CudaStream};

use super::driver::{Driver, Gpu, Graph, Kernel, Module, Shape};
use super::judge::Judge;
use super::library::{Direct, PoolProps, call, direct};
use crate::error::{Error, Result};
use crate::handle::{DevicePtr, EventHandle, Place, StreamHandle};

impl From<&CudaStream> for StreamHandle {
    fn from(stream: &CudaStream) -> StreamHandle {
        StreamHandle(stream.cu_stream().expose_provenance())
    }
}

impl From<&Arc<CudaStream>> for StreamHandle {
    fn from(stream: &Arc<CudaStream>) -> StreamHandle {
        StreamHandle::from(&**stream)
    }
}

impl From<&CudaEvent> for EventHandle {
    fn from(event: &CudaEvent) -> EventHandle {
        EventHandle(event.cu_event().expose_provenance())
    }
}

struct System {
    direct: &'static Direct,
    context: usize,
    /// A pool of stream-ordered memory. Freed memory stays mapped, so that the next allocation is fast. The driver's
    /// default pool returns freed memory to the system at every synchronization. A destroyed pool lives on until all
    /// its memory is freed.
    pool: usize,
    gpu: Gpu,
}

impl Drop for System {
    fn drop(&mut self) {
        // SAFETY: `open` made the pool, and this is its only owner.
        let _ = unsafe { self.direct.cuMemPoolDestroy(pointer(self.pool)) };
    }
}

/// Returns the number of devices.
///
/// # Errors
/// `DriverUnavailable` if there is no working driver. `Device` if the driver refuses the call.
pub(super) fn device_count() -> Result<u32> {
    direct()?;
    let mut count = 0;
    // SAFETY: the driver is initialised, and the call writes one number.
    unsafe { call!(cuDeviceGetCount(&mut count))? };
    Ok(count as u32)
}

/// Opens a device.
///
/// # Errors
/// Errors as for [`device_count`]. `Unsupported` if there is no such device, or if the device has no stream-ordered
/// memory or no unified addressing. `Device` if the driver refuses the context.
pub(super) fn open(ordinal: u32) -> Result<Arc<dyn Driver>> {
    let count = device_count()?;
    if ordinal >= count {
        let (wrong, remedy) = match count {
            0 => ("this machine has no GPU that the driver shows", "step on the host".to_owned()),
            _ => ("no such GPU", format!("use cuda:0 to cuda:{}", count - 1)),
        };
        return Err(Error::unsupported(format_args!("cuda:{ordinal}"), wrong, remedy));
    }
    let mut device = 0;
    // SAFETY: the ordinal is below the count, and the call writes one handle.
    unsafe { call!(cuDeviceGet(&mut device, ordinal as i32))? };
    // SAFETY: the device handle comes from the driver, and the call writes one handle.
    let context = made(|context| unsafe { call!(cuDevicePrimaryCtxRetain(context, device)) })?;
    let attribute = |attribute| {
        let mut value = 0;
        // SAFETY: the device handle comes from the driver, and the call writes one number.
        unsafe { call!(cuDeviceGetAttribute(&mut value, attribute, device)) }.map(|()| value)
    };
    for (needed, wrong) in [
        (CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, "this GPU has no stream-ordered memory"),
        (CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, "this GPU reaches host memory under other addresses"),
    ] {
        if attribute(needed)? == 0 {
            return Err(Error::unsupported(format_args!("cuda:{ordinal}"), wrong, "use another GPU"));
        }
    }
    let l2_bytes = attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as u64;
    let counted = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let mut name = [0u8; 256];
    // SAFETY: the driver writes a string of at most that many bytes.
    unsafe { call!(cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device))? };
    let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
    let direct = direct()?;
    let props = PoolProps {
        kind: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as u32,
        handles: 0,
        location: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32,
        ordinal: ordinal as i32,
        rest: [0; 9],
    };
    // SAFETY: the driver only reads the struct.
    let pool = made(|pool| unsafe { direct.cuMemPoolCreate(pool, &props) })?;
    let gpu = Gpu { ordinal, multiprocessors: counted as u32, l2_bytes, name };
    let system = System { direct, context, pool, gpu };
    let (threshold, mut bytes) = (CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD as i32, u64::MAX);
    // SAFETY: the call above made the pool, and the attribute has 64 bits.
    unsafe { direct.cuMemPoolSetAttribute(pointer(pool), threshold, (&raw mut bytes).cast())? };
    Ok(Arc::new(system))
}

/// Makes a call that writes a handle, and returns the handle.
fn made<T>(make: impl FnOnce(&mut *mut T) -> Result<()>) -> Result<usize> {
    let mut handle = ptr::null_mut();
    make(&mut handle).map(|()| handle.expose_provenance())
}

fn pointer<T>(number: usize) -> *mut T {
    ptr::with_exposed_provenance_mut(number)
}

fn stream_of(stream: StreamHandle) -> CUstream {
    pointer(stream.0)
}

fn event_of(event: EventHandle) -> CUevent {
    pointer(event.0)
}

// SAFETY: memory comes from the driver. For every unsafe block below, the caller guarantees handles and addresses (see
// the trait). Out-pointers lead to locals, and the context is current between `enter` and `leave`.
unsafe impl Driver for System {
    fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    fn judge(&self) -> Option<Judge> {
        self.direct.judge
    }

    /// Pushes the context only if it is not current. On a trainer's thread, the context is usually current.
    fn enter(&self) -> Result<bool> {
        let (mut current, context) = (ptr::null_mut(), pointer(self.context));
        // SAFETY: the conditions of every call hold (see the impl).
        unsafe { self.direct.cuCtxGetCurrent(&mut current)? };
        if current == context {
            return Ok(false);
        }
        // SAFETY: the context is never released.
        unsafe { call!(cuCtxPushCurrent_v2(context))? };
        Ok(true)
    }

    fn leave(&self) {
        let mut popped = ptr::null_mut();
        // SAFETY: the conditions of every call hold (see the impl). The call cannot fail after an `enter`.
        let _ = unsafe { call!(cuCtxPopCurrent_v2(&mut popped)) };
    }

    fn load(&self, image: &[u8]) -> Result<Module> {
        // The driver reads the image in words of 8 bytes.
        let mut aligned = vec![0u64; image.len().div_ceil(8)];
        bytemuck::cast_slice_mut(&mut aligned)[..image.len()].copy_from_slice(image);
        // SAFETY: the conditions of every call hold (see the impl). The image says its own length.
        made(|module| unsafe { call!(cuModuleLoadData(module, aligned.as_ptr().cast())) }).map(Module)
    }

    fn kernel(&self, module: Module, name: &CStr) -> Result<Kernel> {
        // SAFETY: the conditions of every call hold (see the impl).
        made(|kernel| unsafe { call!(cuModuleGetFunction(kernel, pointer(module.0), name.as_ptr())) })
            .map(Kernel)
    }

    unsafe fn resident_blocks(&self, kernel: Kernel, threads: u32) -> Result<u32> {
        let (mut each, kernel, threads) = (0, pointer(kernel.0), threads as i32);
        // SAFETY: guaranteed by the caller. The kernels take no dynamic shared memory.
        unsafe { call!(cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut each, kernel, threads, 0))? };
        Ok((each.max(1) as u32).saturating_mul(self.gpu.multiprocessors).max(1))
    }

    unsafe fn unload(&self, module: Module) {
        // SAFETY: the conditions of every call hold (see the impl).
        let _ = unsafe { call!(cuModuleUnload(pointer(module.0))) };
    }

    fn create_stream(&self, priority: i32) -> Result<StreamHandle> {
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the conditions of every call hold (see the impl). The driver clamps the priority.
        made(|stream| unsafe { call!(cuStreamCreateWithPriority(stream, flags, priority)) }).map(StreamHandle)
    }

    unsafe fn destroy_stream(&self, stream: StreamHandle) {
        // SAFETY: the conditions of every call hold (see the impl).
        let _ = unsafe { call!(cuStreamDestroy_v2(stream_of(stream))) };
    }

    unsafe fn inspect_stream(&self, stream: StreamHandle) -> Result<()> {
        if stream.0 <= 2 {
            // A default stream belongs to the current context.
            return Ok(());
        }
        // SAFETY: the conditions of every call hold (see the impl).
        if unsafe { self.direct.context_of(stream_of(stream))? } == pointer(self.context) {
            return Ok(());
        }
        let thing = format_args!("stream {:#x}", stream.0);
        let remedy = format_args!("use one of the primary context of cuda:{}", self.gpu.ordinal);
        Err(Error::unsupported(thing, "belongs to another device or context", remedy))
    }

    fn inspect_memory(&self, address: DevicePtr) -> Result<Place> {
        let ask = |attribute| {
            let mut answer: u32 = 0;
            let at = (&raw mut answer).cast();
            // SAFETY: the conditions of every call hold (see the impl). Both attributes have 32 bits, and an unknown
            // address gives an error.
            unsafe { call!(cuPointerGetAttribute(at, attribute, address.0)) }.map(|()| answer)
        };
        if ask(CU_POINTER_ATTRIBUTE_MEMORY_TYPE)? == CUmemorytype::CU_MEMORYTYPE_HOST as u32 {
            return Ok(Place::Host);
        }
        ask(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL).map(Place::Cuda)
    }

    fn create_event(&self, timed: bool) -> Result<EventHandle> {
        let flags = if timed { CU_EVENT_DEFAULT } else { CU_EVENT_DISABLE_TIMING };
        // SAFETY: the conditions of every call hold (see the impl).
        made(|event| unsafe { call!(cuEventCreate(event, flags as u32)) }).map(EventHandle)
    }

    unsafe fn destroy_event(&self, event: EventHandle) {
        // SAFETY: the conditions of every call hold (see the impl).
        let _ = unsafe { call!(cuEventDestroy_v2(event_of(event))) };
    }

    unsafe fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        // SAFETY: the conditions of every call hold (see the impl).
        unsafe { self.direct.cuEventRecord(event_of(event), stream_of(stream)) }
    }

    unsafe fn wait(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        // SAFETY: the conditions of every call hold (see the impl).
        unsafe { self.direct.cuStreamWaitEvent(stream_of(stream), event_of(event), 0) }
    }

    unsafe fn is_passed(&self, event: EventHandle) -> Result<bool> {
        // SAFETY: the conditions of every call hold (see the impl).
        unsafe { self.direct.is_passed(event_of(event)) }
    }

    unsafe fn elapsed_ns(&self, from: EventHandle, to: EventHandle) -> Result<f64> {
        let mut ms = 0.0;
        // SAFETY: the conditions of every call hold (see the impl).
        unsafe { self.direct.cuEventElapsedTime_v2(&mut ms, event_of(from), event_of(to))? };
        Ok(f64::from(ms) * 1e6)
    }

    fn allocate(&self, bytes: u64, stream: StreamHandle) -> Result<DevicePtr> {
        let (mut address, bytes, pool) = (0, bytes.max(1) as usize, pointer(self.pool));
        // SAFETY: the conditions of every call hold (see the impl). The driver refuses a length of zero.
        unsafe { self.direct.cuMemAllocFromPoolAsync(&mut address, bytes, pool, stream_of(stream))? };
        Ok(DevicePtr(address))
    }

    unsafe fn free(&self, address: DevicePtr, stream: StreamHandle) {
        // SAFETY: the conditions of every call hold (see the impl).
        let _ = unsafe { call!(cuMemFreeAsync(address.0, stream_of(stream))) };
    }

    fn allocate_mapped(&self, bytes: u64) -> Result<NonNull<u8>> {
        let mut host = ptr::null_mut();
        let flags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the conditions of every call hold (see the impl).
        unsafe { call!(cuMemHostAlloc(&mut host, bytes.max(1) as usize, flags))? };
        let none = Error::Device { call: "cuMemHostAlloc", code: 0, name: "a null address".to_owned() };
        NonNull::new(host.cast()).ok_or(none)
    }

    unsafe fn free_mapped(&self, memory: NonNull<u8>) {
        // SAFETY: the conditions of every call hold (see the impl).
        let _ = unsafe { call!(cuMemFreeHost(memory.as_ptr().cast())) };
    }

    unsafe fn fill(
        &self,
        address: DevicePtr,
        element: &[u8],
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        let (at, count, stream) = (address.0, bytes as usize / element.len().max(1), stream_of(stream));
        // SAFETY: the conditions of every call hold (see the impl).
        unsafe {
            match *element {
                [a, b, c, d] => call!(cuMemsetD32Async(at, u32::from_ne_bytes([a, b, c, d]), count, stream)),
                [a, b] => call!(cuMemsetD16Async(at, u16::from_ne_bytes([a, b]), count, stream)),
                [byte, ..] => call!(cuMemsetD8Async(at, byte, count, stream)),
                [] => Ok(()),
            }
        }
    }

    unsafe fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: u64, stream: StreamHandle) -> Result<()> {
        // SAFETY: the conditions of every call hold (see the impl).
        unsafe { call!(cuMemcpyDtoDAsync_v2(to.0, from.0, bytes as usize, stream_of(stream))) }
    }

    unsafe fn copy_down(&self, to: *mut u8, from: DevicePtr, bytes: u64, stream: StreamHandle) -> Result<()> {
        // SAFETY: the conditions of every call hold (see the impl).
        unsafe { call!(cuMemcpyDtoHAsync_v2(to.cast(), from.0, bytes as usize, stream_of(stream))) }
    }

    unsafe fn copy_up(&self, to: DevicePtr, from: *const u8, bytes: u64, stream: StreamHandle) -> Result<()> {
        // SAFETY: the conditions of every call hold (see the impl).
        unsafe { call!(cuMemcpyHtoDAsync_v2(to.0, from.cast(), bytes as usize, stream_of(stream))) }
    }

    unsafe fn upload(&self, to: DevicePtr, from: &[u8], stream: StreamHandle) -> Result<()> {
        // SAFETY: the conditions of every call hold (see the impl). The slice outlives the copy, because the call waits
        // for the stream.
        unsafe {
            self.copy_up(to, from.as_ptr(), from.len() as u64, stream)?;
            self.direct.cuStreamSynchronize(stream_of(stream))
        }
    }

    unsafe fn download(&self, to: &mut [u8], from: DevicePtr, stream: StreamHandle) -> Result<()> {
        // SAFETY: the conditions of every call hold (see the impl). The slice outlives the copy, because the call waits
        // for the stream.
        unsafe {
            self.copy_down(to.as_mut_ptr(), from, to.len() as u64, stream)?;
            self.direct.cuStreamSynchronize(stream_of(stream))
        }
    }

    unsafe fn launch(
        &self,
        kernel: Kernel,
        shape: Shape,
        stream: StreamHandle,
        args: *const c_void,
    ) -> Result<()> {
        let (function, stream) = (pointer(kernel.0), stream_of(stream));
        let Shape { blocks, threads } = shape;
        let mut params = [args.cast_mut()];
        let (params, none) = (params.as_mut_ptr(), ptr::null_mut());
        // SAFETY: the conditions of every call hold (see the impl). The driver copies the struct before it returns.
        unsafe { self.direct.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, params, none) }
    }

    unsafe fn call_host(
        &self,
        function: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
        stream: StreamHandle,
    ) -> Result<()> {
        // SAFETY: the conditions of every call hold (see the impl).
        unsafe { call!(cuLaunchHostFunc(stream_of(stream), Some(function), argument)) }
    }

    unsafe fn begin_capture(&self, stream: StreamHandle) -> Result<()> {
        // Other threads may allocate and wait during the capture.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the conditions of every call hold (see the impl).
        unsafe { call!(cuStreamBeginCapture_v2(stream_of(stream), mode)) }
    }

    unsafe fn capture_of(&self, stream: StreamHandle) -> Result<Option<u64>> {
        // SAFETY: the conditions of every call hold (see the impl).
        unsafe { self.direct.capture_of(stream_of(stream)) }
    }

    unsafe fn end_capture(&self, stream: StreamHandle) -> Result<Graph> {
        let (mut graph, mut exec) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the conditions of every call hold (see the impl). The graph is not used after it is instantiated.
        unsafe {
            call!(cuStreamEndCapture(stream_of(stream), &mut graph))?;
            let instantiated = call!(cuGraphInstantiateWithFlags(&mut exec, graph, 0));
            let _ = call!(cuGraphDestroy(graph));
            instantiated?;
        }
        Ok(Graph(exec.expose_provenance()))
    }

    unsafe fn launch_graph(&self, graph: Graph, stream: StreamHandle) -> Result<()> {
        // SAFETY: the conditions of every call hold (see the impl).
        unsafe { self.direct.cuGraphLaunch(pointer(graph.0), stream_of(stream)) }
    }

    unsafe fn destroy_graph(&self, graph: Graph) {
        // SAFETY: the conditions of every call hold (see the impl).
        let _ = unsafe { call!(cuGraphExecDestroy(pointer(graph.0))) };
    }
}
