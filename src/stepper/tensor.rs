//! The identifier of one tensor of a parameter, and the bytes of its elements.
//!
//! Every call that reads or writes a tensor takes a `TensorId`. The identifier does not name a `Memory`: `claims.rs`
//! finds the `Memory`, and refuses tensors that the stepper does not have. All readers and writers use `Elements` to
//! compute a tensor's byte range.

use std::ops::Range;

use crate::layout::{ParamId, Plan, Segment};
use crate::op::{self, Memory, Span};
use crate::schedule::Schedule;

/// A tensor of a stepper: a parameter, or a tensor that belongs to a parameter.
///
/// ```
/// # use instep::{Adam, Layout, Solo, Stepper};
/// # let layout = Layout::builder().param("w", 2).build()?;
/// let w = layout.id("w")?;
/// let mut stepper = Stepper::host(&layout, Adam::default(), Solo::default())?;
/// stepper.write(w, &[3.0, 4.0])?;
/// stepper.begin()?.write(w.grad(), &[0.5, 0.5])?;
/// let mut weights = [0.0; 2];
/// stepper.read(w, &mut weights)?;
/// assert_eq!((weights, stepper.view::<f32>(w.state("exp_avg"))?), ([3.0, 4.0], &[0.0; 2][..]));
/// # Ok::<(), instep::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorId<'n> {
    /// The parameter itself. If the parameter has a [master weight](crate::Master),
    /// [`Stepper::read`](crate::Stepper::read) returns the master's values.
    Param(ParamId),
    /// The parameter's gradient. After a pass, the gradient is **the sum over ranks, still multiplied by the loss
    /// scale**. The sum is neither divided nor clipped. The gradient of a local parameter is not summed over ranks. The
    /// step applies division and clipping as one factor. By default, it does not write the result to the gradient. For
    /// the mean, divide the sum by [`world_size`](crate::Stepper::world_size) and the loss scale. With the action
    /// [Average](crate::SegmentAction), the gradient is the mean of the scaled gradients.
    /// [`StepperBuilder::gradients`](crate::StepperBuilder::gradients) can average, zero or release the gradient.
    Grad(ParamId),
    /// A state of the parameter's optimizers, by its name in `torch.optim`
    /// ([`Stepper::state_names`](crate::Stepper::state_names) lists the names). All groups with the same kind of
    /// optimizer have as many states as the group that needs the most states. A state that an optimizer does not use
    /// stays zero.
    State(ParamId, &'n str),
    /// The parameter's [copy](crate::StepperBuilder::copy_params) in another type. Only steps write the copy. The copy
    /// is zeros until the parameter's first update.
    Copy(ParamId),
    /// The parameter's [moving average](crate::StepperBuilder::ema). The average is zeros until the parameter's first
    /// update. The first update overwrites an average that you wrote, unless you also set the [step
    /// count](crate::Stepper::set_step_count).
    Ema(ParamId),
}

impl From<ParamId> for TensorId<'_> {
    fn from(id: ParamId) -> Self {
        TensorId::Param(id)
    }
}

impl ParamId {
    /// Returns the identifier of the parameter's gradient.
    pub fn grad(self) -> TensorId<'static> {
        TensorId::Grad(self)
    }

    /// Returns the identifier of a state of the parameter's optimizers.
    pub fn state(self, name: &str) -> TensorId<'_> {
        TensorId::State(self, name)
    }

    /// Returns the identifier of the parameter's copy in another type.
    pub fn copy(self) -> TensorId<'static> {
        TensorId::Copy(self)
    }

    /// Returns the identifier of the parameter's moving average.
    pub fn ema(self) -> TensorId<'static> {
        TensorId::Ema(self)
    }
}

/// A range of elements of one parameter's tensor, counted from the parameter's first element.
#[derive(Clone, Debug)]
pub(super) struct Elements<'s> {
    pub(super) memory: Memory,
    pub(super) segment: &'s Segment,
    pub(super) range: Range<u64>,
}

impl<'s> Elements<'s> {
    /// Returns which elements of a tensor this rank has now. For a sharded tensor, these are the elements of this
    /// rank's shard. For a parameter or a copy, these are all elements while the bucket is unsharded.
    pub(super) fn present(
        memory: Memory,
        segment: &'s Segment,
        plan: &Plan,
        schedule: &Schedule,
    ) -> Elements<'s> {
        let is_unsharded = memory.is_sent() && schedule.is_full(segment.bucket);
        let is_full = is_unsharded || !(memory.is_sent() || memory.is_sharded_state());
        let range = if is_full { 0..segment.len } else { plan.bucket_of(segment).shard_of_segment(segment) };
        Elements { memory, segment, range }
    }

    /// Returns the span that stores these elements now. While a bucket is resharded, its offloaded parameters are only
    /// in the host's memory.
    pub(super) fn span(&self, plan: &Plan, schedule: &Schedule) -> Span {
        let Elements { memory, segment, range } = self;
        let is_of_host = *memory == Memory::Params && !schedule.is_full(segment.bucket);
        let memory = if is_of_host { memory.of_step(plan) } else { *memory };
        let first = if memory.has_gradient_offsets() { segment.grad_start } else { segment.start };
        Span::within(memory, plan.bucket_of(segment), first + range.start, first + range.end)
    }

    /// Returns the range of these elements in the full tensor, in bytes.
    pub(super) fn bytes(&self, plan: &Plan) -> Range<usize> {
        let at = |element| op::bytes_of(self.memory, plan.storage_of(self.segment), element) as usize;
        at(self.range.start)..at(self.range.end)
    }
}
