//! What users hold: a stepper, its passes, and views of the memory that it owns.
//!
//! The safe interface cannot race: views borrow the pass, everything that may launch takes the pass mutably or by
//! value, and to touch is to wait. Must not decide any order itself; it forwards events to the schedule.

mod builder;
mod groups;
mod pass;
mod run;
mod views;

pub use builder::{StepperBuilder, Unused};
pub use pass::{Abandoned, Pass};
pub use run::Recording;
pub use views::{Grads, Params, ParamsMut};

use std::cell::RefCell;
use std::num::NonZeroU32;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::host::{HostDevice, Isa};
use crate::layout::{Layout, ParamId, Plan};
use crate::op::{Collective, Device, Memory};
use crate::optim::Optimizer;
use crate::schedule::{Mode, Policy};
use groups::Groups;
use run::Run;

/// One rank's parameters, gradients and optimizer state, and the schedule that steps them.
///
/// # Ordering
/// Calls return once they are queued; whatever touches memory first waits for the ops that it conflicts with.
///
/// # Source
/// PyTorch's overlapped optimizers: `_optimizer_overlap`, `optimizer_overlap_hooks`.
pub struct Stepper<D: Device = HostDevice> {
    layout: Layout,
    plan: Arc<Plan>,
    policy: Policy,
    state_names: &'static [&'static str],
    groups: Groups,
    isa: Isa,
    comm: Arc<dyn Collective>,
    /// Parameters were written since the last broadcast, so ranks may differ.
    params_written: bool,
    /// Per parameter, whether its gradient was written in the open pass.
    written: RefCell<Vec<bool>>,
    run: RefCell<Run<D>>,
}

/// What the device decided about the last pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Status {
    /// Passes begun so far, this one included.
    pub pass: u64,
    /// Whether it changed nothing because of a non-finite gradient.
    pub skipped: bool,
    /// Norm of the averaged gradients, infinite or NaN if one of them is; `None` if neither mode nor option asked for
    /// it, or the pass was given up.
    pub norm: Option<f64>,
    /// Factor that clipping multiplied them by; 1 without clipping, and in a skipped pass.
    pub clip: f64,
    /// The first bucket with an infinite or NaN gradient among those stepped. Eager steps it all the same.
    pub first_nonfinite_bucket: Option<u32>,
}

impl Stepper {
    /// Starts the options for a stepper of `layout`.
    pub fn builder(layout: &Layout, optimizer: impl Optimizer + 'static) -> StepperBuilder<'_> {
        StepperBuilder::new(layout, Box::new(optimizer))
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

    /// The parameters, between passes.
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// `Order` inside a pass, `Poisoned` after a failure.
    pub fn params(&self) -> Result<Params<'_>> {
        self.settle_between_passes()?;
        Ok(Params::new(self))
    }

    /// The parameters, to initialise or load them. The next pass gives every rank those of rank 0, in a collective: once
    /// a pass has been made, call this on all ranks or on none.
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// As [`params`](Self::params).
    pub fn params_mut(&mut self) -> Result<ParamsMut<'_>> {
        self.settle_between_passes()?;
        self.params_written = true;
        Ok(ParamsMut::new(self))
    }

    /// A parameter's gradient as the last pass left it: the sum over ranks, or the mean where the action is Average.
    ///
    /// # Shapes
    /// As many f32 as the parameter, aligned to 64 bytes.
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// As [`params`](Self::params); `Layout` if `id` is of another layout.
    pub fn grad(&self, id: ParamId) -> Result<&[f32]> {
        self.settle_between_passes()?;
        self.view(id, Memory::Grads)
    }

    /// A parameter's optimizer state by name, as `torch.optim` calls it.
    ///
    /// # Shapes
    /// As many f32 as the parameter, aligned to 64 bytes.
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// As [`grad`](Self::grad); `Unsupported` if the optimizer keeps no such state.
    pub fn state(&self, id: ParamId, name: &str) -> Result<&[f32]> {
        self.settle_between_passes()?;
        let index = self.state_names.iter().position(|known| *known == name);
        let index = index.ok_or_else(|| Error::Unsupported {
            what: format!("the state `{name}`"),
            have: if self.state_names.is_empty() { "none".into() } else { self.state_names.join(", ") },
        })?;
        self.view(id, Memory::State(index as u8))
    }

    /// How many updates a parameter has had.
    ///
    /// # Ordering
    /// Waits for all steps.
    ///
    /// # Errors
    /// As [`grad`](Self::grad).
    pub fn step_count(&self, id: ParamId) -> Result<u64> {
        self.settle_control()?;
        self.read_step_count(self.layout.index(id)?)
    }

    /// Sets the learning rate of a group ([`DEFAULT_GROUP`](crate::layout::DEFAULT_GROUP) if the layout names none) from
    /// the next pass on. Ranks must set the same: what is compared at each collective are the options they were built
    /// with.
    ///
    /// # Ordering
    /// Waits for the last pass to have begun on the optim stream, not for its steps; behind an abandoned pass, for all
    /// that it left in flight.
    ///
    /// # Errors
    /// `Config` if there is no such group or the optimizer refuses the rate, which changes nothing; `Order` inside a
    /// pass, `Poisoned` after a failure.
    pub fn set_lr(&mut self, group: &str, lr: f64) -> Result<()> {
        self.refuse_open_pass()?;
        let (index, hyper) = self.groups.set_lr(group, lr)?;
        self.write_group(index, hyper)
    }

    /// What was decided about the last pass.
    ///
    /// # Ordering
    /// Waits for all steps; asked after every pass, it takes from Normed the overlap with the next forward.
    ///
    /// # Errors
    /// As [`params`](Self::params).
    pub fn status(&self) -> Result<Status> {
        self.settle_control()?;
        self.read_status()
    }

    /// How many bytes each memory takes, padding included. The arenas of parameters, gradients and each state are of one
    /// size, since they share offsets.
    pub fn memory(&self) -> Vec<(Memory, u64)> {
        self.run.borrow().device.memories().sizes().collect()
    }

    /// What has been recorded since the last call, if [`StepperBuilder::record`] asked for it. The checker judges whole
    /// lists: one that begins in the middle of a run lacks the Records that its Waits refer to.
    pub fn take_recording(&mut self) -> Option<Recording> {
        let run = self.run.get_mut();
        let mut recording = run.take_recording()?;
        recording.ran = run.device.take_ran();
        Some(recording)
    }
}

impl<D: Device> Stepper<D> {
    /// Opens a pass: one forward and backward.
    ///
    /// # Ordering
    /// Does not wait; the steps of the last pass may still run. In the first pass, and after
    /// [`params_mut`](Stepper::params_mut), all ranks take rank 0's parameters.
    ///
    /// # Errors
    /// `Order` if a pass is open, because one was leaked: see [`abandon_open_pass`](Self::abandon_open_pass).
    pub fn begin(&mut self) -> Result<Pass<'_, D>> {
        self.begin_accumulating(NonZeroU32::MIN)
    }

    /// Opens a pass of several micro-batches, whose gradients add up: the first write of the pass replaces, later ones
    /// are the trainer's to add ([`Grads::add`]). Buckets launch in the last micro-batch only. A mean over micro-batches is
    /// the trainer's too: it divides its loss by their number.
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
        let run = self.run.get_mut();
        run.schedule.begin(self.params_written, micro_batches)?;
        run.submit();
        self.params_written = false;
        self.written.get_mut().fill(false);
        Ok(Pass::new(self))
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
    /// Waits for everything.
    ///
    /// # Errors
    /// `Poisoned` if anything has failed; `Order` if a pass was leaked open, which ends the other ranks too.
    pub fn close(mut self) -> Result<()> {
        let run = self.run.get_mut();
        if run.schedule.is_open() {
            return Err(Error::Order("a pass is open".into()));
        }
        run.schedule.synchronize();
        run.settle()
    }

    /// The layout it was built for.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Buckets and offsets.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Names of the optimizer's states.
    pub fn state_names(&self) -> &'static [&'static str] {
        self.state_names
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

    /// The kernels' instruction set.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    fn settle_between_passes(&self) -> Result<()> {
        self.refuse_open_pass()?;
        self.run.borrow_mut().touch_all()
    }

    fn settle_control(&self) -> Result<()> {
        self.refuse_open_pass()?;
        self.run.borrow_mut().touch_control()
    }

    fn refuse_open_pass(&self) -> Result<()> {
        if self.run.borrow().schedule.is_open() {
            return Err(Error::Order("a pass is open; its own views reach parameters and gradients".into()));
        }
        Ok(())
    }
}

impl<D: Device> Drop for Stepper<D> {
    fn drop(&mut self) {
        if self.run.get_mut().schedule.is_open() {
            let rank = self.comm.rank();
            self.comm.abort(&Error::PeerLost { rank, why: "it dropped its stepper inside a pass".into() });
        }
    }
}

impl<D: Device> std::fmt::Debug for Stepper<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stepper")
            .field("rank", &self.comm.rank())
            .field("world_size", &self.comm.world_size())
            .field("mode", &self.policy.mode)
            .field("buckets", &self.plan.buckets().len())
            .field("isa", &self.isa)
            .finish()
    }
}
