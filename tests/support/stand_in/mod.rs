//! A GPU's driver without a GPU: it writes every call down, and runs each in the order of the calls.
//!
//! Its memory is the CPU's, its kernels the CPU's table or, in the lane that compiles them, the `.cu` files as fibers.
//! That is one of the orders that streams and events allow, so what a run leaves must be right; whether every order is
//! allowed is what the calls are compared for. Must know no mode, op or bucket.
#![allow(unsafe_code)]

pub(crate) mod calls;
pub(crate) mod commands;

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};

use instep::cuda::driver::{Driver, Graph, Kernel, Mapped, Module, Shape};
use instep::{DevicePtr, Error, EventHandle, Place, Result, StreamHandle};

use calls::Call;
use commands::{Command, KERNELS, run};

/// An image whose kernels are somebody else's: their launches are written down and do nothing.
pub(crate) const FOREIGN: &[u8] = b"foreign";

/// What one allocation may take.
const MEMORY_BYTES: u64 = 64 << 20;

/// The trainer's stream in all tests.
pub(crate) const COMPUTE: StreamHandle = StreamHandle(0x1000);

/// Which events are not passed until they are said to be.
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
    /// Everything allocated, by address.
    memory: HashMap<usize, Box<[u64]>>,
    next_handle: usize,
    /// How many kernels were asked for that are not the library's.
    foreign: usize,
    /// Events that are for measuring, which order nothing, and how many of them were recorded when each was last.
    timed: HashMap<EventHandle, u64>,
    clock: u64,
    entered: u32,
    capturing: Option<Vec<Command>>,
    graphs: HashMap<usize, Vec<Command>>,
    /// Calls of this name fail, after so many more that do not.
    broken: Option<(&'static str, usize)>,
    stalled: Stalled,
    /// Where each event was recorded last.
    recorded_on: HashMap<EventHandle, StreamHandle>,
    /// Every copy to the host has one wrong bit.
    flipping: bool,
    /// Events that were recorded and not asked for yet: even an idle GPU takes a moment.
    fresh: HashSet<EventHandle>,
    /// Events that were last recorded in a capture, which nobody outside may wait or ask for.
    captured: HashSet<EventHandle>,
}

/// See the module.
#[derive(Default)]
pub(crate) struct StandIn {
    state: Mutex<State>,
    /// Whether kernels run as fibers.
    fibers: bool,
}

impl StandIn {
    pub(crate) fn new() -> Arc<StandIn> {
        Arc::new(StandIn::default())
    }

    /// With the `.cu` files' own kernels.
    pub(crate) fn with_fibers() -> Arc<StandIn> {
        Arc::new(StandIn { state: Mutex::default(), fibers: true })
    }

    /// The calls since the last time.
    pub(crate) fn take_calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.state().calls)
    }

    /// Makes every call of a name fail.
    pub(crate) fn break_call(&self, name: &'static str) {
        self.break_call_after(name, 0);
    }

    /// Makes every call of a name fail but the next few.
    pub(crate) fn break_call_after(&self, name: &'static str, successes: usize) {
        self.state().broken = Some((name, successes));
    }

    /// Lets no event be passed any more.
    #[allow(dead_code)]
    pub(crate) fn stall(&self) {
        self.state().stalled = Stalled::All;
    }

    /// Lets only the trainer's events be passed.
    #[allow(dead_code)]
    pub(crate) fn stall_sums(&self) {
        self.state().stalled = Stalled::Sums;
    }

    /// Lets all events be passed again.
    #[allow(dead_code)]
    pub(crate) fn go_on(&self) {
        self.state().stalled = Stalled::None;
    }

    /// Lets every copy to the host come with one wrong bit: the command's tests ask for it.
    #[allow(dead_code)]
    pub(crate) fn flip_bits(&self) {
        self.state().flipping = true;
    }

    /// Bytes that are allocated and were not given back.
    pub(crate) fn allocated_bytes(&self) -> usize {
        self.state().memory.values().map(|memory| 8 * memory.len()).sum()
    }

    /// Forgets what has been left behind.
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

    /// For what cannot fail, and does nothing without a device.
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
        // Not zero, as a GPU's is not.
        let mut memory = vec![0xdead_beef_dead_beef_u64; (bytes as usize).div_ceil(8) + 8].into_boxed_slice();
        let at = NonNull::new(memory.as_mut_ptr().cast::<u8>()).unwrap();
        // Device memory is aligned to 256 bytes, but a stand-in that gives less shows who relies on it.
        state.memory.insert(at.as_ptr().expose_provenance(), memory);
        Ok(at)
    }

    fn give_back(&self, name: &'static str, address: usize) {
        self.assert_entered(name);
        let given = self.state().memory.remove(&address);
        assert!(given.is_some(), "{name} of {address:#x}, which was never allocated, or twice");
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

// SAFETY: memory is kept in boxes of words until it is given back.
unsafe impl Driver for StandIn {
    fn ordinal(&self) -> u32 {
        0
    }

    fn multiprocessors(&self) -> u32 {
        2
    }

    fn name(&self) -> &str {
        "stand-in"
    }

    fn l2_bytes(&self) -> u64 {
        64 << 10
    }

    fn enter(&self) -> Result<()> {
        self.state().entered += 1;
        Ok(())
    }

    fn leave(&self) {
        self.state().entered -= 1;
    }

    fn image(&self) -> Result<&[u8]> {
        Ok(b"stand-in")
    }

    fn load(&self, image: &[u8]) -> Result<Module> {
        assert!(image == b"stand-in" || image == FOREIGN, "an image of {} bytes", image.len());
        let module = self.handle("load")?;
        Ok(Module(if image == FOREIGN { 0 } else { module }))
    }

    fn kernel(&self, module: Module, name: &CStr) -> Result<Kernel> {
        let place = KERNELS.iter().position(|kernel| name.to_str() == Ok(kernel));
        if let (0, None) = (module.0, place) {
            let foreign = &mut self.state().foreign;
            *foreign += 1;
            return Ok(Kernel(KERNELS.len() + *foreign - 1));
        }
        Ok(Kernel(place.unwrap_or_else(|| panic!("no kernel {name:?}"))))
    }

    unsafe fn unload(&self, _: Module) {
        self.assert_entered("unload");
    }

    fn create_stream(&self, priority: i32) -> Result<StreamHandle> {
        let stream = StreamHandle(self.handle("create_stream")?);
        drop(self.call("create_stream", Some(Call::CreateStream { stream, priority }))?);
        Ok(stream)
    }

    unsafe fn destroy_stream(&self, _: StreamHandle) {
        self.assert_entered("destroy_stream");
    }

    unsafe fn inspect_stream(&self, stream: StreamHandle) -> Result<()> {
        let own = 0x2001..=0x2000 + self.state().next_handle;
        if stream == COMPUTE || stream.0 == 0 || own.contains(&stream.0) {
            return Ok(());
        }
        Err(Error::Unsupported { what: format!("the stream {:#x}", stream.0), have: "cuda:0".to_owned() })
    }

    fn inspect_memory(&self, address: DevicePtr) -> Result<Place> {
        self.assert_entered("inspect_memory");
        let state = self.state();
        let inside = |at: usize, words: usize| (at..at + 8 * words).contains(&(address.0 as usize));
        if state.memory.iter().any(|(at, memory)| inside(*at, memory.len())) {
            Ok(Place::Cuda(0))
        } else {
            Ok(Place::Host)
        }
    }

    fn create_event(&self, timed: bool) -> Result<EventHandle> {
        let event = EventHandle(self.handle("create_event")?);
        if timed {
            self.state().timed.insert(event, 0);
        }
        Ok(event)
    }

    unsafe fn destroy_event(&self, _: EventHandle) {
        self.assert_entered("destroy_event");
    }

    unsafe fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        let timed = self.state().timed.contains_key(&event);
        let mut state = self.call("record", (!timed).then_some(Call::Record { event, stream }))?;
        state.clock += u64::from(timed);
        let clock = state.clock;
        state.timed.entry(event).and_modify(|at| *at = clock);
        let is_captured = state.capturing.is_some();
        assert!(!(timed && is_captured), "a measuring event in a capture, where nobody can read it");
        state.fresh.insert(event);
        state.recorded_on.insert(event, stream);
        if is_captured {
            state.captured.insert(event)
        } else {
            state.captured.remove(&event)
        };
        Ok(())
    }

    unsafe fn wait(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        let state = self.call("wait", Some(Call::Wait { stream, event }))?;
        let crosses = state.captured.contains(&event) != state.capturing.is_some();
        assert!(!crosses || event.0 < 0x2000, "a wait into a capture, or out of one");
        Ok(())
    }

    unsafe fn is_passed(&self, event: EventHandle) -> Result<bool> {
        let mut state = self.call("is_passed", Some(Call::Query { event }))?;
        assert!(state.capturing.is_none(), "no event can be asked for in a capture");
        assert!(!state.captured.contains(&event), "an event of a capture cannot be asked for");
        let stalled = match state.stalled {
            Stalled::None => false,
            Stalled::Sums => state.recorded_on.get(&event) != Some(&COMPUTE),
            Stalled::All => true,
        };
        Ok(!state.fresh.remove(&event) && !stalled)
    }

    unsafe fn elapsed_ns(&self, from: EventHandle, to: EventHandle) -> Result<f64> {
        let state = self.state();
        Ok(state.timed[&to] as f64 - state.timed[&from] as f64)
    }

    fn allocate(&self, bytes: u64, _: StreamHandle) -> Result<DevicePtr> {
        self.memory("allocate", bytes).map(|at| DevicePtr(at.addr().get() as u64))
    }

    unsafe fn free(&self, address: DevicePtr, _: StreamHandle) {
        self.give_back("free", address.0 as usize);
    }

    fn allocate_mapped(&self, bytes: u64) -> Result<Mapped> {
        let host = self.memory("allocate_mapped", bytes)?;
        Ok(Mapped { host, device: DevicePtr(host.addr().get() as u64) })
    }

    unsafe fn free_mapped(&self, memory: Mapped) {
        self.give_back("free_mapped", memory.host.addr().get());
    }

    unsafe fn zero(&self, address: DevicePtr, bytes: u64, stream: StreamHandle) -> Result<()> {
        assert!(bytes > 0, "drivers refuse to fill nothing");
        self.command("zero", Call::Zero { stream, bytes }, Command::Zero { address, bytes })
    }

    unsafe fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: u64, stream: StreamHandle) -> Result<()> {
        self.command("copy", Call::CopyOnDevice { stream, bytes }, Command::Copy { to, from, bytes })
    }

    unsafe fn upload(&self, to: DevicePtr, from: &[u8], stream: StreamHandle) -> Result<()> {
        let state = self.call("upload", Some(Call::Copy { stream, bytes: from.len() }))?;
        assert!(state.capturing.is_none(), "no stream of a capture can be waited for");
        drop(state);
        // SAFETY: addresses are of this stand-in's own memory, as long as the caller says.
        unsafe { commands::pointer(to).copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        Ok(())
    }

    unsafe fn download(&self, to: &mut [u8], from: DevicePtr, stream: StreamHandle) -> Result<()> {
        let state = self.call("download", Some(Call::Copy { stream, bytes: to.len() }))?;
        assert!(state.capturing.is_none(), "no stream of a capture can be waited for");
        // SAFETY: as in `upload`.
        unsafe { commands::pointer(from).copy_to_nonoverlapping(to.as_mut_ptr(), to.len()) };
        if let Some(last) = to.last_mut().filter(|_| state.flipping) {
            *last ^= 1;
        }
        Ok(())
    }

    unsafe fn launch(
        &self,
        kernel: Kernel,
        shape: Shape,
        stream: StreamHandle,
        args: *const c_void,
    ) -> Result<()> {
        let Some(name) = KERNELS.get(kernel.0) else {
            let kernel = kernel.0 - KERNELS.len();
            return self.call("launch", Some(Call::LaunchForeign { kernel, shape, stream })).map(drop);
        };
        // SAFETY: the struct that this kernel takes, by the caller's promise.
        let command = unsafe { Command::launch(name, shape, args) };
        self.command("launch", Call::Launch { kernel: name, shape, stream }, command)
    }

    unsafe fn begin_capture(&self, stream: StreamHandle) -> Result<()> {
        let mut state = self.call("begin_capture", Some(Call::BeginCapture { stream }))?;
        assert!(state.capturing.replace(Vec::new()).is_none(), "a capture in a capture");
        Ok(())
    }

    unsafe fn end_capture(&self, stream: StreamHandle) -> Result<Graph> {
        let mut state = self.call("end_capture", Some(Call::EndCapture { stream }))?;
        let commands = state.capturing.take().expect("nothing is being captured");
        state.next_handle += 1;
        let graph = state.next_handle;
        state.graphs.insert(graph, commands);
        Ok(Graph(graph))
    }

    unsafe fn launch_graph(&self, graph: Graph, stream: StreamHandle) -> Result<()> {
        let commands =
            self.call("launch_graph", Some(Call::LaunchGraph { stream }))?.graphs[&graph.0].clone();
        commands.iter().for_each(|command| run(command, self.fibers));
        Ok(())
    }

    unsafe fn destroy_graph(&self, graph: Graph) {
        self.assert_entered("destroy_graph");
        assert!(self.state().graphs.remove(&graph.0).is_some(), "a graph freed twice");
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
