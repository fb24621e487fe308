//! Builds a stepper from options: first checks which options exclude each other, then makes the parts. The last steps
//! cannot fail.
//!
//! One table says which options exclude each other. Options come first, environment variables second, defaults last.
//! After a refusal no thread, memory or collective call is left.

use crate::layout::{Gradients, Layout, Plan, SegmentAction, Storage, Storages, Tails};
use crate::optim::{Clip, LossScale, LossScaler, Optimizer};
use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use crate::collective::{Collective, Comms, Sums};
use crate::device::Device;
use crate::error::{Error, Result, environment};
use crate::handle::Place;
use crate::host::HostDevice;
use crate::host::kernels::{Isa, Kernels};
use crate::host::memories::Memories;
use crate::host::runner::Parts;
use crate::launch::{Assignment, BorrowedPieces, Settings, StepConstants};
use crate::pool::Pool;
use crate::schedule::{Decision, Mode, Policy, Schedule};
use crate::stepper::builder::StepperBuilder;
use crate::stepper::offload::refuse_averages;
use crate::stepper::shards::refuse_whole_work;
use crate::stepper::state::agreement::Agreement;
use crate::stepper::state::borrowed::Borrowed;
use crate::stepper::state::hypers::Rates;
use crate::stepper::state::optimizers::{Optimizers, Registered, Target};
use crate::stepper::state::options::{Accumulation, Divisor, Unused};
use crate::stepper::state::run::Run;
use crate::stepper::state::written::Loaded;
use crate::stepper::state::written::ParamsWritten;
use crate::stepper::stepper::Stepper;

/// The largest divisor: above 2^24, f32 cannot represent every integer.
const LARGEST_DIVISOR: f64 = (1 << 24) as f64;

const UNSEEN: &str = "Eager steps a bucket before it has seen the others";

/// The parts from which a device is built.
pub(super) struct Blueprint {
    pub(super) plan: Arc<Plan>,
    pub(super) assignment: Arc<Assignment>,
    /// Only the first communicator; `make` derives the others from it.
    pub(super) comms: Comms,
    pub(super) borrowed: Option<BorrowedPieces>,
    pub(super) timed: bool,
}

impl Stepper {
    /// Builds a stepper on the CPU with default options.
    ///
    /// # Errors
    /// Errors as for [`StepperBuilder::host`].
    pub fn host(
        layout: &Layout,
        optimizer: impl Optimizer + 'static,
        sums: impl Into<Sums>,
    ) -> Result<Stepper> {
        Stepper::builder(layout, optimizer).host(sums)
    }
}

impl StepperBuilder<'_> {
    /// Builds the stepper on the CPU. Threads start at the first pass.
    ///
    /// # Errors
    /// `Config` for a value out of range or an option that the mode refuses. `Unsupported` if this machine lacks the
    /// instruction set or cannot release memory, if the collective cannot reach the host's memory or sum the gradients'
    /// type, or if a custom optimizer does not support the options. `Arithmetic` if the kernels fail their self-test.
    /// `Layout` if the memory cannot be addressed or allocated.
    pub fn host(self, sums: impl Into<Sums>) -> Result<Stepper> {
        self.on_host(sums.into(), None)
    }

    pub(super) fn on_host(self, sums: Sums, memory: Option<Borrowed>) -> Result<Stepper> {
        let comm = &sums.comm;
        if !comm.reaches(Place::Host) {
            let remedy = "use one that does, such as in_process's or Solo";
            return Err(Error::unsupported(
                "gradients in host memory",
                "this collective cannot reach them",
                remedy,
            ));
        }
        let kernels = Kernels::load(self.isa.map_or_else(Isa::from_environment, Ok)?)?;
        let (pool, is_inline) = (self.pool(&**comm)?, self.is_inline);
        self.assemble(sums, memory, |blueprint| {
            blueprint.assignment.refuse_unreached(Place::Host)?;
            let Blueprint { plan, assignment, mut comms, borrowed, timed } = blueprint;
            comms.split(&plan)?;
            let comm = Some(&*comms.world);
            let memories = Arc::new(Memories::new(&plan, &assignment, comm, borrowed)?);
            let parts = Parts { plan, memories, assignment, kernels, pool, comms: comms.clone() };
            Ok((HostDevice::new(parts, timed, is_inline)?, comms))
        })
    }

    /// Makes everything but the device. `make` then makes the device, and returns it with all communicators.
    pub(super) fn assemble<D: Device>(
        mut self,
        Sums { comm, are_by_caller }: Sums,
        memory: Option<Borrowed>,
        make: impl FnOnce(Blueprint) -> Result<(D, Comms)>,
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
        self.refuse_unsharding()?;
        self.refuse_offload(memory.is_some())?;
        self.refuse_accumulation()?;
        self.refuse_unknown_calls(&*comm)?;
        let counts_nothing = memory.is_some() || are_by_caller;
        let unused = self.unused.unwrap_or(if counts_nothing { Unused::Refuse } else { Unused::Skip });
        self.unused = Some(unused);
        if are_by_caller && (unused == Unused::Skip || self.uneven_inputs.is_some()) {
            let wrong = "sums by the caller bring no counts of ranks";
            let remedy = "use Unused::Refuse or Unused::StepZero, and no uneven_inputs";
            return Err(Error::config("unused", format!("{unused:?}"), wrong, remedy));
        }
        let registered = std::mem::take(&mut self.registered);
        self.refuse_contradiction(&registered)?;
        let mut optimizers = Optimizers::new(self.layout, self.optimizer.as_deref(), registered)?;
        let constants = StepConstants {
            divisor: if self.counts_ranks() { 0.0 } else { self.divisor(world_size) },
            loss_scale: self.loss_scale,
            largest_loss_scale: LossScaler::largest_scale(self.divisor(world_size)),
            clip: self.clip,
            skip_nonfinite: self.skip_nonfinite || self.loss_scale.skips_nonfinite(),
            ema_decay: self.ema_decay.unwrap_or_default(),
        };
        let rates = Rates::new(self.layout, &optimizers, std::mem::take(&mut self.lr_schedules))?;
        let deadline = match self.deadline {
            Some(deadline) => deadline,
            None => Duration::from_millis(environment("INSTEP_DEADLINE_MS", 1)?.unwrap_or(60_000)),
        };
        let mut plan = self.plan(world_size, memory.as_ref())?;
        plan = self.sharded(plan, rank, world_size)?;
        if self.offload.is_some() {
            plan = plan.offloaded();
        }
        let chosen = &self.optimized;
        let is_chosen = |param: usize| chosen.as_ref().is_none_or(|chosen| chosen.contains(&param));
        plan.optimize_only(|param| optimizers.rounds(param) > 0 && is_chosen(param));
        optimizers.leave_out(|param| plan.segment_of(param).action == SegmentAction::Step);
        let assignment = Arc::new(optimizers.assignment(self.layout, &plan, constants)?);
        optimizers.refuse_storage(&plan)?;
        refuse_whole_work(self.layout, &plan, &assignment, &*comm)?;
        refuse_averages(self.layout, &plan)?;
        let grads = plan.storages().iter().map(|storage| storage.precision.grad);
        if let Some(grad) = { grads }.find(|grad| !comm.sums(*grad)) {
            let thing = format_args!("{grad} gradients");
            let remedy = "use f32 gradients or another collective";
            return Err(Error::unsupported(thing, "this collective cannot sum them", remedy));
        }
        comm.prepare(&plan)?;
        let plan = Arc::new(plan);
        let borrowed = memory.map(|memory| memory.pieces(self.layout, &plan, None)).transpose()?;
        let mut policy = Policy::new(self.mode, self.decision());
        policy.keeps_order = world_size > 1 && !are_by_caller;
        policy.sums_by_caller = are_by_caller;
        policy.trainer_is_a_stream = D::TRAINER_IS_A_STREAM;
        let mut schedule = Schedule::new(self.layout, Arc::clone(&plan), policy);
        let counts = assignment.counts(&plan);
        let stops = (0..plan.buckets().len() as u32).map(|bucket| assignment.stops(&plan, bucket));
        let spans = stops.map(|stops| stops.iter().map(|stop| counts.norms_of(&stop.records)).collect());
        schedule.share_norms_of_parameters(spans.collect());
        if D::TRAINER_IS_A_STREAM {
            schedule.share_launches(assignment.shares_with_next(&plan));
        }
        let agreement = self.agreement(&plan);
        let (device, comms) = make(Blueprint {
            plan: Arc::clone(&plan),
            assignment: Arc::clone(&assignment),
            comms: Comms::new(comm, deadline, Arc::clone(agreement.words())),
            borrowed,
            timed: self.record,
        })?;
        let borrows_behind_masters = plan.is_foreign();
        let params_written = ParamsWritten::new(&plan, are_by_caller);
        let mut stepper = Stepper {
            layout: self.layout.clone(),
            settings: Settings::new(&plan, &assignment),
            settings_changed: false,
            assignment,
            optimizers,
            rates,
            divisor: self.divisor(world_size),
            clip: self.clip,
            loss_scale: self.loss_scale,
            unused,
            is_capturing: false,
            abandoned: 0,
            loaded: Loaded::default(),
            written: vec![false; plan.segments().len()].into(),
            plan,
            policy,
            agreement,
            comms,
            max_unsharded: self.max_unsharded,
            params_written,
            run: RefCell::new(Run::new(schedule, device, self.record)),
        };
        if borrows_behind_masters {
            stepper.derive_masters()?;
        }
        Ok(stepper)
    }

    pub(super) fn decision(&self) -> Decision {
        match self.clip {
            Some(Clip::PerBucket(_)) => Decision::EachBucket,
            _ if self.loss_scale.skips_nonfinite() => Decision::WholePassAndLossScale,
            None if !self.skip_nonfinite && self.group_clips.is_empty() => Decision::None,
            _ => Decision::WholePass,
        }
    }

    fn plan(&self, world_size: u32, memory: Option<&Borrowed>) -> Result<Plan> {
        let tails =
            Tails { used: self.unused == Some(Unused::Skip), contributors: self.uneven_inputs.is_some() };
        let Some(memory) = memory else {
            let caps = self.caps.unwrap_or_default();
            let plan = Plan::new(self.layout, world_size, caps, tails, self.storages())?;
            if tails.contributors && plan.carrier().is_none() {
                let wrong = "the layout has no elements to count ranks with";
                return Err(Error::config("uneven_inputs", "set", wrong, "leave it out"));
            }
            return Ok(plan.with_gradients(self.gradients));
        };
        if tails.used {
            let wrong = "a borrowed bucket is summed as it is, and has no element that counts ranks";
            let remedy = "use Unused::Refuse or Unused::StepZero, and Stepper::set_unused";
            return Err(Error::config("unused", "Skip", wrong, remedy));
        }
        if tails.contributors {
            return Err(Error::config(
                "uneven_inputs",
                "set",
                "a borrowed bucket is summed as it is, and has no element that counts ranks",
                "remove this option, or let the stepper own its buckets",
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
        Ok(memory.plan(self.layout, self.storages())?.with_gradients(self.gradients))
    }

    fn storages(&self) -> Storages {
        let (copy, ema) = (self.copy_dtype, self.ema_decay.is_some());
        let common = Storages::from(Storage { precision: self.precision, copy, ema });
        let groups = self.group_precisions.iter();
        let storages = groups.fold(common, |storages, (group, precision)| storages.group(group, *precision));
        let clips = self.group_clips.iter();
        clips.fold(storages, |storages, (group, max_norm)| storages.group_clip(group, *max_norm))
    }

    /// Refuses an optimizer for a parameter that is to have none.
    fn refuse_contradiction(&self, registered: &[Registered]) -> Result<()> {
        for Registered { target, .. } in registered {
            let (Target::Params(params) | Target::FurtherParams(params)) = target else { continue };
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

    /// Refuses options that exclude each other, and values out of a range that no other type checks.
    fn refuse(&self, world_size: u32) -> Result<()> {
        if let Some(clip) = self.clip {
            self.refuse_clip(clip)?;
        }
        self.refuse_group_clips()?;
        if self.skip_nonfinite && self.mode == Mode::Eager {
            return Err(Error::config("skip_nonfinite", true, UNSEEN, "use Normed or Sequential"));
        }
        if let Some(divisor) = self.gradient_divisor {
            if !(1.0..=LARGEST_DIVISOR).contains(&divisor) {
                return Err(Error::range("gradient_divisor", divisor, "a number from 1 to 2^24"));
            }
            if self.counts_ranks() {
                let wrong = "uneven_inputs divides by the ranks that had data";
                return Err(Error::config("gradient_divisor", divisor, wrong, "use Divisor::WorldSize"));
            }
        }
        match self.loss_scale {
            LossScale::Constant(loss_scale) => self.refuse_loss_scale(loss_scale, world_size)?,
            LossScale::Dynamic(_) | LossScale::External(_) if self.mode == Mode::Eager => {
                return Err(Error::config("loss_scale", "dynamic", UNSEEN, "use Normed or Sequential"));
            }
            LossScale::Dynamic(scaler) => scaler.validate(self.divisor(world_size))?,
            LossScale::External(_) => {}
        }
        if let Some(decay) = self.ema_decay.filter(|decay| !(0.0..=1.0).contains(decay)) {
            return Err(Error::range("ema", decay, "a decay rate from 0 to 1"));
        }
        if let Some(threads) = self.threads {
            Pool::refuse_threads("threads", threads)?;
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
            Clip::PerBucket(_) if self.loss_scale.skips_nonfinite() => {
                refused("cannot be combined with a dynamic loss_scale", "keep one")
            }
            _ => Ok(()),
        }
    }

    fn refuse_group_clips(&self) -> Result<()> {
        let Some((group, _)) = self.group_clips.first() else { return Ok(()) };
        if self.mode == Mode::Eager {
            return Err(Error::config("group_clip", group, UNSEEN, "use Normed or Sequential"));
        }
        if let Some(clip @ (Clip::Previous(_) | Clip::PerBucket(_))) = self.clip {
            let wrong = format_args!("cannot be combined with {clip:?}, which is not by the norm of a group");
            return Err(Error::config("group_clip", group, wrong, "use Clip::Global or no clip"));
        }
        let is_norm = |max_norm: &f64| *max_norm > 0.0 && max_norm.is_finite();
        match self.group_clips.iter().find(|(_, max_norm)| !max_norm.as_ref().is_none_or(is_norm)) {
            Some((group, max_norm)) => {
                let wrong = format_args!("{} is out of range", max_norm.unwrap_or_default());
                Err(Error::config("group_clip", group, wrong, "use a finite number above 0"))
            }
            None => Ok(()),
        }
    }

    /// Gradients are multiplied by its reciprocal in f32, where it must neither vanish nor overflow.
    fn refuse_loss_scale(&self, loss_scale: f64, world_size: u32) -> Result<()> {
        let multiplier = |divisor: f64| (1.0 / (divisor * loss_scale)) as f32;
        let most = self.divisor(world_size);
        let fewest = if self.counts_ranks() { 1.0 } else { most };
        if [fewest, most].map(multiplier).iter().all(|m| m.is_normal() && *m > 0.0) {
            return Ok(());
        }
        let allowed = "a finite number above 0, with 1 / (world_size * loss_scale) a normal f32";
        Err(Error::range("loss_scale", loss_scale, allowed))
    }

    pub(super) fn pool(&self, comm: &dyn Collective) -> Result<Pool> {
        if let Some(threads) = self.threads {
            return Pool::with_threads(threads);
        }
        if let Some(pool) = comm.pool() {
            return Ok(pool);
        }
        Pool::from_environment()
    }

    fn agreement(&self, plan: &Plan) -> Agreement {
        let (mode, strategy, shard_size) = (self.mode, self.strategy, plan.shards().0);
        let (unused, uneven_inputs, divisor) =
            (self.unused.unwrap_or_default(), self.uneven_inputs, self.gradient_divisor);
        let (clip, skip_nonfinite, loss_scale) = (self.clip, self.skip_nonfinite, self.loss_scale);
        let (precision, ema) = (self.precision, self.ema_decay);
        let mut options = format!(
            "mode: {mode:?}\nstrategy: {strategy:?} of {shard_size}\nunused: {unused:?}\nuneven_inputs: {uneven_inputs:?}\n\
             gradient_divisor: {divisor:?}\nclip: {clip:?}\n\
             skip_nonfinite: {skip_nonfinite}\nloss_scale: {loss_scale:?}\n{precision:?}\nema: {ema:?}"
        );
        if self.offload.is_some() {
            options.push_str("\noffload: true");
        }
        if self.accumulation != Accumulation::default() {
            options.push_str(&format!("\naccumulation: {:?}", self.accumulation));
        }
        for (group, precision) in &self.group_precisions {
            options.push_str(&format!("\nof group {group:?}: {precision:?}"));
        }
        for (group, max_norm) in &self.group_clips {
            options.push_str(&format!("\nclip of group {group:?}: {max_norm:?}"));
        }
        Agreement::new(self.layout, plan, &options)
    }

    /// Returns the divisor of the summed gradients if all ranks have data.
    fn divisor(&self, world_size: u32) -> f64 {
        self.gradient_divisor.unwrap_or_else(|| f64::from(world_size))
    }

    /// Returns whether the mean is taken over the ranks that had data alone.
    fn counts_ranks(&self) -> bool {
        self.uneven_inputs == Some(Divisor::ContributingRanks)
    }
}
