//! Builds a stepper from options: first checks the options, then makes the stepper's parts.
//!
//! One table says which options exclude each other. An option overrides its environment variable, and the variable
//! overrides the default. A refused build leaves no running thread, no allocated memory and no unfinished collective
//! call.

use crate::layout::{Gradients, Layout, Plan, SegmentAction, Storage, Storages, Tails};
use crate::optim::{Clip, LossScale, LossScaler, Optimizer};
use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use crate::collective::{Collective, Comms, Sums};
use crate::device::{Blueprint, Device};
use crate::error::{Error, Result, environment, refuse};
use crate::handle::Place;
use crate::host::HostDevice;
use crate::host::kernels::{Isa, Kernels};
use crate::host::memories::Memories;
use crate::host::runner::Parts;
use crate::launch::{Settings, StepConstants};
use crate::pool::Pool;
use crate::schedule::{Decision, Mode, Policy, Schedule};
use crate::stepper::builder::StepperBuilder;
use crate::stepper::offload::refuse_averages;
use crate::stepper::shards::refuse_full_work;
use crate::stepper::state::agreement::Agreement;
use crate::stepper::state::borrowed::Borrowed;
use crate::stepper::state::hypers::Rates;
use crate::stepper::state::optimizers::{Optimizers, Registered, Target};
use crate::stepper::state::options::{Accumulation, Divisor, Strategy, Unused};
use crate::stepper::state::run::Run;
use crate::stepper::state::written::{Loaded, ParamsWritten};
use crate::stepper::stepper::Stepper;

/// The largest divisor: above 2^24, f32 cannot represent every integer.
const LARGEST_DIVISOR: f64 = (1 << 24) as f64;

const UNSEEN: &str = "Eager steps a bucket before it has seen the others";
const LATER: &str = "use Normed or Sequential";

/// Returns the value of an option as text, or an empty text if the option is not set.
fn shown(value: Option<impl std::fmt::Debug>) -> String {
    value.map_or_else(String::new, |value| format!("{value:?}"))
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
    /// `Config` if a value is out of range, or if the mode does not allow an option. `Unsupported` if this machine
    /// lacks the instruction set or cannot release memory. `Unsupported` if the collective cannot reach the host's
    /// memory, or cannot sum the gradients' type. `Unsupported` if a custom optimizer does not support the options.
    /// `Arithmetic` if the kernels fail their self-test. `Layout` if the memory cannot be addressed or allocated.
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

    /// Makes the stepper. The closure `make` receives a blueprint, from which it makes the device and any further
    /// communicators.
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
        let counts_nothing = memory.is_some() || are_by_caller;
        let unused = self.unused.unwrap_or(if counts_nothing { Unused::Refuse } else { Unused::Skip });
        self.unused = Some(unused);
        self.refuse(&*comm, memory.is_some(), are_by_caller)?;
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
        let is_averaged = |param| optimizers.rounds(param) == 0 || !is_chosen(param);
        plan.change_actions([SegmentAction::Step, SegmentAction::Average], is_averaged);
        optimizers.leave_out(|param| plan.segment_of(param).action == SegmentAction::Step);
        let assignment = Arc::new(optimizers.assignment(self.layout, &plan, constants)?);
        optimizers.refuse_storage(&plan)?;
        refuse_full_work(self.layout, &plan, &assignment, &*comm)?;
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
        let borrows_params = plan.is_foreign();
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
        if borrows_params {
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

    /// Refuses an optimizer for a parameter that must not have one.
    fn refuse_contradiction(&self, registered: &[Registered]) -> Result<()> {
        for Registered { target, .. } in registered {
            let (Target::Params(params) | Target::FurtherParams(params)) = target else { continue };
            for param in params {
                let parameter = &self.layout.parameters()[*param];
                let is_left = self.optimized.as_ref().is_some_and(|chosen| !chosen.contains(param));
                refuse! {
                    "action" = format_args!("{:?}", parameter.action), if parameter.action != SegmentAction::Step
                        => format_args!("`{}` has an optimizer all the same", parameter.name),
                        "use SegmentAction::Step or drop the optimizer";
                    "optimize_only" = &parameter.name, if is_left
                        => "has an optimizer, but is not in this list", "add it or drop its optimizer";
                }
            }
        }
        Ok(())
    }

    /// Refuses options that exclude each other, and values out of range that are not checked elsewhere.
    fn refuse(&self, comm: &dyn Collective, is_borrowed: bool, are_by_caller: bool) -> Result<()> {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let (is_eager, skips) = (self.mode == Mode::Eager, self.loss_scale.skips_nonfinite());
        let (is_sharded, is_fsdp) = (self.strategy != Strategy::Replicated, self.strategy == Strategy::Fsdp);
        let (is_offloaded, is_summed) = (self.offload.is_some(), self.accumulation == Accumulation::Summed);
        let (is_uneven, is_skip) = (self.uneven_inputs.is_some(), self.unused == Some(Unused::Skip));
        let (divisor, decay) = (self.gradient_divisor.unwrap_or(1.0), self.ema_decay.unwrap_or_default());
        let is_norm = |max_norm: f64| max_norm > 0.0 && max_norm.is_finite();
        let is_per_bucket = matches!(self.clip, Some(Clip::PerBucket(_)));
        let group = self.group_clips.first().map(|(group, _)| &**group);
        let of_group =
            self.group_clips.iter().find(|(_, max_norm)| max_norm.is_some_and(|norm| !is_norm(norm)));
        refuse! {
            "world_size" = 0, if world_size == 0
                => "out of range", "use 1 or more";
            "rank" = rank, if rank >= world_size
                => "out of range", format_args!("use a rank below the world size, {world_size}");
            "clip" = shown(self.clip), if self.clip.is_some_and(|clip| !is_norm(clip.max_norm()))
                => "out of range", "use a finite number above 0";
            "clip" = shown(self.clip), if is_eager && matches!(self.clip, Some(Clip::Global(_)))
                => "Eager steps the first bucket before the norm of all is known",
                "use Normed or Sequential, or Clip::Previous or Clip::PerBucket, which are not exact";
            "clip" = shown(self.clip), if is_per_bucket && self.skip_nonfinite
                => "cannot be combined with skip_nonfinite", "keep one";
            "clip" = shown(self.clip), if is_per_bucket && skips
                => "cannot be combined with a dynamic loss_scale", "keep one";
            "group_clip" = group.unwrap_or_default(), if is_eager && group.is_some()
                => UNSEEN, LATER;
            "group_clip" = group.unwrap_or_default(),
                if group.is_some() && (is_per_bucket || matches!(self.clip, Some(Clip::Previous(_))))
                => format_args!("cannot be combined with {}, which is not by the norm of a group", shown(self.clip)),
                "use Clip::Global or no clip";
            "group_clip" = of_group.map_or("", |(group, _)| group), if of_group.is_some()
                => format_args!("{} is out of range", of_group.and_then(|of| of.1).unwrap_or_default()),
                "use a finite number above 0";
            "skip_nonfinite" = true, if is_eager && self.skip_nonfinite
                => UNSEEN, LATER;
            "gradient_divisor" = divisor, if !(1.0..=LARGEST_DIVISOR).contains(&divisor)
                => "out of range", "use a number from 1 to 2^24";
            "gradient_divisor" = divisor, if self.gradient_divisor.is_some() && self.counts_ranks()
                => "uneven_inputs divides by the ranks that had data", "use Divisor::WorldSize";
            "loss_scale" = "dynamic", if is_eager && !matches!(self.loss_scale, LossScale::Constant(_))
                => UNSEEN, LATER;
            "ema" = decay, if !(0.0..=1.0).contains(&decay)
                => "out of range", "use a decay rate from 0 to 1";
            "deadline" = 0, if self.deadline == Some(Duration::ZERO)
                => "no rank could arrive in time", "use a longer one";
            "uneven_inputs" = shown(self.uneven_inputs), if is_fsdp && is_uneven
                => "a rank without data does not know which buckets the others unshard", "use Strategy::Zero";
            "max_unsharded" = shown(self.max_unsharded), if !is_fsdp && self.max_unsharded.is_some()
                => "every rank has all parameters all the time", "use Strategy::Fsdp";
            "shard_size" = shown(self.shard_size), if !is_sharded && self.shard_size.is_some()
                => "every rank has all values", "use Strategy::Zero or Strategy::Fsdp";
            "accumulation" = "Summed", if is_summed && !is_sharded
                => "every rank has full gradients", "use Strategy::Zero or Strategy::Fsdp";
            "accumulation" = "Summed", if is_summed && is_uneven
                => "a rank without data does not know how many micro-batches the others make",
                "use Accumulation::Local";
            "offload" = "set", if is_offloaded && is_borrowed
                => "the caller's tensors are not copied yet", "let the stepper own its buckets";
            "offload" = "set", if is_offloaded && self.copy_dtype.is_some()
                => "copies of parameters would stay with the host",
                "use 16-bit parameters with a master instead of copy_params";
            "offload" = "set", if is_offloaded && self.gradients == Gradients::Average
                => "averaged gradients would stay with the host",
                "use Gradients::Keep, Gradients::Zero or, on the host, Gradients::Release";
            "unused" = shown(self.unused), if are_by_caller && (is_skip || is_uneven)
                => "sums by the caller bring no counts of ranks",
                "use Unused::Refuse or Unused::StepZero, and no uneven_inputs";
            "unused" = "Skip", if is_borrowed && is_skip
                => "a borrowed bucket is summed as it is, and has no element that counts ranks",
                "use Unused::Refuse or Unused::StepZero, and Stepper::set_unused";
            "uneven_inputs" = "set", if is_borrowed && is_uneven
                => "a borrowed bucket is summed as it is, and has no element that counts ranks",
                "remove this option, or let the stepper own its buckets";
            "bucket_cap_bytes" = "set", if is_borrowed && self.caps.is_some()
                => "borrowed buckets have fixed sizes", "remove this option";
            "gradients" = "Release", if is_borrowed && self.gradients == Gradients::Release
                => "borrowed memory cannot be released", "use Gradients::Keep or Gradients::Zero";
        }
        match self.loss_scale {
            LossScale::Constant(loss_scale) => self.refuse_loss_scale(loss_scale, world_size)?,
            LossScale::Dynamic(scaler) => scaler.validate(self.divisor(world_size))?,
            LossScale::External(_) => {}
        }
        self.threads.map_or(Ok(()), |threads| Pool::refuse_threads("threads", threads))?;
        self.refuse_unknown_calls(comm)
    }

    /// Refuses a loss scale if 1 / (divisor * loss scale) is not a normal f32, because gradients are multiplied by this
    /// factor.
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

    /// Returns the divisor of the summed gradients for a pass in which all ranks have data.
    fn divisor(&self, world_size: u32) -> f64 {
        self.gradient_divisor.unwrap_or_else(|| f64::from(world_size))
    }

    /// Returns whether the mean is taken over only the ranks that had data.
    fn counts_ranks(&self) -> bool {
        self.uneven_inputs == Some(Divisor::ContributingRanks)
    }
}
