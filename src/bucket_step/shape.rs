//! Which tensors a step has, and what each call's must be: complete, long enough, aligned, writable.
//!
//! All tensors of a call are checked before an address changes. This file computes addresses and touches no element.

use super::tensors::{Element, Location, Run, Tensor, Tensors};
use crate::abi::INSTEP_QUANTUM;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::launch::Bases;
use crate::layout::{Gradients, Master, Moments, Plan, Segment, SegmentAction, Storage};
use crate::op::{Memory, Span};

/// One kind of tensor.
#[derive(Clone, Copy, Debug)]
struct Kind {
    memory: Memory,
    /// Bytes of a unit: of an element, or of the scale of a block.
    bytes: u64,
    /// `None` for codes and remainders.
    dtype: Option<DType>,
    /// Elements of a unit.
    elements: u64,
    is_written: bool,
}

/// The elements of one parameter in the bucket.
#[derive(Clone, Copy, Debug)]
struct Extent {
    /// The parameter's place in the bucket's list.
    place: usize,
    start: u64,
    len: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Shape {
    len: u64,
    extents: Vec<Extent>,
    kinds: Vec<Kind>,
}

impl Shape {
    /// `places` gives, per segment, its parameter's place in the bucket's list.
    pub(super) fn new(plan: &Plan, places: &[usize], states: usize) -> Shape {
        let averages = |segment: &Segment| segment.action == SegmentAction::Average;
        let ends = matches!(plan.gradients(), Gradients::Zero | Gradients::Average);
        let writes_grads = ends || plan.segments().iter().any(averages);
        let kind = |memory| {
            let elements = if matches!(memory, Memory::Scales(_)) { INSTEP_QUANTUM.into() } else { 1 };
            let bytes = Span::elements(memory, plan, 0, elements).bytes();
            let dtype = dtype_of(memory, &plan.buckets()[0].storage);
            Kind { memory, bytes, dtype, elements, is_written: memory != Memory::Grads || writes_grads }
        };
        let extent = |(segment, place): (&Segment, &usize)| Extent {
            place: *place,
            start: segment.start,
            len: segment.len,
        };
        Shape {
            len: plan.arena_len(),
            extents: plan.segments().iter().zip(places).map(extent).collect(),
            kinds: Memory::of_tensors(plan, states).map(kind).collect(),
        }
    }

    /// Returns the number of elements of a run for the whole bucket.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Writes the addresses of a step's tensors: one entry for all segments, or one per segment.
    pub(super) fn bind(&self, tensors: &Tensors<'_>, bases: &mut Vec<Bases>) -> Result<()> {
        let mut is_whole = true;
        for kind in &self.kinds {
            let Some(tensor) = tensors.get(kind.memory) else {
                let remedy = format_args!("add them with `{}`", method(kind.memory));
                return Err(Error::layout(named(kind.memory), "missing, but this step has them", remedy));
            };
            self.check(kind, tensor)?;
            is_whole &= matches!(tensor.location, Location::Whole(_));
        }
        let is_needed = |memory: &Memory| self.kinds.iter().any(|kind| kind.memory == *memory);
        if let Some(extra) = tensors.memories().find(|memory| !is_needed(memory)) {
            return Err(Error::layout(named(extra), "given, but this step has none", "leave them out"));
        }
        self.fill(is_whole, bases, |bases, segment| {
            for kind in &self.kinds {
                // Each is there, as checked above.
                let address = tensors.get(kind.memory).map_or(0, |tensor| self.base(kind, tensor, segment));
                bases.set(kind.memory, address);
            }
        });
        Ok(())
    }

    /// Writes the addresses of gradients alone, which a norm reads.
    pub(super) fn bind_grads(&self, grads: &Tensor<'_>, bases: &mut Vec<Bases>) -> Result<()> {
        let Some(kind) = self.kinds.iter().find(|kind| kind.memory == Memory::Grads) else { return Ok(()) };
        let kind = Kind { is_written: false, ..*kind };
        self.check(&kind, grads)?;
        self.fill(matches!(grads.location, Location::Whole(_)), bases, |bases, segment| {
            bases.set(Memory::Grads, self.base(&kind, grads, segment));
        });
        Ok(())
    }

    fn fill(&self, is_whole: bool, bases: &mut Vec<Bases>, put: impl Fn(&mut Bases, usize)) {
        bases.clear();
        bases.resize(if is_whole { 1 } else { self.extents.len() }, Bases::default());
        bases.iter_mut().enumerate().for_each(|(segment, bases)| put(bases, segment));
    }

    /// The base to which a segment's tiles add their offsets.
    fn base(&self, kind: &Kind, tensor: &Tensor<'_>, segment: usize) -> usize {
        match &tensor.location {
            Location::Whole(run) => run.address,
            Location::Each(runs) => {
                let extent = &self.extents[segment];
                let offset = extent.start / kind.elements * kind.bytes;
                runs.run(extent.place).address.wrapping_sub(offset as usize)
            }
        }
    }

    /// This names a tensor only in errors, because a name is allocated.
    fn check(&self, kind: &Kind, tensor: &Tensor<'_>) -> Result<()> {
        let refuse = |wrong: &str, remedy| Err(Error::layout(named(kind.memory), wrong, remedy));
        if kind.is_written && !tensor.is_writable {
            let remedy = "lend them with `Tensor::slice_mut` or `Tensor::slices_mut`";
            return refuse("only lent for reading, but this step writes them", remedy);
        }
        if let Some(Element { bytes, dtype }) = tensor.element {
            if bytes as u64 != kind.bytes {
                let wrong = format!("elements of {bytes} bytes, where the precision has {}", kind.bytes);
                return refuse(&wrong, "use the precision's type");
            }
            if let (Some(lent), Some(wanted)) = (dtype, kind.dtype)
                && lent != wanted
            {
                let wrong = format!("elements of {lent}, where the precision has {wanted}");
                return refuse(&wrong, "use the precision's type");
            }
        }
        match &tensor.location {
            Location::Whole(run) => self.check_run(kind, run, self.len, "the bucket"),
            Location::Each(runs) => {
                if runs.count != self.extents.len() {
                    let wrong = format!("{} runs for {} parameters", runs.count, self.extents.len());
                    return refuse(&wrong, "give one run per parameter of the bucket");
                }
                let mut extents = self.extents.iter();
                extents.try_for_each(|at| self.check_run(kind, &runs.run(at.place), at.len, "its parameter"))
            }
        }
    }

    fn check_run(&self, kind: &Kind, run: &Run, len: u64, of: &str) -> Result<()> {
        let units = len.div_ceil(kind.elements);
        if let Some(bytes) = run.bytes.filter(|bytes| *bytes as u64 != units * kind.bytes) {
            let elements = bytes as u64 / kind.bytes;
            let wrong = format_args!("a run of {elements} elements, where {of} has {units}");
            return Err(Error::layout(named(kind.memory), wrong, "lend exactly as many"));
        }
        let alignment = kind.bytes as usize;
        if units > 0 && (run.address == 0 || !run.address.is_multiple_of(alignment)) {
            let wrong =
                format_args!("the address {:#x} is null or not a multiple of {alignment}", run.address);
            return Err(Error::layout(named(kind.memory), wrong, "align it to an element"));
        }
        Ok(())
    }
}

/// The type of a tensor's elements, if they are numbers by themselves.
fn dtype_of(memory: Memory, storage: &Storage) -> Option<DType> {
    let Storage { precision, copy, .. } = storage;
    match memory {
        Memory::Params => Some(precision.param),
        Memory::Grads => Some(precision.grad),
        Memory::Master => (precision.master == Master::F32).then_some(DType::F32),
        Memory::Copy => *copy,
        Memory::State(_) => match precision.moments {
            Moments::F32 => Some(DType::F32),
            Moments::BF16 => Some(DType::BF16),
            Moments::EightBit => None,
        },
        _ => Some(DType::F32),
    }
}

fn named(memory: Memory) -> String {
    match memory {
        Memory::Params => "parameters".to_owned(),
        Memory::Grads => "gradients".to_owned(),
        Memory::Master => "masters".to_owned(),
        Memory::Copy => "copies".to_owned(),
        Memory::Ema => "moving averages".to_owned(),
        Memory::State(k) => format!("states {k}"),
        Memory::Scales(k) => format!("scales of states {k}"),
        Memory::HostParams | Memory::HostGrads => unreachable!("no stepper offloads a bucket alone"),
        Memory::Sums => unreachable!("a bucket alone has no micro-batches"),
        Memory::Control | Memory::Settings => unreachable!("no tensor"),
    }
}

/// Names the method that adds a tensor.
fn method(memory: Memory) -> &'static str {
    match memory {
        Memory::State(_) => "Tensors::states",
        Memory::Scales(_) => "Tensors::scales",
        Memory::Master => "Tensors::master",
        Memory::Copy => "Tensors::copy",
        Memory::Ema => "Tensors::ema",
        Memory::Params | Memory::Grads | Memory::HostParams | Memory::HostGrads => "Tensors::new",
        Memory::Sums | Memory::Control | Memory::Settings => "Tensors::new",
    }
}
