//! Steps one bucket immediately, without a stepper. The fused launch works on the caller's memory.
//!
//! This module depends on `launch` and the devices, and uses no schedule, pass or collective. A bucket step runs the
//! same launches as a stepper, and gives the same bits. A call checks all its arguments before it writes anything.

mod builder;
mod element;
mod gpu;
mod host;
mod marks;
mod norm;
mod scaling;
mod settings;
mod shape;
mod tensors;

pub use builder::BucketStepBuilder;
pub use element::StepElement;
pub use gpu::OnGpu;
pub use host::OnHost;
pub use norm::{Decision, GradNorm, NORM_LIMBS, NormOnGpu, NormOnHost, NormSum, NormSumOnGpu};
pub use scaling::Scaling;
pub use tensors::{Lent, StepTensors};

use crate::error::{Error, Result};
use crate::launch::{Assignment, Settings};
use crate::layout::{Layout, ParamId, Plan};
use crate::optim::Optimizer;
use builder::{Parts, group_of};
use marks::BucketMark;
use shape::Shape;

/// The optimizer step of one bucket. The caller lends the bucket's tensors to each call.
///
/// `BucketStep` is for engines that reduce gradients themselves and need only the fused update, without passes,
/// collectives or a schedule. A `BucketStep` stores step counts and hyperparameters. The caller owns parameters,
/// gradients and states. Buckets may be stepped in any order, on any thread.
///
/// For a model with several buckets, build one `BucketStep` per bucket, and set the bucket's parameters and their
/// offsets with [`BucketStepBuilder::bucket`]. To clip by the norm of all buckets, call
/// [`add_norm`](BucketStep::add_norm) for each bucket, then [`GradNorm::decide`] once, then
/// [`step_decided`](BucketStep::step_decided) for each bucket. To change a learning rate, call
/// [`set_lr`](BucketStep::set_lr). To resume, restore the tensors and call
/// [`set_step_count`](BucketStep::set_step_count) for every parameter. Only a stepper can be saved to a
/// [checkpoint](crate::checkpoint).
///
/// ```
/// use instep::bucket_step::{Lent, StepTensors};
/// use instep::{AdamW, BucketStep, Layout, Scaling};
///
/// let layout = Layout::builder().param("weight", 6).param("bias", 2).build()?;
/// let mut step = BucketStep::builder(&layout, AdamW { lr: 0.1, ..Default::default() }).host()?;
///
/// // One flat run per kind of tensor; `Lent::slices_mut` takes one run per parameter.
/// let (mut params, mut exp_avg, mut exp_avg_sq) = ([1.0f32; 8], [0.0f32; 8], [0.0f32; 8]);
/// for _ in 0..10 {
///     let summed = [2.0f32; 8]; // over two ranks
///     let states = [Lent::slice_mut(&mut exp_avg), Lent::slice_mut(&mut exp_avg_sq)];
///     let tensors = StepTensors::new(Lent::slice_mut(&mut params), Lent::slice(&summed)).states(states);
///     step.step(&tensors, Scaling::mean(2))?;
/// }
/// assert_eq!(step.step_count(layout.id("bias")?)?, 10);
/// assert!(params.iter().all(|p| (p - 0.0).abs() < 0.01));
/// # Ok::<(), instep::Error>(())
/// ```
///
/// # Source
/// The fused optimizers of PyTorch and apex also take a list of tensors. [`Scaling::grad_scaler`] corresponds to the
/// arguments `grad_scale` and `found_inf` of PyTorch's fused optimizers.
pub struct BucketStep<E = OnHost> {
    layout: Layout,
    plan: Plan,
    assignment: Assignment,
    /// The optimizer of each group.
    optimizers: Vec<GroupOptimizer>,
    /// The settings of the next step.
    settings: Settings,
    /// For each parameter of the layout, the index of its first segment. `None` if the parameter is not in the bucket.
    segments: Vec<Option<usize>>,
    /// For each segment, the reasons why steps skip it.
    left: Vec<Left>,
    /// Whether a gradient was missing in the last call.
    lacks_some: bool,
    /// Whether the set of skipped parameters has changed since the records were last derived from the settings.
    is_stale: bool,
    mark: BucketMark,
    shape: Shape,
    engine: E,
}

/// A group's optimizer, with the hyperparameters of the next step.
struct GroupOptimizer {
    optimizer: Box<dyn Optimizer>,
    /// The names of the states for which the step was built. Each step must lend these states.
    state_names: &'static [&'static str],
}

/// Why steps skip a segment.
#[derive(Clone, Copy, Default)]
struct Left {
    is_frozen: bool,
    /// Whether the last call had no gradient for the segment.
    is_missing: bool,
}

impl Left {
    fn any(self) -> bool {
        self.is_frozen || self.is_missing
    }
}

impl BucketStep {
    /// Returns a builder for a step of a layout's parameters.
    pub fn builder(layout: &Layout, optimizer: impl Optimizer + 'static) -> BucketStepBuilder {
        BucketStepBuilder::new(layout, optimizer.as_rule().boxed())
    }
}

impl<E> BucketStep<E> {
    fn new(parts: Parts, is_on_gpu: bool, engine: impl FnOnce(&Parts) -> Result<E>) -> Result<BucketStep<E>> {
        let shape = Shape::new(&parts.plan, &parts.places, &parts.state_labels(), is_on_gpu);
        let engine = engine(&parts)?;
        let Parts { layout, plan, optimizers, assignment, settings, .. } = parts;
        let with_states = |optimizer: Box<dyn Optimizer>| GroupOptimizer {
            state_names: optimizer.state_names(),
            optimizer,
        };
        let mut segments = vec![None; layout.parameters().len()];
        for (k, segment) in plan.segments().iter().enumerate() {
            segments[segment.param as usize].get_or_insert(k);
        }
        Ok(BucketStep {
            left: vec![Left::default(); plan.segments().len()],
            segments,
            optimizers: optimizers.into_iter().map(with_states).collect(),
            layout,
            plan,
            assignment,
            settings,
            lacks_some: false,
            is_stale: false,
            mark: BucketMark::new(),
            shape,
            engine,
        })
    }

    /// Returns the layout that the step was built for.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the number of elements of a run that covers the whole bucket.
    pub fn elements(&self) -> u64 {
        self.shape.len()
    }

    /// Returns the names of a group's states, in the order of [`StepTensors::states`].
    ///
    /// # Errors
    /// `Layout` if the layout has no such group.
    pub fn state_names(&self, group: &str) -> Result<&'static [&'static str]> {
        Ok(self.optimizers[group_of(&self.layout, group)?].state_names)
    }

    /// Returns the index of a parameter's record.
    fn record(&self, id: ParamId) -> Result<usize> {
        let param = self.layout.index(id)?;
        match self.segments[param] {
            Some(segment) => Ok(self.assignment.record(0, segment)),
            None => {
                let name = &self.layout.parameters()[param].name;
                Err(Error::layout(format_args!("`{name}`"), "not in this bucket", "ask its own bucket"))
            }
        }
    }

    /// Returns the name that errors use for the bucket. This name contains the name of the bucket's first parameter.
    fn name(&self) -> String {
        let first = self.plan.segments().first();
        let name = |param: u32| &*self.layout.parameters()[param as usize].name;
        format!("bucket of `{}`", first.map_or("", |segment| name(segment.param)))
    }
}

impl<E> std::fmt::Debug for BucketStep<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BucketStep").field("elements", &self.elements()).finish_non_exhaustive()
    }
}
