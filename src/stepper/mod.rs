//! What users hold: a stepper, its passes, and views of the memory that it owns.
//!
//! The safe interface cannot race: views borrow the pass, everything that may launch takes the pass mutably or by
//! value, and to touch is to wait. Must not decide any order itself; it forwards events to the schedule.

mod access;
mod agreement;
mod attached;
mod borrowed;
mod build;
mod builder;
mod control_access;
mod copies;
pub(crate) mod counts;
mod gpu;
mod graphs;
mod join;
mod multipliers;
mod optimizers;
mod pass;
mod rates;
mod rebuild;
mod run;
mod scaling;
mod stored;
mod views;

pub use access::Status;
pub use attached::Attached;
pub use borrowed::Borrowed;
pub use builder::{StepperBuilder, Unused};
pub use join::Divisor;
pub use optimizers::OptimizerId;
pub use pass::{Abandoned, Pass};
pub use run::Recording;
pub use views::{Grads, Params, ParamsMut};

use std::cell::RefCell;
use std::num::NonZeroU32;
use std::sync::Arc;

use crate::collective::Collective;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::hazard::{self, Hazard};
use crate::host::{HostDevice, Isa};
use crate::launch::Assignment;
use crate::layout::{Layout, Plan};
use crate::op::Memory;
use crate::optim::Optimizer;
use crate::schedule::{Mode, Opening, Policy};
use agreement::Agreement;
use optimizers::Optimizers;
use rates::Rates;
use run::Run;
use scaling::Loaded;

/// One rank's parameters, gradients and optimizer state, and the schedule that steps them.
///
/// # Ordering
/// Calls return once they are queued; whatever touches memory first waits for the ops that it conflicts with. On a GPU
/// it is the trainer's stream that waits, wherever a call is said to; the thread does in calls that copy to the host or
/// from it, in [`join`](Self::join) and [`close`](Self::close), and where it is eight passes ahead.
///
/// # Source
/// PyTorch's overlapped optimizers: `_optimizer_overlap`, `optimizer_overlap_hooks`.
pub struct Stepper<D: Device = HostDevice> {
    layout: Layout,
    plan: Arc<Plan>,
    policy: Policy,
    assignment: Arc<Assignment>,
    optimizers: Optimizers,
    rates: Rates,
    /// Constant, unless the policy says otherwise.
    loss_scale: f64,
    loaded: Loaded,
    agreement: Agreement,
    comm: Arc<dyn Collective>,
    /// Parameters were written since the last broadcast, so ranks may differ.
    params_written: bool,
    /// Per parameter, whether its gradient was written in the open pass.
    written: RefCell<Vec<bool>>,
    run: RefCell<Run<D>>,
}

impl Stepper {
    /// Starts the options for a stepper of `layout`.
    pub fn builder(layout: &Layout, optimizer: impl Optimizer + 'static) -> StepperBuilder<'_> {
        StepperBuilder::new(layout, Some(optimizer.boxed()))
    }

    /// Starts the options for a stepper of `layout` whose parameters have no optimizer until
    /// [`group`](StepperBuilder::group) or [`optimizer_for`](StepperBuilder::optimizer_for) gives them one: what has
    /// none is averaged over the ranks.
    pub fn builder_without_optimizer(layout: &Layout) -> StepperBuilder<'_> {
        StepperBuilder::new(layout, None)
    }

    /// A stepper on the CPU with default options.
    ///
    /// # Errors
    /// As [`StepperBuilder::host`].
    pub fn host(
        layout: &Layout,
        optimizer: impl Optimizer + 'static,
        comm: impl Collective + 'static,
    ) -> Result<Stepper> {
        Stepper::builder(layout, optimizer).host(comm)
    }

    /// The kernels' instruction set.
    pub fn isa(&self) -> Isa {
        self.run.borrow().device.isa()
    }
}

impl<D: Device> Stepper<D> {
    /// How many bytes each memory takes, padding included. The arenas of parameters, gradients and each state have as
    /// many elements, since they share offsets, of the sizes that the [precision](crate::StepperBuilder::precision)
    /// says.
    pub fn memory(&self) -> Vec<(Memory, u64)> {
        self.run.borrow().device.sizes()
    }

    /// What has been recorded since the last call, if [`StepperBuilder::record`] asked for it. The checker judges whole
    /// lists: one that begins in the middle of a run lacks the Records that its Waits refer to.
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 2).build()?;
    /// let mut stepper = Stepper::builder(&layout, Sgd::default()).record(true).host(Solo::default())?;
    /// for _ in 0..3 {
    ///     stepper.begin()?.finish()?;
    /// }
    /// if let Some(recording) = stepper.take_recording() {
    ///     assert!(stepper.check(&recording).is_empty()); // no race
    ///     println!("{:?}", recording.exposure());
    /// }
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// Waits for all steps, unless a pass is open.
    pub fn take_recording(&mut self) -> Option<Recording> {
        // A failed run has a recording too: what was submitted, and what ran of it.
        let _ = self.settle_between_passes();
        if !D::TRAINER_IS_A_STREAM {
            // What is behind the last step is to be in it too; a device whose trainer is a stream waits for all.
            let _ = self.settle_control();
        }
        self.run.get_mut().take_recording()
    }

    /// Judges a recording of this stepper: every pair of accesses that conflict and are not ordered.
    pub fn check(&self, recording: &Recording) -> Vec<Hazard> {
        hazard::check(&self.plan, self.assignment.state_count(), &recording.list)
    }

    /// Opens a pass: one forward and backward.
    ///
    /// # Ordering
    /// Does not wait; the steps of the last pass may still run. In the first pass, and after
    /// [`params_mut`](Stepper::params_mut), all ranks take rank 0's parameters.
    ///
    /// # Errors
    /// `Order` if a pass is open, because one was leaked: see [`abandon_open_pass`](Self::abandon_open_pass); `Config`
    /// if the optimizer refuses a rate of a [schedule](StepperBuilder::lr_schedule).
    pub fn begin(&mut self) -> Result<Pass<'_, D>> {
        self.begin_accumulating(NonZeroU32::MIN)
    }

    /// Opens a pass of several micro-batches, whose gradients add up: the first write of the pass replaces, later ones
    /// are the trainer's to add ([`Grads::add`]). Buckets launch in the last micro-batch only. A mean over
    /// micro-batches is the trainer's too: it divides its loss by their number.
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// # let layout = Layout::builder().param("w", 2).build()?;
    /// # let w = layout.id("w")?;
    /// # let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Default::default() }, Solo::default())?;
    /// let mut pass = stepper.begin_accumulating(2.try_into().unwrap())?;
    /// pass.grads().add(w, &[1.0, 2.0])?;
    /// pass.grad_ready(w)?; // nothing is launched yet
    /// pass.next_micro_batch()?;
    /// pass.grads().add(w, &[0.5, 0.5])?;
    /// pass.grad_ready(w)?; // now the bucket is on its way
    /// pass.finish()?;
    /// assert_eq!(stepper.params()?.get(w)?, [-1.5, -2.5]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Ordering
    /// As [`begin`](Self::begin).
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    pub fn begin_accumulating(&mut self, micro_batches: NonZeroU32) -> Result<Pass<'_, D>> {
        self.open(Opening { micro_batches, ..Opening::default() })?;
        Ok(Pass::new(self))
    }

    /// Opens a pass with what this stepper knows of it.
    fn open(&mut self, opening: Opening) -> Result<()> {
        self.follow_schedules()?;
        let run = self.run.get_mut();
        let schedule = &run.schedule;
        let frozen = (0..self.layout.parameters().len()).filter(|param| schedule.is_frozen(*param));
        let agreement = self.agreement.number(&(&self.optimizers, &self.loaded), frozen);
        run.schedule.begin(Opening { broadcast: self.params_written, agreement, ..opening })?;
        run.submit();
        self.params_written = false;
        self.written.get_mut().fill(false);
        Ok(())
    }

    /// Gives up a pass whose [`Pass`] was leaked.
    ///
    /// # Errors
    /// `Order` if no pass is open.
    pub fn abandon_open_pass(&mut self) -> Result<Abandoned> {
        let run = self.run.get_mut();
        let stepped_buckets = 0..run.schedule.abandon()?;
        run.submit();
        Ok(Abandoned { stepped_buckets })
    }

    /// Ends the stepper.
    ///
    /// # Ordering
    /// Waits for everything, whatever it returns. On a GPU it does not once something has failed: what was queued
    /// before may still run, and only a synchronisation of the device tells when it has.
    ///
    /// # Errors
    /// `Poisoned` if anything has failed; `Order` if a pass was leaked open, which ends the other ranks too.
    pub fn close(mut self) -> Result<()> {
        let run = self.run.get_mut();
        let outcome = if run.schedule.is_open() {
            self.comm.abort(&closed_inside(self.comm.rank()));
            Err(Error::Order("a pass is open".into()))
        } else {
            run.schedule.synchronize();
            run.settle()
        };
        outcome.and(run.device.end())
    }

    /// The layout it was built for.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Buckets and offsets.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.comm.rank()
    }

    /// Number of ranks that gradients are averaged over.
    pub fn world_size(&self) -> u32 {
        self.comm.world_size()
    }

    /// When steps run.
    pub fn mode(&self) -> Mode {
        self.policy.mode
    }
}

impl<D: Device> Drop for Stepper<D> {
    fn drop(&mut self) {
        if self.run.get_mut().schedule.is_open() {
            self.comm.abort(&closed_inside(self.comm.rank()));
        } else if std::thread::panicking() {
            // Where memory is borrowed the device's end waits for what is queued, and peers may wait for this rank.
            let rank = self.comm.rank();
            self.comm.abort(&Error::PeerLost { rank, why: "it panicked".into() });
        }
    }
}

fn closed_inside(rank: u32) -> Error {
    Error::PeerLost { rank, why: "it dropped its stepper inside a pass".into() }
}

impl<D: Device> std::fmt::Debug for Stepper<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stepper")
            .field("rank", &self.comm.rank())
            .field("world_size", &self.comm.world_size())
            .field("mode", &self.policy.mode)
            .field("buckets", &self.plan.buckets().len())
            .finish()
    }
}
