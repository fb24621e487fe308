//! A GPU's driver without a GPU: it records every call and runs the calls in their order.
//!
//! Its memory is host memory. Its kernels are those of the CPU or, in the lane that compiles them, the `.cu` files as
//! fibers. Streams and events allow this order of calls, so a run's results must be right. Tests compare the recorded
//! calls to prove the other orders. The stand-in knows no mode, op or bucket.
#![allow(unsafe_code)]

pub(crate) mod calls;
pub(crate) mod commands;
mod driver;

use std::collections::{HashMap, HashSet};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};

use instep::{Error, EventHandle, Result, StreamHandle};

use calls::Call;
use commands::{Command, run};

/// An image whose kernels do not belong to the library: their launches are recorded and do nothing.
pub(crate) const FOREIGN: &[u8] = b"foreign";

/// Largest allocation, in bytes.
const MEMORY_BYTES: u64 = 64 << 20;

/// The trainer's stream in all tests.
pub(crate) const COMPUTE: StreamHandle = StreamHandle(0x1000);

/// The events that do not pass.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Stalled {
    #[default]
    None,
    Sums,
    All,
}

#[derive(Default)]
struct State {
    calls: Vec<Call>,
    /// All allocations, by address.
    memory: HashMap<usize, Box<[u64]>>,
    next_handle: usize,
    /// Number of kernels that were looked up and do not belong to the library.
    foreign: usize,
    /// Timed events with the clock at their latest record. They order nothing.
    timed: HashMap<EventHandle, u64>,
    clock: u64,
    entered: u32,
    capturing: Option<Vec<Command>>,
    graphs: HashMap<usize, Vec<Command>>,
    /// Calls of this name fail after this many successes.
    broken: Option<(&'static str, usize)>,
    stalled: Stalled,
    /// The stream on which each event was last recorded.
    recorded_on: HashMap<EventHandle, StreamHandle>,
    /// Whether every copy to the host has one wrong bit.
    flipping: bool,
    /// Events that were recorded and not queried yet: even on an idle GPU they do not pass at once.
    fresh: HashSet<EventHandle>,
    /// Events that were last recorded in a capture; calls outside it may neither wait for nor query them.
    captured: HashSet<EventHandle>,
}

/// A driver that records every call and runs it on the CPU.
#[derive(Default)]
pub(crate) struct StandIn {
    state: Mutex<State>,
    /// Whether kernels run as fibers.
    fibers: bool,
    /// Runs before kernels are loaded, which each stepper does once.
    gate: Option<Box<dyn Fn() + Send + Sync>>,
}

impl StandIn {
    pub(crate) fn new() -> Arc<StandIn> {
        Arc::new(StandIn::default())
    }

    /// Returns a stand-in that runs the kernels of the `.cu` files.
    pub(crate) fn with_fibers() -> Arc<StandIn> {
        Arc::new(StandIn { state: Mutex::default(), fibers: true, gate: None })
    }

    /// Returns a stand-in that calls `gate` before it loads kernels, for a test that stops a bench between two rows.
    #[allow(dead_code)]
    pub(crate) fn with_gate(gate: impl Fn() + Send + Sync + 'static) -> Arc<StandIn> {
        Arc::new(StandIn { state: Mutex::default(), fibers: false, gate: Some(Box::new(gate)) })
    }

    /// Returns the calls since this was last called.
    pub(crate) fn take_calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.state().calls)
    }

    /// Makes every call of a name fail.
    pub(crate) fn break_call(&self, name: &'static str) {
        self.break_call_after(name, 0);
    }

    /// Makes every call of a name fail after the next few.
    pub(crate) fn break_call_after(&self, name: &'static str, successes: usize) {
        self.state().broken = Some((name, successes));
    }

    /// Stops all events from passing.
    #[allow(dead_code)]
    pub(crate) fn stall(&self) {
        self.state().stalled = Stalled::All;
    }

    /// Lets only the trainer's events pass.
    #[allow(dead_code)]
    pub(crate) fn stall_sums(&self) {
        self.state().stalled = Stalled::Sums;
    }

    /// Lets all events pass again.
    #[allow(dead_code)]
    pub(crate) fn go_on(&self) {
        self.state().stalled = Stalled::None;
    }

    /// Makes every copy to the host have one wrong bit, for the command's tests.
    #[allow(dead_code)]
    pub(crate) fn flip_bits(&self) {
        self.state().flipping = true;
    }

    /// Returns the bytes that are allocated.
    pub(crate) fn allocated_bytes(&self) -> usize {
        self.state().memory.values().map(|memory| 8 * memory.len()).sum()
    }

    /// Returns the number of graphs that have not been freed.
    #[allow(dead_code)]
    pub(crate) fn live_graphs(&self) -> usize {
        self.state().graphs.len()
    }

    /// Frees all leaked memory.
    pub(crate) fn forget_memory(&self) {
        self.state().memory.clear();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn call(&self, name: &'static str, call: Option<Call>) -> Result<MutexGuard<'_, State>> {
        let mut state = self.state();
        assert!(state.entered > 0, "{name} without the device being current");
        let failing = state.broken.as_mut().filter(|(broken, _)| *broken == name);
        if let Some((_, successes)) = failing {
            if *successes > 0 {
                *successes -= 1;
                state.calls.extend(call);
                return Ok(state);
            }
            return Err(Error::Device { call: name, code: 719, name: "CUDA_ERROR_LAUNCH_FAILED".to_owned() });
        }
        state.calls.extend(call);
        Ok(state)
    }

    /// Asserts that the device is current, in calls that cannot fail.
    fn assert_entered(&self, name: &'static str) {
        assert!(
            self.state().entered > 0 || std::thread::panicking(),
            "{name} without the device being current"
        );
    }

    fn handle(&self, name: &'static str) -> Result<usize> {
        let mut state = self.call(name, Some(Call::Make { what: name }))?;
        state.next_handle += 1;
        Ok(0x2000 + state.next_handle)
    }

    fn memory(&self, name: &'static str, bytes: u64) -> Result<NonNull<u8>> {
        let mut state = self.call(name, Some(Call::Make { what: name }))?;
        if bytes > MEMORY_BYTES {
            return Err(Error::Device { call: name, code: 2, name: "CUDA_ERROR_OUT_OF_MEMORY".to_owned() });
        }
        // Not zero, because a GPU's memory is not.
        let mut memory = vec![0xdead_beef_dead_beef_u64; (bytes as usize).div_ceil(8) + 8].into_boxed_slice();
        let at = NonNull::new(memory.as_mut_ptr().cast::<u8>()).unwrap();
        // A GPU aligns to 256 bytes. Less alignment here shows code that relies on it.
        state.memory.insert(at.as_ptr().expose_provenance(), memory);
        Ok(at)
    }

    fn give_back(&self, name: &'static str, address: usize) {
        self.assert_entered(name);
        let given = self.state().memory.remove(&address);
        assert!(given.is_some(), "{name} of {address:#x}, which is not allocated");
    }

    fn command(&self, name: &'static str, call: Call, command: Command) -> Result<()> {
        let mut state = self.call(name, Some(call))?;
        if let Some(graph) = &mut state.capturing {
            graph.push(command);
            return Ok(());
        }
        drop(state);
        run(&command, self.fibers);
        Ok(())
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.state().entered, 0, "the device was left current");
            assert!(self.state().capturing.is_none(), "a stream was left capturing");
        }
    }
}
