//! The stand-in's calls: each is recorded, checked as a driver checks it, and run at once.
//!
//! A capture keeps commands for a graph and runs none of them. A call outside `enter` and `leave` panics.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::LazyLock;

use instep::cuda::driver::{Driver, Gpu, Graph, Kernel, Module, Shape};
use instep::{DevicePtr, Error, EventHandle, Place, Result, StreamHandle};

use super::calls::Call;
use super::commands::{self, Command, KERNELS, run};
use super::{COMPUTE, FOREIGN, Stalled, StandIn};

// SAFETY: memory is kept in boxes of words until it is given back.
unsafe impl Driver for StandIn {
    fn gpu(&self) -> &Gpu {
        static GPU: LazyLock<Gpu> = LazyLock::new(|| {
            let name = "stand-in".to_owned();
            Gpu { ordinal: 0, multiprocessors: 2, l2_bytes: 64 << 10, name }
        });
        &GPU
    }

    fn enter(&self) -> Result<bool> {
        self.state().entered += 1;
        Ok(true)
    }

    fn leave(&self) {
        self.state().entered -= 1;
    }

    fn image(&self) -> Result<&[u8]> {
        Ok(b"stand-in")
    }

    fn load(&self, image: &[u8]) -> Result<Module> {
        if let Some(gate) = &self.gate {
            gate();
        }
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

    unsafe fn resident_blocks(&self, _: Kernel, _: u32) -> Result<u32> {
        self.assert_entered("resident_blocks");
        Ok(4 * self.gpu().multiprocessors)
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
        Err(Error::unsupported(
            format_args!("stream {:#x}", stream.0),
            "not of cuda:0",
            "use one of this device",
        ))
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
        assert!(!(timed && is_captured), "a timed event in a capture cannot be read");
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
        assert!(state.capturing.is_none(), "an event cannot be queried in a capture");
        assert!(!state.captured.contains(&event), "an event of a capture cannot be queried");
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

    fn allocate_mapped(&self, bytes: u64) -> Result<NonNull<u8>> {
        self.memory("allocate_mapped", bytes)
    }

    unsafe fn free_mapped(&self, memory: NonNull<u8>) {
        self.give_back("free_mapped", memory.addr().get());
    }

    unsafe fn fill(
        &self,
        address: DevicePtr,
        element: &[u8],
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        assert!(bytes > 0, "drivers refuse a fill of zero bytes");
        let (count, rest) = (bytes as usize / element.len(), bytes as usize % element.len());
        assert!(rest == 0 && address.0.is_multiple_of(element.len() as u64), "a fill by whole elements");
        let filled = Command::Fill { address, bytes: element.repeat(count) };
        self.command("fill", Call::Fill { stream, bytes }, filled)
    }

    unsafe fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: u64, stream: StreamHandle) -> Result<()> {
        self.command("copy", Call::CopyOnDevice { stream, bytes }, Command::Copy { to, from, bytes })
    }

    unsafe fn copy_down(&self, to: *mut u8, from: DevicePtr, bytes: u64, stream: StreamHandle) -> Result<()> {
        let to = DevicePtr(to.expose_provenance() as u64);
        self.command("copy_down", Call::CopyDown { stream, bytes }, Command::Copy { to, from, bytes })
    }

    unsafe fn copy_up(&self, to: DevicePtr, from: *const u8, bytes: u64, stream: StreamHandle) -> Result<()> {
        let from = DevicePtr(from.expose_provenance() as u64);
        self.command("copy_up", Call::CopyUp { stream, bytes }, Command::Copy { to, from, bytes })
    }

    unsafe fn upload(&self, to: DevicePtr, from: &[u8], stream: StreamHandle) -> Result<()> {
        let state = self.call("upload", Some(Call::Copy { stream, bytes: from.len() }))?;
        assert!(state.capturing.is_none(), "a captured stream cannot be waited for");
        drop(state);
        // SAFETY: the address is in this stand-in's memory, which is as long as the caller says.
        unsafe { commands::pointer(to).copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        Ok(())
    }

    unsafe fn download(&self, to: &mut [u8], from: DevicePtr, stream: StreamHandle) -> Result<()> {
        let state = self.call("download", Some(Call::Copy { stream, bytes: to.len() }))?;
        assert!(state.capturing.is_none(), "a captured stream cannot be waited for");
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

    unsafe fn call_host(
        &self,
        function: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
        stream: StreamHandle,
    ) -> Result<()> {
        let argument = argument.expose_provenance();
        self.command("call_host", Call::OnHost { stream }, Command::CallHost { function, argument })
    }

    unsafe fn begin_capture(&self, stream: StreamHandle) -> Result<()> {
        let mut state = self.call("begin_capture", Some(Call::BeginCapture { stream }))?;
        assert!(state.capturing.replace(Vec::new()).is_none(), "a capture in a capture");
        Ok(())
    }

    unsafe fn capture_of(&self, _: StreamHandle) -> Result<Option<u64>> {
        Ok(self.state().capturing.is_some().then_some(1))
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
