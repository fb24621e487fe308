//! A bucket's step on the CPU: on the calling thread, and on the threads of a pool if there is one.
//!
//! A step first makes one call that computes its scalars. The step then makes one launch for each kind of optimizer, or
//! two launches for LAMB. A step allocates nothing.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::BucketStep;
use super::builder::{BucketStepBuilder, Parts};
use super::norm::GradNorm;
use super::scaling::Scaling;
use super::settings::Engine;
use super::tensors::{Lent, StepTensors};
use crate::abi::InstepControl;
use crate::error::{Error, Result};
use crate::host::Isa;
use crate::host::bucket_job::{BucketJob, Execution, Prefetches, SegmentBases};
use crate::host::kernels::Kernels;
use crate::host::memories::Memories;
use crate::launch::{Kind, Launch, Progress, Settings, begin_args, first_control, first_records};
use crate::op::{Memory, Span};
use crate::pool::{Job, Pool};

/// The CPU's part of a [`BucketStep`].
pub struct OnHost {
    memories: Arc<Memories>,
    kernels: Kernels,
    pool: Pool,
    bases: Arc<SegmentBases>,
    /// Whether `bases` has the addresses of all tensors of a step. `add_norm` stores only the addresses of gradients.
    is_bound: bool,
    steps: Vec<Launched>,
    norms: Vec<Launched>,
}

/// One launch of the bucket. The pool runs `job`, which calls `work`. [`OnHost`] changes the launch's arguments through
/// `work`.
struct Launched {
    work: Arc<BucketJob>,
    job: Arc<Job>,
}

impl BucketStepBuilder {
    /// Builds the step on the CPU. This call starts no thread.
    ///
    /// # Errors
    /// `Config` for a hyperparameter or an option that is out of range, or for a precision that the optimizer refuses.
    /// `Layout` for a bucket that does not fit the layout. `Unsupported` for a custom optimizer, or an instruction set
    /// that this machine lacks. `Arithmetic` if the kernels fail their self-test.
    pub fn host(self) -> Result<BucketStep> {
        let kernels = Kernels::load(self.isa.map_or_else(Isa::from_environment, Ok)?)?;
        let pool = self.pool.clone().unwrap_or_else(Pool::alone);
        BucketStep::new(self.parts()?, false, |parts| OnHost::new(parts, kernels, pool))
    }
}

impl OnHost {
    fn new(parts: &Parts, kernels: Kernels, pool: Pool) -> Result<OnHost> {
        let Parts { plan, assignment, settings, .. } = parts;
        let memories = Arc::new(Memories::without_tensors(assignment.counts(plan))?);
        // SAFETY: nothing runs on this memory yet.
        unsafe {
            let records = first_records(plan, memories.regions(), assignment);
            memories.write_control(first_control(&assignment.constants), records);
            memories.write_settings(settings);
        }
        let tensors = Memory::of_tensors(plan, assignment.state_count());
        let bytes = tensors.map(|memory| Span::whole(memory, plan).bytes()).sum();
        let prefetches = Prefetches::of(bytes)?;
        let execution = Execution { kernels, prefetches, threads: pool.threads() };
        let bases = Arc::<SegmentBases>::default();
        let launched = |kind| {
            let launches = Launch::unbound(kind, 0, plan, memories.regions(), assignment);
            let launched = |launch| {
                let work = BucketJob::unbound(kind, launch, &memories, execution, Arc::clone(&bases));
                let work = Arc::new(work);
                Launched { job: Job::new(Arc::clone(&work)), work }
            };
            launches.into_iter().map(launched).collect()
        };
        let (steps, norms) = (launched(Kind::Step), launched(Kind::Norm));
        Ok(OnHost { memories, kernels, pool, bases, is_bound: false, steps, norms })
    }

    /// Runs launches with this control block.
    ///
    /// # Safety
    /// `bases` has the addresses of this call's tensors. `control` is valid, and only launches write to it.
    unsafe fn run(&self, launches: &[Launched], control: *mut InstepControl) {
        for launch in launches {
            // SAFETY: launches of this bucket run one at a time, because each borrows the bucket mutably.
            unsafe { launch.work.set_control(control) };
            self.pool.run(&launch.job);
        }
    }
}

impl Engine for OnHost {
    fn write_settings(&mut self, settings: &Settings) {
        // SAFETY: no launch runs, because each launch borrows the bucket mutably.
        unsafe { self.memories.write_settings(settings) };
    }

    fn read_progress(&self, record: usize) -> Result<Progress> {
        // SAFETY: no launch runs, because each launch borrows the bucket mutably.
        Ok(Progress::of(&unsafe { self.memories.read_record(record) }))
    }

    fn write_progress(&mut self, record: usize, progress: Progress) -> Result<()> {
        // SAFETY: no launch runs, because each launch borrows the bucket mutably.
        unsafe { self.memories.write_progress(record, progress) };
        Ok(())
    }
}

impl BucketStep {
    /// Steps the bucket on the calling thread and the pool's threads.
    ///
    /// # Ordering
    /// Returns after the step has ended.
    ///
    /// # Errors
    /// `Layout` if a tensor is missing or superfluous, too short or too long, of another element type, null or
    /// misaligned. Also returns `Layout` if a tensor that the step writes is lent only for reading, or if two runs that
    /// cover the whole bucket overlap. `Unsupported` for a slice of a GPU's memory. `Config` if `scaling` has a factor
    /// out of range or an unaligned address. After these errors, nothing has been written.
    pub fn step(&mut self, tensors: &StepTensors<'_>, scaling: Scaling) -> Result<()> {
        scaling.validate()?; // before anything changes
        self.bind(tensors)?;
        // SAFETY: `bind` has checked the tensors. The call borrows them, or the caller of `Lent::at` has promised that
        // they are valid.
        unsafe { self.step_again(scaling) }
    }

    /// Steps the tensors of the last [`step`](Self::step) or [`step_decided`](Self::step_decided) that returned `Ok`,
    /// without checking the tensors again. The checks are a large part of the time of a small step.
    ///
    /// ```
    /// # use instep::bucket_step::{Lent, StepTensors};
    /// # use instep::{BucketStep, Layout, Scaling, Sgd};
    /// let layout = Layout::builder().param("w", 2).build()?;
    /// let mut step = BucketStep::builder(&layout, Sgd { lr: 1.0, ..Default::default() }).host()?;
    /// let (mut params, mut grads) = ([0.0f32; 2], [1.0f32; 2]);
    /// let [to_params, to_grads] = [&raw mut params, &raw mut grads];
    /// // SAFETY: both arrays live on, and nothing else touches them during a step.
    /// unsafe {
    ///     let tensors = StepTensors::new(Lent::at(to_params.cast()), Lent::at(to_grads.cast()));
    ///     step.step(&tensors, Scaling::NONE)?;
    ///     (*to_grads)[0] = 3.0;
    ///     step.step_again(Scaling::NONE)?;
    ///     assert_eq!(*to_params, [-4.0, -2.0]);
    /// }
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Ordering as for [`step`](Self::step).
    ///
    /// # Errors
    /// `Order` if no `step` or `step_decided` has returned `Ok` since the step was built, or since the last
    /// [`add_norm`](Self::add_norm). `Config` if `scaling` has a factor out of range or an unaligned address. After
    /// these errors, nothing has been written.
    ///
    /// # Safety
    /// All tensors of the last `step` or `step_decided` that returned `Ok` meet the contract of [`Lent::at`] for this
    /// call too, even if they were lent as slices.
    pub unsafe fn step_again(&mut self, scaling: Scaling) -> Result<()> {
        scaling.validate()?;
        if !self.engine.is_bound {
            return Err(Error::order(self.name(), "has no tensors of a step", "call step first"));
        }
        self.begin(scaling);
        let engine = &self.engine;
        // SAFETY: the caller's promise about the tensors. The block is our own.
        unsafe { engine.run(&engine.steps, engine.memories.regions().control()) };
        self.mark.step();
        Ok(())
    }

    /// Steps the bucket after a norm over several buckets has been decided. The gradients are clipped by the norm's
    /// coefficient, or the step is skipped.
    ///
    /// # Errors
    /// Errors as for [`step`](Self::step). `Order` if the norm has not been decided, or if the bucket was not added to
    /// the norm. If [`GradNorm::sum`] was called, a bucket that was added to another norm is accepted too. Also returns
    /// `Order` if the bucket has been stepped, with or without this norm, since it was added.
    pub fn step_decided(&mut self, tensors: &StepTensors<'_>, norm: &mut GradNorm) -> Result<()> {
        norm.refuse_step(&self.mark, || self.name())?;
        self.bind(tensors)?;
        self.begin(Scaling::NONE);
        // SAFETY: `bind` has checked the tensors. The call borrows them, or the caller of `Lent::at` has promised that
        // they are valid. `norm` is borrowed mutably.
        unsafe { self.engine.run(&self.engine.steps, norm.control()) };
        norm.marks().step(&mut self.mark);
        Ok(())
    }

    /// Adds the bucket's summed gradients to a norm. Parameters without a gradient are left out.
    ///
    /// # Errors
    /// `Layout` for gradients that [`step`](Self::step) would refuse. `Order` if the norm has not been begun, if it has
    /// been decided, or if this bucket was already added to it.
    pub fn add_norm(&mut self, grads: &Lent<'_>, norm: &mut GradNorm) -> Result<()> {
        norm.refuse_add(&self.mark, || self.name())?;
        let (mut outcome, shape) = (Ok(false), &self.shape);
        // SAFETY: no launch of this bucket runs, because the bucket is borrowed mutably.
        unsafe { self.engine.bases.set(|bases| outcome = shape.bind_grads(grads, bases)) };
        let lacks_some = outcome?;
        self.engine.is_bound = false;
        self.pass_over_missing(grads, lacks_some);
        if self.is_stale {
            // The parameters' records tell the norm which parameters are frozen. If the records are stale, this call
            // derives them again, and does not leave this to the next step.
            self.begin(Scaling::NONE);
        }
        let engine = &self.engine;
        // SAFETY: `bind_grads` has checked the gradients. The call borrows them, or the caller of `Lent::at` has
        // promised that they are valid. `norm` is borrowed mutably.
        unsafe { engine.run(&engine.norms, norm.control()) };
        norm.marks().add(&mut self.mark);
        Ok(())
    }

    /// Checks a call's tensors and stores their addresses. If a tensor is refused, no stored address changes.
    fn bind(&mut self, tensors: &StepTensors<'_>) -> Result<()> {
        let (mut outcome, shape) = (Ok(false), &self.shape);
        // SAFETY: no launch of this bucket runs, because the bucket is borrowed mutably.
        unsafe { self.engine.bases.set(|bases| outcome = shape.bind(tensors, bases)) };
        let lacks_some = outcome?;
        self.engine.is_bound = true;
        self.pass_over_missing(tensors.grads(), lacks_some);
        Ok(())
    }

    /// Counts the last step's updates, and derives the scalars of the next step.
    fn begin(&mut self, scaling: Scaling) {
        self.is_stale = false;
        let engine = &self.engine;
        let mut args = begin_args(engine.memories.regions(), &self.assignment.constants);
        scaling.put(&mut args);
        // SAFETY: control memory has as many records as `args` says, and the builder has checked their optimizers.
        // Nothing runs on this memory. `Scaling`'s addresses are valid by its own contract.
        unsafe { engine.kernels.begin(&args) }
    }
}
