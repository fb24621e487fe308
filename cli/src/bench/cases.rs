//! The cases of the step bench: their optimizers, their shapes, and the values in their tensors.
//!
//! The value of an element is a function of the element's index. No value is 0, because the square root of 0 takes a
//! slow path on some machines.

use std::collections::HashMap;
use std::str::FromStr;

use clap::ValueEnum;
use instep::bench::Launcher;
use instep::optim::{ALL, Descriptor, Optimizer, Value};
use instep::{AdamW, Isa, Layout, Sgd};
use serde::Serialize;

use super::precisions::{Kind, storage};
use super::reference;
use super::system::last_level_cache_bytes;

/// The world size of the timed steps. The world size is above 1, so that steps also divide the gradients by the world
/// size.
pub(super) const WORLD_SIZE: u32 = 8;

/// The approximate number of elements that are stepped in one sample. A sample therefore takes tens of milliseconds,
/// much longer than a clock tick or the wake-up of a thread.
pub(super) const SAMPLE_ELEMENTS: f64 = 32e6;

/// An optimizer, or one of its `VARIANTS`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    descriptor: &'static Descriptor,
    variant: Option<&'static Variant>,
}

/// An optimizer with some options changed, and the name of this combination.
#[derive(Debug)]
struct Variant {
    name: &'static str,
    of: &'static Descriptor,
    changes: &'static [(&'static str, Value)],
}

/// The variants. Each variant sets an option that adds a state to its optimizer. The state increases the memory traffic
/// of a step.
const VARIANTS: [Variant; 2] = [
    Variant { name: "momentum", of: Sgd::DESCRIPTOR, changes: &[("momentum", Value::Number(0.9))] },
    Variant { name: "amsgrad", of: AdamW::DESCRIPTOR, changes: &[("amsgrad", Value::Flag(true))] },
];

const LR: f64 = 1e-4;

impl Case {
    /// Returns every optimizer, each followed by its variants.
    pub(super) fn all() -> Vec<Case> {
        let with_variants = |descriptor: &&'static Descriptor| {
            let descriptor = *descriptor;
            let variants = VARIANTS.iter().filter(move |variant| variant.of.name == descriptor.name);
            let variants = variants.map(move |variant| Case { descriptor, variant: Some(variant) });
            [Case { descriptor, variant: None }].into_iter().chain(variants)
        };
        ALL.iter().flat_map(with_variants).collect()
    }

    pub(super) fn name(self) -> String {
        self.variant.map_or_else(|| self.descriptor.key(), |variant| variant.name.to_owned())
    }

    pub(super) fn optimizer(self) -> instep::Result<Box<dyn Optimizer>> {
        let mut optimizer = self.descriptor.build();
        optimizer.set("lr", Value::Number(LR))?;
        for (field, value) in self.variant.map_or(&[][..], |variant| variant.changes) {
            optimizer.set(field, *value)?;
        }
        Ok(optimizer)
    }

    /// Returns whether the update of one element depends on all elements of its parameter.
    pub(super) fn is_scaled(self) -> bool {
        self.descriptor.is_scaled
    }

    /// Returns this optimizer's formula in f64, with its hyperparameters.
    pub(super) fn reference(self) -> instep::Result<reference::Rule> {
        let optimizer = self.optimizer()?;
        let mut numbers = HashMap::new();
        for field in self.descriptor.fields {
            let values = optimizer.get(field.name).into_iter().flat_map(Value::numbers);
            numbers.extend(field.parts.iter().map(|part| part.keyword).zip(values));
        }
        let number = |name: &str| numbers.get(name).copied().unwrap_or(f64::NAN);
        Ok(reference::Rule::named(&self.descriptor.key(), &number))
    }
}

impl PartialEq for Case {
    fn eq(&self, other: &Case) -> bool {
        self.name() == other.name()
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Case, String> {
        let names = || Case::all().into_iter().map(Case::name).collect::<Vec<String>>().join(", ");
        Case::all()
            .into_iter()
            .find(|case| case.name() == text)
            .ok_or_else(|| format!("there are {}", names()))
    }
}

/// Whether the bucket is in the last-level cache when it is stepped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Cache {
    /// The bucket is not in the cache: the steps rotate through buckets that together are at least four times as large
    /// as the cache. On the host, `--quick` steps only one bucket.
    Beyond,
    /// The bucket is in the cache if it fits, because every step uses the same bucket. In a sweep, the bucket has at
    /// most a quarter of the cache's size.
    Resident,
}

impl Cache {
    pub(super) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// The size of a bucket, and whether the bucket is in the cache when it is stepped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Shape {
    /// One segment of 64 Ki elements. Every step uses the same bucket.
    L2,
    /// One segment of 1 Mi elements. Every step uses the same bucket.
    L3,
    /// One segment of 16 Mi elements. The steps rotate through several buckets, which together are more than four times
    /// as large as the last-level cache.
    Dram,
    /// 50 segments, which have 25 MiB of f32 gradients in all. The steps rotate through several buckets, which together
    /// are more than four times as large as the last-level cache.
    Bucket,
    /// One segment with a number of elements that a sweep defines.
    #[value(skip)]
    Sized(usize, Cache),
}

impl Shape {
    pub(super) fn name(self) -> String {
        match self {
            Shape::Sized(elements, cache) => format!("{elements} {}", cache.name()),
            named => format!("{named:?}").to_lowercase(),
        }
    }

    pub(super) fn cache(self) -> Cache {
        match self {
            Shape::L2 | Shape::L3 => Cache::Resident,
            Shape::Dram | Shape::Bucket => Cache::Beyond,
            Shape::Sized(_, cache) => cache,
        }
    }

    /// Returns the number of segments of a bucket, and the number of elements of a segment.
    pub(super) fn segments(self) -> (usize, usize) {
        match self {
            Shape::L2 => (1, 64 << 10),
            Shape::L3 => (1, 1 << 20),
            Shape::Dram => (1, 16 << 20),
            Shape::Bucket => (50, (25 << 20) / 4 / 50),
            Shape::Sized(elements, _) => (1, elements),
        }
    }

    pub(super) fn elements(self) -> usize {
        let (segments, length) = self.segments();
        segments * length
    }

    /// Returns the number of buckets. With [`Cache::Beyond`] and without `quick`, all buckets together are so large
    /// that each bucket has left the cache before its next step.
    pub(super) fn buckets(self, bytes_per_element: u64, quick: bool) -> usize {
        let bytes = self.elements() as u64 * bytes_per_element;
        let beyond = (4 * last_level_cache_bytes()).div_ceil(bytes) as usize;
        match self.cache() {
            Cache::Beyond if quick => 1,
            // If a bucket of a sweep is larger than the caches, it evicts itself.
            Cache::Beyond if beyond == 1 && matches!(self, Shape::Sized(..)) => 1,
            Cache::Beyond => beyond + self.buckets_per_sample(),
            Cache::Resident => 1,
        }
    }

    /// Returns the number of buckets that are stepped in one sample.
    pub(super) fn buckets_per_sample(self) -> usize {
        (SAMPLE_ELEMENTS / self.elements() as f64).ceil() as usize
    }
}

/// Returns the gradient of element `k`, summed over ranks.
pub(super) fn gradient(k: usize) -> f32 {
    ((k % 613) as f32 - 306.3) * 1e-2
}

/// Returns the initial value of element `k` of the parameters.
pub(super) fn parameter(k: usize) -> f32 {
    0.5 + (k % 977) as f32 * 1e-3
}

/// Returns the number of bytes per element, summed over all arrays. The few scales of 8-bit states are not counted.
pub(super) fn resident_bytes(case: Case, kind: Kind) -> instep::Result<u64> {
    let (precision, states) = (kind.precision(), case.optimizer()?.state_names().len() as u64);
    let stepped = precision.param.bytes() + precision.grad.bytes() + precision.master.bytes();
    Ok(stepped + states * precision.moments.bytes())
}

/// Makes a launcher with buckets of this shape, and fills parameters and gradients.
pub(super) fn launcher(
    case: Case,
    kind: Kind,
    shape: Shape,
    isa: Isa,
    threads: usize,
    quick: bool,
) -> instep::Result<Launcher> {
    use instep::op::Memory;
    let optimizer = case.optimizer()?;
    let (segments, length) = shape.segments();
    let precision = kind.precision();
    let buckets = shape.buckets(resident_bytes(case, kind)?, quick);
    let names = (0..buckets * segments).map(|k| format!("p{k}"));
    let layout = names.fold(Layout::builder(), |builder, name| builder.param(name, length)).build()?;
    let cap_bytes = shape.elements() as u64 * precision.grad.bytes();
    let mut launcher =
        Launcher::new(&layout, &*optimizer, cap_bytes, WORLD_SIZE, storage(kind), isa, threads)?;
    launcher.fill(Memory::Params, parameter)?;
    launcher.fill(Memory::Grads, gradient)?;
    Ok(launcher)
}
