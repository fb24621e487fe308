//! One bucket's launches on a GPU, on streams and addresses that come with each call.
//!
//! A step is a launch for the scalars of the update, and one per kind of optimizer, LAMB two. Nothing waits but a host
//! that is eight steps ahead. A failure is sticky, because records and settings may then be of different steps.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use super::Cuda;
use super::driver::{Driver, Entered, Shape};
use super::kernels::Kernels;
use super::last_use::LastUse;
use super::launches::{BucketLaunch, Preparation};
use super::memory::{DeviceMemory, address, bytes_of_all, fetch};
use super::owned::Event;
use super::pinned::{SLOTS, SettingsRing};
use super::tile_tables::TileTables;
use crate::abi::{INSTEP_GPU_THREADS, InstepBeginArgs, InstepTile};
use crate::error::{Error, Result};
use crate::handle::{DevicePtr, StreamHandle};
use crate::launch::{Assignment, Bases, Kind, Progress, Settings, StepConstants, begin_args};
use crate::layout::Plan;

/// See the module.
pub(crate) struct BucketEngine {
    driver: Arc<dyn Driver>,
    kernels: ManuallyDrop<Kernels>,
    memory: ManuallyDrop<DeviceMemory>,
    settings: ManuallyDrop<SettingsRing>,
    steps: ManuallyDrop<Vec<Unbound>>,
    norms: ManuallyDrop<Vec<Unbound>>,
    last: ManuallyDrop<LastUse>,
    /// Steps so far.
    begun: u64,
    grad_bytes: u64,
    failed: Option<Error>,
}

/// A launch, and its tables once parameters or gradients have lain apart.
struct Unbound {
    launch: BucketLaunch,
    tiles: Vec<InstepTile>,
    tables: Option<TileTables>,
}

// SAFETY: the pointers in the arguments lead into the engine's own memory and are used only through the driver.
unsafe impl Send for BucketEngine {}

impl BucketEngine {
    pub(crate) fn new(
        cuda: &Cuda,
        plan: &Plan,
        (constants, assignment): (&StepConstants, &Assignment),
        settings: &Settings,
    ) -> Result<BucketEngine> {
        let driver = Arc::clone(&cuda.driver);
        let _entered = Entered::new(&*driver)?;
        let kernels = Kernels::load(&driver, &assignment.kernels(plan))?;
        let last = LastUse::new(&driver)?;
        let stream = last.own();
        let mut memory = DeviceMemory::without_tensors(&driver, stream, plan, (constants, assignment))?;
        let settings = SettingsRing::new(&driver, settings)?;
        let preparation = Preparation {
            driver: &driver,
            kernels: &kernels,
            plan,
            constants,
            assignment,
            stream,
            max_blocks: cuda.max_blocks,
        };
        let steps = preparation.unbound(Kind::Step, &mut memory)?;
        let norms = preparation.unbound(Kind::Norm, &mut memory)?;
        let unbound = |(launch, tiles)| Unbound { launch, tiles, tables: None };
        Ok(BucketEngine {
            kernels: ManuallyDrop::new(kernels),
            memory: ManuallyDrop::new(memory),
            settings: ManuallyDrop::new(settings),
            steps: ManuallyDrop::new(steps.into_iter().map(unbound).collect()),
            norms: ManuallyDrop::new(norms.into_iter().map(unbound).collect()),
            last: ManuallyDrop::new(last),
            begun: 0,
            // Its plan has one bucket.
            grad_bytes: plan.buckets()[0].storage.precision.grad.bytes(),
            failed: None,
            driver: Arc::clone(&driver),
        })
    }

    /// Replaces the settings from the next step on.
    pub(crate) fn set(&mut self, settings: &Settings) {
        self.settings.set(settings);
    }

    /// Enqueues a step, under a control block of its own or another one. `scale` puts the factors of the gradients into the
    /// arguments.
    ///
    /// # Safety
    /// The stream is this device's. The bases lead to the tensors, in its memory, and nothing else touches them until the
    /// stream has passed the step. So it is with the other block, which steps may write together.
    pub(crate) unsafe fn step(
        &mut self,
        constants: &StepConstants,
        bases: &[Bases],
        (scale, control): (impl FnOnce(&mut InstepBeginArgs), Option<DevicePtr>),
        stream: StreamHandle,
    ) -> Result<()> {
        self.on_stream(stream, |engine| {
            engine.begin(constants, scale, stream)?;
            // SAFETY: the caller's promise.
            unsafe { engine.enqueue(Kind::Step, bases, control, stream) }
        })
    }

    /// Makes the records of the settings, and derives the next update's scalars.
    fn begin(
        &mut self,
        constants: &StepConstants,
        scale: impl FnOnce(&mut InstepBeginArgs),
        stream: StreamHandle,
    ) -> Result<()> {
        if let Some(reader) = self.settings.reader(self.begun) {
            self.block_on(reader)?;
        }
        self.settings.write(self.begun);
        let mut args = InstepBeginArgs {
            ring: ptr::with_exposed_provenance(self.settings.ring().0 as usize),
            slot_words: self.settings.slot_words(),
            slot_count: SLOTS as u64,
            ..begin_args(&self.memory.regions, constants)
        };
        scale(&mut args);
        let shape = Shape { blocks: 1, threads: INSTEP_GPU_THREADS };
        // SAFETY: the kernel takes this struct, and the engine keeps the memory.
        unsafe { self.driver.launch(self.kernels.begin, shape, stream, ptr::from_ref(&args).cast())? };
        self.settings.mark_read(self.begun, stream)?;
        self.begun += 1;
        Ok(())
    }

    /// Enqueues the norm of the gradients, which adds to another control block; after a beginning, if the records are older
    /// than the settings.
    ///
    /// # Safety
    /// As for [`step`](Self::step).
    pub(crate) unsafe fn norm(
        &mut self,
        bases: &[Bases],
        control: DevicePtr,
        begin: Option<&StepConstants>,
        stream: StreamHandle,
    ) -> Result<()> {
        self.on_stream(stream, |engine| {
            if let Some(constants) = begin {
                engine.begin(constants, |_| {}, stream)?;
            }
            // SAFETY: the caller's promise.
            unsafe { engine.enqueue(Kind::Norm, bases, Some(control), stream) }
        })
    }

    /// # Safety
    /// As for [`step`](Self::step).
    unsafe fn enqueue(
        &mut self,
        kind: Kind,
        bases: &[Bases],
        control: Option<DevicePtr>,
        stream: StreamHandle,
    ) -> Result<()> {
        let (own, grad_bytes) = (self.last.own(), self.grad_bytes);
        let launches = if kind == Kind::Step { &mut self.steps } else { &mut self.norms };
        for unbound in launches.iter_mut() {
            // SAFETY: the caller's promise.
            unsafe { unbound.enqueue(&self.driver, own, (bases, grad_bytes, control), stream)? };
        }
        Ok(())
    }

    /// Returns the progress of a record, after all steps. A failure is not remembered: a copy to the host changes nothing here.
    pub(crate) fn read_progress(&self, record: usize) -> Result<Progress> {
        self.refuse_failed()?;
        let _entered = Entered::new(&*self.driver)?;
        let at = self.memory.regions.records().wrapping_add(record);
        self.last.join(self.last.own())?;
        // SAFETY: a record of our own, which no step writes any more when the stream comes to the copy.
        Ok(Progress::of(&unsafe { fetch(&*self.driver, at.cast_const(), self.last.own())? }))
    }

    /// Sets the progress of a record, after all steps.
    pub(crate) fn write_progress(&mut self, record: usize, progress: Progress) -> Result<()> {
        self.guarded(|engine| {
            let at = engine.memory.regions.records().wrapping_add(record);
            engine.last.join(engine.last.own())?;
            // SAFETY: as in `read_progress`. The upload has ended when it returns, so a later step on any stream sees it.
            unsafe {
                let mut record = fetch(&*engine.driver, at.cast_const(), engine.last.own())?;
                progress.set(&mut record);
                engine.driver.upload(address(at), bytes_of_all(&[record]), engine.last.own())
            }
        })
    }

    fn block_on(&self, event: &Event) -> Result<()> {
        while !event.is_passed()? {
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    /// Enqueues work after the last one, and marks its end even if only a part was enqueued.
    fn on_stream(
        &mut self,
        stream: StreamHandle,
        work: impl FnOnce(&mut BucketEngine) -> Result<()>,
    ) -> Result<()> {
        self.guarded(|engine| {
            engine.last.join(stream)?;
            let outcome = work(engine);
            let marked = engine.last.mark(stream);
            outcome.and(marked)
        })
    }

    /// Refuses anything after a failure.
    pub(crate) fn refuse_failed(&self) -> Result<()> {
        match &self.failed {
            None => Ok(()),
            Some(first) => {
                let op = "an earlier call of this bucket".to_owned();
                Err(Error::Poisoned { op, first: Arc::new(first.clone()) })
            }
        }
    }

    fn guarded<T>(&mut self, work: impl FnOnce(&mut BucketEngine) -> Result<T>) -> Result<T> {
        self.refuse_failed()?;
        let driver = Arc::clone(&self.driver);
        let outcome = Entered::new(&*driver).and_then(|_entered| work(self));
        outcome.inspect_err(|error| self.failed = Some(error.clone()))
    }
}

impl Unbound {
    /// # Safety
    /// As for [`BucketEngine::step`].
    unsafe fn enqueue(
        &mut self,
        driver: &Arc<dyn Driver>,
        own: StreamHandle,
        (bases, grad_bytes, control): (&[Bases], u64, Option<DevicePtr>),
        stream: StreamHandle,
    ) -> Result<()> {
        let (first, is_apart) = (bases.first().copied().unwrap_or_default(), bases.len() > 1);
        if is_apart && self.tables.is_none() && !self.tiles.is_empty() {
            self.tables = Some(TileTables::new(driver, own, std::mem::take(&mut self.tiles))?);
        }
        let table = match self.tables.as_mut().filter(|_| is_apart) {
            Some(tables) => Some(tables.with(bases, grad_bytes, stream)?),
            None => None,
        };
        // SAFETY: the kernel's own arguments, completed by the caller's addresses.
        unsafe {
            self.launch.enqueue_changed(&**driver, stream, |args| {
                first.put(args);
                if let Some(control) = control {
                    args.control = ptr::with_exposed_provenance_mut(control.0 as usize);
                }
                if let Some(table) = table {
                    (args.param_base, args.grads, args.tiles) = (ptr::null_mut(), ptr::null_mut(), table);
                }
            })?;
        }
        match self.tables.as_mut().filter(|_| is_apart) {
            Some(tables) => tables.mark_used(stream),
            None => Ok(()),
        }
    }
}

impl Drop for BucketEngine {
    fn drop(&mut self) {
        let driver = Arc::clone(&self.driver);
        let Ok(_entered) = Entered::new(&*driver) else { return };
        // A drop does not wait long: what the GPU may still use is leaked.
        if !self.last.is_over_soon() {
            return;
        }
        // SAFETY: each dropped once, here; nothing runs any more.
        unsafe {
            ManuallyDrop::drop(&mut self.steps);
            ManuallyDrop::drop(&mut self.norms);
            ManuallyDrop::drop(&mut self.settings);
            ManuallyDrop::drop(&mut self.memory);
            ManuallyDrop::drop(&mut self.kernels);
            ManuallyDrop::drop(&mut self.last);
        }
    }
}
