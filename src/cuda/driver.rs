//! The seam to a GPU's driver: the few calls that the device makes, a method each.
//!
//! Two stand behind it: the real driver (`system.rs`) and, in tests, a stand-in that writes calls down and runs the
//! kernels on the CPU. Hidden, because it is no interface for users. Must decide nothing: an order, a size or an
//! argument that is wrong here was wrong before it came here.
#![allow(unsafe_code, missing_docs)]

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use crate::error::Result;
use crate::handle::{DevicePtr, EventHandle, Place, StreamHandle};

/// A loaded binary of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Module(pub usize);

/// One kernel of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(pub usize);

/// A captured graph, ready to be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Graph(pub usize);

/// Pinned memory of the CPU's that the GPU reaches under an address of its own.
#[derive(Clone, Copy, Debug)]
pub struct Mapped {
    pub host: NonNull<u8>,
    pub device: DevicePtr,
}

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub blocks: u32,
    pub threads: u32,
}

/// A driver, bound to one device. Every call but those that describe it is made between [`enter`](Driver::enter) and
/// [`leave`](Driver::leave).
///
/// # Safety
/// An implementation's memory is as long as it was asked for, aligned to 8 bytes, and stays until it is given back. Of
/// all unsafe methods: handles come from this driver and have not been given back, addresses lead to as many bytes as
/// the call says, and whatever is in flight on a stream keeps what it touches.
pub unsafe trait Driver: Send + Sync {
    /// Which device.
    fn ordinal(&self) -> u32;

    /// How many multiprocessors it has.
    fn multiprocessors(&self) -> u32;

    /// What its maker calls it.
    fn name(&self) -> &str;

    /// Size of its last-level cache.
    fn l2_bytes(&self) -> u64;

    /// Makes the device the calling thread's.
    fn enter(&self) -> Result<()>;

    /// Gives the thread back the device that it had.
    fn leave(&self);

    /// The kernels that this driver is to load.
    fn image(&self) -> Result<&[u8]> {
        super::built::embedded()
    }

    fn load(&self, image: &[u8]) -> Result<Module>;
    fn kernel(&self, module: Module, name: &CStr) -> Result<Kernel>;
    /// # Safety
    /// As for the trait.
    unsafe fn unload(&self, module: Module);

    /// A stream of its own that no other one waits for; the lower the priority, the sooner its work is scheduled.
    fn create_stream(&self, priority: i32) -> Result<StreamHandle>;
    /// # Safety
    /// As for the trait; what is queued still runs.
    unsafe fn destroy_stream(&self, stream: StreamHandle);
    /// Refuses a stream of another device.
    ///
    /// # Safety
    /// As for the trait.
    unsafe fn inspect_stream(&self, stream: StreamHandle) -> Result<()>;
    /// Where memory lies, or an error if the driver does not know the address.
    fn inspect_memory(&self, address: DevicePtr) -> Result<Place>;

    fn create_event(&self, timed: bool) -> Result<EventHandle>;
    /// # Safety
    /// As for the trait.
    unsafe fn destroy_event(&self, event: EventHandle);
    /// # Safety
    /// As for the trait.
    unsafe fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()>;
    /// # Safety
    /// As for the trait.
    unsafe fn wait(&self, stream: StreamHandle, event: EventHandle) -> Result<()>;
    /// Whether what was recorded last has been passed.
    ///
    /// # Safety
    /// As for the trait.
    unsafe fn is_passed(&self, event: EventHandle) -> Result<bool>;
    /// Between two timed events that have been passed.
    ///
    /// # Safety
    /// As for the trait.
    unsafe fn elapsed_ns(&self, from: EventHandle, to: EventHandle) -> Result<f64>;

    /// Memory that is there once the stream has passed the call.
    fn allocate(&self, bytes: u64, stream: StreamHandle) -> Result<DevicePtr>;
    /// # Safety
    /// As for the trait; what is in front of it on the stream may still use the memory.
    unsafe fn free(&self, address: DevicePtr, stream: StreamHandle);
    fn allocate_mapped(&self, bytes: u64) -> Result<Mapped>;
    /// # Safety
    /// As for the trait.
    unsafe fn free_mapped(&self, memory: Mapped);

    /// Fills with zero bytes.
    ///
    /// # Safety
    /// As for the trait.
    unsafe fn zero(&self, address: DevicePtr, bytes: u64, stream: StreamHandle) -> Result<()>;
    /// Copies inside the device's memory.
    ///
    /// # Safety
    /// As for the trait; the two do not overlap.
    unsafe fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: u64, stream: StreamHandle) -> Result<()>;
    /// Copies behind what is on the stream, and returns when it is done.
    ///
    /// # Safety
    /// As for the trait.
    unsafe fn upload(&self, to: DevicePtr, from: &[u8], stream: StreamHandle) -> Result<()>;
    /// Copies behind what is on the stream, and returns when it is done.
    ///
    /// # Safety
    /// As for the trait.
    unsafe fn download(&self, to: &mut [u8], from: DevicePtr, stream: StreamHandle) -> Result<()>;
    /// Launches a kernel whose one argument is the struct at `args`.
    ///
    /// # Safety
    /// As for the trait; `args` is the struct that the kernel takes.
    unsafe fn launch(
        &self,
        kernel: Kernel,
        shape: Shape,
        stream: StreamHandle,
        args: *const c_void,
    ) -> Result<()>;

    /// From here on the stream's work, and that of streams that wait for it, is written down and not run.
    ///
    /// # Safety
    /// As for the trait.
    unsafe fn begin_capture(&self, stream: StreamHandle) -> Result<()>;
    /// # Safety
    /// As for the trait.
    unsafe fn end_capture(&self, stream: StreamHandle) -> Result<Graph>;
    /// # Safety
    /// As for the trait.
    unsafe fn launch_graph(&self, graph: Graph, stream: StreamHandle) -> Result<()>;
    /// # Safety
    /// As for the trait.
    unsafe fn destroy_graph(&self, graph: Graph);
}

/// The device is the calling thread's as long as this lives.
pub(crate) struct Entered<'a>(&'a dyn Driver);

impl<'a> Entered<'a> {
    pub(crate) fn new(driver: &'a dyn Driver) -> Result<Entered<'a>> {
        driver.enter()?;
        Ok(Entered(driver))
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}
