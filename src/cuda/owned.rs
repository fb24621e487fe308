//! Streams, events, code, graphs and memory of a GPU. Each object is freed when its last owner is dropped.
//!
//! A handle is alive as long as the value that owns it. A stream that is passed as a plain handle is alive too, because
//! a value of this file owns it, or because it is the trainer's stream, which the caller has promised to keep alive.
//! Work that is already queued still runs after the handles that it uses are freed. Stream-ordered memory is freed
//! after the work that is on its stream. The host does not wait to allocate or free such memory. (CUDA's stream-ordered
//! allocator.)
#![allow(unsafe_code)]

use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::driver::{Driver, Entered, Graph, Module};
use crate::abi::InstepStatus;
use crate::error::{Error, Result};
use crate::handle::{DevicePtr, EventHandle, StreamHandle};

/// How long a drop waits for the GPU before it leaks memory that may still be in use.
const GRACE: Duration = Duration::from_millis(20);

/// A driver's call that frees a handle.
type Free<H> = unsafe fn(&(dyn Driver + 'static), H);

/// A handle, and the call that frees it. The call is made with the device current.
pub(super) struct Owned<H: Copy> {
    driver: Arc<dyn Driver>,
    handle: H,
    free: Free<H>,
}

impl<H: Copy> Owned<H> {
    fn new(driver: &Arc<dyn Driver>, handle: H, free: Free<H>) -> Owned<H> {
        Owned { driver: Arc::clone(driver), handle, free }
    }

    pub(super) fn handle(&self) -> H {
        self.handle
    }
}

impl<H: Copy> Drop for Owned<H> {
    fn drop(&mut self) {
        let Ok(_entered) = Entered::new(&*self.driver) else { return };
        // SAFETY: every constructor below makes the handle with this driver, together with the call that frees it, for
        // only this owner.
        unsafe { (self.free)(&*self.driver, self.handle) }
    }
}

/// An event. The event's position is the stream's position at the last [`record`](Self::record). Clones share one
/// event.
#[derive(Clone)]
pub(crate) struct Event(Arc<Position>);

struct Position {
    event: Owned<EventHandle>,
    is_recorded: AtomicBool,
}

impl Event {
    pub(crate) fn new(driver: &Arc<dyn Driver>, timed: bool) -> Result<Event> {
        let event = Owned::new(driver, driver.create_event(timed)?, <dyn Driver>::destroy_event);
        Ok(Event(Arc::new(Position { event, is_recorded: AtomicBool::new(false) })))
    }

    pub(crate) fn handle(&self) -> EventHandle {
        self.0.event.handle
    }

    pub(crate) fn record(&self, stream: StreamHandle) -> Result<()> {
        self.0.is_recorded.store(true, Ordering::Relaxed);
        // SAFETY: the event and the stream are alive.
        unsafe { self.0.event.driver.record(self.handle(), stream) }
    }

    /// Makes later work on the stream wait for the event's last position, if there is one.
    pub(crate) fn hold(&self, stream: StreamHandle) -> Result<()> {
        if !self.0.is_recorded.load(Ordering::Relaxed) {
            return Ok(());
        }
        // SAFETY: the event and the stream are alive.
        unsafe { self.0.event.driver.wait(stream, self.handle()) }
    }

    /// Returns true if the event's last position has been passed, or if the event has not been recorded.
    pub(crate) fn is_passed(&self) -> Result<bool> {
        let is_recorded = self.0.is_recorded.load(Ordering::Relaxed);
        // SAFETY: the event is alive.
        Ok(!is_recorded || unsafe { self.0.event.driver.is_passed(self.handle())? })
    }

    /// Waits until the event's last position has been passed, but at most for `GRACE`. Returns whether the position has
    /// been passed. Each time `is_busy` returns true, the measured time starts again from zero.
    pub(super) fn is_passed_soon(&self, is_busy: impl Fn() -> bool) -> bool {
        let mut since = Instant::now();
        loop {
            match self.is_passed() {
                Ok(false) if since.elapsed() < GRACE => {
                    std::thread::sleep(Duration::from_micros(20));
                    if is_busy() {
                        since = Instant::now();
                    }
                }
                outcome => return outcome == Ok(true),
            }
        }
    }

    /// Blocks until the event's last position has been passed, if there is one.
    pub(super) fn block(&self) -> Result<()> {
        while !self.is_passed()? {
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    /// Returns the nanoseconds from the event `zero` to this event. The owner of `zero` is alive. Both events are timed
    /// and have been passed.
    pub(crate) fn ns_since(&self, zero: EventHandle) -> Result<f64> {
        // SAFETY: both events are alive. The driver refuses events that are not timed or not passed.
        unsafe { self.0.event.driver.elapsed_ns(zero, self.handle()) }
    }
}

pub(super) fn capture_of(driver: &dyn Driver, stream: StreamHandle) -> Result<Option<u64>> {
    // SAFETY: the stream is alive.
    unsafe { driver.capture_of(stream) }
}

pub(super) type OwnedStream = Owned<StreamHandle>;

impl OwnedStream {
    pub(super) fn with_priority(driver: &Arc<dyn Driver>, priority: i32) -> Result<OwnedStream> {
        Ok(Owned::new(driver, driver.create_stream(priority)?, <dyn Driver>::destroy_stream))
    }
}

/// Code on the GPU. The driver does not free the code of a launch that has not ended.
pub(super) type OwnedModule = Owned<Module>;

impl OwnedModule {
    pub(super) fn load(driver: &Arc<dyn Driver>) -> Result<OwnedModule> {
        Ok(Owned::new(driver, driver.load(driver.image()?)?, <dyn Driver>::unload))
    }
}

/// A graph that was captured from a stream. Dropping it frees the graph, but enqueued work still runs.
pub(super) type OwnedGraph = Owned<Graph>;

impl OwnedGraph {
    /// Begins a capture of the stream, with the device current. Returns an error if the stream is being captured
    /// already.
    pub(super) fn begin(driver: &dyn Driver, stream: StreamHandle) -> Result<()> {
        // SAFETY: the stream is alive.
        unsafe { driver.begin_capture(stream) }
    }

    /// Ends the capture, with the device current. An invalid capture ends with an error, and leaves no graph.
    pub(super) fn end(driver: &Arc<dyn Driver>, stream: StreamHandle) -> Result<OwnedGraph> {
        // SAFETY: the stream is alive.
        let graph = unsafe { driver.end_capture(stream)? };
        Ok(Owned::new(driver, graph, <dyn Driver>::destroy_graph))
    }

    pub(super) fn launch(&self, stream: StreamHandle) -> Result<()> {
        // SAFETY: the graph refers to memory that the capturing device keeps, and to memory of the trainer's captured
        // work. The caller of `Stepper::replay` promises that the latter is alive.
        unsafe { self.driver.launch_graph(self.handle, stream) }
    }
}

/// One allocation of a GPU's memory, and the stream on which a drop frees it. The memory is freed after all work that
/// is on this stream by then.
pub(super) struct Arena(Owned<(DevicePtr, StreamHandle)>);

impl Arena {
    /// Allocates memory with arbitrary contents, for work that is enqueued on the stream later.
    pub(super) fn new(driver: &Arc<dyn Driver>, bytes: u64, stream: StreamHandle) -> Result<Arena> {
        let free: Free<(DevicePtr, StreamHandle)> = |driver, (address, stream)| {
            // SAFETY: this driver has allocated the memory. The owner's drop (`CudaDevice`, `AnyStream`) or the caller
            // of `free_on` has made this stream come after all work that uses it.
            unsafe { driver.free(address, stream) }
        };
        let address = driver.allocate(bytes, stream)?;
        pointer(address)?;
        Ok(Arena(Owned::new(driver, (address, stream), free)))
    }

    pub(super) fn zeroed(driver: &Arc<dyn Driver>, bytes: u64, stream: StreamHandle) -> Result<Arena> {
        let arena = Arena::new(driver, bytes, stream)?;
        if bytes > 0 {
            // SAFETY: the memory was just allocated on this stream, and is `bytes` bytes long.
            unsafe { driver.fill(arena.address(), &[0], bytes, stream)? };
        }
        Ok(arena)
    }

    pub(super) fn address(&self) -> DevicePtr {
        self.0.handle.0
    }

    pub(super) fn base(&self) -> *mut u8 {
        // The provenance is exposed because, in tests, the device's memory is host memory.
        ptr::with_exposed_provenance_mut(self.address().0 as usize)
    }

    /// Changes the stream on which the memory is freed. Before the memory is freed, the caller makes that stream wait
    /// for all streams that use the memory.
    pub(super) fn free_on(&mut self, stream: StreamHandle) {
        self.0.handle.1 = stream;
    }
}

pub(super) fn pointer(address: DevicePtr) -> Result<NonNull<u8>> {
    let none =
        || Error::Device { call: "cuMemAllocFromPoolAsync", code: 0, name: "a null address".to_owned() };
    NonNull::new(ptr::with_exposed_provenance_mut(address.0 as usize)).ok_or_else(none)
}

/// Pinned memory, which has the same address for the host and the GPU. It is zeroed at first. While enqueued work may
/// use the memory, the owner must leak it instead of dropping it.
pub(super) struct OwnedMapped {
    memory: Owned<NonNull<u8>>,
    bytes: usize,
}

impl OwnedMapped {
    pub(super) fn new(driver: &Arc<dyn Driver>, bytes: usize) -> Result<OwnedMapped> {
        let memory = Owned::new(driver, driver.allocate_mapped(bytes as u64)?, <dyn Driver>::free_mapped);
        // SAFETY: the memory was allocated for these bytes, and nothing else has its address yet.
        unsafe { memory.handle.as_ptr().write_bytes(0, bytes) };
        Ok(OwnedMapped { memory, bytes })
    }

    pub(super) fn device(&self) -> DevicePtr {
        DevicePtr(self.host().as_ptr().expose_provenance() as u64)
    }

    pub(super) fn run(&self) -> (usize, u64) {
        (self.device().0 as usize, self.bytes as u64)
    }

    pub(super) fn host(&self) -> NonNull<u8> {
        self.memory.handle
    }

    /// Writes `words`, starting at word `at`. A kernel that reads at the same time may read a mix of old and new words.
    pub(super) fn write(&mut self, at: usize, words: &[u32]) {
        assert!((at + words.len()) * size_of::<u32>() <= self.bytes, "{at} and {} words", words.len());
        // SAFETY: the words are inside the memory, which is aligned to a page. `&mut self` excludes other accesses by
        // the host.
        unsafe {
            let to = self.host().as_ptr().cast::<u32>().add(at);
            ptr::copy_nonoverlapping(words.as_ptr(), to, words.len());
        }
    }

    /// Reads the sequence number in this slot, the status, and the sequence number again. The GPU may write the status
    /// at any time, so the status is complete only if both numbers agree with the number in the status.
    pub(super) fn status(&self, slot: usize, between: impl Fn()) -> (u64, InstepStatus, u64) {
        assert!((slot + 1) * size_of::<InstepStatus>() <= self.bytes, "slot {slot}");
        // SAFETY: the slot is inside the memory and aligned. It has plain numbers, for which all bits are valid. The
        // reads are volatile, because the GPU writes the slot.
        unsafe {
            let at = self.host().cast::<InstepStatus>().add(slot).as_ptr();
            let sequence = &raw const (*at).sequence;
            let before = sequence.read_volatile();
            between();
            let status = at.read_volatile();
            between();
            (before, status, sequence.read_volatile())
        }
    }
}
