//! The stepper: one rank's layout, plan, state, schedule and device, and the calls that need only these parts.
//!
//! The stepper informs the schedule of the trainer's calls, and the schedule decides the order of the ops. The safe
//! interface cannot race, because views borrow the pass, and every launch borrows the pass mutably or consumes it.

use crate::launch::Settings;
use std::cell::RefCell;
use std::num::NonZeroU32;
use std::sync::Arc;

use crate::collective::Comms;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::hazard::{self, Hazard};
use crate::host::{HostDevice, Isa};
use crate::launch::Assignment;
use crate::layout::{Layout, Plan};
use crate::op::Memory;
use crate::optim::{Clip, LossScale};
use crate::schedule::Policy;
use crate::stepper::state::agreement::{Agreement, Changing};
use crate::stepper::state::hypers::Rates;
use crate::stepper::state::optimizers::{Assigned, Hyperparameters, Optimizers};
use crate::stepper::state::options::Unused;
use crate::stepper::state::run::{Recording, Run};
use crate::stepper::state::written::{Loaded, ParamsWritten};

/// One rank's parameters, gradients and optimizer state, and the schedule that steps them.
///
/// # Ordering
/// Calls return once their ops are queued. An access first waits for the ops that it conflicts with. On a GPU, "waits"
/// means that the trainer's stream waits. The thread itself waits in calls that copy to or from the host, in
/// [`join`](Self::join) and [`close`](Self::close), and when it is eight passes ahead of the GPU. Every other call in
/// which the thread waits says so in its documentation.
///
/// # Source
/// PyTorch's overlapped optimizers: `_optimizer_overlap`, `optimizer_overlap_hooks`.
pub struct Stepper<D: Device = HostDevice> {
    pub(super) layout: Layout,
    pub(super) plan: Arc<Plan>,
    pub(super) policy: Policy,
    pub(super) assignment: Arc<Assignment>,
    pub(super) optimizers: Optimizers,
    pub(super) rates: Rates,
    /// The settings that the next `Begin` op reads.
    pub(super) settings: Settings,
    /// Whether `settings` has changes that are not yet written to the device.
    pub(super) settings_changed: bool,
    /// The divisor of summed gradients for a pass in which all ranks have data.
    pub(super) divisor: f64,
    pub(super) clip: Option<Clip>,
    /// The loss scale as it was configured.
    pub(super) loss_scale: LossScale,
    pub(super) unused: Unused,
    /// Whether the open pass is being captured. Until the capture ends, all calls that are valid only between passes
    /// are refused.
    pub(super) is_capturing: bool,
    pub(super) abandoned: u64,
    pub(super) loaded: Loaded,
    pub(super) agreement: Agreement,
    pub(super) comms: Comms,
    /// The maximum number of buckets that may be unsharded at the same time.
    pub(super) max_unsharded: Option<NonZeroU32>,
    /// Parameters that were written since the last broadcast. They may differ between ranks.
    pub(super) params_written: ParamsWritten,
    /// Whether each parameter's gradient was written in the open pass.
    pub(super) written: RefCell<Vec<bool>>,
    pub(super) run: RefCell<Run<D>>,
}

impl Stepper {
    /// Returns the kernels' instruction set.
    pub fn isa(&self) -> Isa {
        self.run.borrow().device.isa()
    }
}

impl<D: Device> Stepper<D> {
    /// Returns how many bytes each kind of [`Memory`] takes, padding included. Unless tensors are sharded, each state's
    /// arena has as many elements as the arena of parameters, because both use the same offsets. The
    /// [precision](crate::StepperBuilder::precision) sets the size of an element. For [sharded
    /// parameters](crate::Strategy::Fsdp), the result counts this rank's shards and the buckets that are unsharded now.
    pub fn memory(&self) -> Vec<(Memory, u64)> {
        let sizes = self.run.borrow().device.sizes();
        let present = |(memory, bytes): (Memory, u64)| (memory, bytes - self.resharded_bytes(memory));
        sizes.into_iter().map(present).collect()
    }

    /// Returns what was recorded since the last `take_recording`, if [`record`](crate::StepperBuilder::record) was set.
    /// [`check`](Self::check) needs a complete recording. If a recording begins in the middle of a training run, some
    /// of its `Wait` ops have no `Record` op, and `check` reports them as faults.
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
        // After a failure, the recording still has the ops that were submitted and those that ran.
        let _ = self.settle_between_passes();
        if !D::TRAINER_IS_A_STREAM {
            // The recording includes the ops after the last step, so `settle_control` waits for them. If the trainer is
            // a stream, the device waits for all ops anyway.
            let _ = self.settle_control();
        }
        if (self.plan.shards_params() || self.plan.is_offloaded()) && self.refuse_open_pass().is_ok() {
            // The waits above do not cover releases of memory, or the copies of a pass without a step.
            let run = self.run.get_mut();
            run.schedule.synchronize();
            let _ = run.settle();
        }
        self.run.get_mut().take_recording()
    }

    /// Returns the faults of a recording of this stepper. Faults are conflicting accesses that are not ordered, and
    /// wrong `Wait` and `Record` ops.
    pub fn check(&self, recording: &Recording) -> Vec<Hazard> {
        hazard::check(&self.plan, self.assignment.state_count(), &recording.list)
    }

    /// Ends the stepper and returns its first failure, if any.
    ///
    /// # Ordering
    /// Waits for all ops, even if it returns an error. The exception is a failure on a GPU: this call then does not
    /// wait, and queued ops may still run until you synchronise the device.
    ///
    /// # Errors
    /// `Poisoned` if anything has failed. `Order` if a leaked pass is still open. If a pass is open, closing also ends
    /// the group of ranks, so the other ranks get an error.
    pub fn close(mut self) -> Result<()> {
        let is_open = self.run.get_mut().schedule.is_open();
        if is_open {
            self.abort_group(&closed_inside(self.rank()));
        }
        let run = self.run.get_mut();
        let outcome = if is_open {
            Err(Error::order("stepper", "closed while a pass was open", "finish or abandon the pass first"))
        } else {
            run.schedule.synchronize();
            run.settle().and(run.refuse_rescued())
        };
        outcome.and(run.device.end())
    }

    /// Returns the agreement's number. In the next collective, the agreement's numbers of all ranks must be equal.
    pub(super) fn agreed_number(&mut self) -> u64 {
        let schedule = &self.run.get_mut().schedule;
        let frozen = (0..self.layout.parameters().len()).filter(|param| schedule.is_frozen(*param));
        let changing = Changing {
            assigned: &Assigned(&self.optimizers),
            hyperparameters: &Hyperparameters(&self.optimizers),
            loaded: &self.loaded,
            written: &self.params_written.names(&self.layout),
        };
        self.agreement.number(&changing, frozen)
    }

    pub(super) fn abort_group(&self, cause: &Error) {
        self.comms.abort(cause);
    }

    /// Returns the layout that the stepper was built for.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the plan: the buckets, and the offsets of all tensors.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns the number of this rank.
    pub fn rank(&self) -> u32 {
        self.comms.world.rank()
    }

    /// Returns the number of ranks over which gradients are averaged.
    pub fn world_size(&self) -> u32 {
        self.comms.world.world_size()
    }
}

impl<D: Device> Drop for Stepper<D> {
    fn drop(&mut self) {
        if self.run.get_mut().schedule.is_open() {
            self.abort_group(&closed_inside(self.rank()));
        } else if std::thread::panicking() {
            // With borrowed memory, ending the device waits for queued ops. These ops may wait for other ranks, and the
            // other ranks may wait for this one.
            let rank = self.rank();
            self.abort_group(&Error::PeerLost { rank, why: "it panicked".into() });
        }
    }
}

/// The result of abandoning a pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Abandoned {
    /// The buckets that were stepped before the pass was abandoned, in order. These buckets keep their new parameters,
    /// states and step counts. Only `Eager` mode has such buckets.
    pub stepped_buckets: Vec<u32>,
}

fn closed_inside(rank: u32) -> Error {
    Error::PeerLost { rank, why: "it dropped its stepper inside a pass".into() }
}

impl<D: Device> std::fmt::Debug for Stepper<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stepper")
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .field("mode", &self.policy.mode)
            .field("buckets", &self.plan.buckets().len())
            .finish()
    }
}
