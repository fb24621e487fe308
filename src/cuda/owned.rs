//! Streams, events, code, graphs and pinned memory of a GPU that are given back with their last owner.
//!
//! A handle of this file lives as long as its value. A stream that comes as a plain handle is alive too: it is one of
//! these, or the trainer's, by the promise of the caller who named it. Queued work outlives all of them.
#![allow(unsafe_code)]

use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::driver::{Driver, Entered, Graph, Mapped, Module};
use crate::abi::InstepStatus;
use crate::error::Result;
use crate::handle::{DevicePtr, EventHandle, StreamHandle};

/// A position on a stream, from its last [`record`](Self::record). Clones are the same event.
#[derive(Clone)]
pub(crate) struct Event(Arc<OwnedEvent>);

struct OwnedEvent {
    driver: Arc<dyn Driver>,
    handle: EventHandle,
}

impl Event {
    pub(crate) fn new(driver: &Arc<dyn Driver>, timed: bool) -> Result<Event> {
        let handle = driver.create_event(timed)?;
        Ok(Event(Arc::new(OwnedEvent { driver: Arc::clone(driver), handle })))
    }

    #[cfg(feature = "bench")]
    pub(crate) fn handle(&self) -> EventHandle {
        self.0.handle
    }

    /// Makes it the stream's position of now.
    pub(crate) fn record(&self, stream: StreamHandle) -> Result<()> {
        // SAFETY: both are alive.
        unsafe { self.0.driver.record(self.0.handle, stream) }
    }

    /// Makes later work on the stream wait for it.
    pub(crate) fn hold(&self, stream: StreamHandle) -> Result<()> {
        // SAFETY: both are alive.
        unsafe { self.0.driver.wait(stream, self.0.handle) }
    }

    /// Whether its last position has been passed, or there is none.
    pub(crate) fn is_passed(&self) -> Result<bool> {
        // SAFETY: the event is alive.
        unsafe { self.0.driver.is_passed(self.0.handle) }
    }

    /// Returns the time from this one to another; both are timed, and passed.
    pub(crate) fn ns_until(&self, later: &Event) -> Result<f64> {
        later.ns_since(self.0.handle)
    }

    /// The same since an event by its handle, whose owner is alive.
    pub(crate) fn ns_since(&self, zero: EventHandle) -> Result<f64> {
        // SAFETY: both are alive. The driver refuses others.
        unsafe { self.0.driver.elapsed_ns(zero, self.0.handle) }
    }
}

impl Drop for OwnedEvent {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and this was its last owner.
        unsafe { self.driver.destroy_event(self.handle) }
    }
}

/// A stream of the crate's own.
pub(super) struct OwnedStream {
    driver: Arc<dyn Driver>,
    handle: StreamHandle,
}

impl OwnedStream {
    pub(super) fn new(driver: &Arc<dyn Driver>, priority: i32) -> Result<OwnedStream> {
        let handle = driver.create_stream(priority)?;
        Ok(OwnedStream { driver: Arc::clone(driver), handle })
    }

    pub(super) fn handle(&self) -> StreamHandle {
        self.handle
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        // SAFETY: made by `new`.
        unsafe { self.driver.destroy_stream(self.handle) }
    }
}

/// Code on the GPU.
pub(super) struct OwnedModule {
    driver: Arc<dyn Driver>,
    handle: Module,
}

impl OwnedModule {
    /// Takes over a module that this driver has loaded.
    pub(super) fn new(driver: &Arc<dyn Driver>, handle: Module) -> OwnedModule {
        OwnedModule { driver: Arc::clone(driver), handle }
    }
}

impl Drop for OwnedModule {
    fn drop(&mut self) {
        // SAFETY: loaded by this driver, which keeps the code of launches in flight.
        unsafe { self.driver.unload(self.handle) }
    }
}

/// A graph that was captured from a stream. Freed when dropped; what is in flight runs on.
pub(super) struct OwnedGraph {
    driver: Arc<dyn Driver>,
    handle: Graph,
}

impl OwnedGraph {
    /// Begins a capture of the stream, with the device current. If it is being captured already, this is refused.
    pub(super) fn begin(driver: &dyn Driver, stream: StreamHandle) -> Result<()> {
        // SAFETY: the stream is alive.
        unsafe { driver.begin_capture(stream) }
    }

    /// Ends the capture, with the device current. One that is invalid ends with an error, and leaves no graph.
    pub(super) fn end(driver: &Arc<dyn Driver>, stream: StreamHandle) -> Result<OwnedGraph> {
        // SAFETY: the stream is alive.
        let handle = unsafe { driver.end_capture(stream)? };
        Ok(OwnedGraph { driver: Arc::clone(driver), handle })
    }

    pub(super) fn handle(&self) -> Graph {
        self.handle
    }

    /// Runs it on the stream, with the device current.
    pub(super) fn launch(&self, stream: StreamHandle) -> Result<()> {
        // SAFETY: the graph refers to memory of the device that captured it, which keeps it, and to what the trainer
        // captured, which is alive by the promise of the caller of `Stepper::replay`.
        unsafe { self.driver.launch_graph(self.handle, stream) }
    }
}

impl Drop for OwnedGraph {
    fn drop(&mut self) {
        if let Ok(_entered) = Entered::new(&*self.driver) {
            // SAFETY: instantiated by `end`, and this was its only owner.
            unsafe { self.driver.destroy_graph(self.handle) }
        }
    }
}

/// Pinned memory under an address for the host and one for the GPU, all zeros at first. Its owner forgets it instead of
/// dropping it while work that uses it may be in flight.
pub(super) struct OwnedMapped {
    driver: Arc<dyn Driver>,
    memory: Mapped,
    bytes: usize,
}

impl OwnedMapped {
    pub(super) fn new(driver: &Arc<dyn Driver>, bytes: usize) -> Result<OwnedMapped> {
        let memory = driver.allocate_mapped(bytes as u64)?;
        // SAFETY: allocated for them; nothing else has the address yet.
        unsafe { memory.host.as_ptr().write_bytes(0, bytes) };
        Ok(OwnedMapped { driver: Arc::clone(driver), memory, bytes })
    }

    /// Returns the GPU's address of its first byte.
    pub(super) fn device(&self) -> DevicePtr {
        self.memory.device
    }

    /// Returns the host's address of its first byte.
    pub(super) fn host(&self) -> NonNull<u8> {
        self.memory.host
    }

    /// Writes words from word `at` on. No kernel reads them meanwhile, or it may read some of the old ones.
    pub(super) fn write(&mut self, at: usize, words: &[u32]) {
        assert!((at + words.len()) * size_of::<u32>() <= self.bytes, "{at} and {} words", words.len());
        // SAFETY: inside the memory, which is aligned to a page, and the host's alone through `&mut self`.
        unsafe {
            let to = self.memory.host.as_ptr().cast::<u32>().add(at);
            ptr::copy_nonoverlapping(words.as_ptr(), to, words.len());
        }
    }

    /// Reads the status of that number and, before and after it, the sequence number in it: the GPU writes it at any time,
    /// so it is whole only if all three agree.
    pub(super) fn status(&self, slot: usize, between: impl Fn()) -> (u64, InstepStatus, u64) {
        assert!((slot + 1) * size_of::<InstepStatus>() <= self.bytes, "slot {slot}");
        // SAFETY: inside the memory, aligned; plain numbers, of which any bits are some. Volatile, because the GPU writes.
        unsafe {
            let at = self.memory.host.cast::<InstepStatus>().add(slot).as_ptr();
            let sequence = &raw const (*at).sequence;
            let before = sequence.read_volatile();
            between();
            let status = at.read_volatile();
            between();
            (before, status, sequence.read_volatile())
        }
    }
}

impl Drop for OwnedMapped {
    fn drop(&mut self) {
        // SAFETY: made by `new`; nothing in flight uses it, by the contract.
        unsafe { self.driver.free_mapped(self.memory) }
    }
}
