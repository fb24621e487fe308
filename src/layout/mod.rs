//! The parameters in registration order, with their names, lengths and numbers of uses.
//!
//! This module computes offsets and has no tensors. All ranks must have the same [`Layout`]. A [`Plan`] is a layout
//! that is divided into buckets, for given bucket caps and a world size. Layouts and plans do not depend on a device,
//! so they can be built and inspected anywhere.

mod bucket;
mod cut;
mod element_types;
mod flat;
mod foreign;
mod names;
mod plan;

pub use bucket::{Bucket, BucketCaps, Gradients, Segment, Tails};
pub use element_types::{Master, MixedPrecisionPolicy, Moments, Precision, Rounding, Storage, Storages};
pub use foreign::ForeignBucket;
pub(crate) use names::fold;
pub use plan::Plan;

use names::NameIndex;

use std::sync::Arc;

use crate::abi::{INSTEP_ACTION_AVERAGE, INSTEP_ACTION_LEAVE, INSTEP_ACTION_STEP};
use crate::dtype::DType;
use crate::error::{Error, Result, one_of};
use crate::text::sentence;

/// What a step does with a parameter. The discriminants equal the kernels' constants.
#[repr(u32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SegmentAction {
    /// Applies the optimizer.
    #[default]
    Step = INSTEP_ACTION_STEP,
    /// Multiplies the reduced gradient by 1/world_size in place, even in a skipped pass. Use this action for parameters
    /// that another optimizer updates. The result is the unclipped gradient of the *scaled* loss: your optimizer must
    /// divide it by the pass's loss scale and check for infinities. The gradient is not part of the norm, and never
    /// causes a skip.
    Average = INSTEP_ACTION_AVERAGE,
    /// Changes nothing: the gradient remains the sum over ranks, and the parameter does not change.
    Leave = INSTEP_ACTION_LEAVE,
}

/// One registered parameter.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Parameter {
    /// Unique within the layout.
    pub name: String,
    /// Number of elements. It may be zero.
    pub len: u64,
    /// Dimensions. Their product is the length. Unless [`shape`](LayoutBuilder::shape) sets dimensions, a parameter has
    /// one dimension.
    pub shape: Vec<u64>,
    /// The type of the parameter and its gradient, if it differs from the group's [precision](Precision).
    pub dtype: Option<DType>,
    /// The largest number of hand-overs of the gradient in one pass: 1, or the number of places in the model that share
    /// the parameter.
    pub uses: u32,
    /// What a step does with the parameter.
    pub action: SegmentAction,
    /// The parameter's group, as an index into [`Layout::groups`]. The group has the hyperparameters.
    pub group: u32,
    /// Whether the parameter is local to each rank: it is never reduced, averaged or broadcast.
    pub local: bool,
}

/// Identifies a parameter of one particular layout. A layout with other parameters returns an error for this id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ParamId {
    index: u32,
    fingerprint: u64,
}

/// The registered parameters, in order. Clones share them.
///
/// ```
/// let layout = instep::Layout::builder().param("weight", 64 * 10).param("bias", 10).build()?;
/// assert_eq!(layout.parameter(layout.id("bias")?)?.len, 10);
/// # Ok::<(), instep::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    parameters: Arc<[Parameter]>,
    by_name: Arc<NameIndex>,
    groups: Arc<Groups>,
    fingerprint: u64,
}

/// The names of groups, and the index of each name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Groups {
    names: Vec<String>,
    by_name: NameIndex,
}

/// The name of the group for parameters that were not put into another group.
pub const DEFAULT_GROUP: &str = "default";

/// The largest number of dimensions that numpy, PyTorch and our own reader all support.
const MAX_DIMENSIONS: usize = 64;

/// Collects parameters for a [`Layout`].
#[derive(Clone, Debug)]
pub struct LayoutBuilder {
    parameters: Vec<Parameter>,
    groups: Groups,
    /// An option that was set before any parameter was added.
    misplaced: Option<&'static str>,
}

impl Default for LayoutBuilder {
    /// Returns a builder without parameters, like [`Layout::builder`].
    fn default() -> LayoutBuilder {
        let mut groups = Groups::default();
        groups.place(DEFAULT_GROUP.into());
        LayoutBuilder { parameters: Vec::new(), groups, misplaced: None }
    }
}

impl LayoutBuilder {
    /// Adds a parameter of `len` elements. Add parameters in forward order. Buckets are filled from the last parameter
    /// to the first, because backward computes the last parameters' gradients first.
    pub fn param(mut self, name: impl Into<String>, len: usize) -> Self {
        self.parameters.push(Parameter {
            name: name.into(),
            len: len as u64,
            shape: vec![len as u64],
            dtype: None,
            uses: 1,
            action: SegmentAction::Step,
            group: 0,
            local: false,
        });
        self
    }

    /// Sets the dimensions of the parameter added last. [Checkpoints](crate::checkpoint) store the dimensions. Steps do
    /// not depend on dimensions, so layouts that differ only in dimensions have the same
    /// [fingerprint](Layout::fingerprint).
    ///
    /// ```
    /// let layout = instep::Layout::builder().param("weight", 64 * 10).shape([64, 10]).build()?;
    /// assert_eq!(layout.parameter(layout.id("weight")?)?.shape, [64, 10]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    pub fn shape(self, dimensions: impl IntoIterator<Item = usize>) -> Self {
        let shape = dimensions.into_iter().map(|dimension| dimension as u64).collect();
        self.last("shape", |last| last.shape = shape)
    }

    /// Sets the type of the parameter added last and of its gradient, instead of the types in the group's
    /// [precision](Precision). All other fields of the group's precision still apply, except that an f32 parameter has
    /// no [master](Master). Parameters of different precisions never share a bucket.
    ///
    /// ```
    /// use instep::{DType, Layout, Precision, Sgd, Solo, Stepper};
    ///
    /// let layout = Layout::builder().param("linear.weight", 6).param("norm.weight", 2).dtype(DType::F32).build()?;
    /// let bf16 = Precision { param: DType::BF16, grad: DType::BF16, ..Precision::F32 };
    /// let stepper = Stepper::builder(&layout, Sgd::default()).precision(bf16).host(Solo::default())?;
    /// let types: Vec<_> = stepper.plan().buckets().iter().map(|bucket| bucket.storage.precision.param).collect();
    /// assert_eq!(types, [DType::F32, DType::BF16]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    ///
    /// # Source
    /// PyTorch gives a gradient its parameter's type, and DDP makes separate buckets for each type.
    pub fn dtype(self, dtype: DType) -> Self {
        self.last("dtype", |last| last.dtype = Some(dtype))
    }

    /// Puts the parameter added last into a group. A group may have its own hyperparameters (see
    /// [`StepperBuilder::group`](crate::StepperBuilder::group)). Parameters of different groups may share buckets and
    /// launches.
    pub fn in_group(mut self, name: impl Into<String>) -> Self {
        let group = self.groups.place(name.into());
        self.last("in_group", |last| last.group = group)
    }

    /// Declares that the parameter added last is handed over up to `uses` times in a pass (tied weights). The
    /// parameter's gradient is complete at the last hand-over, or at the end of the pass.
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Solo, Stepper};
    /// let layout = Layout::builder().param("embedding", 2).uses(2).build()?;
    /// let tied = layout.id("embedding")?;
    /// let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Default::default() }, Solo::default())?;
    /// let mut pass = stepper.begin()?;
    /// pass.grads().add(tied, &[1.0, 2.0])?; // the first write of a pass replaces, later ones add
    /// pass.grad_ready(tied)?;
    /// pass.grads().add(tied, &[0.5, 0.5])?;
    /// pass.grad_ready(tied)?; // complete: on its way
    /// pass.finish()?;
    /// assert_eq!(stepper.view::<f32>(tied)?, [-1.5, -2.5]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    pub fn uses(self, uses: u32) -> Self {
        self.last("uses", |last| last.uses = uses)
    }

    /// Sets what the step does with the parameter added last.
    pub fn action(self, action: SegmentAction) -> Self {
        self.last("action", |last| last.action = action)
    }

    /// Makes the parameter added last local to each rank. The parameter's gradient is not reduced: each rank steps the
    /// parameter with the rank's own gradient. The parameter is never broadcast. The gradient is not part of the global
    /// norm and is not clipped. A skipped pass skips the parameter too. An infinite or NaN gradient of a local
    /// parameter does not skip the pass, because only this rank has the gradient. The parameter is then stepped with
    /// the infinite or NaN gradient.
    ///
    /// ```
    /// # use instep::{Layout, Sgd, Stepper, in_process};
    /// let layout = Layout::builder().param("shared", 1).param("own", 1).local().build()?;
    /// let (shared, own) = (layout.id("shared")?, layout.id("own")?);
    /// let ends = in_process(2, |comm| {
    ///     let rank = comm.rank() as f32;
    ///     let mut stepper = Stepper::host(&layout, Sgd { lr: 1.0, ..Default::default() }, comm)?;
    ///     let mut pass = stepper.begin()?;
    ///     pass.grads().write(shared, &[rank])?;
    ///     pass.grads().write(own, &[rank])?;
    ///     pass.finish()?;
    ///     let params = stepper.params();
    ///     instep::Result::Ok((params.get(shared)?[0], params.get(own)?[0]))
    /// })?;
    /// assert_eq!(ends, [(-0.5, 0.0), (-0.5, -1.0)]);
    /// # Ok::<(), instep::Error>(())
    /// ```
    pub fn local(self) -> Self {
        self.last("local", |last| last.local = true)
    }

    fn last(mut self, option: &'static str, set: impl FnOnce(&mut Parameter)) -> Self {
        match self.parameters.last_mut() {
            Some(last) => set(last),
            None => self.misplaced = Some(option),
        }
        self
    }

    /// Checks and closes the layout.
    ///
    /// # Errors
    /// `Layout` if there is no parameter, if a name occurs twice or is empty, or if a use count is zero. Also returns
    /// `Layout` if a shape does not match its parameter's length or has more than 64 dimensions, if an option comes
    /// before the first parameter, or if the layout has 2^56 elements or 2^32 parameters or more.
    pub fn build(self) -> Result<Layout> {
        let refuse = |thing: &str, wrong, remedy| Err(Error::layout(thing, wrong, remedy));
        if let Some(option) = self.misplaced {
            return refuse(
                &format!("`{option}`"),
                "called before the first parameter",
                "call it after `param`",
            );
        }
        if self.parameters.is_empty() {
            return refuse("layout", "has no parameters", "add one with `param`");
        }
        if u32::try_from(self.parameters.len()).is_err() {
            return refuse("layout", "has more than 2^32 parameters", "join some of them");
        }
        let mut by_name = NameIndex::default();
        let name_at = |index: u32| self.parameters[index as usize].name.as_str();
        let mut elements = 0u64;
        for parameter in &self.parameters {
            let name = &parameter.name;
            if name.is_empty() {
                return refuse("parameter", "has an empty name", "name every parameter");
            }
            if by_name.insert(name, name_at).is_some() {
                return refuse(
                    &format!("`{name}`"),
                    "registered twice",
                    "give every parameter a name of its own",
                );
            }
            let product = parameter.shape.iter().try_fold(1u64, |product, next| product.checked_mul(*next));
            if product != Some(parameter.len) || parameter.shape.len() > MAX_DIMENSIONS {
                let Parameter { shape, len, .. } = parameter;
                return Err(Error::layout(
                    format_args!("`{name}`"),
                    format_args!("shape {} does not fit {len} elements", sentence(format_args!("{shape:?}"))),
                    format_args!("use at most {MAX_DIMENSIONS} dimensions with that product"),
                ));
            }
            if parameter.uses == 0 {
                return refuse(&format!("`{name}`"), "has zero uses", "use 1 or more");
            }
            elements = match elements.checked_add(parameter.len) {
                Some(sum) if sum < plan::TOO_MANY_ELEMENTS => sum,
                _ => {
                    return refuse(
                        &format!("`{name}`"),
                        "takes the layout past 2^56 elements",
                        "split the model",
                    );
                }
            };
        }
        let fingerprint = fingerprint(&self.parameters, &self.groups.names);
        Ok(Layout {
            parameters: self.parameters.into(),
            by_name: Arc::new(by_name),
            groups: Arc::new(self.groups),
            fingerprint,
        })
    }
}

impl Layout {
    /// Returns a builder without parameters.
    pub fn builder() -> LayoutBuilder {
        LayoutBuilder::default()
    }

    /// Returns the names of the groups. The first name is [`DEFAULT_GROUP`], even if this group has no parameter.
    pub fn groups(&self) -> &[String] {
        &self.groups.names
    }

    /// Returns the index of a group in [`groups`](Self::groups).
    pub(crate) fn group(&self, name: &str) -> Option<usize> {
        self.groups.find(name).map(|group| group as usize)
    }

    /// Returns the index of a group that an option names.
    ///
    /// # Errors
    /// `Config` if there is no group of that name.
    pub(crate) fn require_group(&self, option: &'static str, name: &str) -> Result<usize> {
        self.group(name).ok_or_else(|| {
            let known = one_of(name, self.groups().iter().map(String::as_str));
            Error::config(option, name, "not a group of the layout", format_args!("use {known}"))
        })
    }

    /// Returns the parameter called `name`.
    ///
    /// # Errors
    /// `Layout` if there is no such parameter. The error lists the names most similar to `name`.
    pub fn id(&self, name: &str) -> Result<ParamId> {
        self.find(name).ok_or_else(|| {
            Error::layout(
                format_args!("`{name}`"),
                "no parameter has this name",
                format_args!("use {}", one_of(name, self.parameters.iter().map(|p| &*p.name))),
            )
        })
    }

    /// Returns the parameter called `name`, or `None`. A search for a missing name also compares only a few names. For
    /// a missing name, [`id`](Self::id) takes longer, because its error names similar parameters, and finding them
    /// takes a comparison with all names.
    pub fn find(&self, name: &str) -> Option<ParamId> {
        let index = self.by_name.find(name, |index| &self.parameters[index as usize].name)?;
        Some(self.id_at(index as usize))
    }

    /// Returns all parameters, in registration order.
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = ParamId> + ExactSizeIterator + '_ {
        (0..self.parameters.len()).map(|index| self.id_at(index))
    }

    /// Returns the description of `id`.
    ///
    /// # Errors
    /// `Layout` if `id` belongs to another layout.
    pub fn parameter(&self, id: ParamId) -> Result<&Parameter> {
        Ok(&self.parameters[self.index(id)?])
    }

    /// Returns a hash of the layout. Ranks compare this hash. The hash is FNV-1a, so it is the same in every process of
    /// a run.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Returns, for each parameter, the total length of all parameters that were registered earlier.
    pub(crate) fn first_elements(&self) -> Vec<u64> {
        let mut next = 0;
        let first = |parameter: &Parameter| {
            let first = next;
            next += parameter.len;
            first
        };
        self.parameters.iter().map(first).collect()
    }

    pub(crate) fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Returns a parameter's index in registration order. A [plan](Plan) identifies the parameter by this index.
    ///
    /// # Errors
    /// `Layout` if `id` belongs to another layout.
    pub fn index(&self, id: ParamId) -> Result<usize> {
        if id.fingerprint != self.fingerprint {
            let remedy = "take its id from the layout that this was built for";
            return Err(Error::layout(
                format_args!("parameter {}", id.index),
                "belongs to another layout",
                remedy,
            ));
        }
        Ok(id.index as usize)
    }

    fn id_at(&self, index: usize) -> ParamId {
        // `build` has bounded the count by 2^32.
        ParamId { index: index as u32, fingerprint: self.fingerprint }
    }
}

impl Groups {
    fn find(&self, name: &str) -> Option<u32> {
        self.by_name.find(name, |index| &self.names[index as usize])
    }

    /// Returns the index of a group. A new group is added at the end.
    fn place(&mut self, name: String) -> u32 {
        let known = self.by_name.insert(&name, |index| &self.names[index as usize]);
        known.unwrap_or_else(|| {
            self.names.push(name);
            self.names.len() as u32 - 1
        })
    }
}

fn fingerprint(parameters: &[Parameter], groups: &[String]) -> u64 {
    // A name's length is hashed before its bytes, so that no two different lists hash the same bytes.
    let text = |hash, text: &str| fold(fold(hash, &(text.len() as u64).to_le_bytes()), text.as_bytes());
    let hash = groups.iter().fold(names::EMPTY, |hash, group| text(hash, group));
    parameters.iter().fold(hash, |hash, p| {
        let hash = fold(text(hash, &p.name), &p.group.to_le_bytes());
        let hash = fold(hash, &p.len.to_le_bytes());
        let dtype = p.dtype.map_or(0, |dtype| dtype as u8 + 1);
        fold(fold(hash, &p.uses.to_le_bytes()), &[p.action as u8, u8::from(p.local) | dtype << 1])
    })
}

#[cfg(test)]
#[path = "../../tests/unit/layout.rs"]
mod tests;
