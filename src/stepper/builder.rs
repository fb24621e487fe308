//! Options of a stepper, and their refusal before anything exists.
//!
//! One table says which modes accept what. Options come first, environment variables second, defaults last. Must
//! leave nothing behind when it refuses: no thread, no memory, no collective.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result, environment};
use crate::host::HostDevice;
use crate::host::arena::Memories;
use crate::host::execute::{Parts, Rule};
use crate::host::kernels::{Isa, Kernels};
use crate::layout::{BucketCaps, Layout, Plan, Tails};
use crate::op::Collective;
use crate::optim::Optimizer;
use crate::pool::Pool;
use crate::schedule::{Mode, Policy, Schedule};
use crate::stepper::Stepper;
use crate::stepper::agreement::Agreement;
use crate::stepper::groups::Groups;
use crate::stepper::join::Divisor;
use crate::stepper::run::Run;

/// What happens to a parameter that no rank had a gradient for in a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Unused {
    /// Nothing: value, state and step count stay. A parameter that *some* rank used is stepped on all of them.
    #[default]
    Skip,
    /// It is stepped with a zero gradient, so momentum and decay still move it.
    StepZero,
}

/// Options of a [`Stepper`].
pub struct StepperBuilder<'a> {
    layout: &'a Layout,
    optimizer: Box<dyn Optimizer>,
    groups: Vec<(String, Box<dyn Optimizer>)>,
    mode: Mode,
    caps: BucketCaps,
    unused: Unused,
    uneven_inputs: Option<Divisor>,
    max_norm: Option<f64>,
    skip_nonfinite: bool,
    loss_scale: f64,
    isa: Option<Isa>,
    threads: Option<usize>,
    deadline: Option<Duration>,
    record: bool,
}

impl<'a> StepperBuilder<'a> {
    pub(super) fn new(layout: &'a Layout, optimizer: Box<dyn Optimizer>) -> Self {
        StepperBuilder {
            layout,
            optimizer,
            groups: Vec::new(),
            mode: Mode::default(),
            caps: BucketCaps::default(),
            unused: Unused::default(),
            uneven_inputs: None,
            max_norm: None,
            skip_nonfinite: false,
            loss_scale: 1.0,
            isa: None,
            threads: None,
            deadline: None,
            record: false,
        }
    }

    /// Hyperparameters for one group of the layout. Every group has the same optimizer, and shares its launches.
    pub fn group(mut self, name: impl Into<String>, optimizer: impl Optimizer + 'static) -> Self {
        self.groups.push((name.into(), Box::new(optimizer)));
        self
    }

    /// When steps run; Eager unless said otherwise. The result is the same bits in every mode.
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// Bytes of gradients per bucket, the first one included. Unset: 1 MiB, then 25 MiB.
    pub fn bucket_cap_bytes(mut self, bytes: u64) -> Self {
        self.caps = BucketCaps { first_bytes: bytes, rest_bytes: bytes };
        self
    }

    /// What happens to parameters without a gradient.
    pub fn unused(mut self, unused: Unused) -> Self {
        self.unused = unused;
        self
    }

    /// Lets ranks run out of data at different times (see [`Stepper::join`]), and says what the mean is then taken over. On
    /// [`Solo`](crate::Solo), which is one rank, that is 1.
    pub fn uneven_inputs(mut self, divisor: Divisor) -> Self {
        self.uneven_inputs = Some(divisor);
        self
    }

    /// Clips the global norm of the averaged gradients to `max_norm`, exactly. Refused in Eager.
    pub fn max_norm(mut self, max_norm: f64) -> Self {
        self.max_norm = Some(max_norm);
        self
    }

    /// Leaves every parameter, state and step count as it is in a pass in which a gradient to be stepped is infinite or
    /// NaN, or becomes so when it is averaged. Refused in Eager.
    pub fn skip_nonfinite(mut self, skip: bool) -> Self {
        self.skip_nonfinite = skip;
        self
    }

    /// A constant factor in the loss, divided out of the gradients.
    pub fn loss_scale(mut self, loss_scale: f64) -> Self {
        self.loss_scale = loss_scale;
        self
    }

    /// Instruction set of the kernels. Unset: `INSTEP_ISA`, else the widest.
    pub fn isa(mut self, isa: Isa) -> Self {
        self.isa = Some(isa);
        self
    }

    /// Kernel threads of this stepper alone. Unset: the communicator's shared pool, else `INSTEP_THREADS`, else one
    /// per core.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// How long a collective waits for other ranks. Unset: `INSTEP_DEADLINE_MS`, else 60 s.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Keeps the list of ops and accesses, and their times, until [`Stepper::take_recording`] takes it; the list grows
    /// with every pass.
    pub fn record(mut self, record: bool) -> Self {
        self.record = record;
        self
    }

    /// Builds the stepper on the CPU. Threads start at the first pass.
    ///
    /// # Errors
    /// `Config` for a value out of range or an option that the mode refuses, `Unsupported` or `Arithmetic` for an
    /// instruction set that cannot be used, `Layout` if the memory cannot be addressed.
    pub fn host(mut self, comm: impl Collective + 'static) -> Result<Stepper> {
        let comm: Arc<dyn Collective> = Arc::new(comm);
        let (rank, world_size) = (comm.rank(), comm.world_size());
        if world_size == 0 {
            return Err(Error::config("world_size", 0, "there is at least one rank"));
        }
        if rank >= world_size {
            return Err(Error::config("rank", rank, "must be below the world size"));
        }
        self.refuse(world_size)?;
        let groups = Groups::new(self.layout, &*self.optimizer, std::mem::take(&mut self.groups))?;
        let rule = Rule {
            optimizer: groups.kernel(),
            states: groups.state_names().len(),
            divisor: if self.counts_ranks() { 0.0 } else { f64::from(world_size) },
            loss_scale: self.loss_scale,
            max_norm: self.max_norm,
            skip_nonfinite: self.skip_nonfinite,
        };
        let isa = self.isa.map_or_else(Isa::from_environment, Ok)?;
        let kernels = Kernels::load(isa)?;
        let deadline = match self.deadline {
            Some(deadline) => deadline,
            None => Duration::from_millis(environment("INSTEP_DEADLINE_MS")?.unwrap_or(60_000)),
        };
        let pool = self.pool(&*comm)?;
        let tails = Tails { used: self.unused == Unused::Skip, contributors: self.uneven_inputs.is_some() };
        let plan = Arc::new(Plan::new(self.layout, world_size, self.caps, tails)?);
        if tails.contributors && plan.carrier().is_none() {
            return Err(Error::config(
                "uneven_inputs",
                "set",
                "a layout without elements has nothing to count ranks in",
            ));
        }
        let memories = Arc::new(Memories::new(&plan, rule.states, self.layout.groups().len())?);
        let policy = Policy::new(self.mode, self.max_norm.is_some() || self.skip_nonfinite);
        let schedule = Schedule::new(self.layout, Arc::clone(&plan), policy);
        let agreement = Agreement::new(
            self.layout,
            &plan,
            format_args!(
                "{:?} {:?} {:?} {:?} {} {}",
                self.mode,
                self.unused,
                self.uneven_inputs,
                self.max_norm,
                self.skip_nonfinite,
                self.loss_scale
            ),
        );
        let parts = Parts {
            plan: Arc::clone(&plan),
            memories,
            rule,
            hypers: groups.hypers()?,
            kernels,
            pool,
            comm: comm.clone(),
            deadline,
        };
        let device = HostDevice::new(parts, self.record);
        Ok(Stepper {
            layout: self.layout.clone(),
            state_names: groups.state_names(),
            groups,
            isa,
            written: vec![false; plan.segments().len()].into(),
            plan,
            policy,
            agreement,
            comm,
            params_written: true,
            run: RefCell::new(Run::new(schedule, device, self.record)),
        })
    }

    /// The table of what excludes what, and ranges that no other type checks.
    fn refuse(&self, world_size: u32) -> Result<()> {
        if let Some(max_norm) = self.max_norm {
            if !(max_norm > 0.0 && max_norm.is_finite()) {
                return Err(Error::config("max_norm", max_norm, "must be finite and above zero"));
            }
            if self.mode == Mode::Eager {
                let why = "the norm of all buckets is not known when Eager steps the first; use Normed or Sequential";
                return Err(Error::config("max_norm", max_norm, why));
            }
        }
        if self.skip_nonfinite && self.mode == Mode::Eager {
            let why = "Eager steps buckets before it has seen the others; use Normed or Sequential";
            return Err(Error::config("skip_nonfinite", true, why));
        }
        // Gradients are multiplied by this in f32, where it must neither vanish nor overflow.
        let multiplier = |ranks: u32| (1.0 / (f64::from(ranks) * self.loss_scale)) as f32;
        let fewest = if self.counts_ranks() { 1 } else { world_size };
        if ![fewest, world_size].map(multiplier).iter().all(|m| m.is_normal() && *m > 0.0) {
            let why = "must be finite and above zero, and 1/(world_size * loss_scale) a normal f32";
            return Err(Error::config("loss_scale", self.loss_scale, why));
        }
        if let Some(threads) = self.threads.filter(|threads| !(1..=Pool::MAX_THREADS).contains(threads)) {
            return Err(Error::config("threads", threads, "must be from 1 to 1024"));
        }
        if self.deadline == Some(Duration::ZERO) {
            return Err(Error::config("deadline", 0, "no rank could arrive in time"));
        }
        Ok(())
    }

    fn pool(&self, comm: &dyn Collective) -> Result<Pool> {
        if let Some(threads) = self.threads {
            return Ok(Pool::new(threads));
        }
        if let Some(pool) = comm.pool() {
            return Ok(pool);
        }
        Pool::from_environment()
    }

    /// Whether the mean is taken over the ranks that had data.
    fn counts_ranks(&self) -> bool {
        self.uneven_inputs == Some(Divisor::ContributingRanks)
    }
}
