//! A bucket's step on the CPU: on the calling thread, and on a pool's if there is one.
//!
//! A step is one call into the kernels for its scalars and one launch. It allocates nothing.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::builder::{BucketStepBuilder, Parts};
use super::norm::GradNorm;
use super::scaling::Scaling;
use super::tensors::{Tensor, Tensors};
use super::{BucketStep, refuse_carried};
use crate::abi::InstepControl;
use crate::error::Result;
use crate::host::Isa;
use crate::host::arena::Memories;
use crate::host::bucket_job::{BucketJob, Execution, SegmentBases};
use crate::host::kernels::Kernels;
use crate::host::prefetch::ahead_bytes;
use crate::launch::{Kind, Launch, Progress, begin_args, first_control, first_records};
use crate::layout::ParamId;
use crate::op::{Memory, Span};
use crate::optim::Optimizer;
use crate::pool::{Job, Pool};

/// The CPU's half of a [`BucketStep`].
pub struct OnHost {
    memories: Arc<Memories>,
    kernels: Kernels,
    pool: Pool,
    bases: Arc<SegmentBases>,
    steps: Vec<Launched>,
    norms: Vec<Launched>,
}

/// A launch, as the pool runs it and as its owner changes it.
struct Launched {
    work: Arc<BucketJob>,
    job: Arc<Job>,
}

impl BucketStepBuilder {
    /// Builds the step on the CPU. No thread starts before a step.
    ///
    /// # Errors
    /// `Config` for a hyperparameter or option out of range or a precision that the optimizer refuses, `Layout` for a
    /// bucket that does not fit the layout, `Unsupported` for an instruction set that this machine lacks or an optimizer
    /// that is code of your own, `Arithmetic` if the kernels fail their self-test.
    pub fn host(self) -> Result<BucketStep> {
        let kernels = Kernels::load(self.isa.map_or_else(Isa::from_environment, Ok)?)?;
        let pool = self.pool.clone().unwrap_or_else(|| Pool::new(1));
        BucketStep::new(self.parts()?, |parts| OnHost::new(parts, kernels, pool))
    }
}

impl OnHost {
    fn new(parts: &Parts, kernels: Kernels, pool: Pool) -> Result<OnHost> {
        let Parts { plan, assignment, constants, settings, .. } = parts;
        let memories = Arc::new(Memories::without_tensors(constants.counts(plan, assignment))?);
        // SAFETY: nothing runs on this memory yet.
        unsafe {
            let records = first_records(plan, memories.regions(), assignment);
            memories.write_control(first_control(constants), records);
            memories.write_settings(settings);
        }
        let tensors = Memory::of_tensors(plan, assignment.state_count());
        let bytes = tensors.map(|memory| Span::whole(memory, plan).bytes()).sum();
        let execution =
            Execution { kernels, ahead_bytes: ahead_bytes(kernels, bytes)?, threads: pool.threads() };
        let bases = Arc::<SegmentBases>::default();
        let launched = |kind| {
            let launches = Launch::unbound(kind, 0, plan, memories.regions(), (constants, assignment));
            let launched = |launch| {
                let work = BucketJob::unbound(kind, launch, &memories, execution, Arc::clone(&bases));
                let work = Arc::new(work);
                Launched { job: Job::new(Arc::clone(&work)), work }
            };
            launches.into_iter().map(launched).collect()
        };
        let (steps, norms) = (launched(Kind::Step), launched(Kind::Norm));
        Ok(OnHost { memories, kernels, pool, bases, steps, norms })
    }

    /// Runs launches under a control block.
    ///
    /// # Safety
    /// The bases lead to the tensors of this call; the block is valid, and nothing else writes it but launches.
    unsafe fn run(&self, launches: &[Launched], control: *mut InstepControl) {
        for launch in launches {
            // SAFETY: launches of this bucket run one at a time, since each needs it mutably.
            unsafe { launch.work.set_control(control) };
            self.pool.run(&launch.job);
        }
    }
}

impl BucketStep {
    /// Steps the bucket, on the calling thread and the pool's.
    ///
    /// # Ordering
    /// The tensors are stepped when it returns.
    ///
    /// # Errors
    /// `Layout` if a tensor is missing, superfluous, too short or long, of elements of another size or type, misaligned, or only
    /// lent for reading where the step writes; `Config` for factors that cannot be divided out. Nothing has been written
    /// then.
    pub fn step(&mut self, tensors: &Tensors<'_>, scaling: Scaling) -> Result<()> {
        scaling.validate()?;
        self.bind(tensors)?;
        self.begin(scaling);
        let engine = &self.engine;
        // SAFETY: `bind` has checked the tensors, which the call borrows or the caller vouches for; the block is our own.
        unsafe { engine.run(&engine.steps, engine.memories.regions().control()) };
        Ok(())
    }

    /// Steps the bucket as a norm over several buckets has decided: clipped by its coefficient, or not at all.
    ///
    /// # Errors
    /// Errors as for [`step`](Self::step); `Order` if the norm has not been decided.
    pub fn step_decided(&mut self, tensors: &Tensors<'_>, norm: &mut GradNorm) -> Result<()> {
        norm.refuse_undecided()?;
        self.bind(tensors)?;
        self.begin(Scaling::NONE);
        // SAFETY: as in `step`; `norm` is borrowed mutably.
        unsafe { self.engine.run(&self.engine.steps, norm.control()) };
        Ok(())
    }

    /// Adds the bucket's summed gradients to a norm.
    ///
    /// # Errors
    /// Errors as for [`step`](Self::step), of the gradients alone; `Order` if the norm has been decided.
    pub fn add_norm(&mut self, grads: &Tensor<'_>, norm: &mut GradNorm) -> Result<()> {
        norm.refuse_decided()?;
        let mut outcome = Ok(());
        let shape = &self.shape;
        // SAFETY: no launch of this bucket runs, since it is borrowed mutably.
        unsafe { self.engine.bases.set(|bases| outcome = shape.bind_grads(grads, bases)) };
        outcome?;
        if self.is_stale {
            // A norm leaves out what is frozen, as the records say, and so does the step, which begins once more.
            self.begin(Scaling::NONE);
        }
        let engine = &self.engine;
        // SAFETY: as in `step`.
        unsafe { engine.run(&engine.norms, norm.control()) };
        Ok(())
    }

    /// Replaces the hyperparameters of a group, such as [`DEFAULT_GROUP`](crate::DEFAULT_GROUP), from the next step on: any of them, a learning rate above all.
    ///
    /// # Errors
    /// `Layout` if there is no such group, `Config` for values out of range, `Unsupported` for another kind of optimizer,
    /// or one with other states.
    pub fn set_optimizer(&mut self, group: &str, optimizer: &dyn Optimizer) -> Result<()> {
        self.replace(group, optimizer)?;
        // SAFETY: no launch runs, since the bucket is borrowed mutably.
        unsafe { self.engine.memories.write_settings(&self.settings) };
        Ok(())
    }

    /// Sets whether steps pass over a parameter, as over one without a gradient in this pass: neither its tensors nor its
    /// step count change, and nothing is read at its addresses.
    ///
    /// # Errors
    /// `Layout` if it is not in this bucket.
    pub fn set_frozen(&mut self, id: ParamId, frozen: bool) -> Result<()> {
        self.freeze(id, frozen)?;
        // SAFETY: as in `set_optimizer`.
        unsafe { self.engine.memories.write_settings(&self.settings) };
        Ok(())
    }

    /// Returns how many updates a parameter has had.
    ///
    /// # Errors
    /// `Layout` if it is not in this bucket.
    pub fn step_count(&self, id: ParamId) -> Result<u64> {
        let record = self.record(id)?;
        // SAFETY: no launch runs: each needs the bucket mutably.
        Ok(Progress::of(&unsafe { self.engine.memories.read_record(record) }).count)
    }

    /// Sets how many updates a parameter has had: when a training is resumed. NAdam's product of momenta is resumed by
    /// [`set_carried`](Self::set_carried).
    ///
    /// # Errors
    /// `Layout` if it is not in this bucket.
    pub fn set_step_count(&mut self, id: ParamId, count: u64) -> Result<()> {
        let carried = self.carried(id)?;
        self.set_progress(id, Progress { count, carried })
    }

    /// Returns the number that the optimizer carries beside the step count: NAdam's product of momenta, 1 in others.
    ///
    /// # Errors
    /// `Layout` if it is not in this bucket.
    pub fn carried(&self, id: ParamId) -> Result<f64> {
        let record = self.record(id)?;
        // SAFETY: as in `step_count`.
        Ok(Progress::of(&unsafe { self.engine.memories.read_record(record) }).carried)
    }

    /// Sets that number, after [`set_step_count`](Self::set_step_count).
    ///
    /// # Errors
    /// `Layout` if it is not in this bucket, `Config` if the number is not from 0 to 1.
    pub fn set_carried(&mut self, id: ParamId, carried: f64) -> Result<()> {
        refuse_carried(carried)?;
        let count = self.step_count(id)?;
        self.set_progress(id, Progress { count, carried })
    }

    fn set_progress(&mut self, id: ParamId, progress: Progress) -> Result<()> {
        let record = self.record(id)?;
        // SAFETY: as in `set_optimizer`.
        unsafe { self.engine.memories.write_progress(record, progress) };
        Ok(())
    }

    fn bind(&mut self, tensors: &Tensors<'_>) -> Result<()> {
        let shape = &self.shape;
        let mut outcome = Ok(());
        // SAFETY: no launch of this bucket runs, since it is borrowed mutably.
        unsafe { self.engine.bases.set(|bases| outcome = shape.bind(tensors, bases)) };
        outcome
    }

    /// Counts the last step's updates and derives the next ones' scalars.
    fn begin(&mut self, scaling: Scaling) {
        self.is_stale = false;
        let engine = &self.engine;
        let mut args = begin_args(engine.memories.regions(), &self.constants);
        scaling.put(&mut args);
        // SAFETY: control memory holds that many records of optimizers that the builder has checked, and nothing runs on
        // it; `Scaling`'s addresses are valid by its own contract.
        unsafe { engine.kernels.begin(&args) }
    }
}
