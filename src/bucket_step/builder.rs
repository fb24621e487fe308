//! Options of a `BucketStep`.
//!
//! Layout, groups and precision mean the same as in a stepper. All options are checked before the first call to a
//! device.

use std::hint::black_box;

use crate::abi::{INSTEP_TILE_ELEMENTS, InstepTile};
use crate::dtype::DType;
use crate::error::{Error, Result, refuse};
use crate::host::Isa;
use crate::launch::{Assignment, Settings, StepConstants, refuse_storage};
use crate::layout::{ForeignBucket, Gradients, Layout, Plan, Precision, Segment, Storage};
use crate::optim::Optimizer;
use crate::pool::Pool;

/// The largest number of elements in a bucket. An f32 bucket of this length occupies 4 TiB.
const MOST_ELEMENTS: u64 = 1 << 40;

/// Options of a [`BucketStep`](super::BucketStep).
#[derive(Clone, Debug)]
pub struct BucketStepBuilder {
    layout: Layout,
    bucket: Option<ForeignBucket>,
    /// The optimizer of each group.
    optimizers: Vec<Box<dyn Optimizer>>,
    /// For each group, whether [`group`](Self::group) has set its optimizer.
    has_own: Vec<bool>,
    precision: Precision,
    copy: Option<DType>,
    ema_decay: Option<f64>,
    gradients: Gradients,
    pub(super) isa: Option<Isa>,
    pub(super) pool: Option<Pool>,
    refused: Option<Error>,
}

/// The options that every device needs.
pub(super) struct Parts {
    pub(super) layout: Layout,
    pub(super) plan: Plan,
    pub(super) places: Vec<usize>,
    pub(super) optimizers: Vec<Box<dyn Optimizer>>,
    pub(super) assignment: Assignment,
    pub(super) settings: Settings,
}

impl Parts {
    /// Returns a label for each state. The label names the optimizers that have the state, and their groups in the
    /// bucket.
    pub(super) fn state_labels(&self) -> Vec<String> {
        let groups = self.layout.groups();
        let is_here = |group: &usize| {
            let of_group = |param: u32| self.layout.parameters()[param as usize].group as usize == *group;
            self.plan.segments().iter().any(|segment| of_group(segment.param))
        };
        let here: Vec<usize> = (0..groups.len()).filter(is_here).collect();
        let label = |k: usize| {
            let mut owners: Vec<(String, Vec<&str>)> = Vec::new();
            for group in &here {
                let optimizer = &*self.optimizers[*group];
                let Some(state) = optimizer.state_names().get(k) else { continue };
                let name = optimizer.descriptor().map_or("custom", |descriptor| descriptor.name);
                let state = format!("`{state}` of {name}");
                match owners.iter_mut().find(|(known, _)| *known == state) {
                    Some((_, of)) => of.push(&groups[*group]),
                    None => owners.push((state, vec![&groups[*group]])),
                }
            }
            let owner = |(state, of): &(String, Vec<&str>)| match &**of {
                [first] => format!("{state} (group `{first}`)"),
                [first, rest @ ..] => format!("{state} (group `{first}` and {} more)", rest.len()),
                [] => state.clone(),
            };
            format!("state {}", owners.iter().map(owner).collect::<Vec<_>>().join(" or "))
        };
        (0..self.assignment.state_count()).map(label).collect()
    }
}

impl BucketStepBuilder {
    pub(super) fn new(layout: &Layout, optimizer: Box<dyn Optimizer>) -> BucketStepBuilder {
        BucketStepBuilder {
            layout: layout.clone(),
            bucket: None,
            optimizers: vec![optimizer; layout.groups().len()],
            has_own: vec![false; layout.groups().len()],
            precision: Precision::F32,
            copy: None,
            ema_decay: None,
            gradients: Gradients::Keep,
            isa: None,
            pool: None,
            refused: None,
        }
    }

    /// Sets the parameters of the bucket and their offsets in it. By default, the bucket has all parameters of the
    /// layout, in registration order and without gaps.
    pub fn bucket(self, bucket: ForeignBucket) -> Self {
        BucketStepBuilder { bucket: Some(bucket), ..self }
    }

    /// Sets a separate optimizer for a group of the layout. Optimizers of the same kind, such as two
    /// [`Sgd`](crate::Sgd)s, share a launch. If this method is called twice for a group, the build returns an error.
    pub fn group(mut self, name: &str, optimizer: impl Optimizer + 'static) -> Self {
        let refused = match group_of(&self.layout, name) {
            Ok(group) if self.has_own[group] => {
                let wrong = "has an optimizer already";
                Error::config("group", name, wrong, "name each group once")
            }
            Ok(group) => {
                self.optimizers[group] = optimizer.as_rule().boxed();
                self.has_own[group] = true;
                return self;
            }
            Err(error) => error,
        };
        self.refused = self.refused.or(Some(refused));
        self
    }

    /// Sets the tensors' element types. The default is f32 throughout.
    pub fn precision(self, precision: Precision) -> Self {
        BucketStepBuilder { precision, ..self }
    }

    /// Makes each step also write the stepped parameters to a copy in another type
    /// ([`StepTensors::copy`](super::StepTensors::copy)).
    pub fn copy_params(self, dtype: DType) -> Self {
        BucketStepBuilder { copy: Some(dtype), ..self }
    }

    /// Makes each step also update a moving average of each parameter ([`StepTensors::ema`](super::StepTensors::ema)).
    pub fn ema(self, decay: f64) -> Self {
        BucketStepBuilder { ema_decay: Some(decay), ..self }
    }

    /// Sets what the step's launch does with the gradients. By default the launch does not change the gradients.
    pub fn gradients(self, gradients: Gradients) -> Self {
        BucketStepBuilder { gradients, ..self }
    }

    /// Sets the instruction set of the CPU kernels. The environment variable `INSTEP_ISA` sets the default. If the
    /// variable is unset, the default is the widest set that this CPU supports.
    pub fn isa(self, isa: Isa) -> Self {
        BucketStepBuilder { isa: Some(isa), ..self }
    }

    /// Sets a pool of threads. A step on the CPU is split over the calling thread and the pool's threads. Clones of a
    /// pool share threads. By default, only the calling thread steps.
    pub fn pool(self, pool: Pool) -> Self {
        BucketStepBuilder { pool: Some(pool), ..self }
    }

    pub(super) fn parts(self) -> Result<Parts> {
        if let Some(refused) = self.refused {
            return Err(refused);
        }
        let ema_decay = self.ema_decay.unwrap_or_default();
        refuse! {
            "ema" = ema_decay, if !(0.0..=1.0).contains(&ema_decay)
                => "out of range", "use a decay rate from 0 to 1";
            "gradients" = "Release", if self.gradients == Gradients::Release
                => "the caller's memory cannot be released", "keep, zero or average them";
        }
        let storage = Storage { precision: self.precision, copy: self.copy, ema: self.ema_decay.is_some() };
        let bucket = self.bucket.unwrap_or_else(|| whole(&self.layout));
        let (plan, places) = Plan::flat(&self.layout, &bucket, storage)?;
        refuse_endless(&plan)?;
        let plan = plan.with_gradients(self.gradients);
        let mut optimizers = Vec::new();
        for optimizer in &self.optimizers {
            if let Some(custom) = optimizer.as_rule().custom() {
                let thing = format_args!("optimizer `{}`", custom.name());
                let remedy = "call that code yourself, or use a Stepper";
                return Err(Error::unsupported(thing, "a bucket step runs kernels alone", remedy));
            }
            refuse_storage(&**optimizer, &plan.buckets()[0].storage)?;
            optimizers.push((&**optimizer, optimizer.as_rule().hyper()?));
        }
        let group = |param: usize| vec![self.layout.parameters()[param].group];
        let constants = StepConstants { ema_decay, ..StepConstants::PLAIN };
        let assignment = Assignment::new(&self.layout, &plan, constants, optimizers, group);
        let settings = Settings::new(&plan, &assignment);
        let (layout, optimizers) = (self.layout, self.optimizers);
        Ok(Parts { layout, plan, places, optimizers, assignment, settings })
    }
}

/// Returns an error if the bucket is too long, or if its list of tiles would not fit in memory. The lengths may be
/// arbitrarily large here, because no tensors exist before the first step.
fn refuse_endless(plan: &Plan) -> Result<()> {
    let elements: u64 = plan.segments().iter().map(|segment| segment.len).sum();
    let tiles_of = |segment: &Segment| match segment.row {
        0 => segment.len.div_ceil(INSTEP_TILE_ELEMENTS.into()),
        row => segment.len / row * row.div_ceil(INSTEP_TILE_ELEMENTS.into()),
    };
    let tiles: u64 = plan.segments().iter().map(tiles_of).sum();
    let bytes = tiles.saturating_mul(size_of::<InstepTile>() as u64);
    let mut list = Vec::<u8>::new();
    // `black_box` keeps the allocation: a compiler may remove an allocation that nothing uses.
    if elements <= MOST_ELEMENTS && black_box(&mut list).try_reserve_exact(bytes as usize).is_ok() {
        return Ok(());
    }
    let wrong = format_args!("{elements} elements, whose list of tiles takes {bytes} bytes");
    Err(Error::layout("bucket", wrong, "correct the lengths, or cut it into several"))
}

pub(super) fn group_of(layout: &Layout, name: &str) -> Result<usize> {
    layout.groups().iter().position(|known| known == name).ok_or_else(|| {
        let known = crate::error::one_of(name, layout.groups().iter().map(|name| &**name));
        Error::layout(
            format_args!("group `{name}`"),
            "the layout has none of this name",
            format_args!("use {known}"),
        )
    })
}

/// Returns the bucket of all parameters, without gaps.
fn whole(layout: &Layout) -> ForeignBucket {
    let lens = layout.parameters().iter().map(|parameter| parameter.len as usize);
    let bucket = ForeignBucket::new(lens.clone().sum());
    let mut offset = 0;
    layout.ids().zip(lens).fold(bucket, |bucket, (id, len)| {
        let at = offset;
        offset += len;
        bucket.gradient(id, at)
    })
}
