//! One bucket's launches on a GPU. Each call passes a stream and the addresses of the tensors.
//!
//! If the host counts the updates ([`HostRecords`]), a step is one launch per kind of optimizer. Otherwise, a step
//! first launches another kernel, which derives the update's scalars. This kernel is a Begin, and a norm may launch one
//! too. The host then also waits when it is eight Begins ahead of the GPU. A failure is sticky, because the records and
//! the settings may then belong to different steps.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;

use super::Cuda;
use super::any_stream::AnyStream;
use super::driver::Driver;
use super::engine::Engine;
use super::given::HostRecords;
use super::gpu_memory::{DeviceMemory, fetch, write_progress};
use super::kernels::Kernels;
use super::launches::{BucketLaunch, Preparation};
use super::pinned::SettingsRing;
use super::tile_tables::TileTables;
use crate::abi::{InstepBeginArgs, InstepGiven, InstepTile};
use crate::error::Result;
use crate::handle::{DevicePtr, StreamHandle};
use crate::launch::{Assignment, Bases, Kind, Progress, Settings};
use crate::layout::Plan;

pub(crate) type BucketEngine = AnyStream<Bucket>;

/// One bucket's launches and memory. The launches are declared first, so they are dropped before the engine's memory.
pub(crate) struct Bucket {
    steps: Vec<Unbound>,
    norms: Vec<Unbound>,
    engine: Engine,
    /// The records on the host, while the host counts updates.
    host: Option<HostRecords>,
    /// The records that were on the host until their counts were sent to the GPU. These records stay alive, because the
    /// copy to the GPU may still run.
    _sent: Option<HostRecords>,
}

/// The arguments that a call adds to a launch: the tensors' addresses and two optional arguments. The optional
/// arguments are the address of another control block, and the results of a Begin that ran on the host.
#[derive(Clone, Copy)]
struct Completion<'a> {
    bases: &'a [Bases],
    control: Option<DevicePtr>,
    given: Option<&'a InstepGiven>,
}

/// A launch without the tensors' addresses. The launch's tables of tiles are made at the first call that passes an
/// address for each parameter or gradient.
struct Unbound {
    launch: BucketLaunch,
    tiles: Vec<InstepTile>,
    tables: Option<TileTables>,
    grad_bytes: u64,
}

// SAFETY: the pointers lead into the engine's own memory. Only the driver uses the part on the GPU, and only this
// bucket has the part in `HostRecords`.
unsafe impl Send for Bucket {}

impl BucketEngine {
    pub(crate) fn of(
        cuda: &Cuda,
        plan: &Plan,
        assignment: &Assignment,
        settings: &Settings,
    ) -> Result<BucketEngine> {
        let driver = &cuda.driver;
        AnyStream::new(driver, "bucket", |stream| {
            let kernels = Kernels::load(driver, &assignment.kernels(plan))?;
            let mut memory = DeviceMemory::without_tensors(driver, stream, plan, assignment)?;
            let ring = SettingsRing::new(driver, settings)?;
            let max_blocks = cuda.max_blocks;
            let preparation = Preparation { kernels: &kernels, plan, assignment, max_blocks };
            let steps = preparation.unbound(Kind::Step, &mut memory)?;
            let norms = preparation.unbound(Kind::Norm, &mut memory)?;
            let launches = steps.iter().map(|(launch, tiles)| (launch.args(), &**tiles));
            let host = HostRecords::new(driver, plan, assignment, settings, launches)?;
            // The plan of a bucket step has one bucket.
            let grad_bytes = plan.buckets()[0].storage.precision.grad.bytes();
            let unbound = |(launch, tiles)| Unbound { launch, tiles, tables: None, grad_bytes };
            Ok(Bucket {
                steps: steps.into_iter().map(unbound).collect(),
                norms: norms.into_iter().map(unbound).collect(),
                engine: Engine { kernels, settings: ring, memory, constants: assignment.constants },
                host,
                _sent: None,
            })
        })
    }

    /// Replaces the settings for the next step and all later steps.
    pub(crate) fn set(&mut self, settings: &Settings) {
        self.inner.engine.settings.set(settings);
        if let Some(host) = &mut self.inner.host {
            host.set(settings);
        }
    }

    /// Enqueues a step. The step reads the control block at `control`, or the bucket's own block if `control` is
    /// `None`. `scale` writes the gradients' factors (divisor, loss scale, clip) into the arguments of Begin.
    ///
    /// # Safety
    /// The stream belongs to this device. `bases` has the addresses of the tensors, which are in this device's memory.
    /// Nothing else touches the tensors until the stream has passed the step. Until then, only steps touch the block at
    /// `control`, and several steps may write this block at the same time.
    pub(crate) unsafe fn step(
        &mut self,
        bases: &[Bases],
        scale: impl Fn(&mut InstepBeginArgs),
        control: Option<DevicePtr>,
        stream: StreamHandle,
    ) -> Result<()> {
        self.on_stream(stream, |bucket, own| {
            let host = bucket.host.as_mut().filter(|_| control.is_none());
            let given = host.and_then(|host| host.begin(&scale));
            if given.is_none() {
                bucket.begin(scale, stream)?;
            }
            let completion = Completion { bases, control, given: given.as_ref() };
            // SAFETY: guaranteed by the caller.
            unsafe { bucket.enqueue(Kind::Step, own, completion, stream) }
        })
    }

    /// Enqueues work that adds the norm of the gradients to the control block at `control`. If the records are older
    /// than the settings (`is_stale`) or are on the host, this call first enqueues a Begin.
    ///
    /// # Safety
    /// The stream and the bases meet the conditions of [`step`](Self::step).
    pub(crate) unsafe fn norm(
        &mut self,
        bases: &[Bases],
        control: DevicePtr,
        is_stale: bool,
        stream: StreamHandle,
    ) -> Result<()> {
        self.on_stream(stream, |bucket, own| {
            if is_stale || bucket.host.is_some() {
                bucket.begin(|_| {}, stream)?;
            }
            let completion = Completion { bases, control: Some(control), given: None };
            // SAFETY: guaranteed by the caller.
            unsafe { bucket.enqueue(Kind::Norm, own, completion, stream) }
        })
    }

    /// Returns a record's progress after all enqueued steps. A failure of this call is not sticky, because the call
    /// changes nothing. If the host counts updates, this call does not wait for the GPU, so it does not detect a step
    /// that failed on the GPU.
    pub(crate) fn read_progress(&self, record: usize) -> Result<Progress> {
        if let Some(host) = &self.inner.host {
            return self.refuse_failed().map(|()| host.read_progress(record));
        }
        self.read(|bucket, own| {
            let DeviceMemory { driver, regions, .. } = &bucket.engine.memory;
            let at = regions.records().wrapping_add(record);
            // SAFETY: this is a record of our own. When the stream comes to the copy, no step writes it any more.
            Ok(Progress::of(&unsafe { fetch(&**driver, at.cast_const(), own)? }))
        })
    }

    /// Sets a record's [`Progress`], from which later steps continue. If the records are on the GPU, this call first
    /// waits for all enqueued steps.
    pub(crate) fn write_progress(&mut self, record: usize, progress: Progress) -> Result<()> {
        self.refuse_failed()?;
        if let Some(host) = &mut self.inner.host {
            host.write_progress(record, progress);
            return Ok(());
        }
        self.copy(|bucket, own| {
            let DeviceMemory { driver, regions, .. } = &bucket.engine.memory;
            let at = regions.records().wrapping_add(record);
            // SAFETY: this is a record of our own. When the stream comes to the upload, no step touches it any more.
            // The upload has ended when the call returns, so a later step on any stream sees the new values.
            unsafe { write_progress(&**driver, at, progress, own) }
        })
    }
}

impl Bucket {
    /// Begins an update on the GPU. The host first waits until the GPU has read the settings of the Begin that was
    /// enqueued eight Begins earlier.
    fn begin(&mut self, scale: impl FnOnce(&mut InstepBeginArgs), stream: StreamHandle) -> Result<()> {
        if let Some(host) = self.host.take() {
            let DeviceMemory { driver, regions, .. } = &self.engine.memory;
            // SAFETY: the engine's memory has as many control blocks, records and norms as the host's memory. A drop
            // waits for work that may still run.
            let begun = unsafe { host.send(&**driver, regions, stream) };
            self._sent = Some(host);
            self.engine.settings.begun = begun?;
        }
        self.engine.settings.reader().block()?;
        self.engine.settings.write();
        self.engine.begin(scale, stream)?;
        self.engine.settings.mark_read(stream).map(drop)
    }

    /// # Safety
    /// The conditions of [`BucketEngine::step`] hold.
    unsafe fn enqueue(
        &mut self,
        kind: Kind,
        own: StreamHandle,
        completion: Completion<'_>,
        stream: StreamHandle,
    ) -> Result<()> {
        let launches = if kind == Kind::Step { &mut self.steps } else { &mut self.norms };
        // SAFETY: guaranteed by the caller.
        launches.iter_mut().try_for_each(|launch| unsafe {
            launch.enqueue(&self.engine.memory.driver, own, completion, stream)
        })
    }
}

impl Unbound {
    /// # Safety
    /// The conditions of [`BucketEngine::step`] hold.
    unsafe fn enqueue(
        &mut self,
        driver: &Arc<dyn Driver>,
        own: StreamHandle,
        Completion { bases, control, given }: Completion<'_>,
        stream: StreamHandle,
    ) -> Result<()> {
        let (first, is_apart) = (bases.first().copied().unwrap_or_default(), bases.len() > 1);
        if is_apart && self.tables.is_none() && !self.tiles.is_empty() {
            self.tables = Some(TileTables::new(driver, own, std::mem::take(&mut self.tiles))?);
        }
        let mut tables = self.tables.as_mut().filter(|_| is_apart);
        let table = tables.as_mut().map(|tables| tables.with(bases, self.grad_bytes, stream)).transpose()?;
        // SAFETY: these are the kernel's own arguments, completed by the caller's addresses.
        unsafe {
            self.launch.enqueue_changed(&**driver, stream, |launch| {
                let args = &mut launch.args;
                first.put(args);
                if let Some(given) = given {
                    (args.records, launch.given) = (ptr::null_mut(), *given);
                }
                if let Some(control) = control {
                    args.control = ptr::with_exposed_provenance_mut(control.0 as usize);
                }
                if let Some(table) = table {
                    (args.param_base, args.grads, args.tiles) = (ptr::null_mut(), ptr::null_mut(), table);
                }
            })?;
        }
        tables.map_or(Ok(()), |tables| tables.mark_used(stream))
    }
}
