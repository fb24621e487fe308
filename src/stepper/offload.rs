//! Steps on the host (offload): the options that cannot be combined with offload, and how parameters are restored after
//! a failure.
//!
//! The host's memory stores the parameters, and the device has copies of them. The ops of `schedule/offload.rs` update
//! these copies. A write by the trainer changes both the host's memory and the device's copy.

use crate::collective::Collective;
use crate::cuda::HostSide;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::host::kernels::{Isa, Kernels};
use crate::layout::{Layout, Plan, Segment, SegmentAction};
use crate::op::{Memory, Span};
use crate::stepper::builder::StepperBuilder;
use crate::stepper::state::options::OffloadPolicy;
use crate::stepper::stepper::Stepper;

impl StepperBuilder<'_> {
    /// Runs steps on the host, in the host's memory. Reduced gradients are copied to the host. Stepped parameters are
    /// copied back to the device after the step. With [`Strategy::Fsdp`](crate::Strategy), stepped parameters are
    /// copied back when their bucket is [unsharded](Stepper::unshard). The copies run on separate streams and overlap
    /// with forward and backward. Without this option, steps run on the stepper's device.
    ///
    /// On a GPU, the driver calls the host's kernels in stream order (`cuLaunchHostFunc`). [`threads`](Self::threads)
    /// and [`isa`](Self::isa) apply to these kernels. Your own
    /// [`StepParam::step_param`](crate::optim::StepParam::step_param) runs in a callback of the driver and must make no
    /// CUDA call. The tensors of a [`grad_scaler`](Self::grad_scaler) must be in the host's memory. Collectives must
    /// also accept page-locked host memory ([`Call::stream`](crate::collective::Call::stream)). After a graph has
    /// captured a communicator's collectives, NCCL also runs its network operations in callbacks of the driver. A step
    /// on the host may then delay collectives between machines. Dropping a stepper waits for running steps.
    ///
    /// The result has the same bits as without offload. [`Memory::is_offloaded`](crate::op::Memory::is_offloaded)
    /// returns whether an entry of [`Stepper::memory`] is in the host's memory. On the host device, all memory is the
    /// host's, so offload saves no memory and only lets you test the schedule.
    ///
    /// ```
    /// use instep::{Adam, Layout, OffloadPolicy, Solo, Stepper};
    ///
    /// let layout = Layout::builder().param("w", 4096).build()?;
    /// let w = layout.id("w")?;
    /// let builder = Stepper::builder(&layout, Adam::default()).offload(OffloadPolicy::default());
    /// let mut stepper = builder.host(Solo::default())?;
    /// let mut pass = stepper.begin()?;
    /// pass.grads().get_mut(w)?.fill(1.0);
    /// pass.finish()?;
    /// assert!(stepper.view::<f32>(w)?[0] < 0.0);
    /// let memory = stepper.memory();
    /// let host: u64 = memory.iter().filter(|(m, _)| m.is_offloaded(stepper.plan())).map(|(_, bytes)| bytes).sum();
    /// assert!(host >= 4 * 4 * 4096); // parameters, gradients and two states
    /// # Ok::<(), instep::Error>(())
    /// ```
    pub fn offload(mut self, policy: OffloadPolicy) -> Self {
        self.offload = Some(policy);
        self
    }

    /// Returns the host's part of an offloaded stepper on a GPU: its kernels and threads.
    pub(super) fn host_side(&self, comm: &dyn Collective) -> Result<Option<HostSide>> {
        let Some(policy) = self.offload else { return Ok(None) };
        let kernels = Kernels::load(self.isa.map_or_else(Isa::from_environment, Ok)?)?;
        Ok(Some(HostSide { kernels, pool: self.pool(comm)?, is_pinned: policy.pin_memory }))
    }
}

/// Refuses gradients that are averaged for an optimizer outside the stepper, if steps are offloaded.
pub(super) fn refuse_averages(layout: &Layout, plan: &Plan) -> Result<()> {
    let is_averaged = |segment: &&Segment| segment.action == SegmentAction::Average && segment.len > 0;
    match plan.segments().iter().find(is_averaged).filter(|_| plan.is_offloaded()) {
        None => Ok(()),
        Some(segment) => {
            let name = &layout.parameters()[segment.param as usize].name;
            let wrong = "its averaged gradient would stay with the host";
            let remedy = "give it an optimizer, or leave offload out";
            Err(Error::unsupported(format_args!("offload with `{name}`"), wrong, remedy))
        }
    }
}

impl<D: Device> Stepper<D> {
    /// Updates the device's copies of the parameters from the host's memory, after a failure. The ops that make these
    /// copies may have been skipped.
    pub(super) fn restore_params(&mut self) -> Result<()> {
        if !self.plan.is_offloaded() || self.run.get_mut().refuse_rescued().is_ok() {
            return Ok(());
        }
        let mut bytes = Vec::new();
        for (k, bucket) in (0..).zip(self.plan.buckets()) {
            if self.run.borrow().schedule.is_full(k) {
                let [from, to] =
                    [Memory::HostParams, Memory::Params].map(|memory| Span::shard(memory, bucket));
                bytes.resize(from.bytes() as usize, 0);
                self.read_span(from, &mut bytes)?;
                self.write_span(to, &bytes)?;
            }
        }
        Ok(())
    }
}
