//! A trait with one method for each driver call that a device makes.
//!
//! Two types implement the trait: the real driver (`system.rs`) and, in tests, a stand-in that records calls and runs
//! the kernels on the CPU. The tests also have a software GPU, which needs feature `cuda` and nvcc. The stand-in needs
//! neither. With the stand-in, a test can make one call fail or one event stall. Such tests take seconds instead of a
//! minute. The trait is hidden because it is not an interface for users. This module decides nothing: order, sizes and
//! arguments come from the caller.
#![allow(unsafe_code, missing_docs, clippy::missing_safety_doc)]

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use super::judge::Judge;
use crate::abi::INSTEP_GPU_THREADS;
use crate::error::Result;
use crate::handle::{DevicePtr, EventHandle, Place, StreamHandle};

/// A loaded binary of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Module(pub usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(pub usize);

/// A captured graph, ready to be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Graph(pub usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub blocks: u32,
    pub threads: u32,
}

impl Shape {
    /// Returns a shape with a thread for every four of `count` elements, and at most `max_blocks` blocks.
    pub(super) fn of_elements(count: u64, max_blocks: Option<u32>) -> Shape {
        let blocks = count.div_ceil(4 * u64::from(INSTEP_GPU_THREADS));
        // No launch has more blocks than an i32 counts.
        let blocks = blocks.clamp(1, max_blocks.unwrap_or(i32::MAX as u32).max(1).into()) as u32;
        Shape { blocks, threads: INSTEP_GPU_THREADS }
    }
}

pub struct Gpu {
    pub ordinal: u32,
    pub multiprocessors: u32,
    pub l2_bytes: u64,
    pub name: String,
}

/// A driver, bound to one device. All calls except those that describe the device are made between
/// [`enter`](Driver::enter) and [`leave`](Driver::leave).
///
/// # Safety
/// The memory that an implementation allocates has the requested length, is aligned to 8 bytes, and lives until it is
/// freed. The caller of an unsafe method passes only live handles of this driver, and addresses of memory with at least
/// as many bytes as the call accesses. The caller keeps memory alive until all enqueued work that touches it has ended.
pub unsafe trait Driver: Send + Sync {
    fn gpu(&self) -> &Gpu;

    fn ordinal(&self) -> u32 {
        self.gpu().ordinal
    }

    /// Returns the function that takes the claims of ops, if the driver checks work against claims.
    fn judge(&self) -> Option<Judge> {
        None
    }

    /// Makes the device current on the calling thread. Returns true if the device was not current before. The caller
    /// must then call [`leave`](Driver::leave) later.
    fn enter(&self) -> Result<bool>;
    /// Restores the device that was current before.
    fn leave(&self);

    fn image(&self) -> Result<&[u8]> {
        super::built::embedded()
    }

    fn load(&self, image: &[u8]) -> Result<Module>;
    fn kernel(&self, module: Module, name: &CStr) -> Result<Kernel>;
    /// Returns how many blocks of a kernel can be resident on the device at a time, at least 1.
    unsafe fn resident_blocks(&self, kernel: Kernel, threads: u32) -> Result<u32>;
    unsafe fn unload(&self, module: Module);

    /// Creates a stream that does not synchronize with the default stream. A lower number is a higher priority.
    fn create_stream(&self, priority: i32) -> Result<StreamHandle>;
    /// # Safety
    /// The stream meets the trait's conditions. Work that is queued on the stream still runs.
    unsafe fn destroy_stream(&self, stream: StreamHandle);
    /// Refuses a stream of another device.
    unsafe fn inspect_stream(&self, stream: StreamHandle) -> Result<()>;
    /// Returns where the memory at an address is: on the host, or on which GPU.
    ///
    /// # Errors
    /// `Device` if the driver does not know the address.
    fn inspect_memory(&self, address: DevicePtr) -> Result<Place>;

    fn create_event(&self, timed: bool) -> Result<EventHandle>;
    unsafe fn destroy_event(&self, event: EventHandle);
    unsafe fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()>;
    unsafe fn wait(&self, stream: StreamHandle, event: EventHandle) -> Result<()>;
    /// Returns whether the stream has passed the event's last recorded position.
    unsafe fn is_passed(&self, event: EventHandle) -> Result<bool>;
    unsafe fn elapsed_ns(&self, from: EventHandle, to: EventHandle) -> Result<f64>;

    /// Allocates memory that exists once the stream has passed the call.
    fn allocate(&self, bytes: u64, stream: StreamHandle) -> Result<DevicePtr>;
    /// # Safety
    /// The memory meets the trait's conditions. Earlier work on the stream may still use the memory.
    unsafe fn free(&self, address: DevicePtr, stream: StreamHandle);
    /// Allocates page-locked memory of the host, which the GPU accesses at the same address.
    fn allocate_mapped(&self, bytes: u64) -> Result<NonNull<u8>>;
    unsafe fn free_mapped(&self, memory: NonNull<u8>);

    /// Fills memory with copies of an element of 1, 2 or 4 bytes.
    unsafe fn fill(&self, address: DevicePtr, element: &[u8], bytes: u64, stream: StreamHandle)
    -> Result<()>;
    /// Copies inside the device's memory.
    ///
    /// # Safety
    /// Both addresses meet the trait's conditions, and the two ranges do not overlap.
    unsafe fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: u64, stream: StreamHandle) -> Result<()>;
    /// Enqueues a copy to the host's memory. Returns at once if the host's memory is page-locked.
    unsafe fn copy_down(&self, to: *mut u8, from: DevicePtr, bytes: u64, stream: StreamHandle) -> Result<()>;
    /// Copies from the host's memory. Memory that is not page-locked is copied at once, not in the stream's order.
    unsafe fn copy_up(&self, to: DevicePtr, from: *const u8, bytes: u64, stream: StreamHandle) -> Result<()>;
    /// Copies to the GPU after the work that is on the stream, and returns when the copy is done.
    unsafe fn upload(&self, to: DevicePtr, from: &[u8], stream: StreamHandle) -> Result<()>;
    /// Copies to the host after the work that is on the stream, and returns when the copy is done.
    unsafe fn download(&self, to: &mut [u8], from: DevicePtr, stream: StreamHandle) -> Result<()>;
    /// Launches a kernel. The kernel's only argument is the struct at `args`.
    ///
    /// # Safety
    /// The trait's conditions hold, and `args` is the struct that the kernel takes.
    unsafe fn launch(
        &self,
        kernel: Kernel,
        shape: Shape,
        stream: StreamHandle,
        args: *const c_void,
    ) -> Result<()>;

    /// Calls a function of this process on a thread of the driver. Later work on the stream waits until the function
    /// returns.
    ///
    /// # Safety
    /// The trait's conditions hold. The function makes no driver call. The driver may call it with this argument once
    /// or, if the call was captured, once per launch of the graph.
    unsafe fn call_host(
        &self,
        function: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Begins a capture: work on this stream, and on streams that wait for it, is recorded instead of run.
    unsafe fn begin_capture(&self, stream: StreamHandle) -> Result<()>;
    /// Returns the id of the capture that the stream takes part in. No two captures of a process have the same id.
    unsafe fn capture_of(&self, stream: StreamHandle) -> Result<Option<u64>>;
    unsafe fn end_capture(&self, stream: StreamHandle) -> Result<Graph>;
    unsafe fn launch_graph(&self, graph: Graph, stream: StreamHandle) -> Result<()>;
    unsafe fn destroy_graph(&self, graph: Graph);
}

/// Makes the device current on the calling thread until this value is dropped.
pub(crate) struct Entered<'a> {
    driver: &'a dyn Driver,
    was_entered: bool,
}

impl<'a> Entered<'a> {
    pub(crate) fn new(driver: &'a dyn Driver) -> Result<Entered<'a>> {
        Ok(Entered { driver, was_entered: driver.enter()? })
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.was_entered {
            self.driver.leave();
        }
    }
}
