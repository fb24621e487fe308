//! One bucket, stepped now: the fused launch as an object of its own, on anybody's memory.
//!
//! It depends on `launch` and the devices, and knows no schedule, no pass and no collective. A stepper runs the same
//! launches, so both give the same bits. Nothing is written before everything has been checked.

mod builder;
mod gpu;
mod host;
mod norm;
mod scaling;
mod shape;
mod tensors;

pub use builder::BucketStepBuilder;
pub use gpu::OnGpu;
pub use host::OnHost;
pub use norm::{Decision, GradNorm, NORM_LIMBS, NormOnGpu, NormOnHost, NormSum, NormSumOnGpu};
pub use scaling::Scaling;
pub use tensors::{Tensor, Tensors};

use crate::error::{Error, Result};
use crate::launch::{Assignment, Settings, StepConstants};
use crate::layout::{Layout, ParamId, Plan, SegmentAction};
use crate::optim::Optimizer;
use builder::{Parts, group_of};
use shape::Shape;

/// The step of one bucket, on tensors that come with each call.
///
/// It is for engines that reduce gradients themselves and want the fused update alone: no pass, no collective, no
/// schedule. It keeps step counts and hyperparameters; parameters, gradients and states stay the caller's. Buckets may be
/// stepped in any order, on any thread.
///
/// A model of several buckets has one object for each: [`BucketStepBuilder::bucket`] names its parameters and their offsets.
/// To clip over all of them, call [`add_norm`](BucketStep::add_norm) for each, [`GradNorm::decide`] once, and
/// [`step_decided`](BucketStep::step_decided) for each. To change a rate, call
/// [`set_optimizer`](BucketStep::set_optimizer). To resume, restore the tensors and call
/// [`set_step_count`](BucketStep::set_step_count) for every parameter; a [checkpoint](crate::checkpoint) is a stepper's.
///
/// ```
/// use instep::bucket_step::{Tensor, Tensors};
/// use instep::{AdamW, BucketStep, Layout, Scaling};
///
/// let layout = Layout::builder().param("weight", 6).param("bias", 2).build()?;
/// let mut step = BucketStep::builder(&layout, AdamW { lr: 0.1, ..Default::default() }).host()?;
///
/// // One flat run per kind of tensor; `Tensor::slices_mut` takes one run per parameter.
/// let (mut params, mut exp_avg, mut exp_avg_sq) = ([1.0f32; 8], [0.0f32; 8], [0.0f32; 8]);
/// for _ in 0..10 {
///     let summed = [2.0f32; 8]; // over two ranks
///     let states = [Tensor::slice_mut(&mut exp_avg), Tensor::slice_mut(&mut exp_avg_sq)];
///     let tensors = Tensors::new(Tensor::slice_mut(&mut params), Tensor::slice(&summed)).states(states);
///     step.step(&tensors, Scaling::mean(2))?;
/// }
/// assert_eq!(step.step_count(layout.id("bias")?)?, 10);
/// assert!(params.iter().all(|p| (p - 0.0).abs() < 0.01));
/// # Ok::<(), instep::Error>(())
/// ```
///
/// # Source
/// The fused optimizers of PyTorch and apex take a list of tensors as this does; `grad_scale` and `found_inf` are
/// PyTorch's ([`Scaling::grad_scaler`]).
pub struct BucketStep<E = OnHost> {
    layout: Layout,
    plan: Plan,
    assignment: Assignment,
    /// By group.
    kinds: Vec<OptimizerKind>,
    constants: StepConstants,
    /// As the next step is to read them.
    settings: Settings,
    /// Parameters were frozen or thawed since the records were made of the settings.
    is_stale: bool,
    shape: Shape,
    engine: E,
}

/// What a group's optimizer may not change: the launches and the states are made for it.
#[derive(Clone, Copy, PartialEq)]
struct OptimizerKind {
    kernel: u32,
    state_names: &'static [&'static str],
}

impl OptimizerKind {
    fn of(optimizer: &dyn Optimizer) -> OptimizerKind {
        OptimizerKind { kernel: optimizer.as_rule().kernel(), state_names: optimizer.state_names() }
    }
}

impl BucketStep {
    /// Starts the options of a step over a layout's parameters.
    pub fn builder(layout: &Layout, optimizer: impl Optimizer + 'static) -> BucketStepBuilder {
        BucketStepBuilder::new(layout, optimizer.as_rule().boxed())
    }
}

impl<E> BucketStep<E> {
    fn new(parts: Parts, engine: impl FnOnce(&Parts) -> Result<E>) -> Result<BucketStep<E>> {
        let shape = Shape::new(&parts.plan, &parts.places, parts.assignment.state_count());
        let engine = engine(&parts)?;
        let Parts { layout, plan, optimizers, assignment, constants, settings, .. } = parts;
        let kinds = optimizers.iter().map(|optimizer| OptimizerKind::of(&**optimizer)).collect();
        Ok(BucketStep {
            layout,
            plan,
            assignment,
            kinds,
            constants,
            settings,
            is_stale: false,
            shape,
            engine,
        })
    }

    /// Returns the layout it was built for.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the number of elements of a run for the whole bucket.
    pub fn elements(&self) -> u64 {
        self.shape.len()
    }

    /// Returns the names of a group's states, in the order of [`Tensors::states`].
    ///
    /// # Errors
    /// `Layout` if the layout has no such group.
    pub fn state_names(&self, group: &str) -> Result<&'static [&'static str]> {
        Ok(self.kinds[group_of(&self.layout, group)?].state_names)
    }

    /// The record of a parameter.
    fn record(&self, id: ParamId) -> Result<usize> {
        let param = self.layout.index(id)?;
        match self.plan.segments().iter().position(|segment| segment.param as usize == param) {
            Some(segment) => Ok(self.assignment.record(0, segment)),
            None => {
                let name = &self.layout.parameters()[param].name;
                Err(Error::layout(format_args!("`{name}`"), "not in this bucket", "ask its own bucket"))
            }
        }
    }

    /// Puts into the settings whether steps pass over a parameter.
    fn freeze(&mut self, id: ParamId, frozen: bool) -> Result<()> {
        let record = self.record(id)?;
        // One round. Its records are numbered as the segments.
        let action = if frozen { SegmentAction::Leave } else { self.plan.segments()[record].action };
        self.settings.set_action(record, action);
        self.is_stale = true;
        Ok(())
    }

    /// Checks a group's next optimizer and puts it into the settings.
    fn replace(&mut self, group: &str, optimizer: &dyn Optimizer) -> Result<()> {
        let index = group_of(&self.layout, group)?;
        if self.kinds[index] != OptimizerKind::of(optimizer) {
            let wrong = "another optimizer, or other states, than the step was built for";
            return Err(Error::unsupported(
                format_args!("group `{group}`"),
                wrong,
                "build another BucketStep",
            ));
        }
        // The plan has one bucket.
        crate::launch::refuse_storage(optimizer, &self.plan.buckets()[0].storage)?;
        self.settings.set_hyper(index, &optimizer.as_rule().hyper()?);
        Ok(())
    }
}

/// A product of momenta, which becomes 0 when it is too small for its type.
fn refuse_carried(carried: f64) -> Result<()> {
    if (0.0..=1.0).contains(&carried) {
        return Ok(());
    }
    Err(Error::range("carried", carried, "a number from 0 to 1"))
}

impl<E> std::fmt::Debug for BucketStep<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BucketStep").field("elements", &self.elements()).finish_non_exhaustive()
    }
}
