//! From options to a stepper: what excludes what, then the parts, then nothing that can fail.
//!
//! One table says which options exclude each other. Options come first, environment variables second, defaults last. A
//! refusal leaves no thread, no memory and no collective call. Declares an unsafe method and calls none.
#![allow(unsafe_code)]

use crate::layout::{Gradients, Layout, Master, Plan, SegmentAction, Storage, Tails};
use crate::optim::{Clip, LossScale, LossScaler, Optimizer};
use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use crate::collective::Collective;
use crate::device::Device;
use crate::error::{Error, Result, environment};
use crate::handle::Place;
use crate::host::HostDevice;
use crate::host::arena::Memories;
use crate::host::kernels::{Isa, Kernels};
use crate::host::runner::Parts;
use crate::launch::{Assignment, BorrowedPieces, Settings, StepConstants};
use crate::pool::Pool;
use crate::schedule::{Mode, Policy, Schedule};
use crate::stepper::builder::StepperBuilder;
use crate::stepper::state::agreement::Agreement;
use crate::stepper::state::borrowed::Borrowed;
use crate::stepper::state::loaded::Loaded;
use crate::stepper::state::optimizers::{Optimizers, Registered, Target};
use crate::stepper::state::options::{Divisor, Unused};
use crate::stepper::state::rates::Rates;
use crate::stepper::state::run::Run;
use crate::stepper::stepper::Stepper;

const UNSEEN: &str = "Eager steps a bucket before it has seen the others";

/// The parts of a device.
pub(super) struct Blueprint {
    pub(super) plan: Arc<Plan>,
    pub(super) constants: StepConstants,
    pub(super) assignment: Arc<Assignment>,
    pub(super) comm: Arc<dyn Collective>,
    pub(super) deadline: Duration,
    pub(super) borrowed: Option<BorrowedPieces>,
    pub(super) timed: bool,
    /// The number that ranks have in common for good.
    pub(super) agreement: u64,
}

impl Stepper {
    /// Builds a stepper on the CPU with default options.
    ///
    /// # Errors
    /// Errors as for [`StepperBuilder::host`].
    pub fn host(
        layout: &Layout,
        optimizer: impl Optimizer + 'static,
        comm: impl Collective + 'static,
    ) -> Result<Stepper> {
        Stepper::builder(layout, optimizer).host(comm)
    }
}

impl StepperBuilder<'_> {
    /// Builds the stepper on the CPU. Threads start at the first pass.
    ///
    /// # Errors
    /// `Config` for a value out of range or an option that the mode refuses. `Unsupported` if this machine lacks the
    /// instruction set or memory release, the collective cannot sum the gradients' type, or custom code cannot step
    /// what the options ask for. `Arithmetic` if the kernels fail their self-test. `Layout` if the memory cannot be
    /// addressed or allocated.
    pub fn host(self, comm: impl Collective + 'static) -> Result<Stepper> {
        self.on_host(Arc::new(comm), None)
    }

    /// Builds the stepper on the CPU, on parameters and gradient buckets of the caller's; states are the stepper's own.
    /// Results have the same bits as on the stepper's own memory, at any alignment. It rejects
    /// [`uneven_inputs`](Self::uneven_inputs) and [`bucket_cap_bytes`](Self::bucket_cap_bytes). Foreign buckets have no
    /// room for counts, so [`Unused::Skip`] is rejected too. Choose [`Unused::Refuse`] if every pass uses every
    /// parameter: with [`Unused::StepZero`], a gradient that you wrote without asking for it is overwritten with zeros
    /// and stepped.
    ///
    /// ```
    /// use instep::layout::ForeignBucket;
    /// use instep::{Borrowed, Layout, Sgd, Solo, Stepper, Unused};
    ///
    /// let layout = Layout::builder().param("weight", 3).param("bias", 1).build()?;
    /// let [weight, bias] = [layout.id("weight")?, layout.id("bias")?];
    /// let (mut weights, mut biases, mut bucket) = ([1.0f32; 3], [1.0f32; 1], [0.0f32; 4]);
    /// let memory = Borrowed::new()
    ///     .param(weight, weights.as_mut_ptr())
    ///     .param(bias, biases.as_mut_ptr())
    ///     .bucket(ForeignBucket::new(4).gradient(bias, 0).gradient(weight, 1), bucket.as_mut_ptr());
    /// let builder = Stepper::builder(&layout, Sgd { lr: 1.0, ..Default::default() });
    /// // SAFETY: the arrays outlive the stepper, which alone touches them until it is closed.
    /// let mut stepper = unsafe { builder.unused(Unused::Refuse).host_borrowing(Solo::default(), memory)? };
    /// let mut pass = stepper.begin()?;
    /// pass.grads().write(weight, &[1.0, 2.0, 3.0])?;
    /// pass.grads().write(bias, &[4.0])?; // without it, finish would be an error that names the bias
    /// pass.finish()?;
    /// stepper.close()?;
    /// assert_eq!((weights, biases), ([0.0, -1.0, -2.0], [-3.0]));
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// The first pass, and the first one after [`params_mut`](Stepper::params_mut), writes rank 0's parameters over the
    /// other ranks'.
    ///
    /// [`Grads::get_mut`](crate::Grads::get_mut) marks the gradient as written and waits for the last step. After it
    /// you may write through your own pointer until the hand-over.
    ///
    /// # Errors
    /// Errors as for [`host`](Self::host); `Layout` if a tensor lies nowhere, twice, misaligned for its type, or over
    /// another one.
    ///
    /// # Safety
    /// Until the stepper is closed or dropped:
    /// 1. Every address is valid for reads and writes of its tensor, and all of the tensor is initialised. Only the
    ///    stepper, its views, and your own pointers under these rules touch it.
    /// 2. Write a gradient only between [`Grads::get_mut`](crate::Grads::get_mut) and its hand-over.
    /// 3. Read a parameter only between [`Params::get`](crate::Params::get) and its hand-over.
    /// 4. Between passes, call [`Stepper::params`] or [`Stepper::params_mut`] first.
    /// 5. Never write a parameter with a [master](crate::Master); use [`Stepper::write_param`], which writes both.
    ///
    /// Closing and dropping wait for steps that still run. Unless the thread panics, they also wait for peers that a
    /// queued sum needs, up to the deadline.
    pub unsafe fn host_borrowing(self, comm: impl Collective + 'static, memory: Borrowed) -> Result<Stepper> {
        self.on_host(Arc::new(comm), Some(memory))
    }

    fn on_host(self, comm: Arc<dyn Collective>, memory: Option<Borrowed>) -> Result<Stepper> {
        let kernels = Kernels::load(self.isa.map_or_else(Isa::from_environment, Ok)?)?;
        let (pool, is_inline) = (self.pool(&*comm)?, self.is_inline);
        self.assemble(comm, memory, |parts| {
            let Blueprint { plan, constants, assignment, comm, deadline, borrowed, timed, .. } = parts;
            assignment.refuse_unreached(Place::Host)?;
            let memories = Arc::new(Memories::new(&plan, (&constants, &assignment), borrowed)?);
            let parts = Parts { plan, memories, constants, assignment, kernels, pool, comm, deadline };
            HostDevice::new(parts, timed, is_inline)
        })
    }

    /// Everything but the device, which `make` makes of it.
    pub(super) fn assemble<D: Device>(
        mut self,
        comm: Arc<dyn Collective>,
        memory: Option<Borrowed>,
        make: impl FnOnce(Blueprint) -> Result<D>,
    ) -> Result<Stepper<D>> {
        if let Some(refused) = self.refused.take() {
            return Err(refused);
        }
        let (rank, world_size) = (comm.rank(), comm.world_size());
        if world_size == 0 {
            return Err(Error::range("world_size", 0, "1 or more"));
        }
        if rank >= world_size {
            return Err(Error::range(
                "rank",
                rank,
                format_args!("a rank below the world size, {world_size}"),
            ));
        }
        self.refuse(world_size)?;
        if comm.sums_outside() && (self.unused == Unused::Skip || self.uneven_inputs.is_some()) {
            let wrong = "sums made outside the stepper bring no counts of ranks";
            let remedy = "use Unused::Refuse or Unused::StepZero, and no uneven_inputs";
            return Err(Error::config("unused", format!("{:?}", self.unused), wrong, remedy));
        }
        let registered = std::mem::take(&mut self.registered);
        self.refuse_contradiction(&registered)?;
        let mut optimizers = Optimizers::new(self.layout, self.optimizer.as_deref(), registered)?;
        let constants = StepConstants {
            divisor: if self.counts_ranks() { 0.0 } else { f64::from(world_size) },
            loss_scale: self.loss_scale,
            largest_loss_scale: LossScaler::largest_scale(world_size),
            clip: self.clip,
            skip_nonfinite: self.skip_nonfinite || self.loss_scale.is_dynamic(),
            ema_decay: self.ema_decay.unwrap_or_default(),
        };
        let rates = Rates::new(self.layout, &optimizers, std::mem::take(&mut self.lr_schedules))?;
        let deadline = match self.deadline {
            Some(deadline) => deadline,
            None => Duration::from_millis(environment("INSTEP_DEADLINE_MS", 1)?.unwrap_or(60_000)),
        };
        let mut plan = self.plan(world_size, memory.as_ref())?;
        let chosen = &self.optimized;
        let is_chosen = |param: usize| chosen.as_ref().is_none_or(|chosen| chosen.contains(&param));
        plan.optimize_only(|param| optimizers.rounds(param) > 0 && is_chosen(param));
        optimizers.leave_out(|param| plan.segment_of(param).action == SegmentAction::Step);
        let assignment = Arc::new(optimizers.assignment(self.layout, &plan)?);
        optimizers.refuse_storage(plan.storage())?;
        let grad = self.precision.grad;
        if !comm.sums(grad) {
            let thing = format_args!("{grad} gradients");
            let remedy = "use f32 gradients or another collective";
            return Err(Error::unsupported(thing, "this collective cannot sum them", remedy));
        }
        comm.prepare(&plan)?;
        let plan = Arc::new(plan);
        let borrowed = memory.map(|memory| memory.pieces(self.layout, &plan)).transpose()?;
        let mut policy = Policy::new(self.mode, self.clip.is_some() || constants.skip_nonfinite);
        policy.dynamic_loss_scale = self.loss_scale.is_dynamic();
        policy.keeps_order = comm.keeps_order();
        policy.clip_per_bucket = constants.clips_per_bucket();
        policy.trainer_is_a_stream = D::TRAINER_IS_A_STREAM;
        let schedule = Schedule::new(self.layout, Arc::clone(&plan), policy);
        let agreement = self.agreement(&plan);
        let device = make(Blueprint {
            plan: Arc::clone(&plan),
            constants,
            assignment: Arc::clone(&assignment),
            comm: Arc::clone(&comm),
            deadline,
            borrowed,
            timed: self.record,
            agreement: agreement.fixed(),
        })?;
        let borrows_behind_masters = plan.is_foreign() && self.precision.master != Master::None;
        let mut stepper = Stepper {
            layout: self.layout.clone(),
            settings: Settings::new(&plan, &assignment),
            settings_changed: false,
            assignment,
            optimizers,
            rates,
            loss_scale: self.loss_scale,
            unused: self.unused,
            abandoned: 0,
            loaded: Loaded::default(),
            written: vec![false; plan.segments().len()].into(),
            plan,
            policy,
            agreement,
            comm,
            params_written: true,
            run: RefCell::new(Run::new(schedule, device, self.record)),
        };
        if borrows_behind_masters {
            stepper.derive_masters()?;
        }
        Ok(stepper)
    }

    fn plan(&self, world_size: u32, memory: Option<&Borrowed>) -> Result<Plan> {
        let tails = Tails { used: self.unused == Unused::Skip, contributors: self.uneven_inputs.is_some() };
        let Some(memory) = memory else {
            let caps = self.caps.unwrap_or_default();
            let plan = Plan::new(self.layout, world_size, caps, tails, self.storage())?;
            if tails.contributors && plan.carrier().is_none() {
                let wrong = "the layout has no elements to count ranks with";
                return Err(Error::config("uneven_inputs", "set", wrong, "leave it out"));
            }
            return Ok(plan.with_gradients(self.gradients));
        };
        if tails.used {
            let wrong = "borrowed buckets cannot count the ranks that used a parameter";
            return Err(Error::config("unused", "Skip", wrong, "use Unused::Refuse or Unused::StepZero"));
        }
        if tails.contributors {
            return Err(Error::config(
                "uneven_inputs",
                "set",
                "borrowed buckets cannot count ranks",
                "remove this option",
            ));
        }
        if self.caps.is_some() {
            return Err(Error::config(
                "bucket_cap_bytes",
                "set",
                "borrowed buckets have fixed sizes",
                "remove this option",
            ));
        }
        if self.gradients == Gradients::Release {
            let wrong = "borrowed memory cannot be released";
            return Err(Error::config(
                "gradients",
                "Release",
                wrong,
                "use Gradients::Keep or Gradients::Zero",
            ));
        }
        Ok(memory.plan(self.layout, self.storage())?.with_gradients(self.gradients))
    }

    fn storage(&self) -> Storage {
        Storage { precision: self.precision, copy: self.copy_dtype, ema: self.ema_decay.is_some() }
    }

    /// Refuses an optimizer for a parameter that is to have none.
    fn refuse_contradiction(&self, registered: &[Registered]) -> Result<()> {
        for Registered { target, .. } in registered {
            let Target::Params(params) = target else { continue };
            for param in params {
                let parameter = &self.layout.parameters()[*param];
                if parameter.action != SegmentAction::Step {
                    let wrong = format_args!("`{}` has an optimizer all the same", parameter.name);
                    let remedy = "use SegmentAction::Step or drop the optimizer";
                    return Err(Error::config(
                        "action",
                        format_args!("{:?}", parameter.action),
                        wrong,
                        remedy,
                    ));
                }
                if self.optimized.as_ref().is_some_and(|chosen| !chosen.contains(param)) {
                    let wrong = "has an optimizer, but is not in this list";
                    return Err(Error::config(
                        "optimize_only",
                        &parameter.name,
                        wrong,
                        "add it or drop its optimizer",
                    ));
                }
            }
        }
        Ok(())
    }

    /// The table of what excludes what, and ranges that no other type checks.
    fn refuse(&self, world_size: u32) -> Result<()> {
        if let Some(clip) = self.clip {
            self.refuse_clip(clip)?;
        }
        if self.skip_nonfinite && self.mode == Mode::Eager {
            return Err(Error::config("skip_nonfinite", true, UNSEEN, "use Normed or Sequential"));
        }
        match self.loss_scale {
            LossScale::Constant(loss_scale) => self.refuse_loss_scale(loss_scale, world_size)?,
            LossScale::Dynamic(_) if self.mode == Mode::Eager => {
                return Err(Error::config("loss_scale", "dynamic", UNSEEN, "use Normed or Sequential"));
            }
            LossScale::Dynamic(scaler) => scaler.validate(world_size)?,
        }
        if let Some(decay) = self.ema_decay.filter(|decay| !(0.0..=1.0).contains(decay)) {
            return Err(Error::range("ema", decay, "a decay rate from 0 to 1"));
        }
        if let Some(threads) = self.threads.filter(|threads| !(1..=Pool::MAX_THREADS).contains(threads)) {
            return Err(Error::range("threads", threads, "1 to 1024"));
        }
        if self.deadline == Some(Duration::ZERO) {
            return Err(Error::config("deadline", 0, "no rank could arrive in time", "use a longer one"));
        }
        Ok(())
    }

    fn refuse_clip(&self, clip: Clip) -> Result<()> {
        let refused =
            |wrong: &str, remedy: &str| Err(Error::config("clip", format_args!("{clip:?}"), wrong, remedy));
        if !(clip.max_norm() > 0.0 && clip.max_norm().is_finite()) {
            return refused("out of range", "use a finite number above 0");
        }
        match clip {
            Clip::Global(_) if self.mode == Mode::Eager => refused(
                "Eager steps the first bucket before the norm of all is known",
                "use Normed or Sequential, or Clip::Previous or Clip::PerBucket, which are not exact",
            ),
            Clip::PerBucket(_) if self.skip_nonfinite => {
                refused("cannot be combined with skip_nonfinite", "keep one")
            }
            Clip::PerBucket(_) if self.loss_scale.is_dynamic() => {
                refused("cannot be combined with a dynamic loss_scale", "keep one")
            }
            _ => Ok(()),
        }
    }

    /// Gradients are multiplied by its reciprocal in f32, where it must neither vanish nor overflow.
    fn refuse_loss_scale(&self, loss_scale: f64, world_size: u32) -> Result<()> {
        let multiplier = |ranks: u32| (1.0 / (f64::from(ranks) * loss_scale)) as f32;
        let fewest = if self.counts_ranks() { 1 } else { world_size };
        if [fewest, world_size].map(multiplier).iter().all(|m| m.is_normal() && *m > 0.0) {
            return Ok(());
        }
        let allowed = "a finite number above 0, with 1 / (world_size * loss_scale) a normal f32";
        Err(Error::range("loss_scale", loss_scale, allowed))
    }

    fn pool(&self, comm: &dyn Collective) -> Result<Pool> {
        if let Some(threads) = self.threads {
            return Pool::with_threads(threads);
        }
        if let Some(pool) = comm.pool() {
            return Ok(pool);
        }
        Pool::from_environment()
    }

    fn agreement(&self, plan: &Plan) -> Agreement {
        let (mode, unused, uneven_inputs) = (self.mode, self.unused, self.uneven_inputs);
        let (clip, skip_nonfinite, loss_scale) = (self.clip, self.skip_nonfinite, self.loss_scale);
        let (precision, ema) = (self.precision, self.ema_decay);
        let options = format_args!(
            "{mode:?} {unused:?} {uneven_inputs:?} {clip:?} {skip_nonfinite} {loss_scale:?} {precision:?} {ema:?}"
        );
        Agreement::new(self.layout, plan, options)
    }

    /// Whether the mean is taken over the ranks that had data.
    fn counts_ranks(&self) -> bool {
        self.uneven_inputs == Some(Divisor::ContributingRanks)
    }
}
